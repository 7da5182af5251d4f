/* test_twostage.c - quantized all-reduces in two stages on the fake network. */
#include "check.h"
#include "harness.h"

#include <string.h>

#include "engine/twostage.h"
#include "engine/wire.h"

static struct peers peers;

static struct job make_job(uint64_t seed, int n, uint64_t count, uint32_t rings)
{
    static const int dtypes[] = {PCCL_F32, PCCL_F16, PCCL_BF16, PCCL_F64};
    static const int redops[] = {PCCL_SUM, PCCL_AVG, PCCL_MAX, PCCL_MIN};
    struct job job = job_plain(count, seed % 2);
    job.dtype = dtypes[seed % 4];
    job.redop = redops[seed / 4 % 4];
    job.format = 1 + (int)(seed % PCCL_ZERO_POINT_16);
    job.twostage = job.direct = true;
    job.rings = rings;
    job.chunk_bytes = seed % 3 ? 600 : 1 << 16;
    if (seed % 5 == 0) {
        job.n_parts = 3;
        job.part[0].dtype = PCCL_F32;
        job.part[0].count = count / 2;
        job.part[1].dtype = PCCL_F64;
        job.part[1].count = 0;
        job.part[2].dtype = PCCL_F64;
        job.part[2].count = count;
    }
    job_make(&job, n);
    return job;
}

static void run_one(uint64_t seed, int n, uint64_t count, uint32_t rings, bool direct)
{
    struct job job = make_job(seed, n, count, rings);
    int i;
    job.direct = direct;
    job_open(&peers, &job, seed);
    fake_refuse(seed % 3 == 0 ? 30 : 0);
    job_start_all(&peers, &job);
    peers_run(&peers);
    if (!CHECK(job_is_right(&peers, &job)))
        fprintf(stderr, "  seed %lu n %d count %lu rings %u direct %d\n", (unsigned long)seed, n,
                (unsigned long)count, rings, direct);
    CHECK(job_commit(&peers, &job));
    for (i = 0; i < n; i++)
        CHECK(pccl_engine_dropped(peers.peer[i].engine) == 0);
    job_close(&peers, &job);
}

static void test_results(void)
{
    static const uint64_t counts[] = {0, 1, 65, 1000, 12345};
    uint64_t seed;
    for (seed = 1; seed <= 96; seed++)
        run_one(seed, 3 + (int)(seed % 3), counts[seed % 5], 1 + (uint32_t)(seed / 7 % 2),
                seed % 11 != 0);
}

/* Each member sends its contribution once and the results once, around the ring or not. */
static void test_bytes(void)
{
    struct job job = job_plain(4 * 1024, false);
    int i;
    job.format = PCCL_BLOCK_8;
    job.twostage = job.direct = true;
    job_make(&job, 4);
    job_open(&peers, &job, 3);
    job_start_all(&peers, &job);
    peers_run(&peers);
    CHECK(job_commit(&peers, &job));
    for (i = 0; i < 4; i++) {
        const pccl_event *event = peers_last_event(&peers, i, job.op);
        CHECK(event->tx_bytes == 6 * pccl_quantized_size(PCCL_BLOCK_8, PCCL_F32, 1024));
        CHECK(event->rx_bytes == event->tx_bytes);
    }
    job_close(&peers, &job);
}

/* Contributions that come before START wait for it. */
static void test_early(void)
{
    uint64_t seed;
    for (seed = 1; seed <= 24; seed++) {
        struct job job = make_job(seed, 3 + (int)(seed % 3), 2000, 1);
        job_open(&peers, &job, seed);
        (void)job_start_late(&peers, &job, seed);
        CHECK(job_commit(&peers, &job));
        job_close(&peers, &job);
    }
}

/* Aborts after every possible number of passes. */
static void test_aborts(void)
{
    bool done = false;
    int i, k;
    for (k = 0; !done; k++) {
        struct job job = make_job((uint64_t)k + 1, 4, 3000, 1);
        job_open(&peers, &job, (uint64_t)k + 1);
        job_start_all(&peers, &job);
        for (i = 0; i < k; i++)
            (void)peers_step(&peers);
        done = job_is_right(&peers, &job);
        CHECK(job_abort(&peers, &job));
        job_close(&peers, &job);
    }
    CHECK(k > 5);
}

/* Contributions go around the ring if a direct stream is lost before it has carried any; otherwise
 * the collective fails. */
static void test_lost_direct_stream(void)
{
    uint64_t seed;
    int i, around = 0, failed = 0;
    for (seed = 1; seed <= 60; seed++) {
        struct job job = make_job(seed, 5, 6000, 1);
        job_open(&peers, &job, seed);
        job_start_all(&peers, &job);
        for (i = 0; i < (int)(seed % 12); i++)
            (void)peers_step(&peers);
        peers_lose_stream(&peers, 0, TEST_DIRECT + 3);
        peers_run(&peers);
        if (peers_count(&peers, 0, PCCL_FAILED, job.op) > 0) {
            failed++;
            CHECK(job_abort(&peers, &job));
        } else {
            around++;
            CHECK(job_commit(&peers, &job));
        }
        job_close(&peers, &job);
    }
    CHECK(around > 3 && failed > 3);
}

