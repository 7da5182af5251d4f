/* test_faults.c - aborts, lost lanes and hostile messages: buffers come back, nothing leaks. */
#include "check.h"
#include "harness.h"

#include <stdlib.h>

#include "engine/wire.h"

static struct peers peers;
static int format;                   /* of the jobs */

static struct job make_job(uint64_t count, bool in_place, int n)
{
    struct job job = job_plain(count, in_place);
    job.op = 5;
    job.tag = 9;
    job.format = format;
    job_make(&job, n);
    return job;
}

static bool all_complete(const struct job *job)
{
    int i;
    for (i = 0; i < peers.n; i++)
        if (peers_count(&peers, i, PCCL_COMPLETE, job->op) == 0)
            return false;
    return true;
}

/* Aborts after every possible number of passes. Afterwards the ring works, or its streams are
 * reported lost. */
static void test_abort_anywhere(void)
{
    bool done = false;
    int k, i, in_place, again = 0;
    for (in_place = 0; in_place < 2; in_place++)
        for (k = 0, done = false; !done; k++) {
            struct job job = make_job(3000, in_place, 3), next;
            bool intact = true;
            job_open_ring(&peers, &job, 3, (uint64_t)k + 1);
            job_start_all(&peers, &job);
            for (i = 0; i < k; i++)
                (void)peers_step(&peers);
            done = all_complete(&job);
            CHECK(job_abort(&peers, &job));
            for (i = 0; i < 3; i++)
                intact &= peers_count(&peers, i, PCCL_STREAM_LOST, 1) == 0;
            if (intact) {
                next = make_job(500, true, 3);
                next.op = 6;
                next.seq = 11;
                for (i = 0; i < 3; i++)
                    job_register(&peers, i, &next);
                job_start_all(&peers, &next);
                peers_run(&peers);
                CHECK(job_commit(&peers, &next));
                job_free(&next);
                again++;
            }
            job_close(&peers, &job);
        }
    CHECK(again > 0);
}

/* An abort that must close a stream fails the other ops on it, and reports that. */
static void test_abort_takes_along(void)
{
    struct job job = make_job(6000, true, 2), other = make_job(6000, true, 2);
    other.op = 6;
    other.tag = 10;
    job_open_ring(&peers, &job, 2, 1);
    job_register(&peers, 0, &other);
    job_start(&peers, 0, &job);
    job_start(&peers, 0, &other);
    while (peers_step(&peers))
        continue;
    peers_end(&peers, 0, PCCL_ABORT, job.op);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 1) == 1);
    CHECK(peers_count(&peers, 0, PCCL_FAILED, other.op) == 1);
    CHECK(peers_count(&peers, 0, PCCL_FAILED, job.op) == 0);
    CHECK(peers_count(&peers, 0, PCCL_SETTLED, job.op) == 1);
    CHECK(peers_count(&peers, 0, PCCL_SETTLED, other.op) == 0);
    peers_end(&peers, 0, PCCL_ABORT, other.op);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_SETTLED, other.op) == 1);
    CHECK(job_is_restored(&job, 0) && job_is_restored(&other, 0));
    job_close(&peers, &job);
    job_free(&other);
}

/* Cuts one lane after every possible number of passes. */
static void test_lose_lane_anywhere(void)
{
    bool done = false;
    int k, i, hits = 0;
    for (k = 0; !done; k++) {
        struct job job = make_job(3000, true, 3);
        job_open_ring(&peers, &job, 3, (uint64_t)k + 1);
        job_start_all(&peers, &job);
        for (i = 0; i < k; i++)
            (void)peers_step(&peers);
        done = all_complete(&job);
        if (fake_cut(peers.peer[1].endpoint)) {
            peers_run(&peers);
            CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 1) == 1);
            CHECK(peers_count(&peers, 0, PCCL_FAILED, job.op) == 1);
            CHECK(peers_event(&peers, 0, PCCL_FAILED, job.op)->status == PCCL_ESTREAM);
            CHECK(peers_event(&peers, 0, PCCL_FAILED, job.op)->stream == 1);
            hits++;
        }
        CHECK(job_abort(&peers, &job));
        job_close(&peers, &job);
    }
    CHECK(hits > 3);
}

