/* test_allreduce.c - all-reduces on the fake network: whatever the network does, the result is
 * right. */
#include "check.h"
#include "harness.h"

#include <string.h>

static struct peers peers;

/* Runs one all-reduce in a world of its own. */
static void run_one(struct job *job, int n, const pccl_options *options, unsigned refuse_percent,
                    uint64_t seed)
{
    int i;
    job_make(job, n);
    peers_open(&peers, n, options, seed);
    fake_refuse(refuse_percent);
    if (n > 1)
        peers_connect_ring(&peers, 1 + (uint32_t)(seed % 3), 1 + (uint32_t)(seed % 4));
    for (i = 0; i < n; i++) {
        job_register(&peers, i, job);
        job_start(&peers, i, job);
    }
    peers_run(&peers);
    if (!CHECK(job_is_right(&peers, job)))
        fprintf(stderr, "  n %d count %lu in place %d seed %lu\n", n, (unsigned long)job->count,
                job->in_place, (unsigned long)seed);
    CHECK(job_commit(&peers, job));
    CHECK(job_is_right(&peers, job));
    job_close(&peers, job);
}

static void test_sizes(void)
{
    static const int ns[] = {1, 2, 3, 5, 8};
    pccl_options options = peers_options();
    uint64_t seed = 1;
    size_t i, j;
    int in_place;
    for (i = 0; i < sizeof ns / sizeof *ns; i++) {
        uint64_t n = (uint64_t)ns[i];
        uint64_t counts[] = {0, 1, n - 1, n, n + 1, 63, 64, 65, 1000, 64 * n, 64 * n + 1};
        for (j = 0; j < sizeof counts / sizeof *counts; j++)
            for (in_place = 0; in_place < 2; in_place++) {
                struct job job = job_plain(counts[j], in_place);
                run_one(&job, ns[i], &options, in_place ? 40 : 0, seed++);
            }
    }
}

static void test_large(void)
{
    pccl_options options = peers_options();
    struct job job;
    int n;
    for (n = 2; n <= 8; n += 3) {
        job = job_plain(203530, n != 5);
        job.chunk_bytes = 65536;
        run_one(&job, n, &options, 10, 7);
    }
}

/* One-shots of every type and operation, of one array and of several. In place, chunks may arrive
 * before our own chunks of the same offsets are sent. */
static void test_oneshot(void)
{
    static const uint64_t counts[] = {0, 1, 63, 64, 65, 1000, 5003};
    pccl_options options = peers_options();
    uint64_t seed = 1;
    size_t i;
    int dtype;
    for (dtype = PCCL_U8; dtype <= PCCL_F64; dtype++)
        for (i = 0; i < sizeof counts / sizeof *counts; i++, seed++) {
            struct job job = job_plain(counts[i], seed % 2);
            job.oneshot = true;
            job.dtype = dtype;
            job.redop = (int)(seed % (PCCL_MIN + 1));
            job.chunk_bytes = seed % 3 ? 700 : 1;
            options.copy_max = seed % 5 ? 256 : 0;
            run_one(&job, 2, &options, seed % 5 ? 30 : 0, seed);
            job = job_crowd(counts[i] % 200, seed % 2);
            job.oneshot = true;
            job.redop = (int)(seed % (PCCL_MIN + 1));
            job.chunk_bytes = seed % 3 ? 700 : 1;
            run_one(&job, 2, &options, seed % 5 ? 30 : 0, seed);
        }
}

/* Quantized one-shots in every format. In place, part of a chunk to send may be in the undo
 * buffer. */
static void test_oneshot_quantized(void)
{
    static const uint64_t counts[] = {0, 1, 65, 1000, 5003};
    static const int redops[] = {PCCL_SUM, PCCL_AVG, PCCL_MAX, PCCL_MIN};
    pccl_options options = peers_options();
    uint64_t seed = 1;
    size_t i;
    int format, dtype;
    for (format = PCCL_BLOCK_8; format <= PCCL_ZERO_POINT_16; format++)
        for (dtype = PCCL_F16; dtype <= PCCL_F64; dtype++)
            for (i = 0; i < sizeof counts / sizeof *counts; i++, seed++) {
                struct job job = job_plain(counts[i], seed % 2);
                job.oneshot = true;
                job.format = format;
                job.dtype = dtype;
                job.redop = redops[seed / 2 % 4];
                job.chunk_bytes = seed % 3 ? 700 : 1;
                run_one(&job, 2, &options, seed % 5 ? 30 : 0, seed);
            }
}

/* One member starts late, when it has all chunks of the other already. Or it aborts, in the middle
 * or at the end, and its contribution is restored. */
