/* test_collectives.c - every collective, of one array and of several, on the fake network: the
 * results, and the memory after an abort at any moment. */
#include "check.h"
#include "harness.h"

#include <string.h>

static struct peers peers;

static struct job make_job(int what, uint64_t count, bool in_place)
{
    struct job job = job_plain(count, in_place);
    job.what = (enum pccl_collective)what;
    return job;
}

/* Arrays of several types and sizes, one of them empty. */
static struct job make_list(int what, uint64_t count, bool in_place)
{
    struct job job = make_job(what, count, in_place);
    static const int dtypes[] = {PCCL_F32, PCCL_U8, PCCL_F64, PCCL_BF16};
    int k;
    job.n_parts = 4;
    for (k = 0; k < job.n_parts; k++) {
        job.part[k].dtype = dtypes[k];
        job.part[k].count = k == 1 ? 0 : count / (uint64_t)(4 - k) + (uint64_t)k;
    }
    return job;
}

/* Many small arrays. If buffers have one slice, a chunk spans several of them. */
static struct job make_crowd(int what, uint64_t count, bool in_place)
{
    struct job job = job_crowd(count, in_place);
    job.what = (enum pccl_collective)what;
    job.alternating = count % 2 == 0;
    return job;
}

/* Gives each rank of an all-gather another number of rows: none, few or many. */
static void make_unlike(struct job *job, uint64_t seed)
{
    static const uint64_t rows[] = {0, 1, 7, 64, 130, 3, 0, 201};
    int i;
    job->unlike = true;
    for (i = 0; i < TEST_PEERS_MAX; i++)
        job->rows[i] = rows[(seed * 5 + (uint64_t)i * (1 + seed % 3)) % 8];
}

/* Runs one collective in a world of its own. */
static void run_one(struct job *job, int n, uint64_t seed, uint32_t rings)
{
    job->root = (uint32_t)(seed % (uint64_t)n);
    job->rings = rings;
    job_make(job, n);
    job_open(&peers, job, seed);
    fake_refuse(seed % 3 == 0 ? 30 : 0);
    job_start_all(&peers, job);
    peers_run(&peers);
    if (!CHECK(job_is_right(&peers, job)))
        fprintf(stderr, "  what %d n %d count %lu parts %d in place %d rings %u seed %lu\n",
                (int)job->what, n, (unsigned long)job->count, job->n_parts, job->in_place, rings,
                (unsigned long)seed);
    CHECK(job_commit(&peers, job));
    CHECK(job_is_right(&peers, job));
    job_close(&peers, job);
}

static void test_sizes(void)
{
    static const int ns[] = {1, 2, 3, 5, 8};
    uint64_t seed = 1;
    int what, i, j, in_place;
    for (what = 1; what <= PCCL_COLLECTIVES_N; what++)
        for (i = 0; i < 5; i++) {
            uint64_t n = (uint64_t)ns[i];
            uint64_t counts[] = {0, 1, n - 1, n + 1, 63, 64, 65, 997, 64 * n + 1};
            for (j = 0; j < 9; j++)
                for (in_place = 0; in_place < 2; in_place++) {
                    struct job job = make_job(what, counts[j], in_place);
                    run_one(&job, ns[i], seed++, 1);
                    job = make_list(what, counts[j], in_place);
                    run_one(&job, ns[i], seed++, 1);
                    job = make_crowd(what, counts[j], in_place);
                    job.chunk_bytes = seed % 3 ? 1024 : 256;
                    run_one(&job, ns[i], seed++, 1);
                }
        }
}

static void test_types(void)
{
    int what, dtype, redop;
    for (what = 1; what <= PCCL_COLLECTIVES_N; what++)
        for (dtype = PCCL_U8; dtype <= PCCL_F64; dtype++)
            for (redop = PCCL_SUM; redop <= PCCL_MIN; redop++) {
                struct job job = make_job(what, 400, dtype % 2);
                job.dtype = dtype;
                job.redop = redop;
                run_one(&job, 3, (uint64_t)(dtype * 5 + redop + 1), 1);
            }
}

