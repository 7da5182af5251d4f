/* test_calls.c - every call of the table that a working engine makes fails in turn. The caller is
 * told: an op fails, a stream is lost or the engine stops; or the failure has no effect. In each
 * case buffers come back and nothing leaks. */
#include "check.h"
#include "job.h"
#include "star.h"

#include <errno.h>

int __real_pccl_engine_step(pccl_engine *engine);
int __wrap_pccl_engine_step(pccl_engine *engine);

int __wrap_pccl_engine_step(pccl_engine *engine)
{
    int moved;
    fake_in_step = true;
    moved = __real_pccl_engine_step(engine);
    fake_in_step = false;
    return moved;
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

int main(void)
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
    return check_report("calls");
}
