/* test_faults.c - aborts, lost lanes, hostile messages and wrong orders: buffers come back,
 * nothing leaks. */
#include "check.h"
#include "job.h"

#include <stdlib.h>
#include <string.h>

#include "wire.h"

static struct peers peers;
static int format;                   /* of the jobs: all this happens to quantised ones too */

static struct job make_job(uint64_t count, bool in_place, int n)
{
    struct job job = job_plain(count, in_place);
    job.op = 5;
    job.tag = 9;
    job.format = format;
    job_make(&job, n);
    return job;
}

static void open_ring(const struct job *job, int n, uint64_t seed)
{
    pccl_options options = peers_options();
    int i;
    peers_open(&peers, n, &options, seed);
    peers_connect_ring(&peers, 2, 2);
    for (i = 0; i < n; i++)
        job_register(&peers, i, job);
}

static void start_all(const struct job *job)
{
    int i;
    for (i = 0; i < peers.n; i++)
        job_start(&peers, i, job);
}

/* Aborts the op everywhere: all of it must settle, and the buffers be as before. */
static void abort_all(const struct job *job)
{
    int i;
    for (i = 0; i < peers.n; i++)
        peers_end(&peers, i, PCCL_ABORT, job->op);
    peers_run(&peers);
    for (i = 0; i < peers.n; i++) {
        const pccl_event *complete = peers_event(&peers, i, PCCL_COMPLETE, job->op);
        CHECK(peers_count(&peers, i, PCCL_SETTLED, job->op) == 1);
        CHECK((complete != NULL && complete->settled) || job_is_restored(job, i));
    }
}

static bool all_complete(const struct job *job)
{
    int i;
    for (i = 0; i < peers.n; i++)
        if (peers_count(&peers, i, PCCL_COMPLETE, job->op) == 0)
            return false;
    return true;
}

/* Aborts after every possible number of passes. The ring is usable afterwards, or its streams are
 * reported lost. */
static void test_abort_anywhere(void)
{
    bool done = false;
    int k, i, in_place, again = 0;
    for (in_place = 0; in_place < 2; in_place++)
        for (k = 0, done = false; !done; k++) {
            struct job job = make_job(3000, in_place, 3), next;
            bool intact = true;
            open_ring(&job, 3, (uint64_t)k + 1);
            start_all(&job);
            for (i = 0; i < k; i++)
                (void)peers_step(&peers);
            done = all_complete(&job);
            abort_all(&job);
            for (i = 0; i < 3; i++)
                intact &= peers_count(&peers, i, PCCL_STREAM_LOST, 1) == 0;
            if (intact) {
                next = make_job(500, true, 3);
                next.op = 6;
                next.seq = 11;
                for (i = 0; i < 3; i++)
                    job_register(&peers, i, &next);
                start_all(&next);
                peers_run(&peers);
                CHECK(job_is_right(&peers, &next));
                CHECK(job_commit(&peers, &next));
                job_free(&next);
                again++;
            }
            peers_close(&peers);
            job_free(&job);
        }
    CHECK(again > 0);
}

/* An abort that must close a stream takes the other ops on it along, and says so. */
static void test_abort_takes_along(void)
{
    struct job job = make_job(6000, true, 2), other = make_job(6000, true, 2);
    other.op = 6;
    other.tag = 10;
    open_ring(&job, 2, 1);
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
    peers_close(&peers);
    job_free(&job);
    job_free(&other);
}

/* Cuts one lane after every possible number of passes. */
static void test_lose_lane_anywhere(void)
{
    bool done = false;
    int k, i, hits = 0;
    for (k = 0; !done; k++) {
        struct job job = make_job(3000, true, 3);
        open_ring(&job, 3, (uint64_t)k + 1);
        start_all(&job);
        for (i = 0; i < k; i++)
            (void)peers_step(&peers);
        done = all_complete(&job);
        if (fake_cut(peers.peer[1].endpoint)) {
            peers_run(&peers);
            CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 1) == 1);
            CHECK(peers_count(&peers, 0, PCCL_FAILED, job.op) == 1);
            CHECK(peers_event(&peers, 0, PCCL_FAILED, job.op)->status == PCCL_ESTREAM);
            hits++;
        }
        abort_all(&job);
        peers_close(&peers);
        job_free(&job);
    }
    CHECK(hits > 3);
}

