/* test_eager.c - chunks that are sent before START. The receiver holds them, applies them only at
 * the START that names their call, and drops them at the end of their epoch. The sender keeps to a
 * credit. */
#include "check.h"
#include "harness.h"

#include <string.h>

#include "engine/unexpected.h"
#include "engine/wire.h"

static struct peers peers;

/* Steps a random number of times. */
static void step_some(void)
{
    uint32_t steps = fake_random(12);
    while (steps-- > 0)
        (void)peers_step(&peers);
}

static struct job draw(uint64_t seed, int *n)
{
    struct job job = job_plain(seed % 9 * 170 + seed % 3, seed % 2);
    job.what = (enum pccl_collective)(1 + seed % PCCL_COLLECTIVES_N);
    job.eager = true;
    job.chunk_bytes = seed % 3 ? 4096 : 256;
    *n = 2 + (int)(seed / 5 % 4);
    job.root = (uint32_t)(seed % (uint64_t)*n);
    if (job.what != PCCL_ALL_GATHER && job.what != PCCL_BROADCAST && seed % 4 == 0)
        job.format = PCCL_BLOCK_8;
    job.oneshot = job.what == PCCL_ALL_REDUCE && *n == 2;
    if (seed % 7 == 0 && job.format == PCCL_UNQUANTIZED) {
        job.n_parts = 3;
        job.part[0].dtype = PCCL_F32;
        job.part[0].count = 100 + seed % 200;
        job.part[1].dtype = PCCL_I16;
        job.part[1].count = seed % 3;
        job.part[2].dtype = PCCL_F64;
        job.part[2].count = 333;
    } else if (seed % 7 < 3 && job.format == PCCL_UNQUANTIZED) {
        struct job crowd = job_crowd(job.count % 300, job.in_place);
        job.n_parts = crowd.n_parts;
        memcpy(job.part, crowd.part, sizeof job.part);
    }
    return job;
}

/* Every collective, in one ring and in two. Each peer registers, sends eagerly (or not) and starts
 * after any number of steps. Until the first START no peer's memory changes. */
static void test_orders_of_events(void)
{
    pccl_options options = peers_options();
    uint64_t seed, dropped = 0;
    for (seed = 1; seed <= 400; seed++) {
        int n, i;
        struct job job = draw(seed, &n);
        job.rings = n > 2 && seed % 11 < 4 && job.format == PCCL_UNQUANTIZED ? 2 : 1;
        job_make(&job, n);
        peers_open(&peers, n, &options, seed);
        peers_connect_ring(&peers, 2, 2);
        for (i = 0; i < n && job.rings == 2; i++)
            peers_stream(&peers, i, (i + n - 1) % n, 2, 1, 2);
        if (seed % 5)
            fake_refuse(20);
        for (i = 0; i < n; i++) {
            job_register(&peers, i, &job);
            if (fake_random(4))
                job_eager(&peers, i, &job);
            step_some();
        }
        if (seed % 2)
            peers_run(&peers);
        for (i = 0; i < n; i++)
            CHECK(job_is_untouched(&job, i) && peers.peer[i].n_events == 0);
        for (i = 0; i < n; i++) {
            job_start(&peers, (i + (int)seed) % n, &job);
            step_some();
            if (seed % 3 == 0)
                peers_run(&peers);
        }
        peers_run(&peers);
        if (!CHECK(job_is_right(&peers, &job)))
            fprintf(stderr, "  seed %d\n", (int)seed);
        CHECK(job_commit(&peers, &job));
        for (i = 0; i < n; i++)
            dropped += pccl_engine_dropped(peers.peer[i].engine);
        job_close(&peers, &job);
    }
    CHECK(dropped == 0);
}

