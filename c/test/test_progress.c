/* test_progress.c - QUERY: the progress of an op while it runs. */
#include "check.h"
#include "harness.h"
#include "star.h"

static void tell(struct peers *all, int who, uint64_t op)
{
    pccl_command command = {0};
    command.kind = PCCL_QUERY;
    command.op = op;
    peers_command(all, who, &command);
}

/* Removes PROGRESS events, of which there would be too many. */
static void forget(struct peer *peer)
{
    int i;
    for (i = 0; i < peer->n_events; i++)
        if (peer->events[i].kind == PCCL_PROGRESS)
            peer->events[i--] = peer->events[--peer->n_events];
}

/* Sends QUERY after each step, until nothing moves. The progress only grows, and stays below 1000.
 * Returns the number of different answers; -1: none. */
static int watch(struct peers *all, int who, uint64_t op)
{
    int different = 0, told = 0;
    uint64_t last = 0;
    while (peers_step(all)) {
        int seen = peers_count(all, who, PCCL_PROGRESS, op);
        tell(all, who, op);
        (void)pccl_engine_step(all->peer[who].engine);
        peers_read(&all->peer[who]);
        if (peers_count(all, who, PCCL_PROGRESS, op) > seen) {
            const pccl_event *event = peers_event(all, who, PCCL_PROGRESS, op);
            CHECK(event->done >= last && event->done < 1000);
            different += event->done > last;
            last = event->done;
            told++;
            forget(&all->peer[who]);
        }
    }
    return told > 0 ? different : -1;
}

static void test_collective(void)
{
    struct job job = job_plain(60000, true);
    struct peers all;
    job_make(&job, 3);
    job_open_ring(&all, &job, 3, 1);
    tell(&all, 0, job.op);
    peers_run(&all);
    CHECK(peers_count(&all, 0, PCCL_PROGRESS, job.op) == 0);     /* not started */
    job_start_all(&all, &job);
    CHECK(watch(&all, 0, job.op) > 3);
    CHECK(job_is_right(&all, &job));
    tell(&all, 0, job.op);
    tell(&all, 0, 999);
    peers_run(&all);
    CHECK(peers_count(&all, 0, PCCL_PROGRESS, job.op) == 0);     /* complete */
    CHECK(job_commit(&all, &job));
    job_close(&all, &job);
}

static void test_transfer(void)
{
    open_star(1, 3);
    enroll(0, FETCH_OP, PCCL_FETCH, wanted, PIECES);
    enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
    start(0, FETCH_OP, 1, 7);
    start(1, SERVE_OP, 1, 7);
    CHECK(watch(&peers, 1, SERVE_OP) < 0);   /* a SERVE has no progress; the fetch goes on */
    CHECK(is_complete() && has_arrived());
    peers_close(&peers);
    open_star(1, 6);
    enroll(0, FETCH_OP, PCCL_FETCH, wanted, PIECES);
    enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
    start(0, FETCH_OP, 1, 7);
    start(1, SERVE_OP, 1, 7);
    CHECK(watch(&peers, 0, FETCH_OP) >= 2);
    CHECK(is_complete() && has_arrived());
    peers_close(&peers);
}

int main(void)
{
    test_collective();
    test_transfer();
    return check_report("progress");
}