/* A lane is cut when its op is COMPLETE and settled, but the neighbor does not have everything:
 * only STREAM_LOST reports it. */
static void test_lose_lane_of_forgotten_op(void)
{
    pccl_options options = peers_options();
    int seed, k, i, hits = 0;
    options.copy_max = 1 << 20;              /* nothing refers to the op's memory */
    for (seed = 1; seed <= 20; seed++) {
        struct job job = make_job(3000, false, 3);
        const pccl_event *event = NULL;
        peers_open(&peers, 3, &options, (uint64_t)seed);
        peers_connect_ring(&peers, 2, 4);
        for (i = 0; i < 3; i++)
            job_register(&peers, i, &job);
        job_start_all(&peers, &job);
        for (k = 0; k < 1000 && event == NULL; k++) {
            (void)peers_step(&peers);
            event = peers_event(&peers, 0, PCCL_COMPLETE, job.op);
        }
        if (CHECK(event != NULL) && event->settled && !all_complete(&job)) {
            while (fake_cut(peers.peer[1].endpoint))
                continue;
            peers_run(&peers);
            CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 1) == 1);
            CHECK(peers_count(&peers, 0, PCCL_FAILED, job.op) == 0);
            hits += !all_complete(&job);
        }
        CHECK(job_abort(&peers, &job));
        job_close(&peers, &job);
    }
    CHECK(hits > 0);
}

/* A COMPLETE op can be committed after its stream was lost. */
static void test_commit_after_loss(void)
{
    struct job job = make_job(3000, true, 3);
    int i;
    job_open_ring(&peers, &job, 3, 4);
    job_start_all(&peers, &job);
    peers_run(&peers);
    CHECK(job_is_right(&peers, &job));
    CHECK(fake_cut(peers.peer[1].endpoint));
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_FAILED, job.op) == 1);
    for (i = 0; i < 3; i++)
        peers_end(&peers, i, PCCL_COMMIT, job.op);
    peers_run(&peers);
    for (i = 0; i < 3; i++) {
        CHECK(peers_count(&peers, i, PCCL_SETTLED, job.op) == 1);
        CHECK(job_has_result(&job, i));
    }
    job_close(&peers, &job);
}

/* A lane is lost between the two frames of a message. */
static void test_torn_message(void)
{
    struct job job = make_job(6000, true, 2);
    job_open_ring(&peers, &job, 2, 3);
    job_start_all(&peers, &job);
    fake_fail_second_frame(1);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 1)
          + peers_count(&peers, 1, PCCL_STREAM_LOST, 1) == 1);
    CHECK(job_abort(&peers, &job));
    job_close(&peers, &job);
}

static void test_free_unsettled(void)
{
    int k, i;
    for (k = 0; k < 30; k++) {
        struct job job = make_job(6000, true, 3);
        job_open_ring(&peers, &job, 3, (uint64_t)k + 1);
        job_start_all(&peers, &job);
        for (i = 0; i < k; i++)
            (void)peers_step(&peers);
        if (k % 3 == 0)
            peers_end(&peers, 1, PCCL_ABORT, job.op);
        peers_close(&peers);
        for (i = 0; i < 3; i++)
            CHECK(job_is_restored(&job, i));
        job_free(&job);
    }
}

/* ---- hostile messages ---- */

/* A chunk that peer 1 of 3 may receive at step 0. Segment 0 of 3000 elements is [0, 960). */
static struct wire_header good_chunk(void)
{
    struct wire_header header = {0};
    header.kind = WIRE_CHUNK;
    header.segment = 0;
    header.step = 0;
    header.members = 3;
    header.nonce = TEST_NONCE;
    header.run = TEST_RUN;
    header.seq = 10;
    header.tag = 9;
    header.offset = 64;
    header.length = 64;
    return header;
}

enum outcome { TAKEN, DROPPED, FATAL };