/* What has COMPLETE can be committed after its stream was lost: the result is there. */
static void test_commit_after_loss(void)
{
    struct job job = make_job(3000, true, 3);
    int i;
    open_ring(&job, 3, 4);
    start_all(&job);
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
    peers_close(&peers);
    job_free(&job);
}

/* A lane that goes between the two frames of a message. */
static void test_torn_message(void)
{
    struct job job = make_job(6000, true, 2);
    open_ring(&job, 2, 3);
    start_all(&job);
    fake_fail_second_frame(1);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 1)
          + peers_count(&peers, 1, PCCL_STREAM_LOST, 1) == 1);
    abort_all(&job);
    peers_close(&peers);
    job_free(&job);
}

static void test_free_unsettled(void)
{
    int k, i;
    for (k = 0; k < 30; k++) {
        struct job job = make_job(6000, true, 3);
        open_ring(&job, 3, (uint64_t)k + 1);
        start_all(&job);
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

/* A chunk that peer 1 of 3 may receive at hop 0: segment 0 of 3000 elements is [0, 960). */
static struct wire_header good_chunk(void)
{
    struct wire_header header = {0};
    header.kind = WIRE_CHUNK;
    header.segment = 0;
    header.hop = 0;
    header.members = 3;
    header.epoch = TEST_EPOCH;
    header.run = TEST_RUN;
    header.seq = 10;
    header.tag = 9;
    header.offset = 64;
    header.length = 64;
    return header;
}

enum outcome { TAKEN, DROPPED, FATAL };

/* Gives peer 1 one message before or after its START, and checks what comes of it. */
static void try_message(const struct wire_header *header, size_t payload_bytes, bool two_frames,
                        bool started, enum outcome outcome, const char *what)
{
    struct job job = make_job(3000, true, 3);
    unsigned char *bytes = calloc(1, WIRE_HEADER_BYTES + payload_bytes + 1);
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
        fake_inject(peers.peer[1].endpoint, bytes, WIRE_HEADER_BYTES, bytes + WIRE_HEADER_BYTES,
                    payload_bytes);
    else
        fake_inject(peers.peer[1].endpoint, bytes, WIRE_HEADER_BYTES + payload_bytes, NULL, 0);
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
    peers_close(&peers);
    job_free(&job);
    free(bytes);
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
    TRY(TAKEN, DROPPED, header.seq++);               /* before START it may be right */
    TRY(DROPPED, DROPPED, header.kind = WIRE_REQUEST);
    TRY(DROPPED, DROPPED, header.kind = WIRE_DATA);
    TRY(TAKEN, FATAL, header.epoch++);
    TRY(TAKEN, FATAL, header.ring++);
    TRY(FATAL, FATAL, header.ring = 8);
    TRY(TAKEN, FATAL, header.members++);
    TRY(FATAL, FATAL, header.members = 1);
    TRY(FATAL, FATAL, header.members = 0);
    TRY(FATAL, FATAL, header.members = 4097);
    TRY(TAKEN, FATAL, header.segment++);
    TRY(FATAL, FATAL, header.segment = 3);
    TRY(TAKEN, FATAL, header.hop++);
    TRY(FATAL, FATAL, header.hop = 3);               /* final, without our contribution */
    TRY(FATAL, FATAL, header.hop = 4);
    TRY(FATAL, FATAL, header.hop = UINT16_MAX);
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

/* What a quantised payload says is some numbers, whatever its bytes; its size must be right. */
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

/* The REGISTER of a chunk's op has been sent, but other orders are still before it. */
static void test_chunk_overtakes_register(void)
{
    struct job job = make_job(3000, true, 3);
    struct wire_header header = good_chunk();
    unsigned char bytes[WIRE_HEADER_BYTES + 64 * sizeof(float)] = {0};
    pccl_options options = peers_options();
    pccl_order nothing = {0};
    int i;
    peers_open(&peers, 3, &options, 1);
    nothing.kind = PCCL_CLOSE_STREAM;
    for (i = 0; i < 100; i++)
        peers_order(&peers, 1, &nothing);
    job_register(&peers, 1, &job);
    wire_encode(&header, bytes);
    fake_inject(peers.peer[1].endpoint, bytes, sizeof bytes, NULL, 0);
    peers_run(&peers);
    CHECK(pccl_engine_dropped(peers.peer[1].engine) == 0);
    peers_close(&peers);
    job_free(&job);
}

/* The same chunk twice, before and after START; and early chunks that contradict each other or
 * the START. */
static void test_contradictions(void)
{
    int variant;
    for (variant = 0; variant < 7; variant++) {
        struct job job = make_job(3000, true, 3);
        struct wire_header header = good_chunk();
        unsigned char bytes[WIRE_HEADER_BYTES + 64 * sizeof(float)] = {0};
        pccl_options options = peers_options();
        peers_open(&peers, 3, &options, 1);
        peers_connect_ring(&peers, 1, 4);
        job_register(&peers, 1, &job);
        if (variant == 1)
            job_start(&peers, 1, &job);
        peers_run(&peers);
        switch (variant) {
        case 2: header.seq++; break;
        case 3: header.epoch++; break;
        case 4: header.members++; break;
        case 5: header.segment++; break;
        case 6: header.ring++; break;
        }
        wire_encode(&header, bytes);
        fake_inject(peers.peer[1].endpoint, bytes, sizeof bytes, NULL, 0);
        peers_run(&peers);
        CHECK(peers_count(&peers, 1, PCCL_FAILED, job.op) == 0);
        if (variant < 2)
            fake_inject(peers.peer[1].endpoint, bytes, sizeof bytes, NULL, 0);
        else
            job_start(&peers, 1, &job);
        peers_run(&peers);
        CHECK(peers_count(&peers, 1, PCCL_FAILED, job.op) == 1);
        CHECK(peers_event(&peers, 1, PCCL_FAILED, job.op)->status == PCCL_EPROTO);
        peers_end(&peers, 1, PCCL_ABORT, job.op);
        peers_run(&peers);
        CHECK(job_is_restored(&job, 1));
        CHECK(peers_count(&peers, 1, PCCL_SETTLED, job.op) == 1);
        peers_close(&peers);
        job_free(&job);
    }
}

/* A final chunk of our own segment: right once it has been sent, wrong a second time. */
static void test_final_twice(void)
{
    struct job job = make_job(128, true, 2);
    struct wire_header header = good_chunk();
    unsigned char bytes[WIRE_HEADER_BYTES + 64 * sizeof(float)] = {0};
    int i;
    open_ring(&job, 2, 1);
    job_start(&peers, 1, &job);
    peers_run(&peers);
    header.members = 2;
    header.segment = 1;
    header.hop = 1;
    wire_encode(&header, bytes);
    for (i = 0; i < 2; i++) {
        fake_inject(peers.peer[1].endpoint, bytes, sizeof bytes, NULL, 0);
        peers_run(&peers);
        CHECK(peers_count(&peers, 1, PCCL_FAILED, job.op) == i);
    }
    abort_all(&job);
    peers_close(&peers);
    job_free(&job);
}

/* Frames that are no message at all, then random bytes and good headers with random changes,
 * between real traffic. */
static void test_fuzz(void)
{
    unsigned char bytes[WIRE_HEADER_BYTES + 600];
    uint64_t seed;
    int i, j;
    for (seed = 1; seed <= 150; seed++) {
        struct job job = make_job(3000, true, 3);
        open_ring(&job, 3, seed);
        if (seed % 3)
            start_all(&job);
        for (i = 0; i < 30; i++) {
            struct wire_header header = good_chunk();
            size_t head = fake_random(4) ? WIRE_HEADER_BYTES : fake_random(130);
            header.hop = (uint16_t)fake_random(5);
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
        abort_all(&job);
        peers_close(&peers);
        job_free(&job);
    }
}

/* ---- orders ---- */

static void expect_failed(const pccl_order *order, int status, const char *what)
{
    pccl_options options = peers_options();
    peers_open(&peers, 1, &options, 1);
    peers_order(&peers, 0, order);
    peers_run(&peers);
    if (!CHECK(peers_count(&peers, 0, PCCL_FAILED, order->op) == 1
               && peers_event(&peers, 0, PCCL_FAILED, order->op)->status == status))
        fprintf(stderr, "  %s\n", what);
    peers_end(&peers, 0, PCCL_ABORT, order->op);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_SETTLED, order->op) == 1);
    peers_close(&peers);
}

#define EXPECT_EINVAL(change) \
    do { \
        float memory[128] = {0}; \
        pccl_order order = {0}; \
        pccl_part part = {0}; \
        order.kind = PCCL_REGISTER; \
        order.op = 1; \
        order.op_kind = PCCL_COLLECTIVE; \
        order.collective = PCCL_ALL_REDUCE; \
        order.members = 2; \
        order.parts = &part; \
        order.n_parts = 1; \
        part.dtype = PCCL_F32; \
        part.count = 64; \
        part.send = part.recv = memory; \
        change; \
        expect_failed(&order, PCCL_EINVAL, #change); \
    } while (0)

static void test_wrong_orders(void)
{
    EXPECT_EINVAL(order.op_kind = 9);
    EXPECT_EINVAL(order.collective = 5);
    EXPECT_EINVAL(order.redop = 5);
    EXPECT_EINVAL(order.n_parts = PCCL_PARTS_MAX + 1);
    EXPECT_EINVAL(part.dtype = 12);
    EXPECT_EINVAL(order.format = PCCL_ZERO_POINT_16 + 1);
    EXPECT_EINVAL(order.format = UINT32_MAX);
    EXPECT_EINVAL(order.format = PCCL_BLOCK_8; order.redop = PCCL_MAX);
    EXPECT_EINVAL(order.format = PCCL_BLOCK_8; order.collective = PCCL_BROADCAST);
    EXPECT_EINVAL(order.format = PCCL_BLOCK_8; part.dtype = PCCL_I32);
    EXPECT_EINVAL(part.count = UINT64_MAX / 2);
    EXPECT_EINVAL(part.recv = NULL);
    EXPECT_EINVAL(part.recv = memory + 63);
    EXPECT_EINVAL(part.send = memory + 63);
    EXPECT_EINVAL(order.collective = PCCL_ALL_GATHER; order.members = 0);
    EXPECT_EINVAL(order.collective = PCCL_ALL_GATHER; order.members = PCCL_PEERS_MAX + 1);
    EXPECT_EINVAL(order.collective = PCCL_ALL_GATHER; part.send = memory + 32);
    EXPECT_EINVAL(order.collective = PCCL_REDUCE_SCATTER; order.members = 0);
    EXPECT_EINVAL(order.collective = PCCL_REDUCE_SCATTER; part.recv = memory + 127);
}

static void test_wrong_starts(void)
{
    static const char *const names[] = {"members", "position", "begin", "share",
                                        "stream", "seq", "rings", "none", "root", "blocks",
                                        "another block", "no rank", "two ranks"};
    static const uint16_t ranks[] = {1, 2}, swapped[] = {1, 0};
    int variant;
    for (variant = 0; variant < 13; variant++) {
        struct job job = job_plain(1024, true);
        pccl_order order = {0};
        if (variant >= 8)
            job.what = variant == 8 ? PCCL_BROADCAST : PCCL_ALL_GATHER;
        job_make(&job, 2);
        open_ring(&job, 2, 1);
        order.kind = PCCL_START;
        order.op = job.op;
        order.seq = variant == 5 ? job.seq - 1 : job.seq;
        order.n_rings = variant == 6 ? 9 : variant == 7 ? 0 : 1;
        order.rings[0].stream = variant == 4 ? 2 : 1;
        order.rings[0].members = variant == 0 ? 4097 : variant == 9 ? 3 : 2;
        order.rings[0].position = variant == 1 ? 2 : variant == 10 ? 1 : 0;
        order.rings[0].root = variant == 8 ? 2 : 0;
        order.rings[0].ranks = variant == 11 ? ranks : NULL;
        order.rings[0].begin = variant == 2 ? 64 : 0;
        order.rings[0].count = variant == 3 ? 1023 : 1024;
        if (variant == 12) {
            order.n_rings = 2;
            order.rings[1] = order.rings[0];
            order.rings[0].count = order.rings[1].begin = order.rings[1].count = 512;
            order.rings[1].ranks = swapped;
        }
        peers_order(&peers, 0, &order);
        peers_run(&peers);
        if (!CHECK(peers_count(&peers, 0, PCCL_FAILED, job.op) == 1))
            fprintf(stderr, "  %s\n", names[variant]);
        abort_all(&job);
        peers_close(&peers);
        job_free(&job);
    }
}

/* Ends that come too soon, too late or twice. */
static void test_wrong_ends(void)
{
    struct job job = make_job(1000, true, 2);
    pccl_order short_order = {0};
    pccl_msg message;
    open_ring(&job, 2, 1);
    peers_run(&peers);
    job_register(&peers, 1, &job);               /* the number again */
    peers_end(&peers, 0, PCCL_COMMIT, job.op);   /* before COMPLETE */
    peers_end(&peers, 0, PCCL_ABORT, 999);       /* unknown: settled, as far as we know */
    short_order.kind = 99;
    peers_order(&peers, 0, &short_order);
    if (fake_table()->msg_init_size(&message, 3) == 0)
        (void)fake_table()->msg_send(&message, peers.peer[0].pair, 1);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_FAILED, job.op) == 1);
    CHECK(peers_count(&peers, 1, PCCL_FAILED, job.op) == 1);
    CHECK(peers_count(&peers, 0, PCCL_SETTLED, 999) == 1);
    CHECK(pccl_engine_dropped(peers.peer[0].engine) == 2);
    peers_end(&peers, 0, PCCL_ABORT, job.op);
    peers_run(&peers);
    peers_end(&peers, 0, PCCL_ABORT, job.op);
    peers_end(&peers, 0, PCCL_STOP, 0);
    CHECK(pccl_engine_step(peers.peer[0].engine) == 2);
    peers_close(&peers);
    CHECK(job_is_restored(&job, 0));
    job_free(&job);
}

/* A tag is free again for the next op as soon as the first has been told to end. */
static void test_tag_again(void)
{
    struct job job = make_job(3000, true, 2), next = make_job(700, true, 2);
    struct job twin = make_job(700, true, 2);
    int i;
    next.op = 6;
    next.seq = 11;
    twin.op = 7;
    open_ring(&job, 2, 2);
    job_register(&peers, 0, &twin);
    start_all(&job);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_FAILED, twin.op) == 1);
    for (i = 0; i < 2; i++) {
        peers_end(&peers, i, PCCL_COMMIT, job.op);
        job_register(&peers, i, &next);
        job_start(&peers, i, &next);
    }
    peers_run(&peers);
    CHECK(job_is_right(&peers, &job) && job_is_right(&peers, &next));
    CHECK(job_commit(&peers, &next));
    peers_end(&peers, 0, PCCL_ABORT, twin.op);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_SETTLED, twin.op) == 1);
    peers_close(&peers);
    job_free(&job);
    job_free(&next);
    job_free(&twin);
}

