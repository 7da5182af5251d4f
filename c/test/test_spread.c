/* test_spread.c - an op with several neighbors receives without limit, so that its rings do not
 * block each other. The ops after it do not. */
#include "check.h"
#include "harness.h"

enum { N = 3, CHUNK = 256 };

static struct peers peers;

/* Opens streams 1 and 3 to the next peer, and 2 to the previous one. */
static void open_streams(const pccl_options *options)
{
    int i;
    peers_open(&peers, N, options, 1);
    peers_connect_ring(&peers, 2, 2);
    for (i = 0; i < N; i++) {
        peers_stream(&peers, i, (i + N - 1) % N, 2, 2, 2);
        peers_stream(&peers, i, (i + 1) % N, 3, 1, 2);
    }
}

static struct job make(uint64_t op)
{
    struct job job = job_plain(30000, true);
    job.eager = true;
    job.chunk_bytes = CHUNK;
    job.op = op;
    job_make(&job, N);
    return job;
}

/* Begins the next epoch: closes streams 1 and 2. */
static void begin_epoch(void)
{
    int i;
    for (i = 0; i < N; i++) {
        peers_expect(&peers, i, TEST_NONCE + 1);
        peers_close_stream(&peers, i, 1);
        peers_close_stream(&peers, i, 2);
    }
    peers_run(&peers);
}

/* Runs a job in one ring over stream 3, in which peer 1's successor stalls. Returns whether peer 1
 * receives no more chunks than may wait to be sent on. */
static bool is_limited(const struct job *job, const pccl_options *options)
{
    const pccl_event *event;
    int i;
    begin_epoch();
    fake_stall(peers.peer[2].endpoint, true);
    for (i = 0; i < N; i++)
        job_start_at(&peers, i, job, 3, (uint32_t)i, job->op);
    peers_run(&peers);
    fake_stall(peers.peer[2].endpoint, false);
    for (i = 0; i < N; i++)
        peers_end(&peers, i, PCCL_ABORT, job->op);
    peers_run(&peers);
    event = peers_event(&peers, 1, PCCL_SETTLED, job->op);
    return event != NULL && 0 < event->rx_bytes
        && event->rx_bytes <= CHUNK * (options->forward_max + 8);
}

/* An op begins eagerly in two rings. Then it completes in them, or is aborted before START, and
 * another op starts in one ring. Or the op itself starts in one ring, in the next epoch. */
static void test_after_a_collective(void)
{
    enum { COMMITTED, ABORTED, STARTED_IN_ONE, VARIANTS } variant;
    for (variant = 0; variant < VARIANTS; variant++) {
        pccl_options options = peers_options();
        struct job two = make(1), one = make(2);
        int i;
        two.rings = 2;
        open_streams(&options);
        for (i = 0; i < N; i++) {
            job_register(&peers, i, &two);
            job_eager(&peers, i, &two);
        }
        peers_run(&peers);
        for (i = 0; i < N && variant == COMMITTED; i++)
            job_start(&peers, i, &two);
        peers_run(&peers);
        for (i = 0; i < N && variant != STARTED_IN_ONE; i++) {
            peers_end(&peers, i, variant == COMMITTED ? PCCL_COMMIT : PCCL_ABORT, two.op);
            job_register(&peers, i, &one);
        }
        CHECK(is_limited(variant == STARTED_IN_ONE ? &two : &one, &options));
        job_close(&peers, &two);
        job_free(&one);
    }
}

static void test_after_an_exchange(void)
{
    pccl_options options = peers_options();
    struct trade trade = trade_plain(ALL_TO_ALL, 1000, false);
    struct job one = make(2);
    int i;
    trade.rings = 2;
    trade_make(&trade, N, 1);
    open_streams(&options);
    for (i = 0; i < N; i++) {
        trade_register(&peers, i, &trade);
        job_register(&peers, i, &one);
    }
    trade_start_all(&peers, &trade);
    peers_run(&peers);
    CHECK(trade_is_right(&peers, &trade) && trade_end(&peers, PCCL_COMMIT));
    CHECK(is_limited(&one, &options));
    trade_close(&peers, &trade);
    job_free(&one);
}

int main(void)
{
    test_after_a_collective();
    test_after_an_exchange();
    return check_report("spread");
}