/* A job of `n` peers, of which peer 0 has sent as much as it may before START. */
static struct job sent_eagerly(int n, uint64_t count, bool joined)
{
    pccl_options options = peers_options();
    struct job job = job_plain(count, true);
    int i;
    job.eager = true;
    job_make(&job, n);
    peers_open(&peers, n, &options, 1);
    for (i = 0; i < n; i++)
        peers_expect(&peers, i, 5);
    peers_connect_ring(&peers, 2, 100);
    for (i = 0; i < n; i++)
        if (i == 0 || joined)
            job_register(&peers, i, &job);
    job_eager(&peers, 0, &job);
    peers_run(&peers);
    return job;
}

static void finish(struct job *job)
{
    job_start_all(&peers, job);
    peers_run(&peers);
    CHECK(job_commit(&peers, job));
}

/* Chunks that arrive before REGISTER are held until START; none is dropped. */
static void test_not_joined(void)
{
    struct job job = sent_eagerly(2, 3000, false);
    CHECK(job_is_untouched(&job, 1));
    job_register(&peers, 1, &job);
    job_start(&peers, 1, &job);
    peers_run(&peers);
    CHECK(peers_event(&peers, 1, PCCL_FAILED, job.op) == NULL);
    CHECK(!job_is_untouched(&job, 1));       /* it had peer 0's chunks already */
    job_start(&peers, 0, &job);
    peers_run(&peers);
    CHECK(job_commit(&peers, &job));
    CHECK(pccl_engine_dropped(peers.peer[1].engine) == 0);
    job_close(&peers, &job);
}

/* An ABORT before START gives the memory back at once, although chunks are still under way, and
 * closes no stream. Its chunks are not mistaken for those of the next call with the tag. */
static void test_taken_back(void)
{
    int stalled;
    for (stalled = 0; stalled < 2; stalled++) {
        pccl_options options = peers_options();
        struct job job = job_plain(3000, true), next;
        size_t j;
        job.eager = true;
        job_make(&job, 2);
        peers_open(&peers, 2, &options, 1);
        peers_connect_ring(&peers, 1, 100);
        peers_run(&peers);
        if (stalled)
            fake_stall(peers.peer[1].endpoint, true);
        job_register(&peers, 0, &job);
        job_eager(&peers, 0, &job);
        peers_run(&peers);
        peers_end(&peers, 0, PCCL_ABORT, job.op);
        (void)peers_step(&peers);
        CHECK(peers_count(&peers, 0, PCCL_SETTLED, job.op) == 1);
        CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 1) == 0);
        CHECK(job_is_untouched(&job, 0));
        for (j = 0; j < 3000 * sizeof(float); j++)   /* the caller's own use of it */
            ((unsigned char *)job.parts[0][0].recv)[j] = 0x55;
        if (stalled)
            fake_stall(peers.peer[1].endpoint, false);
        peers_run(&peers);
        next = job_plain(3000, true);
        next.eager = true;
        next.op = 2;
        job_make(&next, 2);
        job_register(&peers, 0, &next);
        job_register(&peers, 1, &next);
        job_eager(&peers, 0, &next);
        finish(&next);
        job_close(&peers, &next);
        job_free(&job);
    }
}

/* The receiver aborts its op and registers another one with the tag: that one starts with the
 * sender's call. */
static void test_receiver_votes_anew(void)
{
    struct job job = sent_eagerly(2, 3000, true), again = job;
    peers_end(&peers, 1, PCCL_ABORT, job.op);
    again.op = 9;
    job_register(&peers, 1, &again);
    job_start_at(&peers, 1, &again, 1, 1, job.op);
    job_start(&peers, 0, &job);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_COMPLETE, job.op) == 1);
    CHECK(peers_count(&peers, 1, PCCL_COMPLETE, 9) == 1);
    CHECK(job_has_result(&job, 0) && job_has_result(&job, 1));
    job_close(&peers, &job);
}