/* ---- streams ---- */

static void test_no_stream(void)
{
    pccl_options options = peers_options();
    pccl_order order = {0};
    int nth;
    peers_open(&peers, 1, &options, 1);
    order.kind = PCCL_OPEN_STREAM;
    order.stream = 4;
    order.lanes = 3;
    order.hwm = 1;
    strcpy(order.endpoint, "tcp://nobody:1");
    peers_order(&peers, 0, &order);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 4) == 1);
    order.stream = 5;
    order.hwm = 0;
    peers_order(&peers, 0, &order);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 5) == 1);
    order.hwm = 1;
    for (nth = 0; nth < 15; nth++) {
        order.stream = 100 + (uint32_t)nth;
        order.lanes = 3;
        strcpy(order.endpoint, peers.peer[0].endpoint);
        peers_order(&peers, 0, &order);
        fake_fail_call(nth);
        peers_run(&peers);
        fake_fail_call(-1);
        CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, order.stream) == (nth < 14));
    }
    order.kind = PCCL_CLOSE_STREAM;
    peers_order(&peers, 0, &order);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, order.stream) == 0);
    peers_close(&peers);
}

/* A stream that may choose: the first lane says how many more. One that cannot be had loses it. */
static void test_automatic_lanes(void)
{
    pccl_options options = peers_options();
    pccl_order order = {0};
    peers_open(&peers, 1, &options, 1);
    order.kind = PCCL_OPEN_STREAM;
    order.stream = 4;
    order.hwm = 1;
    strcpy(order.endpoint, peers.peer[0].endpoint);
    peers_order(&peers, 0, &order);
    peers_run(&peers);
    CHECK(fake_lanes() == 8);
    order.stream = 5;
    peers_order(&peers, 0, &order);
    while (fake_lanes() == 8)
        (void)pccl_engine_step(peers.peer[0].engine);
    fake_fail_call(0);
    peers_run(&peers);
    fake_fail_call(-1);
    CHECK(fake_lanes() == 8);
    CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 4) == 0);
    CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 5) == 1);
    peers_close(&peers);
}