static void test_oneshot_early(void)
{
    uint64_t seed;
    int i;
    for (seed = 1; seed <= 30; seed++) {
        struct job job = seed % 5 == 2 ? job_crowd(seed * 20, seed % 3 > 0)
                                       : job_plain(0, seed % 3 > 0);
        job.oneshot = true;
        job.format = seed % 5 < 3 ? PCCL_UNQUANTIZED : PCCL_BLOCK_8;
        job.n_parts = seed % 5 == 2 ? job.n_parts : 3;
        for (i = 0; seed % 5 != 2 && i < 3; i++) {
            job.part[i].dtype = i == 1 ? PCCL_F64 : PCCL_F32;
            job.part[i].count = 65 + 700 * (uint64_t)i;
        }
        job_make(&job, 2);
        job_open_ring(&peers, &job, 2, seed);
        job_start(&peers, 0, &job);
        peers_run(&peers);
        if (seed % 4 == 0) {
            CHECK(job_abort(&peers, &job));
        } else {
            job_start(&peers, 1, &job);
            if (seed % 4 == 1)
                (void)pccl_engine_step(peers.peer[1].engine);
            else
                peers_run(&peers);
            if (seed % 4 == 3) {
                CHECK(job_commit(&peers, &job));
            } else {
                CHECK(job_abort(&peers, &job));
            }
        }
        job_close(&peers, &job);
    }
}

/* One-shot is refused where it is impossible, and fails if only one of the members uses it. */
static void test_oneshot_contradictions(void)
{
    int what;
    for (what = 0; what < 4; what++) {
        struct job job = job_plain(1000, what % 2);
        int n = what == 0 ? 3 : 2;
        job.what = what == 1 ? PCCL_REDUCE_SCATTER : what == 2 ? PCCL_REDUCE : PCCL_ALL_REDUCE;
        job_make(&job, n);
        job_open_ring(&peers, &job, n, 3);
        job.oneshot = true;
        job_start(&peers, 0, &job);
        if (what == 3) {
            job.oneshot = false;
            job_start(&peers, 1, &job);
        }
        peers_run(&peers);
        CHECK(peers_count(&peers, 0, PCCL_FAILED, job.op)
              + peers_count(&peers, 1, PCCL_FAILED, job.op) > 0);
        if (what < 3)
            CHECK(peers_event(&peers, 0, PCCL_FAILED, job.op)->status == PCCL_EINVAL);
        CHECK(job_abort(&peers, &job));
        job_close(&peers, &job);
    }
}

static void test_types(void)
{
    pccl_options options = peers_options();
    int dtype, redop;
    for (dtype = PCCL_U8; dtype <= PCCL_F64; dtype++)
        for (redop = PCCL_SUM; redop <= PCCL_MIN; redop++) {
            struct job job = job_plain(777, (dtype + redop) % 2);
            job.dtype = dtype;
            job.redop = redop;
            run_one(&job, 3, &options, 0, (uint64_t)(dtype * 5 + redop + 1));
        }
}

/* Quantized all-reduces, reduces and reduce-scatters: every format, with chunks of one block and of
 * several, with and without partial results. */
static void test_quantized(void)
{
    static const uint64_t counts[] = {0, 1, 4, 65, 1000, 64 * 5 + 1, 5003};
    static const int redops[] = {PCCL_SUM, PCCL_AVG, PCCL_MAX, PCCL_MIN};
    pccl_options options = peers_options();
    uint64_t seed = 1;
    size_t i;
    int format, n;
    for (format = PCCL_BLOCK_8; format <= PCCL_ZERO_POINT_16; format++)
        for (n = 1; n <= 5; n += n < 3 ? 1 : 2)
            for (i = 0; i < sizeof counts / sizeof *counts; i++, seed++) {
                struct job job = job_plain(counts[i], seed % 2);
                job.format = format;
                job.what = seed % 3 == 0 ? PCCL_REDUCE_SCATTER
                    : seed % 7 < 2 ? PCCL_REDUCE : PCCL_ALL_REDUCE;
                job.root = (uint32_t)(seed % (uint64_t)n);
                job.dtype = PCCL_F16 + (int)(seed % 4);
                job.redop = redops[seed / 2 % 4];
                job.chunk_bytes = seed % 3 ? 700 : 1;
                options.forward_max = 1 + (uint32_t)(seed % 4);
                run_one(&job, n, &options, seed % 5 ? 30 : 0, seed);
            }
}