/* The next epoch: eager chunks are void, as their streams are closed, on both sides. */
static void test_another_epoch(void)
{
    int variant;
    for (variant = 0; variant < 3; variant++) {
        struct job job = sent_eagerly(3, 5000, variant != 1);
        int i;
        if (variant == 2) {          /* its chunks arrive when the receiver is in the next epoch */
            peers_expect(&peers, 1, 6);
            (void)peers_step(&peers);
        }
        for (i = 0; i < 3; i++) {
            peers_expect(&peers, i, 6);
            peers_close_stream(&peers, i, 1);
            peers_stream(&peers, i, (i + 2) % 3, 2, 2, 100);
            if (i > 0 && variant == 1)
                job_register(&peers, i, &job);
        }
        for (i = 0; i < 3; i++)
            job_start_at(&peers, i, &job, 2, 2 - (uint32_t)i, job.op);
        peers_run(&peers);
        CHECK(job_commit(&peers, &job));
        CHECK(peers_count(&peers, 0, PCCL_FAILED, job.op) == 0);
        job_close(&peers, &job);
    }
}

/* A stream that is lost before START fails only the START that needs it. */
static void test_lost_stream(void)
{
    int cut_late;
    for (cut_late = 0; cut_late < 2; cut_late++) {
        struct job job = sent_eagerly(2, 3000, true);
        CHECK(fake_cut(peers.peer[1].endpoint));
        if (!cut_late)
            peers_run(&peers);
        CHECK(peers_count(&peers, 0, PCCL_FAILED, job.op) == 0);
        job_start(&peers, 0, &job);
        peers_run(&peers);
        CHECK(peers_count(&peers, 0, PCCL_FAILED, job.op) == 1);
        CHECK(peers_event(&peers, 0, PCCL_FAILED, job.op)->status == PCCL_ESTREAM);
        CHECK(job_abort(&peers, &job));
        job_close(&peers, &job);
    }
}

/* Aborts an op. Returns the number of payload bytes that it has sent. */
static uint64_t sent_bytes(int who, uint64_t op)
{
    const pccl_event *event;
    peers_end(&peers, who, PCCL_ABORT, op);
    peers_run(&peers);
    event = peers_event(&peers, who, PCCL_SETTLED, op);
    return event != NULL ? event->tx_bytes : 0;
}

/* An op sends 1 MiB before START, so that nothing of an array of this size waits for it, and no more.
 * START gives this credit back, ABORT does not. */
static void test_credit(void)
{
    enum { COUNT = 1 << 21, CREDIT = 1 << 20 };
    pccl_options options = peers_options();
    struct job jobs[5];
    uint64_t first;
    int j;
    peers_open(&peers, 2, &options, 1);
    peers_connect_ring(&peers, 2, 4000);
    for (j = 0; j < 5; j++) {
        jobs[j] = job_plain(COUNT, true);
        jobs[j].eager = true;
        jobs[j].op = 1 + (uint64_t)j;
        jobs[j].tag = 100 + (uint64_t)j;
        jobs[j].seq = 10 + (uint64_t)j;
        jobs[j].chunk_bytes = j < 4 ? 32768 : CREDIT;
        job_make(&jobs[j], 2);
        job_register(&peers, 0, &jobs[j]);
    }
    job_eager(&peers, 0, &jobs[4]);
    peers_run(&peers);
    CHECK(sent_bytes(0, jobs[4].op) == 0);    /* to copy a large chunk takes longer than the vote */
    job_eager(&peers, 0, &jobs[0]);
    peers_run(&peers);
    job_register(&peers, 1, &jobs[0]);
    job_start(&peers, 0, &jobs[0]);
    job_start(&peers, 1, &jobs[0]);
    peers_run(&peers);
    CHECK(job_commit(&peers, &jobs[0]));
    job_eager(&peers, 0, &jobs[1]);
    peers_run(&peers);
    first = sent_bytes(0, jobs[1].op);
    CHECK(first == CREDIT);
    job_eager(&peers, 0, &jobs[2]);
    peers_run(&peers);
    CHECK(sent_bytes(0, jobs[2].op) == 0);
    CHECK(pccl_engine_dropped(peers.peer[1].engine) == 0);
    job_register(&peers, 1, &jobs[3]);
    job_eager(&peers, 0, &jobs[3]);       /* without credit everything is sent after START */
    job_start(&peers, 0, &jobs[3]);
    job_start(&peers, 1, &jobs[3]);
    peers_run(&peers);
    CHECK(job_commit(&peers, &jobs[3]));
    peers_close(&peers);
    for (j = 0; j < 5; j++)
        job_free(&jobs[j]);
}

