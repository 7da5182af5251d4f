/* test_coded.c - all-reduces whose result is left as codes and steps: they are those of the result,
 * or, between two that send each other everything, those that the other one has sent. */
#include "check.h"
#include "job.h"

#include "engine/codes.h"

#include <stdlib.h>
#include <string.h>

enum { STEP = 256, COUNT_MAX = 5003, CODED_MAX = (COUNT_MAX + 63) / 64 * (64 + 8) };

static unsigned char coded[TEST_PEERS_MAX][CODED_MAX + 1];
static void *made[TEST_PEERS_MAX];   /* the job's own, in whose place these are */

/* Where the codes end and the steps begin. */
static size_t steps_at(const struct job *job)
{
    return ((size_t)job->part[0].count + 63) / 64 * 64;
}

static bool is_coded_result(const struct job *job, int who)
{
    const unsigned char *steps = coded[who] + steps_at(job);
    uint64_t i;
    for (i = 0; i < job->count; i++) {
        int code = coded[who][i] - 128;
        if (job->dtype == PCCL_F64) {
            double step, value;
            memcpy(&step, steps + i / 64 * sizeof step, sizeof step);
            value = code * step;
            if (memcmp(&value, job->expected[who][0] + i * sizeof value, sizeof value) != 0)
                return false;
        } else {
            float step, value;
            memcpy(&step, steps + i / 64 * sizeof step, sizeof step);
            value = (float)code * step;
            if (memcmp(&value, job->expected[who][0] + i * sizeof value, sizeof value) != 0)
                return false;
        }
    }
    return true;
}

/* Whether a peer has what the other one has sent. */
static bool has_the_other(const struct job *job, int who)
{
    unsigned char expected[CODED_MAX];
    unsigned char *data = malloc((size_t)pccl_quantized_size(job->format, job->dtype, job->count));
    size_t bytes = codes_bytes(job->dtype, job->count);
    if (data == NULL)
        abort();
    memset(expected, 0xee, sizeof expected);
    (void)pccl_quantize(job->format, job->dtype, data, job->given[1 - who][0], job->count);
    codes_unpack(job->dtype, expected, job->count, 0, data, job->count);
    free(data);
    return memcmp(coded[who], expected, bytes) == 0;
}

static void open_coded(struct peers *peers, struct job *job, int n, uint64_t seed)
{
    pccl_options options = peers_options();
    int i;
    job->coded = true;
    job->format = PCCL_BLOCK_8;
    job_make(job, n);
    peers_open(peers, n, &options, seed);
    if (n > 1)
        peers_connect_ring(peers, 2, 2);
    for (i = 0; i < n; i++) {
        memset(coded[i], 0xee, sizeof coded[i]);
        made[i] = job->parts[i][0].recv;
        job->parts[i][0].recv = coded[i];
        job_register(peers, i, job);
    }
}

static void close_coded(struct peers *peers, struct job *job)
{
    int i;
    CHECK(job_commit(peers, job));
    peers_close(peers);
    for (i = 0; i < job->n; i++)
        job->parts[i][0].recv = made[i];
    job_free(job);
}

static void test_results(void)
{
    static const uint64_t counts[] = {1, 64, 200, 256, 1000, COUNT_MAX};
    static struct peers peers;
    uint64_t seed, step, rows;
    int i, n;
    for (seed = 1; seed <= 96; seed++) {
        struct job job = job_plain(counts[seed % 6], false);
        n = 2 + (int)(seed % 4);
        job.direct = n == 2 && seed % 3 > 0;
        job.dtype = seed % 7 < 5 || job.direct ? PCCL_F32 : PCCL_F64;
        job.redop = seed % 5 == 0 ? PCCL_MAX : seed % 5 == 1 ? PCCL_AVG : PCCL_SUM;
        job.chunk_bytes = seed % 3 ? 700 : 4096;
        job.step = seed % 2 ? STEP : 0;
        open_coded(&peers, &job, n, seed);
        job_start_all(&peers, &job);
        rows = (job.span + STEP - 1) / STEP;
        for (step = 0; job.step > 0 && step < rows; step++)
            for (i = 0; i < n; i++)
                job_fill(&peers, i, &job, step * STEP,
                         (step + 1) * STEP < job.span ? (step + 1) * STEP : job.span);
        peers_run(&peers);
        for (i = 0; i < n; i++) {
            CHECK(peers_count(&peers, i, PCCL_COMPLETE, job.op) == 1);
            CHECK(job.direct ? has_the_other(&job, i) : is_coded_result(&job, i));
            CHECK(coded[i][codes_bytes(job.dtype, job.count)] == 0xee);
            CHECK(peers_count(&peers, i, PCCL_WRITTEN, job.op) == (job.step > 0 ? (int)rows : 0));
            CHECK(job_is_restored(&job, i));
        }
        close_coded(&peers, &job);
    }
}

/* Nobody is left to reduce with: nothing is written. */
static void test_alone(void)
{
    static struct peers peers;
    struct job job = job_plain(200, false);
    open_coded(&peers, &job, 1, 1);
    job_start_all(&peers, &job);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_COMPLETE, job.op) == 1);
    CHECK(coded[0][0] == 0xee && coded[0][steps_at(&job)] == 0xee);
    close_coded(&peers, &job);
}

/* Another collective, another format, memory that overlaps. */
static void test_impossible(void)
{
    static struct peers peers;
    int i;
    for (i = 0; i < 4; i++) {
        struct job job = job_plain(1000, i == 2);
        pccl_options options = peers_options();
        void *recv;
        job.what = i == 0 ? PCCL_REDUCE : PCCL_ALL_REDUCE;
        job.format = i == 1 ? PCCL_BLOCK_4 : PCCL_BLOCK_8;
        job.coded = true;
        job_make(&job, 2);
        peers_open(&peers, 2, &options, 1);
        recv = job.parts[0][0].recv;
        if (i == 3)
            job.parts[0][0].recv = (unsigned char *)job.parts[0][0].send + 3999;
        job_register(&peers, 0, &job);
        peers_run(&peers);
        CHECK(peers_event(&peers, 0, PCCL_FAILED, job.op)->status == PCCL_EINVAL);
        peers_close(&peers);
        job.parts[0][0].recv = recv;
        job_free(&job);
    }
}

int main(void)
{
    test_results();
    test_alone();
    test_impossible();
    return check_report("coded");
}
