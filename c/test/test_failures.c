/* test_failures.c - what an engine needs fails, each time another one: every call of the table, and
 * every allocation, of a collective, an exchange and a transfer. The caller is told: an op fails, a
 * stream is lost or the engine stops; or the failure has no effect. In each case buffers come back
 * and nothing leaks. The linker puts these functions before the real ones. */
#include "check.h"
#include "harness.h"
#include "star.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static long fail_at = -1;            /* which allocation from now fails, from 0; -1: none */
static int refused;
static bool in_engine;

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
    bool now = in_engine && !fake_allocates && fail_at >= 0 && fail_at-- == 0;
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

/* Only what an engine does is to fail, not what the test does. */
int __wrap_pccl_engine_step(pccl_engine *engine)
{
    int moved;
    in_engine = fake_in_step = true;
    moved = __real_pccl_engine_step(engine);
    in_engine = fake_in_step = false;
    return moved;
}

/* ---- calls of the table ---- */

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

/* One all-reduce, from the first command on. Whether the nth call was made. */
static bool reduce(int nth, int error)
{
    pccl_options options = peers_options();
    struct job job = job_plain(2000, true);
    bool failed, all = true;
    int i, n = 0;
    job_make(&job, 3);
    peers_open(&peers, 3, &options, 2);
    peers_connect_ring(&peers, 2, 1);
    for (i = 0; i < 3; i++) {
        job_register(&peers, i, &job);
        job_start(&peers, i, &job);
    }
    fake_fail_in_step(nth, error);
    peers_run(&peers);
    failed = fake_failed_in_step();
    fake_fail_in_step(-1, 0);
    peers_run(&peers);
    for (i = 0; i < 3; i++)
        all &= peers_count(&peers, i, PCCL_COMPLETE, job.op) > 0 && job_has_result(&job, i);
    if (!CHECK(all || told(job.op)))
        fprintf(stderr, "  all-reduce, call %d, %d\n", nth, error);
    for (i = 0; i < 3; i++) {
        CHECK(error != EINTR || peers.peer[i].error == 0);
        peers_end(&peers, i, PCCL_ABORT, job.op);
    }
    peers_run(&peers);
    for (i = 0; i < 3; i++)
        if (peers.peer[i].error == 0)
            n += peers_count(&peers, i, PCCL_SETTLED, job.op) == 1;
        else
            n++;
    CHECK(n == 3);
    peers_close(&peers);
    for (i = 0; i < 3; i++)
        CHECK(job_is_restored(&job, i));
    job_free(&job);
    return failed;
}

/* The commits of an all-reduce. Who is told that its op is settled has the result; who is not, as
 * its engine has stopped, has the memory as it was: there is no third way. */
static bool commit(int nth, int error)
{
    pccl_options options = peers_options();
    struct job job = job_plain(2000, true);
    bool failed, settled[3];
    int i;
    job_make(&job, 3);
    peers_open(&peers, 3, &options, 2);
    peers_connect_ring(&peers, 2, 1);
    for (i = 0; i < 3; i++) {
        job_register(&peers, i, &job);
        job_start(&peers, i, &job);
    }
    peers_run(&peers);
    for (i = 0; i < 3; i++) {
        CHECK(peers_count(&peers, i, PCCL_COMPLETE, job.op) == 1);
        peers_end(&peers, i, PCCL_COMMIT, job.op);
    }
    fake_fail_in_step(nth, error);
    peers_run(&peers);
    failed = fake_failed_in_step();
    fake_fail_in_step(-1, 0);
    peers_run(&peers);
    for (i = 0; i < 3; i++) {
        settled[i] = peers_count(&peers, i, PCCL_SETTLED, job.op) == 1;
        CHECK(settled[i] || peers.peer[i].error < 0);
    }
    peers_close(&peers);
    for (i = 0; i < 3; i++)
        if (!CHECK(settled[i] ? job_has_result(&job, i) : job_is_restored(&job, i)))
            fprintf(stderr, "  commit, call %d, %d\n", nth, error);
    job_free(&job);
    return failed;
}

/* One transfer from two holders. */
static bool transfer(int nth, int error)
{
    bool failed;
    int i;
    open_star(2, 4);
    enroll_leaves(0, FETCH_OP, PCCL_FETCH, wanted, PIECES, 0);
    for (i = 1; i < 3; i++) {
        enroll(i, SERVE_OP, PCCL_SERVE, offered, PIECES);
        start(i, SERVE_OP, 1, 7);
    }
    start(0, FETCH_OP, 2, 7);
    fake_fail_in_step(nth, error);
    peers_run(&peers);
    failed = fake_failed_in_step();
    fake_fail_in_step(-1, 0);
    peers_run(&peers);
    if (!CHECK(is_complete() ? has_arrived() : told(FETCH_OP) || told(SERVE_OP)))
        fprintf(stderr, "  transfer, call %d, %d\n", nth, error);
    for (i = 0; i < 3; i++)
        CHECK(error != EINTR || peers.peer[i].error == 0);
    peers_close(&peers);
    return failed;
}

static void test_calls(void)
{
    static const int errors[] = {EMFILE, EINTR, ENOMEM};
    int i, nth;
    for (i = 0; i < 3; i++) {
        for (nth = 0; reduce(nth, errors[i]); nth++)
            continue;
        CHECK(nth > 100);
        for (nth = 0; commit(nth, errors[i]); nth++)
            continue;
        CHECK(nth > 10);
        for (nth = 0; transfer(nth, errors[i]); nth++)
            continue;
        CHECK(nth > 100);
    }
}

/* ---- allocations ---- */

/* The nth allocation of the engines fails: the op fails or the engine stops, or it was not
 * needed; an abort or the end of the engine gives the buffers back. */