/* Chunks that a START has taken no longer count, so any number of calls may begin eagerly. */
static void test_again(void)
{
    enum { COUNT = 1 << 19, TIMES = 20 };    /* more in all than a receiver holds */
    pccl_options options = peers_options();
    uint64_t sent = 0;
    int j;
    peers_open(&peers, 2, &options, 1);
    peers_connect_ring(&peers, 2, 4000);
    for (j = 1; j <= TIMES; j++) {
        struct job job = job_plain(COUNT, true);
        job.eager = true;
        job.op = (uint64_t)j;
        job.tag = (uint64_t)j;
        job.seq = 10 + (uint64_t)j;
        job.chunk_bytes = 65536;
        job_make(&job, 2);
        job_register(&peers, 0, &job);
        job_eager(&peers, 0, &job);
        peers_run(&peers);
        job_register(&peers, 1, &job);
        finish(&job);
        sent += COUNT / 2 * sizeof(float);
        job_free(&job);
    }
    CHECK(sent > EAGER_MAX && pccl_engine_dropped(peers.peer[1].engine) == 0);
    peers_close(&peers);
}

static struct wire_header eager_chunk(uint64_t call)
{
    struct wire_header header = {0};
    header.kind = WIRE_CHUNK;
    header.eager = true;
    header.members = 2;
    header.run = TEST_RUN;
    header.tag = 101;
    header.seq = call;
    header.length = 64;
    return header;
}

/* Chunks beyond what an honest sender sends are dropped, for a registered tag and for another. */
static void test_flood(void)
{
    enum { MESSAGE = 1 << 20 };
    int joined, i;
    for (joined = 0; joined < 2; joined++) {
        pccl_options options = peers_options();
        struct job job = job_plain(1000, true);
        struct wire_header again = eager_chunk(1);
        const uint64_t limit = joined ? 31 : 15;     /* each costs a little more than its bytes */
        job_make(&job, 2);
        peers_open(&peers, 2, &options, 1);
        if (joined)
            job_register(&peers, 0, &job);
        for (i = 0; i < 40; i++) {
            struct wire_header header = eager_chunk(1 + (uint64_t)i % 3);
            header.tag += joined ? 0 : (uint64_t)i % 5;
            peers_inject(&peers, 0, &header, MESSAGE);
            peers_run(&peers);
        }
        CHECK(pccl_engine_dropped(peers.peer[0].engine) == 40 - limit);
        CHECK(peers_count(&peers, 0, PCCL_FAILED, job.op) == 0);
        CHECK(job_is_untouched(&job, 0));
        peers_expect(&peers, 0, 9);
        peers_run(&peers);
        again.tag = 500;
        again.nonce = 9;
        peers_inject(&peers, 0, &again, MESSAGE);
        peers_run(&peers);
        CHECK(pccl_engine_dropped(peers.peer[0].engine) == 40 - limit);
        job_close(&peers, &job);
    }
}

/* Chunks for a tag that is registered later have a limit of their own from then on. After its ABORT
 * they count with the others again. */
