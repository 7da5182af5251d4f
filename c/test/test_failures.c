/* test_failures.c - lets everything that an engine needs fail, one call or allocation at a time:
 * every call of the table and every allocation of a collective, an exchange and a transfer. Either
 * the caller is told (an op fails, a stream is lost or the engine stops), or the failure has no
 * effect. In each case buffers come back and nothing leaks. The linker replaces the functions that
 * begin with __wrap_. */
#include "check.h"
#include "harness.h"
#include "star.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static long fail_at = -1;            /* index of the allocation from now that fails; -1: none */
static int refused;

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *old, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *old, size_t size);
int __real_pccl_engine_step(pccl_engine *engine);
int __wrap_pccl_engine_step(pccl_engine *engine);

static bool is_out_of_memory(void)
{
    bool now = fake_in_step && !fake_allocates && fail_at >= 0 && fail_at-- == 0;
    refused += now;
    return now;
}

void *__wrap_malloc(size_t size)
{
    return is_out_of_memory() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t n, size_t size)
{
    return is_out_of_memory() ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *old, size_t size)
{
    return is_out_of_memory() ? NULL : __real_realloc(old, size);
}

/* Only the engine may fail, not the test. */
int __wrap_pccl_engine_step(pccl_engine *engine)
{
    int moved;
    fake_in_step = true;
    moved = __real_pccl_engine_step(engine);
    fake_in_step = false;
    return moved;
}

/* ---- faults ---- */

/* The nth call of the table fails with `error`; or, if that is 0, the nth allocation. */
struct fault {
    int nth, error;
};

static void arm(const struct fault *fault)
{
    refused = 0;
    if (fault->error == 0)
        fail_at = fault->nth;
    else
        fake_fail_in_step(fault->nth, fault->error);
}

/* Returns whether the fault has happened. */
static bool disarm(const struct fault *fault)
{
    bool failed = fault->error == 0 ? refused > 0 : fake_failed_in_step();
    fail_at = -1;
    fake_fail_in_step(-1, 0);
    return failed;
}

/* Whether a peer has reported a fault of its op or stream, or has stopped. */
static bool told(uint64_t op)
{
    bool any = false;
    uint32_t stream;
    int i;
    for (i = 0; i < peers.n; i++) {
        any |= peers.peer[i].error < 0 || peers_count(&peers, i, PCCL_FAILED, op) > 0;
        for (stream = 1; stream <= 3; stream++)
            any |= peers_count(&peers, i, PCCL_STREAM_LOST, stream) > 0;
    }
    return any;
}

static void check(bool holds, const struct fault *fault, const char *what)
{
    if (!CHECK(holds))
        fprintf(stderr, "  %s, %s %d, errno %d\n", what,
                fault->error == 0 ? "allocation" : "call", fault->nth, fault->error);
}

/* An interrupted call stops no engine. */
static void check_engines(const struct fault *fault)
{
    int i;
    for (i = 0; i < peers.n; i++)
        CHECK(fault->error != EINTR || peers.peer[i].error == 0);
}

/* Without a fault everything is right. An allocation that fails is reported; a call that fails is
 * reported or has no effect. */
static bool is_fair(const struct fault *fault, bool failed, bool right, bool reported)
{
    return failed ? reported || (fault->error != 0 && right) : right && !reported;
}

/* Runs something with each fault in turn, until there is no call or allocation left to fail. */
static void sweep(bool (*run)(const struct fault *fault, const struct job *job),
                  const struct job *job, int error, int least)
{
    struct fault fault = {0, 0};
    fault.error = error;
    while (run(&fault, job))
        fault.nth++;
    CHECK(fault.nth > least);
}

/* ---- what fails: each returns whether the fault has happened ---- */

static void open_job(struct job *job)
{
    pccl_options options = peers_options();
    int i;
    job_make(job, 3);
    peers_open(&peers, 3, &options, 2);
    peers_connect_ring(&peers, 2, 1);
    for (i = 0; i < 3; i++) {
        job_register(&peers, i, job);
        if (job->eager)
            job_eager(&peers, i, job);
    }
}

/* One collective, from the first command on. */
static bool run_collective(const struct fault *fault, const struct job *plan)
{
    struct job job = *plan;
    bool failed, right = true;
    int i;
    open_job(&job);
    arm(fault);
    for (i = 0; job.eager && i < 100; i++)
        (void)peers_step(&peers);
    job_start_all(&peers, &job);
    peers_run(&peers);
    failed = disarm(fault);
    peers_run(&peers);
    for (i = 0; i < 3; i++)
        right &= peers_count(&peers, i, PCCL_COMPLETE, job.op) > 0 && job_has_result(&job, i);
    check(is_fair(fault, failed, right, told(job.op)), fault, "collective");
    check_engines(fault);
    for (i = 0; i < 3; i++)
        peers_end(&peers, i, PCCL_ABORT, job.op);
    peers_run(&peers);
    for (i = 0; i < 3; i++)
        CHECK(peers.peer[i].error < 0 || peers_count(&peers, i, PCCL_SETTLED, job.op) == 1);
    peers_close(&peers);
    for (i = 0; i < 3; i++)
        CHECK(job_is_restored(&job, i));
    job_free(&job);
    return failed;
}