static void test_no_engine(void)
{
    pccl_options options = peers_options();
    pccl_engine *engine;
    char bound[64];
    int nth, error = 0, tries = 0;
    fake_reset(1);
    for (nth = 0; ; nth++) {
        fake_fail_call(nth);
        engine = pccl_engine_new(fake_table(), &options, &error);
        if (engine != NULL)
            break;
        CHECK(error == PCCL_EZMQ && fake_open() == 0);
        tries++;
    }
    CHECK(tries > 5);
    fake_fail_call(1);
    CHECK(pccl_engine_bind(engine, "tcp://*:*", bound, sizeof bound) == PCCL_EZMQ);
    CHECK(pccl_engine_errno(engine) != 0);
    pccl_engine_free(engine);
    pccl_engine_free(NULL);
    options.forward_max = 0;
    CHECK(pccl_engine_new(fake_table(), &options, &error) == NULL && error == PCCL_EINVAL);
    CHECK(fake_open() == 0);
}

int main(void)
{
    for (format = PCCL_BLOCK_8; format >= PCCL_UNQUANTIZED; format--) {
        test_abort_anywhere();
        test_lose_lane_anywhere();
        test_free_unsettled();
        test_fuzz();
    }
    format = PCCL_UNQUANTIZED;
    test_abort_takes_along();
    test_commit_after_loss();
    test_torn_message();
    test_hostile_messages();
    test_hostile_payloads();
    test_chunk_overtakes_register();
    test_contradictions();
    test_final_twice();
    test_wrong_orders();
    test_wrong_starts();
    test_wrong_ends();
    test_tag_again();
    test_no_stream();
    test_automatic_lanes();
    test_no_engine();
    return check_report("faults");
}