static void test_joined_later(void)
{
    enum { MESSAGE = 1 << 20, HELD = 15 };       /* messages: fewer than a receiver holds */
    pccl_options options = peers_options();
    struct job job = job_plain(1000, true);
    struct wire_header header = eager_chunk(1);
    int i;
    job_make(&job, 2);
    peers_open(&peers, 2, &options, 1);
    for (i = 0; i < 2 * HELD; i++) {
        if (i == HELD)
            job_register(&peers, 0, &job);
        header.tag = i < HELD ? job.tag : job.tag + 1;
        peers_inject(&peers, 0, &header, MESSAGE);
        peers_run(&peers);
    }
    CHECK(pccl_engine_dropped(peers.peer[0].engine) == 0);
    peers_end(&peers, 0, PCCL_ABORT, job.op);
    header.tag = job.tag + 2;
    peers_run(&peers);
    peers_inject(&peers, 0, &header, 64);
    peers_run(&peers);
    CHECK(pccl_engine_dropped(peers.peer[0].engine) == 1);
    job_close(&peers, &job);
}

/* START takes only chunks of its call, epoch, ring and tag. */
static void test_which_call(void)
{
    static const struct { uint64_t call, nonce, ring, tag; bool taken; int dropped; } cases[] = {
        {1, 0, 0, 101, true, 0},     /* job_start() names call 1 */
        {0, 0, 0, 101, false, 1},    /* no call */
        {2, 0, 0, 101, false, 0},    /* may start later */
        {1, 4, 0, 101, false, 1},    /* another epoch */
        {1, 0, 1, 101, false, 0},    /* another ring */
        {1, 0, 9, 101, false, 1},    /* no ring */
        {1, 0, 0, 102, false, 0},    /* another tag */
    };
    size_t i;
    int late;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (late = 0; late < 2; late++) {
            pccl_options options = peers_options();
            struct job job = job_plain(128, true);
            struct wire_header header = eager_chunk(cases[i].call);
            job.eager = true;
            job_make(&job, 2);
            peers_open(&peers, 2, &options, 1);
            peers_connect_ring(&peers, 1, 4);
            job_register(&peers, 0, &job);
            header.segment = 1;
            header.offset = 64;
            header.nonce = cases[i].nonce;
            header.ring = (uint8_t)cases[i].ring;
            header.tag = cases[i].tag;
            peers_run(&peers);
            if (late)
                job_start(&peers, 0, &job);
            peers_run(&peers);
            peers_inject(&peers, 0, &header, 64 * sizeof(float));
            peers_run(&peers);
            CHECK(late || job_is_untouched(&job, 0));
            CHECK(pccl_engine_dropped(peers.peer[0].engine) == (uint64_t)cases[i].dropped);
            if (!late)
                job_start(&peers, 0, &job);
            peers_run(&peers);
            CHECK(job_is_untouched(&job, 0));    /* it adds nothing but zeros */
            peers_end(&peers, 0, PCCL_ABORT, job.op);
            peers_run(&peers);
            CHECK((peers_event(&peers, 0, PCCL_SETTLED, job.op)->rx_bytes > 0) == cases[i].taken);
            CHECK(pccl_engine_dropped(peers.peer[0].engine) == (uint64_t)cases[i].dropped);
            job_close(&peers, &job);
        }
}

/* Each peer has another op number for the call. */
static void test_own_numbers(void)
{
    enum { N = 3 };
    pccl_options options = peers_options();
    struct job job = job_plain(3000, true), mine[N];
    int i;
    job_make(&job, N);
    peers_open(&peers, N, &options, 1);
    peers_connect_ring(&peers, 2, 100);
    for (i = 0; i < N; i++) {
        mine[i] = job;
        mine[i].op = 10 + (uint64_t)i;
        job_register(&peers, i, &mine[i]);
        job_eager(&peers, i, &mine[i]);
    }
    peers_run(&peers);
    for (i = 0; i < N; i++) {
        job_start_at(&peers, i, &mine[i], 1, (uint32_t)i, 10 + (uint64_t)(i + N - 1) % N);
        peers_run(&peers);
    }
    for (i = 0; i < N; i++) {
        CHECK(pccl_engine_dropped(peers.peer[i].engine) == 0);
        CHECK(peers_count(&peers, i, PCCL_COMPLETE, mine[i].op) == 1 && job_has_result(&job, i));
    }
    job_close(&peers, &job);
}

