/* test_progressive.c - all-reduces whose memory is filled while they run: the engine reads nothing
 * before its READY, and emits WRITTEN once for each window, when it holds the result. */
#include "check.h"
#include "harness.h"

#include <string.h>

enum { WINDOW = 256, STEPS_MAX = 64 };

struct told {
    int times[STEPS_MAX];
    int n;
};

/* Reads the new events of a peer. At each WRITTEN the window must hold the result. */
static void hear(const struct peers *peers, const struct job *job, int who, struct told *told)
{
    const size_t width = pccl_dtype_size(job->part[0].dtype);
    const unsigned char *recv = job->parts[who][0].recv;
    const size_t bytes = (size_t)job->part[0].count * width;
    for (; told->n < peers->peer[who].n_events; told->n++) {
        const pccl_event *event = &peers->peer[who].events[told->n];
        size_t from, to;
        if (event->kind != PCCL_WRITTEN || !CHECK(event->done < STEPS_MAX))
            continue;
        told->times[event->done]++;
        from = (size_t)event->done * WINDOW * width;
        to = from + WINDOW * width < bytes ? from + WINDOW * width : bytes;
        CHECK(memcmp(recv + from, job->expected[who][0] + from, to - from) == 0);
    }
}

static void hear_all(struct peers *peers, const struct job *job, struct told *told)
{
    int i;
    peers_run(peers);
    for (i = 0; i < peers->n; i++)
        hear(peers, job, i, &told[i]);
}

/* Fills the memory of all peers window by window, before and after START, in an order that depends
 * on the seed. Held chunks do not fill the ring up. Peers that send before START send only windows
 * that are ready. */
static void test_any_order(void)
{
    static const uint64_t counts[] = {1, 200, 256, 1000, 5003};
    static struct peers peers;
    pccl_options options = peers_options();
    uint64_t seed, k, windows;
    int i, n;
    for (seed = 1; seed <= 120; seed++) {
        struct job job = job_plain(counts[seed % 5], seed % 2);
        struct told told[TEST_PEERS_MAX] = {{{0}, 0}};
        n = 1 + (int)(seed % 4);
        job.window = WINDOW;
        job.oneshot = n == 2 && seed % 3 == 0;
        job.dtype = seed % 7 < 5 ? PCCL_F32 : PCCL_F64;
        job.format = seed % 8 < 5 ? PCCL_UNQUANTIZED : PCCL_BLOCK_8;
        job.chunk_bytes = seed % 3 ? 700 : 4096;
        job.eager = seed % 5 < 3;
        job_make(&job, n);
        windows = (job.span + WINDOW - 1) / WINDOW;
        peers_open(&peers, n, &options, seed);
        if (n > 1)
            peers_connect_ring(&peers, 2, 2);
        for (i = 0; i < n; i++) {
            job_register(&peers, i, &job);
            if (job.eager && n > 1 && (seed + (uint64_t)i) % 3)
                job_eager(&peers, i, &job);
        }
        for (k = 0; k < windows + 1; k++)
            for (i = 0; i < n; i++) {
                uint64_t turn = (k + (uint64_t)i * seed) % (windows + 1);
                uint64_t window = seed % 2 ? windows - turn : turn - 1;
                uint64_t end = (window + 1) * WINDOW < job.span ? (window + 1) * WINDOW : job.span;
                if (turn == 0)
                    job_start(&peers, i, &job);
                else
                    job_fill(&peers, i, &job, window * WINDOW, end);
                if (seed % 4)
                    hear_all(&peers, &job, told);
                if (k < windows)
                    CHECK(peers_count(&peers, i, PCCL_COMPLETE, job.op) == 0);
            }
        hear_all(&peers, &job, told);
        CHECK(job_is_right(&peers, &job));
        for (i = 0; i < n && n > 1; i++)
            for (k = 0; k < windows; k++)
                CHECK(told[i].times[k] == 1);
        CHECK(job_commit(&peers, &job));
        job_close(&peers, &job);
    }
}

/* A peer that is not ready holds the chunks that it receives. An abort releases them, and restores
 * the memory. */