/* Two rings in opposite directions. In the second, positions are not ranks. */
static void test_two_rings(void)
{
    uint64_t seed;
    int what;
    for (what = 1; what <= PCCL_COLLECTIVES_N; what++)
        for (seed = 1; seed <= 12; seed++) {
            struct job job = make_list(what, 3000 + seed, seed % 2);
            job.chunk_bytes = 512;
            run_one(&job, 2 + (int)(seed % 4), seed, 2);
            job = make_crowd(what, seed * 50, seed % 2);
            job.chunk_bytes = 512;
            run_one(&job, 2 + (int)(seed % 4), seed, 2);
        }
}

/* All-gathers whose slices differ, of one array and of several, in one ring and in two. */
static void test_unlike_slices(void)
{
    uint64_t seed;
    for (seed = 1; seed <= 120; seed++) {
        uint64_t count = seed % 4 == 0 ? 1 : seed % 70;
        struct job job = seed % 2 ? make_job(PCCL_ALL_GATHER, count, seed % 5 < 2)
                                  : make_list(PCCL_ALL_GATHER, count, seed % 5 < 2);
        int n = 1 + (int)(seed % 5);
        make_unlike(&job, seed);
        if (seed % 40 == 0)
            memset(job.rows, 0, sizeof job.rows);
        job.chunk_bytes = seed % 3 ? 256 : 4096;
        run_one(&job, n, seed, 1 + (uint32_t)(n > 1 && seed % 7 == 0));
    }
}

/* Each peer sends and receives exactly the rows that exist: 4 peers, rows of 64 floats. */
static void test_unlike_byte_counts(void)
{
    static const uint64_t rows[] = {3, 0, 1, 10};
    struct job job = make_job(PCCL_ALL_GATHER, 64, false);
    int i;
    job.unlike = true;
    memcpy(job.rows, rows, sizeof rows);
    job_make(&job, 4);
    job_open(&peers, &job, 3);
    job_start_all(&peers, &job);
    peers_run(&peers);
    CHECK(job_commit(&peers, &job));
    for (i = 0; i < 4; i++) {
        const pccl_event *event = peers_last_event(&peers, i, job.op);
        CHECK(event->tx_bytes == (14 - rows[(i + 1) % 4]) * 256);
        CHECK(event->rx_bytes == (14 - rows[i]) * 256);
    }
    job_close(&peers, &job);
}

/* Some peers get START only when the others can make no progress without them. */
static void test_early_chunks(void)
{
    uint64_t seed;
    int what, n;
    for (what = 1; what <= PCCL_COLLECTIVES_N; what++)
        for (seed = 1; seed <= 24; seed++) {
            struct job job = seed % 8 < 4 ? make_list(what, seed % 7 * 150, seed % 2)
                                          : make_crowd(what, seed % 7 * 50, seed % 2);
            n = 2 + (int)(seed % 4);
            if (what == PCCL_ALL_GATHER && seed % 2)
                make_unlike(&job, seed);
            job.root = (uint32_t)(seed / 4 % (uint64_t)n);
            job.chunk_bytes = seed % 3 ? 4096 : 256;
            job.rings = 1 + (uint32_t)(seed % 3 == 0);
            job_make(&job, n);
            job_open(&peers, &job, seed);
            CHECK(job_start_late(&peers, &job, seed));
            CHECK(job_commit(&peers, &job));
            job_close(&peers, &job);
        }
}

/* Aborts on all peers after every possible number of passes, with or without a lane being cut
 * before. Each contribution is restored, unless its op was complete and settled. */