/* Offers a packet of `bytes` bytes to `unexpected`. Returns whether it is held. */
static bool hold(struct unexpected *unexpected, uint64_t call, uint64_t tag, size_t bytes,
                 bool awaited)
{
    struct wire_header header = eager_chunk(call);
    struct packet *packet = packet_new();
    struct source source = {0};
    bool held;
    source.zmq = fake_table();
    header.tag = tag;
    CHECK(packet_reserve(&source, packet, &header, bytes) == PCCL_OK);
    held = unexpected_hold(unexpected, &header, &packet, awaited);
    packet_free(fake_table(), packet);
    return held;
}

static bool has(struct unexpected *unexpected, uint64_t call)
{
    struct wire_header header = eager_chunk(call);
    struct packet *packet = unexpected_take(unexpected, &header);
    if (packet == NULL)
        return false;
    packet_free(fake_table(), packet);
    return true;
}

/* START frees the chunks of its call and of smaller ones; and the limits of what is held. */
static void test_held_chunks(void)
{
    enum { NEARLY_ALL = EAGER_MAX - 2 * EAGER_COST };
    struct unexpected unexpected = {0};
    struct wire_header header = eager_chunk(5);
    fake_reset(1);
    CHECK(hold(&unexpected, 4, 101, 10, false) && hold(&unexpected, 5, 101, 10, false));
    CHECK(hold(&unexpected, 6, 101, 10, false) && hold(&unexpected, 4, 102, 10, false));
    CHECK(has(&unexpected, 5));
    unexpected_forget(&unexpected, fake_table(), &header);
    CHECK(!has(&unexpected, 4) && !has(&unexpected, 5) && has(&unexpected, 6));
    unexpected_free(&unexpected, fake_table());
    CHECK(hold(&unexpected, 1, 101, NEARLY_ALL, false) && !hold(&unexpected, 1, 102, 8192, false));
    unexpected_await(&unexpected, TEST_RUN, 101, true);
    /* its sender may have begun another one */
    CHECK(hold(&unexpected, 1, 102, NEARLY_ALL, false) && !hold(&unexpected, 1, 103, 8192, false));
    CHECK(hold(&unexpected, 2, 101, NEARLY_ALL, true) && !hold(&unexpected, 2, 101, 16384, true));
    unexpected_await(&unexpected, TEST_RUN, 101, false);
    unexpected_expect(&unexpected, fake_table(), 0);
    CHECK(has(&unexpected, 1));
    unexpected_expect(&unexpected, fake_table(), 1);
    CHECK(unexpected.first == NULL);
}

/* EAGER twice, with invalid rings, or contradicted by START. */
static void test_wrong_commands(void)
{
    int variant;
    for (variant = 0; variant < 4; variant++) {
        struct job job = sent_eagerly(2, 3000, true), other = job;
        other.oneshot = variant == 3;
        switch (variant) {
        case 0: job_eager(&peers, 0, &job); break;
        case 1: other.span -= 64; job_eager(&peers, 1, &other); break;
        case 2: other.n = 1; job_eager(&peers, 1, &other); break;
        case 3: job_start(&peers, 0, &other); break;
        }
        peers_run(&peers);
        CHECK(peers_count(&peers, variant % 3 != 0, PCCL_FAILED, job.op) == 1);
        CHECK(peers_event(&peers, variant % 3 != 0, PCCL_FAILED, job.op)->status == PCCL_EINVAL);
        CHECK(job_abort(&peers, &job));
        job_close(&peers, &job);
    }
}

int main(void)
{
    test_orders_of_events();
    test_not_joined();
    test_taken_back();
    test_receiver_votes_anew();
    test_another_epoch();
    test_lost_stream();
    test_credit();
    test_again();
    test_flood();
    test_joined_later();
    test_which_call();
    test_own_numbers();
    test_held_chunks();
    test_wrong_commands();
    return check_report("eager");
}