static void test_abort(void)
{
    static struct peers peers;
    uint64_t seed;
    int i;
    for (seed = 1; seed <= 20; seed++) {
        struct job job = job_plain(5003, seed % 2);
        uint64_t some = WINDOW * (seed % 5);
        job.window = WINDOW;
        job.oneshot = seed % 4 < 2;
        job.chunk_bytes = 700;
        job_make(&job, 2);
        job_open_ring(&peers, &job, 2, seed);
        job_start_all(&peers, &job);
        job_fill(&peers, 0, &job, 0, job.span);
        if (some > 0)
            job_fill(&peers, 1, &job, 0, some);
        peers_run(&peers);
        for (i = 0; i < 2; i++) {
            CHECK(peers_count(&peers, i, PCCL_COMPLETE, job.op) == 0);
            CHECK(peers_count(&peers, i, PCCL_FAILED, job.op) == 0);
            peers_end(&peers, i, PCCL_ABORT, job.op);
        }
        peers_run(&peers);
        CHECK(memcmp(job.parts[0][0].send, job.given[0][0], 5003 * sizeof(float)) == 0);
        CHECK(memcmp(job.parts[1][0].send, job.given[1][0], (size_t)some * sizeof(float)) == 0);
        for (i = 0; i < 2; i++)
            CHECK(peers_count(&peers, i, PCCL_SETTLED, job.op) == 1);
        job_close(&peers, &job);
    }
}

/* Before START, too, only windows that are ready are sent. */
static void test_early(void)
{
    static struct peers peers;
    int filled;
    for (filled = 0; filled < 3; filled++) {
        struct job job = job_plain(16 * WINDOW, true);
        pccl_options options = peers_options();
        job.window = WINDOW;
        job.oneshot = true;
        job.eager = true;
        job.chunk_bytes = 64 * sizeof(float);
        job_make(&job, 2);
        peers_open(&peers, 2, &options, 1);
        peers_connect_ring(&peers, 2, 100);
        job_register(&peers, 0, &job);
        job_eager(&peers, 0, &job);
        if (filled == 1)
            job_fill(&peers, 0, &job, 0, 3 * WINDOW);
        if (filled == 2)
            job_fill(&peers, 0, &job, WINDOW, 16 * WINDOW);
        peers_run(&peers);
        CHECK(pccl_engine_dropped(peers.peer[1].engine) == 0);
        peers_end(&peers, 0, PCCL_ABORT, job.op);
        peers_run(&peers);
        CHECK(peers_event(&peers, 0, PCCL_SETTLED, job.op)->tx_bytes
              == (filled == 1 ? 3 * WINDOW * sizeof(float) : 0));
        job_close(&peers, &job);
    }
}

static void test_impossible(void)
{
    static const uint64_t wrong[][2] = {{0, 0}, {1, 64}, {64, 1}, {0, 1088}, {1024, 64},
                                        {UINT64_MAX - 63, 64}, {64, UINT64_MAX - 63}};
    static struct peers peers;
    size_t i;
    for (i = 0; i < sizeof wrong / sizeof wrong[0] + 3; i++) {
        struct job job = job_plain(1000, false);
        pccl_command command = {0};
        command.kind = PCCL_READY;
        command.op = job.op;
        command.length = 64;
        job.window = i == 7 ? 100 : i == 8 ? 0 : WINDOW;
        job.what = i == 9 ? PCCL_REDUCE : PCCL_ALL_REDUCE;
        if (i < 7) {
            command.offset = wrong[i][0];
            command.length = wrong[i][1];
        }
        job_make(&job, 2);
        job_open_ring(&peers, &job, 2, 1);
        peers_command(&peers, 0, &command);
        peers_run(&peers);
        CHECK(peers_event(&peers, 0, PCCL_FAILED, job.op)->status == PCCL_EINVAL);
        job_close(&peers, &job);
    }
}

int main(void)
{
    test_any_order();
    test_abort();
    test_early();
    test_impossible();
    return check_report("progressive");
}