/* READY comes in pieces, in another order on each peer. */
static void test_progressive(void)
{
    uint64_t seed, at, step = 64 * 16, count = 64 * 16 * 12;
    int i;
    for (seed = 1; seed <= 8; seed++) {
        struct job job = job_plain(count, seed % 2);
        job.format = PCCL_BLOCK_8;
        job.twostage = job.direct = true;
        job.chunk_bytes = 2048;
        job.window = step;
        job_make(&job, 4);
        job_open(&peers, &job, seed);
        job_start_all(&peers, &job);
        for (at = 0; at < count; at += step)
            for (i = 0; i < 4; i++) {
                uint64_t from = (at + (uint64_t)i * step * seed) % count;
                job_fill(&peers, i, &job, from, from + step);
                peers_run(&peers);
            }
        CHECK(job_commit(&peers, &job));
        job_close(&peers, &job);
    }
}

enum outcome { TAKEN, DROPPED, FATAL };

/* A contribution of position 0 to the segment of position 1. */
static struct wire_header good(const struct job *job)
{
    struct wire_header header = {0};
    header.kind = WIRE_CHUNK;
    header.members = 4;
    header.step = TWOSTAGE_STEP;
    header.nonce = TEST_NONCE;
    header.run = TEST_RUN;
    header.seq = job->seq;
    header.tag = job->tag;
    header.offset = 2048;
    header.length = 1024;
    return header;
}

static void try_message(const struct wire_header *header, uint64_t bytes, int times, bool early,
                        enum outcome outcome, const char *what)
{
    struct job job = job_plain(4 * 1024, false);
    int i, failed;
    job.format = PCCL_BLOCK_8;
    job.chunk_bytes = 2048;
    job.twostage = job.direct = true;
    job_make(&job, 4);
    job_open(&peers, &job, 4);
    if (!early)
        job_start(&peers, 1, &job);
    peers_run(&peers);
    for (i = 0; i < times; i++)
        peers_inject(&peers, 1, header, (size_t)bytes);
    peers_run(&peers);
    if (early)
        job_start(&peers, 1, &job);
    peers_run(&peers);
    failed = peers_count(&peers, 1, PCCL_FAILED, job.op);
    if (!CHECK((pccl_engine_dropped(peers.peer[1].engine) > 0) == (outcome == DROPPED)
               && failed == (outcome == FATAL)))
        fprintf(stderr, "  %s, %s START\n", what, early ? "before" : "after");
    CHECK(job_abort(&peers, &job));
    job_close(&peers, &job);
}

#define TRY(outcome, change) \
    do { \
        struct job of = job_plain(4 * 1024, false); \
        struct wire_header header = good(&of); \
        uint64_t bytes = pccl_quantized_size(PCCL_BLOCK_8, PCCL_F32, 1024); \
        int times = 1; \
        change; \
        try_message(&header, bytes, times, false, outcome, #change); \
        try_message(&header, bytes, times, true, outcome, #change); \
    } while (0)

static void test_hostile_messages(void)
{
    TRY(TAKEN, (void)0);
    TRY(TAKEN, header.segment = 3);                  /* around the ring */
    TRY(TAKEN, header.offset = 3072);                /* for position 2: to be sent on */
    TRY(DROPPED, header.seq++);
    TRY(DROPPED, header.nonce++);
    TRY(FATAL, times = 2);
    TRY(FATAL, header.segment = 1);
    TRY(FATAL, header.segment = 4);
    TRY(FATAL, header.members = 3);
    TRY(FATAL, header.ring = 1);
    TRY(FATAL, header.ring = PCCL_RINGS_MAX);
    TRY(TAKEN, header.offset = 0);                   /* and for position 3 */
    TRY(FATAL, header.offset = 1024);                /* from itself to itself */
    TRY(FATAL, header.offset = 4096);
    TRY(FATAL, header.offset = 2049);
    TRY(FATAL, header.offset = 2112);                /* another cut */
    TRY(FATAL, header.length = 960);
    TRY(FATAL, bytes--);
    TRY(FATAL, header.length = 512;
        bytes = pccl_quantized_size(PCCL_BLOCK_8, PCCL_F32, 512));
}

static void test_wrong_starts(void)
{
    int variant;
    for (variant = 0; variant < 3; variant++) {
        struct job job = job_plain(1000, false);
        job.format = variant == 0 ? PCCL_UNQUANTIZED : PCCL_BLOCK_8;
        job.twostage = true;
        job.what = variant == 1 ? PCCL_REDUCE : PCCL_ALL_REDUCE;
        job_make(&job, variant == 2 ? 2 : 3);
        job_open_ring(&peers, &job, job.n, 1);
        job_start(&peers, 0, &job);
        peers_run(&peers);
        CHECK(peers_count(&peers, 0, PCCL_FAILED, job.op) == 1
              && peers_event(&peers, 0, PCCL_FAILED, job.op)->status == PCCL_EINVAL);
        CHECK(job_abort(&peers, &job));
        job_close(&peers, &job);
    }
}

int main(void)
{
    test_results();
    test_bytes();
    test_early();
    test_aborts();
    test_lost_direct_stream();
    test_progressive();
    test_hostile_messages();
    test_wrong_starts();
    return check_report("twostage");
}
