/* check.h - a test framework: CHECK(condition) counts the check, and reports it if it fails.
 *
 *     int main(void)
 *     {
 *         test_this();
 *         test_that();
 *         return check_report("name");
 *     }
 */
#ifndef PCCL_CHECK_H
#define PCCL_CHECK_H

#include <stdio.h>

static unsigned long check_count;
static unsigned long check_failures;

enum { CHECK_REPORTS_MAX = 20 };

static inline int check_one(int holds, const char *condition, const char *file, int line)
{
    check_count++;
    if (holds)
        return 1;
    if (check_failures++ < CHECK_REPORTS_MAX)
        fprintf(stderr, "%s:%d: failed: %s\n", file, line, condition);
    return 0;
}

/* Has the value of the condition, so that a loop can stop at the first failure. */
#define CHECK(condition) check_one(!!(condition), #condition, __FILE__, __LINE__)

/* Prints the counts. Returns the exit status: 0 if there were checks and none failed. */
static inline int check_report(const char *name)
{
    printf("%s: %lu checks, %lu failed\n", name, check_count, check_failures);
    return check_failures != 0 || check_count == 0;
}

#endif