/* Gives peer 1 a message, before or after its START, and checks the outcome. */
static void try_message(const struct wire_header *header, size_t payload_bytes, bool two_frames,
                        bool started, enum outcome outcome, const char *what)
{
    struct job job = make_job(3000, true, 3);
    unsigned char bytes[WIRE_HEADER_BYTES], *payload = calloc(1, payload_bytes + 1);
    pccl_options options = peers_options();
    bool right;
    peers_open(&peers, 3, &options, 1);
    peers_connect_ring(&peers, 1, 4);
    job_register(&peers, 1, &job);
    if (started)
        job_start(&peers, 1, &job);
    peers_run(&peers);
    wire_encode(header, bytes);
    if (two_frames)
        fake_inject(peers.peer[1].endpoint, bytes, sizeof bytes, payload, payload_bytes);
    else
        peers_inject(&peers, 1, header, payload_bytes);
    peers_run(&peers);
    right = pccl_engine_dropped(peers.peer[1].engine) == (outcome == DROPPED)
        && peers_count(&peers, 1, PCCL_FAILED, job.op) == (outcome == FATAL);
    if (outcome == FATAL && right)
        right = peers_event(&peers, 1, PCCL_FAILED, job.op)->status == PCCL_EPROTO;
    if (!CHECK(right))
        fprintf(stderr, "  %s, %s START\n", what, started ? "after" : "before");
    peers_end(&peers, 1, PCCL_ABORT, job.op);
    peers_run(&peers);
    CHECK(job_is_restored(&job, 1));
    job_close(&peers, &job);
    free(payload);
}