static bool allocate_for_job(int nth, enum pccl_collective what, bool in_place, int format,
                             bool unlike,
                bool early)
{
    pccl_options options = peers_options();
    struct job job = job_plain(2000, in_place);
    int i, told = 0;
    job.what = what;
    job.format = format;
    job.unlike = unlike;
    job.eager = early;
    if (unlike)
        job.count = 500;
    for (i = 0; i < 3; i++)
        job.rows[i] = (uint64_t)(1 + 3 * i);
    job_make(&job, 3);
    peers_open(&peers, 3, &options, 2);
    peers_connect_ring(&peers, 2, 1);
    for (i = 0; i < 3; i++) {
        job_register(&peers, i, &job);
        if (early)
            job_eager(&peers, i, &job, 1);
    }
    refused = 0;
    fail_at = nth;
    for (i = 0; early && i < 100; i++)
        (void)peers_step(&peers);
    for (i = 0; i < 3; i++)
        job_start(&peers, i, &job);
    for (i = 0; i < 400; i++)
        (void)peers_step(&peers);
    fail_at = -1;
    for (i = 0; i < 3; i++) {
        told += peers_count(&peers, i, PCCL_FAILED, 1) > 0 || peers.peer[i].error < 0
            || peers_count(&peers, i, PCCL_STREAM_LOST, 1) > 0;
        peers_end(&peers, i, PCCL_ABORT, 1);
    }
    peers_run(&peers);
    if (!refused)
        CHECK(told == 0);
    else
        CHECK(told > 0);
    peers_close(&peers);
    for (i = 0; i < 3; i++)
        CHECK(job_is_restored(&job, i));
    job_free(&job);
    return refused > 0;
}

/* The same for an exchange, in which some messages come before START. */
static bool run_trade(int nth)
{
    pccl_options options = peers_options();
    struct trade trade = trade_plain(ALL_TO_ALL, 500, false);
    int i, told = 0;
    trade_make(&trade, 4, 1);
    peers_open(&peers, 4, &options, 2);
    peers_connect_ring(&peers, 2, 1);
    for (i = 0; i < 4; i++)
        trade_register(&peers, i, &trade);
    refused = 0;
    fail_at = nth;
    for (i = 0; i < 4; i++) {
        trade_start(&peers, i, &trade, 1);
        peers_run(&peers);
    }
    fail_at = -1;
    for (i = 0; i < 4; i++)
        told += peers_count(&peers, i, PCCL_FAILED, TRADE_OP) > 0 || peers.peer[i].error < 0
            || peers_count(&peers, i, PCCL_STREAM_LOST, 1) > 0;
    CHECK(refused ? told > 0 : told == 0 && trade_is_right(&peers, &trade));
    (void)trade_end(&peers, PCCL_ABORT);
    peers_close(&peers);
    for (i = 0; i < 4; i++)
        CHECK(trade_is_unharmed(&trade, i));
    trade_free(&trade);
    return refused > 0;
}

/* The same for a transfer from two holders, with leaves that are proven. */
static bool run_transfer(int nth)
{
    int i, told = 0, reminders = 3;
    open_star(2, 4);
    enroll_leaves(0, FETCH_OP, PCCL_FETCH, wanted, PIECES, 0);
    for (i = 1; i < 3; i++) {
        enroll(i, SERVE_OP, PCCL_SERVE, offered, PIECES);
        start(i, SERVE_OP, 1, 7);
    }
    start(0, FETCH_OP, 2, 7);
    refused = 0;
    fail_at = nth;
    peers_run(&peers);
    fail_at = -1;
    while (reminders-- > 0) {        /* a request that there was no memory to keep */
        pccl_command command = {0};
        command.kind = PCCL_REMIND;
        command.op = FETCH_OP;
        command.limit = 99;
        peers_command(&peers, 0, &command);
        peers_run(&peers);
    }
    for (i = 0; i < 3; i++)
        told += peers.peer[i].error < 0
            || peers_count(&peers, i, PCCL_FAILED, i == 0 ? FETCH_OP : SERVE_OP) > 0
            || peers_count(&peers, i, PCCL_STREAM_LOST, 1) > 0
            || peers_count(&peers, i, PCCL_STREAM_LOST, 2) > 0;
    if (!CHECK(is_complete() ? has_arrived() : refused > 0 && told > 0))
        fprintf(stderr, "  transfer, allocation %d\n", nth);
    peers_close(&peers);
    return refused > 0;
}

static void test_memory(void)
{
    int what, in_place, nth;
    for (what = PCCL_ALL_REDUCE; what <= PCCL_REDUCE; what++)
        for (in_place = 0; in_place < 2; in_place++) {
            nth = 0;
            while (allocate_for_job(nth, (enum pccl_collective)what, in_place, PCCL_UNQUANTIZED,
                                    false, false))
                nth++;
            CHECK(nth > 20);
        }
    nth = 0;
    while (allocate_for_job(nth, PCCL_ALL_REDUCE, true, PCCL_BLOCK_8, false, false))
        nth++;
    CHECK(nth > 20);
    nth = 0;
    while (allocate_for_job(nth, PCCL_ALL_GATHER, true, PCCL_UNQUANTIZED, true, false))
        nth++;
    CHECK(nth > 20);
    nth = 0;
    while (allocate_for_job(nth, PCCL_ALL_REDUCE, true, PCCL_UNQUANTIZED, false, true))
        nth++;
    CHECK(nth > 20);
    nth = 0;
    while (run_trade(nth))
        nth++;
    CHECK(nth > 20);
    nth = 0;
    while (run_transfer(nth))
        nth++;
    CHECK(nth > 20);
}

int main(void)
{
    test_calls();
    test_memory();
    return check_report("failures");
}
