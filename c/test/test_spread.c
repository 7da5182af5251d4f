/* test_spread.c - an op over several neighbours may receive without limit, so that its rings do not
 * block each other; what comes after it may not. */
#include "check.h"
#include "job.h"

enum { N = 3, CHUNK = 256 };

static struct peers peers;

/* The next epoch: streams 1 and 2 are closed. */
static void begin_epoch(void)
{
    int i;
    for (i = 0; i < N; i++) {
        pccl_order expect = {0}, close = {0};
        expect.kind = PCCL_EXPECT;
        expect.nonce = TEST_NONCE + 1;
        peers_order(&peers, i, &expect);
        close.kind = PCCL_CLOSE_STREAM;
        for (close.stream = 1; close.stream <= 2; close.stream++)
            peers_order(&peers, i, &close);
    }
    peers_run(&peers);
}

/* START in one ring over stream 3. */
static void start_on_third(int who, const struct job *job)
{
    pccl_order start = {0};
    start.kind = PCCL_START;
    start.op = job->op;
    start.seq = job->seq;
    start.nonce = TEST_NONCE;
    start.chunk_bytes = job->chunk_bytes;
    start.n_rings = 1;
    start.rings[0].stream = 3;
    start.rings[0].members = N;
    start.rings[0].position = (uint32_t)who;
    start.rings[0].count = job->span;
    start.rings[0].call = job->op;
    peers_order(&peers, who, &start);
}

/* What peer 1 receives of a job in one ring whose successor there has stalled. */
static uint64_t received_when_stalled(const struct job *job)
{
    const pccl_event *event;
    int i;
    fake_stall(peers.peer[2].endpoint, true);
    for (i = 0; i < N; i++)
        start_on_third(i, job);
    peers_run(&peers);
    fake_stall(peers.peer[2].endpoint, false);
    for (i = 0; i < N; i++)
        peers_end(&peers, i, PCCL_ABORT, job->op);
    peers_run(&peers);
    event = peers_event(&peers, 1, PCCL_SETTLED, job->op);
    return event != NULL ? event->rx_bytes : 0;
}

/* EARLY in two rings. Then the op succeeds in them, or ends before START, and another one starts in
 * one ring; or it starts itself in one ring, of the next epoch. */
static void test_what_one_ring_receives_is_limited_again(void)
{
    enum { COMMITTED, ABORTED, STARTED_IN_ONE, VARIANTS } variant;
    for (variant = 0; variant < VARIANTS; variant++) {
        pccl_options options = peers_options();
        struct job two = job_plain(30000, true), one = two;
        bool goes_on = variant == STARTED_IN_ONE;
        uint64_t received;
        int i;
        two.early = one.early = true;
        two.chunk_bytes = one.chunk_bytes = CHUNK;
        one.op = 2;
        job_make(&two, N);
        job_make(&one, N);
        peers_open(&peers, N, &options, 1);
        peers_connect_ring(&peers, 2, 2);
        for (i = 0; i < N; i++) {
            peers_stream(&peers, i, (i + N - 1) % N, 2, 2, 2);
            peers_stream(&peers, i, (i + 1) % N, 3, 1, 2);
            job_register(&peers, i, &two);
            job_early(&peers, i, &two, 2);
        }
        peers_run(&peers);
        for (i = 0; i < N && variant == COMMITTED; i++)
            job_start_rings(&peers, i, &two, 2);
        peers_run(&peers);
        for (i = 0; i < N && !goes_on; i++) {
            peers_end(&peers, i, variant == COMMITTED ? PCCL_COMMIT : PCCL_ABORT, two.op);
            job_register(&peers, i, &one);
        }
        begin_epoch();
        received = received_when_stalled(goes_on ? &two : &one);
        CHECK(0 < received && received <= CHUNK * (options.forward_max + 8));
        peers_close(&peers);
        job_free(&two);
        job_free(&one);
    }
}

int main(void)
{
    test_what_one_ring_receives_is_limited_again();
    return check_report("spread");
}