#define TRY(before, after, change) \
    do { \
        struct wire_header header = good_chunk(); \
        size_t bytes = format ? (size_t)pccl_quantized_size(format, PCCL_F32, 64) \
                              : 64 * sizeof(float); \
        change; \
        try_message(&header, bytes, false, false, before, #change); \
        try_message(&header, bytes, true, true, after, #change); \
    } while (0)

static void test_hostile_messages(void)
{
    TRY(TAKEN, TAKEN, (void)0);
    TRY(DROPPED, DROPPED, header.run++);
    TRY(DROPPED, DROPPED, header.tag++);
    TRY(DROPPED, DROPPED, header.seq--);
    TRY(TAKEN, DROPPED, header.seq++);               /* before START it may be valid */
    TRY(DROPPED, DROPPED, header.kind = WIRE_REQUEST);
    TRY(DROPPED, DROPPED, header.kind = WIRE_DATA);
    TRY(TAKEN, DROPPED, header.nonce++);             /* strangers do not know the nonce */
    TRY(TAKEN, FATAL, header.ring++);
    TRY(FATAL, FATAL, header.ring = 8);
    TRY(TAKEN, FATAL, header.members++);
    TRY(FATAL, FATAL, header.members = 1);
    TRY(FATAL, FATAL, header.members = 0);
    TRY(FATAL, FATAL, header.members = 4097);
    TRY(TAKEN, FATAL, header.segment++);
    TRY(FATAL, FATAL, header.segment = 3);
    TRY(TAKEN, FATAL, header.step++);
    TRY(FATAL, FATAL, header.step = 3);               /* final, without our contribution */
    TRY(FATAL, FATAL, header.step = 4);
    TRY(FATAL, FATAL, header.step = UINT16_MAX);
    TRY(FATAL, FATAL, header.length = 0; bytes = 0);
    TRY(FATAL, FATAL, header.length = 63; bytes -= 4);
    TRY(FATAL, FATAL, header.length = 65);
    TRY(FATAL, FATAL, header.length = UINT32_MAX);
    TRY(FATAL, FATAL, header.offset = 1);
    TRY(FATAL, FATAL, header.offset = 3008);
    TRY(FATAL, FATAL, header.offset = UINT64_MAX - 63);
    TRY(TAKEN, FATAL, header.offset = 960);          /* the next segment */
    TRY(TAKEN, FATAL, header.offset = 896; header.length = 128; bytes *= 2);
    TRY(FATAL, FATAL, bytes--);
    TRY(FATAL, FATAL, bytes++);
    TRY(FATAL, FATAL, bytes = 0);
}

/* Gives a chunk to peer 1 of 3, in an all-gather of slices of 1, 2 and 0 rows of 64 floats. It must
 * refuse offsets behind a shorter slice. */
static void try_unlike(uint64_t offset, uint32_t length, uint16_t step, bool started, bool taken)
{
    struct job job = job_plain(64, false);
    struct wire_header header = good_chunk();
    header.step = step;
    header.segment = (uint16_t)((1 + 6 - step - 1) % 3);
    header.offset = offset;
    header.length = length;
    job.what = PCCL_ALL_GATHER;
    job.op = 5;
    job.tag = 9;
    job.unlike = true;
    job.rows[0] = 1;
    job.rows[1] = 2;
    job_make(&job, 3);
    job_open_ring(&peers, &job, 3, 1);
    if (started)
        job_start(&peers, 1, &job);
    peers_run(&peers);
    peers_inject(&peers, 1, &header, length * sizeof(float));
    peers_run(&peers);
    CHECK(peers_count(&peers, 1, PCCL_FAILED, job.op) == !taken);
    CHECK(pccl_engine_dropped(peers.peer[1].engine) == 0);
    CHECK(job_abort(&peers, &job));
    job_close(&peers, &job);
}

/* Gives a chunk of a crowd to a peer of 3. The first segment has the offsets up to 256: parts of 1,
 * 1, 63 and 64 floats. The second has those up to 512: parts of 65 and 7 floats and 5 doubles. */
static void try_crowd(enum pccl_collective what, int who, uint64_t offset, uint32_t length,
                      size_t elements, bool taken)
{
    struct job job = job_crowd(1, true);
    struct wire_header header = good_chunk();
    header.offset = offset;
    header.length = length;
    header.segment = (uint16_t)(who - 1);
    job.what = what;
    job.op = 5;
    job.tag = 9;
    job_make(&job, 3);
    job_open_ring(&peers, &job, 3, 1);
    job_start(&peers, who, &job);
    peers_run(&peers);
    peers_inject(&peers, who, &header, elements * sizeof(float));
    peers_run(&peers);
    if (!CHECK(peers_count(&peers, who, PCCL_FAILED, job.op) == !taken))
        fprintf(stderr, "  offset %d length %d\n", (int)offset, (int)length);
    CHECK(job_abort(&peers, &job));
    job_close(&peers, &job);
}

static void test_chunks_of_several_arrays(void)
{
    const enum pccl_collective reduce = PCCL_ALL_REDUCE, scatter = PCCL_REDUCE_SCATTER;
    try_crowd(reduce, 1, 0, 256, 129, true);
    try_crowd(reduce, 1, 0, 256, 128, false);
    try_crowd(reduce, 1, 0, 256, 256, false);        /* gaps do not travel */
    try_crowd(reduce, 1, 0, 64, 1, true);
    try_crowd(reduce, 1, 0, 64, 64, false);
    try_crowd(reduce, 1, 0, 1, 1, false);            /* ends in a gap */
    try_crowd(reduce, 1, 64, 128, 64, true);
    try_crowd(reduce, 1, 0, 391, 201, false);        /* another segment */
    try_crowd(reduce, 2, 256, 135, 72, true);
    try_crowd(reduce, 2, 256, 136, 72, false);       /* beyond the last float */
    try_crowd(reduce, 2, 256, 192, 72, false);
    try_crowd(reduce, 2, 256, 256, 82, false);       /* floats and doubles */
    try_crowd(reduce, 2, 448, 64, 10, true);
    try_crowd(reduce, 2, 448, 5, 10, false);
    try_crowd(scatter, 1, 2 * 832 + 64, 1, 1, true);
    try_crowd(scatter, 1, 2 * 832 + 64, 128, 64, false);
}

static void test_chunks_behind_short_slices(void)
{
    int started;
    for (started = 0; started < 2; started++) {
        try_unlike(0, 64, 2, started, true);
        try_unlike(64, 64, 2, started, false);       /* behind the row of rank 0 */
        try_unlike(0, 128, 2, started, false);
        try_unlike(256, 64, 3, started, false);      /* rank 2 has none */
        try_unlike(UINT64_C(1) << 40, 64, 2, started, false);
    }
}

/* The result of a REDUCE arrives before START at a peer that START does not make the root. */
static void test_result_of_another_root(void)
{
    struct job job = job_plain(3000, true);
    struct wire_header header = good_chunk();
    header.segment = 2;
    header.step = 1;                                  /* the last one: final */
    job.what = PCCL_REDUCE;
    job.op = 5;
    job.tag = 9;
    job_make(&job, 3);
    job_open_ring(&peers, &job, 3, 1);
    peers_run(&peers);
    peers_inject(&peers, 1, &header, 64 * sizeof(float));
    peers_run(&peers);
    CHECK(peers_count(&peers, 1, PCCL_FAILED, job.op) == 0);
    job_start(&peers, 1, &job);
    peers_run(&peers);
    CHECK(peers_count(&peers, 1, PCCL_FAILED, job.op) == 1
          && peers_event(&peers, 1, PCCL_FAILED, job.op)->status == PCCL_EPROTO);
    CHECK(job_abort(&peers, &job));
    job_close(&peers, &job);
}

/* Any bytes are a valid quantized payload, if their number is right. */
static void test_hostile_payloads(void)
{
    format = PCCL_BLOCK_8;
    TRY(TAKEN, TAKEN, (void)0);
    TRY(FATAL, FATAL, bytes = 64 * sizeof(float));
    TRY(FATAL, FATAL, bytes--);
    TRY(FATAL, FATAL, bytes++);
    TRY(FATAL, FATAL, bytes = 0);
    TRY(FATAL, FATAL, bytes = 64);
    TRY(FATAL, FATAL, header.length = 128);
    TRY(FATAL, FATAL, header.length = UINT32_MAX);
    TRY(FATAL, FATAL, header.length = 0);
    TRY(TAKEN, TAKEN, header.length = 320; header.offset = 0; bytes = 320 + 2 * sizeof(float));
    TRY(FATAL, FATAL, header.length = 320; header.offset = 0; bytes = 320 + 5 * sizeof(float));
    format = PCCL_UNQUANTIZED;
}

/* A chunk arrives while the REGISTER of its op is still queued behind other commands. */
static void test_chunk_overtakes_register(void)
{
    struct job job = make_job(3000, true, 3);
    struct wire_header header = good_chunk();
    pccl_options options = peers_options();
    pccl_command nothing = {0};
    int i;
    peers_open(&peers, 3, &options, 1);
    nothing.kind = PCCL_CLOSE_STREAM;
    for (i = 0; i < 100; i++)
        peers_command(&peers, 1, &nothing);
    job_register(&peers, 1, &job);
    peers_inject(&peers, 1, &header, 64 * sizeof(float));
    peers_run(&peers);
    CHECK(pccl_engine_dropped(peers.peer[1].engine) == 0);
    job_close(&peers, &job);
}

/* The same chunk twice, before and after START; and early chunks that contradict START. */
static void test_contradictions(void)
{
    int variant;
    for (variant = 0; variant < 7; variant++) {
        struct job job = make_job(3000, true, 3);
        struct wire_header header = good_chunk();
        pccl_options options = peers_options();
        peers_open(&peers, 3, &options, 1);
        peers_connect_ring(&peers, 1, 4);
        job_register(&peers, 1, &job);
        if (variant == 1)
            job_start(&peers, 1, &job);
        peers_run(&peers);
        switch (variant) {
        case 2: header.seq++; break;
        case 3: header.nonce++; break;
        case 4: header.members++; break;
        case 5: header.segment++; break;
        case 6: header.ring++; break;
        }
        peers_inject(&peers, 1, &header, 64 * sizeof(float));
        peers_run(&peers);
        CHECK(peers_count(&peers, 1, PCCL_FAILED, job.op) == 0);
        if (variant < 2)
            peers_inject(&peers, 1, &header, 64 * sizeof(float));
        else
            job_start(&peers, 1, &job);
        peers_run(&peers);
        CHECK(peers_count(&peers, 1, PCCL_FAILED, job.op) == 1);
        CHECK(peers_event(&peers, 1, PCCL_FAILED, job.op)->status == PCCL_EPROTO);
        peers_end(&peers, 1, PCCL_ABORT, job.op);
        peers_run(&peers);
        CHECK(job_is_restored(&job, 1));
        CHECK(peers_count(&peers, 1, PCCL_SETTLED, job.op) == 1);
        job_close(&peers, &job);
    }
}

/* A final chunk of our own segment is valid once we have sent ours, and invalid the second time. */
static void test_final_twice(void)
{
    struct job job = make_job(128, true, 2);
    struct wire_header header = good_chunk();
    int i;
    job_open_ring(&peers, &job, 2, 1);
    job_start(&peers, 1, &job);
    peers_run(&peers);
    header.members = 2;
    header.segment = 1;
    header.step = 1;
    for (i = 0; i < 2; i++) {
        peers_inject(&peers, 1, &header, 64 * sizeof(float));
        peers_run(&peers);
        CHECK(peers_count(&peers, 1, PCCL_FAILED, job.op) == i);
    }
    CHECK(job_abort(&peers, &job));
    job_close(&peers, &job);
}

/* Frames that are no messages, random bytes, and good headers with random changes, amid real
 * traffic. */
static void test_fuzz(bool crowd)
{
    unsigned char bytes[WIRE_HEADER_BYTES + 600];
    uint64_t seed;
    int i, j;
    for (seed = 1; seed <= 150; seed++) {
        struct job job = crowd ? job_crowd(100, true) : job_plain(3000, true);
        job.op = 5;
        job.tag = 9;
        job.format = format;
        job_make(&job, 3);
        job_open_ring(&peers, &job, 3, seed);
        if (seed % 3)
            job_start_all(&peers, &job);
        for (i = 0; i < 30; i++) {
            struct wire_header header = good_chunk();
            size_t head = fake_random(4) ? WIRE_HEADER_BYTES : fake_random(130);
            header.step = (uint16_t)fake_random(5);
            header.offset = 64 * fake_random(48);
            for (j = 0; j < (int)sizeof bytes; j++)
                bytes[j] = (unsigned char)fake_random(256);
            if (fake_random(5))
                wire_encode(&header, bytes);
            for (j = (int)fake_random(3); j > 0; j--)
                bytes[fake_random(WIRE_HEADER_BYTES)] ^= (unsigned char)(1u << fake_random(8));
            if (fake_random(2))
                fake_inject(peers.peer[i % 3].endpoint, bytes, head, bytes + WIRE_HEADER_BYTES,
                            fake_random(2) ? 256 : fake_random(600));
            else
                fake_inject(peers.peer[i % 3].endpoint, bytes, head + 256 * fake_random(2),
                            NULL, 0);
            (void)peers_step(&peers);
        }
        peers_run(&peers);
        CHECK(peers.peer[0].error == 0 && peers.peer[1].error == 0 && peers.peer[2].error == 0);
        CHECK(job_abort(&peers, &job));
        job_close(&peers, &job);
    }
}

int main(void)
{
    for (format = PCCL_BLOCK_8; format >= PCCL_UNQUANTIZED; format--) {
        test_abort_anywhere();
        test_lose_lane_anywhere();
        test_free_unsettled();
        test_fuzz(false);
    }
    format = PCCL_UNQUANTIZED;
    test_fuzz(true);
    test_abort_takes_along();
    test_lose_lane_of_forgotten_op();
    test_commit_after_loss();
    test_torn_message();
    test_hostile_messages();
    test_chunks_of_several_arrays();
    test_chunks_behind_short_slices();
    test_hostile_payloads();
    test_result_of_another_root();
    test_chunk_overtakes_register();
    test_contradictions();
    test_final_twice();
    return check_report("faults");
}