/* The commits of a collective. A peer that is told that its op is settled has the result; if its
 * engine has stopped before, the memory is as it was. There is no third outcome. */
static bool run_commit(const struct fault *fault, const struct job *plan)
{
    struct job job = *plan;
    bool failed, settled[3];
    int i;
    open_job(&job);
    job_start_all(&peers, &job);
    peers_run(&peers);
    for (i = 0; i < 3; i++) {
        CHECK(peers_count(&peers, i, PCCL_COMPLETE, job.op) == 1);
        peers_end(&peers, i, PCCL_COMMIT, job.op);
    }
    arm(fault);
    peers_run(&peers);
    failed = disarm(fault);
    peers_run(&peers);
    for (i = 0; i < 3; i++) {
        settled[i] = peers_count(&peers, i, PCCL_SETTLED, job.op) == 1;
        CHECK(settled[i] || peers.peer[i].error < 0);
    }
    peers_close(&peers);
    for (i = 0; i < 3; i++)
        check(settled[i] ? job_has_result(&job, i) : job_is_restored(&job, i), fault, "commit");
    job_free(&job);
    return failed;
}

/* An exchange in which some messages come before START. */
static bool run_exchange(const struct fault *fault, const struct job *plan)
{
    pccl_options options = peers_options();
    struct trade trade = trade_plain(ALL_TO_ALL, 500, false);
    bool failed;
    int i;
    (void)plan;
    trade_make(&trade, 4, 1);
    peers_open(&peers, 4, &options, 2);
    peers_connect_ring(&peers, 2, 1);
    for (i = 0; i < 4; i++)
        trade_register(&peers, i, &trade);
    arm(fault);
    for (i = 0; i < 4; i++) {
        trade_start(&peers, i, &trade);
        peers_run(&peers);
    }
    failed = disarm(fault);
    peers_run(&peers);
    check(is_fair(fault, failed, trade_is_right(&peers, &trade), told(TRADE_OP)), fault,
          "exchange");
    check_engines(fault);
    (void)trade_end(&peers, PCCL_ABORT);
    peers_close(&peers);
    for (i = 0; i < 4; i++)
        CHECK(trade_is_unharmed(&trade, i));
    trade_free(&trade);
    return failed;
}

/* A transfer from two holders. */
static bool run_transfer(const struct fault *fault, const struct job *plan)
{
    bool failed;
    (void)plan;
    start_star(2, 4, 0, 0);
    arm(fault);
    peers_run(&peers);
    failed = disarm(fault);
    remind(3);                       /* repeats a request that a holder could not keep */
    check(is_complete() ? has_arrived() : failed && (told(FETCH_OP) || told(SERVE_OP)), fault,
          "transfer");
    check_engines(fault);
    peers_close(&peers);
    return failed;
}

static void test_calls(void)
{
    static const int errors[] = {EMFILE, EINTR, ENOMEM};
    const struct job job = job_plain(2000, true);
    int i;
    for (i = 0; i < 3; i++) {
        sweep(run_collective, &job, errors[i], 100);
        sweep(run_commit, &job, errors[i], 10);
        sweep(run_transfer, NULL, errors[i], 100);
    }
    sweep(run_exchange, NULL, EMFILE, 100);
}

static void test_memory(void)
{
    int what, in_place, i;
    struct job job;
    for (what = 1; what <= PCCL_COLLECTIVES_N; what++)
        for (in_place = 0; in_place < 2; in_place++) {
            job = job_plain(2000, in_place);
            job.what = (enum pccl_collective)what;
            sweep(run_collective, &job, 0, 20);
        }
    job = job_plain(2000, true);
    job.format = PCCL_BLOCK_8;
    sweep(run_collective, &job, 0, 20);
    job = job_plain(500, true);
    job.what = PCCL_ALL_GATHER;
    job.unlike = true;
    for (i = 0; i < 3; i++)
        job.rows[i] = (uint64_t)(1 + 3 * i);
    sweep(run_collective, &job, 0, 20);
    job = job_plain(2000, true);
    job.eager = true;
    sweep(run_collective, &job, 0, 20);
    sweep(run_exchange, NULL, 0, 20);
    sweep(run_transfer, NULL, 0, 20);
}

int main(void)
{
    test_calls();
    test_memory();
    return check_report("failures");
}