static void abort_anywhere(struct job job, bool cut)
{
    bool done = false;
    int i, k, rescued = 0;
    for (k = 0; !done; k++) {
        job_make(&job, 3);
        job_open(&peers, &job, (uint64_t)k + 1);
        job_start_all(&peers, &job);
        for (i = 0; i < k; i++)
            (void)peers_step(&peers);
        done = true;
        for (i = 0; i < 3; i++)
            done &= peers_count(&peers, i, PCCL_COMPLETE, job.op) == 1;
        if (cut && fake_cut(peers.peer[1].endpoint))
            peers_run(&peers);
        for (i = 0; i < 3; i++)
            peers_end(&peers, i, PCCL_ABORT, job.op);
        peers_run(&peers);
        for (i = 0; i < 3; i++) {
            const pccl_event *complete = peers_event(&peers, i, PCCL_COMPLETE, job.op);
            bool settled = complete != NULL && complete->settled;
            CHECK(peers_count(&peers, i, PCCL_SETTLED, job.op) == 1);
            CHECK(settled || job_is_restored(&job, i));
            rescued += complete == NULL && job.in_place;
        }
        job_close(&peers, &job);
        job.n_parts = job.n_parts == 1 ? 0 : job.n_parts;
    }
    CHECK(rescued > 0 || !job.in_place);
}

static void test_aborts(void)
{
    int what, in_place, cut;
    for (what = 1; what <= PCCL_COLLECTIVES_N; what++)
        for (in_place = 0; in_place < 2; in_place++)
            for (cut = 0; cut < 2; cut++) {
                abort_anywhere(make_job(what, 2000, in_place), cut);
                abort_anywhere(make_list(what, 1500, in_place), cut);
                abort_anywhere(make_crowd(what, 300, in_place), cut);
            }
    for (in_place = 0; in_place < 2; in_place++) {
        struct job job = make_list(PCCL_ALL_GATHER, 12, in_place);
        make_unlike(&job, 2);
        abort_anywhere(job, in_place);
    }
}

/* Payload bytes in and out of each position, for 4 peers and slices of 64 floats. */
static void test_byte_counts(void)
{
    static const uint64_t slices[PCCL_COLLECTIVES_N][2] = {
        {6, 6}, {12, 12}, {12, 12}, {4, 4}, {4, 4}};
    int what, i;
    for (what = 1; what <= PCCL_COLLECTIVES_N; what++) {
        struct job job = make_job(what, 256, true);
        job.root = 3;
        job_make(&job, 4);
        job_open(&peers, &job, 3);
        job_start_all(&peers, &job);
        peers_run(&peers);
        CHECK(job_commit(&peers, &job));
        for (i = 0; i < 4; i++) {
            const pccl_event *event = peers_last_event(&peers, i, job.op);
            int first = what == PCCL_BROADCAST ? 3 : what == PCCL_REDUCE ? 0 : -1;
            int last = what == PCCL_BROADCAST ? 2 : what == PCCL_REDUCE ? 3 : -1;
            CHECK(event->tx_bytes == (i == last ? 0 : slices[what - 1][0] * 256));
            CHECK(event->rx_bytes == (i == first ? 0 : slices[what - 1][1] * 256));
            CHECK(pccl_engine_dropped(peers.peer[i].engine) == 0);
        }
        job_close(&peers, &job);
    }
}

/* A list of arrays takes as many bytes as its elements, and fewer messages than arrays. */
static void test_crowd_counts(void)
{
    struct job job = make_crowd(PCCL_ALL_REDUCE, 1, false);
    uint64_t tx_bytes = 0, rx_bytes = 0;
    int i;
    job.chunk_bytes = 1 << 20;
    job_make(&job, 2);
    job_open(&peers, &job, 3);
    job_start_all(&peers, &job);
    peers_run(&peers);
    CHECK(fake_delivered() == 2 * (1 + 3));          /* of each segment, twice */
    CHECK(job_commit(&peers, &job));
    for (i = 0; i < 2; i++) {
        const pccl_event *event = peers_last_event(&peers, i, job.op);
        tx_bytes += event->tx_bytes;
        rx_bytes += event->rx_bytes;
    }
    CHECK(tx_bytes == 2 * (271 * sizeof(float) + 135 * sizeof(double)));
    CHECK(rx_bytes == tx_bytes);
    job_close(&peers, &job);
}

int main(void)
{
    test_sizes();
    test_types();
    test_two_rings();
    test_unlike_slices();
    test_unlike_byte_counts();
    test_early_chunks();
    test_aborts();
    test_byte_counts();
    test_crowd_counts();
    return check_report("collectives");
}
