/* print_self_test.c - writes the bytes of pccl_self_test() to stdout. It is built and run for other
 * processors by tests/integration/test_builds.py. */
#include "pccl_core.h"

#include <stdio.h>
#include <stdlib.h>

int main(void)
{
    size_t size = pccl_self_test(NULL, 0);
    unsigned char *out = malloc(size);
    if (out == NULL || pccl_self_test(out, size) != size)
        return EXIT_FAILURE;
    return fwrite(out, 1, size, stdout) == size ? EXIT_SUCCESS : EXIT_FAILURE;
}