/* The smallest possible limits, and settings with which all payloads or none are copied. */
static void test_limits(void)
{
    pccl_options options = peers_options();
    uint64_t seed;
    for (seed = 1; seed <= 24; seed++) {
        struct job job = seed % 5 < 3 ? job_plain(5000, seed % 2) : job_crowd(500, seed % 2);
        options.forward_max = 1 + (uint32_t)(seed % 2);
        options.copy_max = seed % 3 == 0 ? 0 : seed % 3 == 1 ? 256 : 1 << 20;
        job.chunk_bytes = seed % 4 == 0 ? 1 : 700;
        run_one(&job, 2 + (int)(seed % 5), &options, 30, seed);
    }
}

/* Several ops at once. Each peer starts them in another order. */
static void test_concurrent(void)
{
    enum { JOBS = 6, N = 4 };
    struct job jobs[JOBS];
    pccl_options options = peers_options();
    uint64_t seed;
    int i, j;
    for (seed = 1; seed <= 5; seed++) {
        peers_open(&peers, N, &options, seed);
        fake_refuse(20);
        peers_connect_ring(&peers, 2, 2);
        for (j = 0; j < JOBS; j++) {
            jobs[j] = job_plain((uint64_t)(j * 400), j % 2);
            jobs[j].op = (uint64_t)(j + 1);
            jobs[j].tag = 100 + (uint64_t)j;
            jobs[j].seq = 20 + (uint64_t)j;
            job_make(&jobs[j], N);
            for (i = 0; i < N; i++)
                job_register(&peers, i, &jobs[j]);
        }
        for (i = 0; i < N; i++)
            for (j = 0; j < JOBS; j++)
                job_start(&peers, i, &jobs[(j * (i % 2 ? 5 : 1) + i) % JOBS]);
        peers_run(&peers);
        for (j = 0; j < JOBS; j++)
            CHECK(job_is_right(&peers, &jobs[j]));
        for (j = 0; j < JOBS; j++)
            CHECK(job_commit(&peers, &jobs[j]));
        peers_close(&peers);
        for (j = 0; j < JOBS; j++)
            job_free(&jobs[j]);
    }
}

/* Some peers get START only when the others can make no progress without them. */
static void test_early_chunks(void)
{
    uint64_t seed;
    for (seed = 1; seed <= 40; seed++) {
        struct job job = job_plain(seed % 7 * 150, seed % 2);
        int n = 2 + (int)(seed % 4);
        job.format = seed % 8 < 4 ? PCCL_UNQUANTIZED : PCCL_BLOCK_8;
        job.chunk_bytes = seed % 3 ? 4096 : 256;
        job_make(&job, n);
        job_open_ring(&peers, &job, n, seed);
        CHECK(job_start_late(&peers, &job, seed));
        CHECK(job_commit(&peers, &job));
        job_close(&peers, &job);
    }
}

/* Two rings in opposite directions divide the data, and do not deadlock: neither waits for room
 * that only the other can free. */
static void test_two_rings(void)
{
    enum { N = 3 };
    pccl_options options = peers_options();
    uint64_t seed;
    int i;
    options.forward_max = 1;
    for (seed = 1; seed <= 40; seed++) {
        struct job job = job_plain(30000 + seed, seed % 2);
        job.chunk_bytes = 512;
        job.rings = 2;
        job_make(&job, N);
        peers_open(&peers, N, &options, seed);
        peers_connect_ring(&peers, 1, 1);
        for (i = 0; i < N; i++) {
            peers_stream(&peers, i, (i + N - 1) % N, 2, 1, 1);
            job_register(&peers, i, &job);
            job_start(&peers, i, &job);
        }
        peers_run(&peers);
        CHECK(job_commit(&peers, &job));
        job_close(&peers, &job);
    }
}

/* Events count the bytes: 2(n-1)/n of the data in and out. */
static void test_byte_counts(void)
{
    struct job job = job_plain(64 * 4, true);
    int i;
    job_make(&job, 4);
    job_open_ring(&peers, &job, 4, 3);
    job_start_all(&peers, &job);
    peers_run(&peers);
    CHECK(job_commit(&peers, &job));
    for (i = 0; i < 4; i++) {
        CHECK(peers_event(&peers, i, PCCL_SETTLED, 1)->tx_bytes == 6 * 64 * sizeof(float));
        CHECK(peers_event(&peers, i, PCCL_SETTLED, 1)->rx_bytes == 6 * 64 * sizeof(float));
        CHECK(pccl_engine_dropped(peers.peer[i].engine) == 0);
    }
    job_close(&peers, &job);
}

int main(void)
{
    test_sizes();
    test_large();
    test_types();
    test_oneshot();
    test_oneshot_quantized();
    test_oneshot_early();
    test_oneshot_contradictions();
    test_quantized();
    test_limits();
    test_concurrent();
    test_early_chunks();
    test_two_rings();
    test_byte_counts();
    return check_report("allreduce");
}
