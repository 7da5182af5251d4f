/* test_exchange.c - exchanges on the fake network: their results, how far rows travel, and which
 * commands and messages are refused. */
#include "check.h"
#include "harness.h"

#include <string.h>

#include "engine/wire.h"

static struct peers peers;

/* Arrays of several types, one of them empty. */
static struct trade make_list(enum trade_kind kind, uint64_t count, bool in_place)
{
    static const int dtypes[] = {PCCL_F32, PCCL_U8, PCCL_F64, PCCL_BF16};
    struct trade trade = trade_plain(kind, count, in_place);
    int k;
    trade.n_parts = TRADE_PARTS_MAX;
    for (k = 0; k < trade.n_parts; k++) {
        trade.dtype[k] = dtypes[k];
        trade.count[k] = k == 1 ? 0 : count / (uint64_t)(4 - k) + (uint64_t)k;
    }
    return trade;
}

/* Runs one exchange in a world of its own. */
static void run_one(struct trade *trade, int n, uint64_t seed, uint32_t rings)
{
    int i;
    trade->rings = rings;
    trade_make(trade, n, seed);
    trade_open(&peers, trade, seed);
    fake_refuse(seed % 3 == 0 ? 30 : 0);
    trade_start_all(&peers, trade);
    peers_run(&peers);
    if (!CHECK(trade_is_right(&peers, trade)))
        fprintf(stderr, "  kind %d n %d count %lu parts %d in place %d rings %u seed %lu\n",
                (int)trade->kind, n, (unsigned long)trade->count[0], trade->n_parts,
                trade->in_place, rings, (unsigned long)seed);
    CHECK(trade_end(&peers, PCCL_COMMIT));
    CHECK(trade_is_right(&peers, trade));
    for (i = 0; i < n; i++)
        CHECK(pccl_engine_dropped(peers.peer[i].engine) == 0);
    trade_close(&peers, trade);
}

static void test_sizes(void)
{
    static const int ns[] = {1, 2, 3, 5, 8};
    static const uint64_t counts[] = {0, 1, 15, 16, 17, 63, 64, 65, 997};
    uint64_t seed = 1;
    int kind, i, j, in_place;
    for (kind = 0; kind < TRADE_KINDS; kind++)
        for (i = 0; i < 5; i++)
            for (j = 0; j < 9; j++)
                for (in_place = 0; in_place < 2; in_place++) {
                    struct trade trade = trade_plain((enum trade_kind)kind, counts[j], in_place);
                    run_one(&trade, ns[i], seed++, 1);
                    trade = make_list((enum trade_kind)kind, counts[j], in_place);
                    run_one(&trade, ns[i], seed++, 1);
                }
}

static void test_types(void)
{
    int kind, dtype;
    for (kind = 0; kind < TRADE_KINDS; kind++)
        for (dtype = PCCL_U8; dtype <= PCCL_F64; dtype++) {
            struct trade trade = trade_plain((enum trade_kind)kind, 401, dtype % 2);
            trade.dtype[0] = dtype;
            run_one(&trade, 3, (uint64_t)dtype + 1, 1);
        }
}

/* Two rings in opposite directions. In the second, positions are not ranks. */
static void test_two_rings(void)
{
    uint64_t seed;
    int kind;
    for (kind = 0; kind < TRADE_KINDS; kind++)
        for (seed = 1; seed <= 12; seed++) {
            struct trade trade = make_list((enum trade_kind)kind, 3000 + seed, seed % 2);
            trade.chunk_bytes = seed % 4 ? 512 : 1;
            run_one(&trade, 2 + (int)(seed % 7), seed, 2);
        }
}

/* Directly, beside one ring and two. */
static void test_direct(void)
{
    uint64_t seed;
    int kind;
    for (kind = 0; kind < TRADE_KINDS; kind++)
        for (seed = 1; seed <= 24; seed++) {
            struct trade trade = make_list((enum trade_kind)kind, 2000 + seed, seed % 2);
            trade.direct = true;
            trade.chunk_bytes = seed % 4 ? 512 : 1;
            run_one(&trade, 2 + (int)(seed % 7), seed, 1 + (uint32_t)(seed > 12));
        }
}

/* Lets a direct stream be lost after some passes, while its handshake lasts or later. If it has
 * carried nothing, the rows go around the ring; otherwise the exchange fails. */
static void test_lost_direct_stream(void)
{
    uint64_t seed;
    int i, around = 0, failed = 0;
    for (seed = 1; seed <= 60; seed++) {
        struct trade trade = make_list(ALL_TO_ALL, 900, false);
        trade.direct = true;
        trade.chunk_bytes = 512;
        trade_make(&trade, 5, seed);
        trade_open(&peers, &trade, seed);
        trade_start_all(&peers, &trade);
        for (i = 0; i < (int)(seed % 12); i++)
            (void)peers_step(&peers);
        peers_lose_stream(&peers, 0, TEST_DIRECT + 3);
        peers_run(&peers);
        CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, TEST_DIRECT + 3) == 1);
        if (peers_count(&peers, 0, PCCL_FAILED, TRADE_OP) == 1) {
            failed++;
            CHECK(peers_event(&peers, 0, PCCL_FAILED, TRADE_OP)->status == PCCL_ESTREAM);
            CHECK(trade_end(&peers, PCCL_ABORT));
        } else {
            CHECK(trade_is_right(&peers, &trade));
            CHECK(trade_end(&peers, PCCL_COMMIT));
            around += peers_event(&peers, 1, PCCL_SETTLED, TRADE_OP)->tx_bytes
                > peers_event(&peers, 4, PCCL_SETTLED, TRADE_OP)->tx_bytes;
        }
        trade_close(&peers, &trade);
    }
    CHECK(around > 3);
    CHECK(failed > 3);
}

/* Some peers get START only when the others can make no progress without them. */
static void test_early_messages(void)
{
    uint64_t seed;
    int kind;
    for (kind = 0; kind < TRADE_KINDS; kind++)
        for (seed = 1; seed <= 24; seed++) {
            struct trade trade = make_list((enum trade_kind)kind, seed % 7 * 150, seed % 2);
            trade.rings = 1 + (uint32_t)(seed % 3 == 0);
            trade.chunk_bytes = seed % 3 ? 4096 : 256;
            trade_make(&trade, 2 + (int)(seed % 4), seed);
            trade_open(&peers, &trade, seed);
            CHECK(trade_start_late(&peers, &trade, seed));
            CHECK(trade_is_right(&peers, &trade));
            CHECK(trade_end(&peers, PCCL_COMMIT));
            trade_close(&peers, &trade);
        }
}

/* Aborts on all peers after every possible number of passes, with or without a lane being cut
 * before. Send is unchanged, and the engines refer to it no more. */
static void abort_anywhere(enum trade_kind kind, bool in_place, bool cut)
{
    bool done = false;
    int i, k, hits = 0;
    for (k = 0; !done; k++) {
        struct trade trade = make_list(kind, 1500, in_place);
        trade_make(&trade, 3, (uint64_t)k + 1);
        trade_open(&peers, &trade, (uint64_t)k + 1);
        trade_start_all(&peers, &trade);
        for (i = 0; i < k; i++)
            (void)peers_step(&peers);
        done = trade_is_right(&peers, &trade);
        if (cut && fake_cut(peers.peer[1].endpoint)) {
            peers_run(&peers);
            hits += peers_count(&peers, 0, PCCL_FAILED, TRADE_OP) == 1
                && peers_event(&peers, 0, PCCL_FAILED, TRADE_OP)->status == PCCL_ESTREAM;
        }
        CHECK(trade_end(&peers, PCCL_ABORT));
        for (i = 0; i < 3; i++)
            CHECK(trade_is_unharmed(&trade, i));
        trade_close(&peers, &trade);
    }
    CHECK(hits > 3 || !cut);
}

static void test_aborts(void)
{
    int kind, in_place, cut;
    for (kind = 0; kind < TRADE_KINDS; kind++)
        for (in_place = 0; in_place < 2; in_place++)
            for (cut = 0; cut < 2; cut++)
                abort_anywhere((enum trade_kind)kind, in_place, cut);
}

/* Rows travel no farther than they must. The table has the rows that each position of four has sent
 * directly, in a ring, and in two opposite ones. The root is the last position. */
static void test_how_far_rows_travel(void)
{
    static const uint64_t sent[3][3][4] = {
        {{0, 0, 0, 3}, {2, 1, 0, 3}, {1, 0, 0, 3}},  /* one way: 3 + 2 + 1; both: 2 + 1, and 1 */
        {{1, 1, 1, 0}, {1, 2, 3, 0}, {1, 1, 2, 0}},
        {{3, 3, 3, 3}, {6, 6, 6, 6}, {4, 4, 4, 4}},
    };
    uint32_t rings;
    int kind, i;
    for (kind = SCATTER; kind <= ALL_TO_ALL; kind++)
        for (rings = 0; rings <= 2; rings++) {
            struct trade trade = trade_plain((enum trade_kind)kind, 64, false);
            trade.direct = rings == 0;
            trade.rings = rings;
            trade_make(&trade, 4, 3);
            trade_open(&peers, &trade, 3);
            trade_start_all(&peers, &trade);
            peers_run(&peers);
            CHECK(trade_end(&peers, PCCL_COMMIT));
            for (i = 0; i < 4; i++) {
                const pccl_event *event = peers_event(&peers, i, PCCL_SETTLED, TRADE_OP);
                if (!CHECK(event->tx_bytes == sent[kind][rings][i] * 256))
                    fprintf(stderr, "  kind %d rings %u position %d: %lu rows\n", kind, rings, i,
                            (unsigned long)(event->tx_bytes / 256));
            }
            trade_close(&peers, &trade);
        }
}

/* ---- invalid commands and messages ---- */

/* Gives peer 0 a command that must fail the op. */
static void expect_failed(const pccl_command *command, const char *what)
{
    pccl_options options = peers_options();
    pccl_command start = {0};
    peers_open(&peers, 2, &options, 1);
    peers_connect_ring(&peers, 1, 1);
    peers_command(&peers, 0, command);
    start.kind = PCCL_START;
    start.op = command->op;
    start.seq = 1;
    start.n_rings = 1;
    start.rings[0].stream = 1;
    start.rings[0].members = 2;
    peers_command(&peers, 0, &start);
    peers_run(&peers);
    if (!CHECK(peers_count(&peers, 0, PCCL_FAILED, 1) == 1
               && peers_event(&peers, 0, PCCL_FAILED, 1)->status == PCCL_EINVAL))
        fprintf(stderr, "  %s\n", what);
    peers_end(&peers, 0, PCCL_ABORT, 1);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_SETTLED, 1) == 1);
    peers_close(&peers);
}

#define EXPECT_EINVAL(change) \
    do { \
        float memory[256] = {0}; \
        uint64_t sends[2] = {1, 1}, recvs[2] = {1, 1}; \
        pccl_part part = {0}; \
        pccl_command command = {0}; \
        command.kind = PCCL_REGISTER; \
        command.op = 1; \
        command.op_kind = PCCL_EXCHANGE; \
        command.members = 2; \
        command.parts = &part; \
        command.n_parts = 1; \
        command.send_rows = sends; \
        command.recv_rows = recvs; \
        part.dtype = PCCL_F32; \
        part.count = 64; \
        part.send = memory; \
        part.recv = memory + 128; \
        change; \
        expect_failed(&command, #change); \
    } while (0)

static void test_wrong_commands(void)
{
    EXPECT_EINVAL(command.members = 0);
    EXPECT_EINVAL(command.members = PCCL_PEERS_MAX + 1);
    EXPECT_EINVAL(command.n_parts = PCCL_PARTS_MAX + 1);
    EXPECT_EINVAL(part.dtype = PCCL_I128 + 1);
    EXPECT_EINVAL(part.send = NULL);
    EXPECT_EINVAL(part.recv = NULL);
    EXPECT_EINVAL(part.count = UINT64_MAX / 4);
    EXPECT_EINVAL(part.count = UINT64_MAX);
    EXPECT_EINVAL(sends[1] = UINT64_MAX);
    EXPECT_EINVAL(recvs[0] = SIZE_MAX / 4; recvs[1] = SIZE_MAX / 4);
    EXPECT_EINVAL(recvs[0] = 2);                     /* our own rows */
    EXPECT_EINVAL(part.recv = memory);               /* would overwrite what is to be sent */
    EXPECT_EINVAL(part.recv = memory + 64);
    EXPECT_EINVAL(part.recv = memory + 127);
    EXPECT_EINVAL(part.recv = memory + 64; recvs[1] = 0);
}

static void test_wrong_starts(void)
{
    static const char *const names[] = {"members", "position", "rank", "stream", "seq", "none",
                                        "rings", "two ranks", "no stream"};
    static const uint16_t ranks[] = {1, 2}, swapped[] = {1, 0};
    int variant;
    for (variant = 0; variant < 9; variant++) {
        struct trade trade = trade_plain(ALL_TO_ALL, 100, false);
        pccl_command command = {0};
        trade_make(&trade, 2, 1);
        trade_open(&peers, &trade, 1);
        command.kind = PCCL_START;
        command.op = TRADE_OP;
        command.seq = variant == 4 ? TRADE_SEQ - 1 : TRADE_SEQ;
        command.n_rings = variant == 5 ? 0 : variant == 6 ? 9 : 1;
        command.rings[0].stream = variant == 3 ? 2 : variant == 8 ? 0 : 1;
        command.rings[0].members = variant == 0 ? 3 : 2;
        command.rings[0].position = variant == 1 ? 2 : 0;
        command.rings[0].ranks = variant == 2 ? ranks : NULL;
        if (variant == 7) {
            command.n_rings = 2;
            command.rings[1] = command.rings[0];
            command.rings[1].ranks = swapped;
        }
        peers_command(&peers, 0, &command);
        peers_run(&peers);
        if (!CHECK(peers_count(&peers, 0, PCCL_FAILED, TRADE_OP) == 1))
            fprintf(stderr, "  %s\n", names[variant]);
        CHECK(trade_end(&peers, PCCL_ABORT));
        trade_close(&peers, &trade);
    }
}

/* A send: two peers with one stream, over which the first sends to the second. */
static void test_a_send(void)
{
    uint64_t counts[] = {0, 1, 997}, seed;
    int i;
    for (seed = 1; seed <= 12; seed++) {
        struct trade trade = trade_plain(SCATTER, counts[seed % 3], false);
        pccl_options options = peers_options();
        trade_make(&trade, 2, 0);
        memset(trade.send_rows[0], 0, sizeof trade.send_rows[0]);
        memset(trade.recv_rows[0], 0, sizeof trade.recv_rows[0]);
        trade.send_rows[0][1] = 1;
        trade.parts[0][0].send = (const unsigned char *)trade.parts[0][0].send
            + (size_t)trade.count[0] * sizeof(float);        /* no row for itself before it */
        peers_open(&peers, 2, &options, seed);
        peers_stream(&peers, 0, 1, 4, 1, 1);
        for (i = 0; i < 2; i++)
            trade_register(&peers, i, &trade);
        peers_run(&peers);
        for (i = 0; i < 2; i++) {
            int who = (i + (int)seed) % 2;
            pccl_command command = {0};
            command.kind = PCCL_START;
            command.op = TRADE_OP;
            command.seq = TRADE_SEQ;
            command.nonce = TEST_NONCE;
            command.chunk_bytes = 256;
            command.n_rings = 1;
            command.rings[0].stream = who == 0 ? 4 : 0;
            command.rings[0].members = 2;
            command.rings[0].position = (uint32_t)who;
            peers_command(&peers, who, &command);
            peers_run(&peers);
        }
        for (i = 0; i < 2; i++)
            CHECK(peers_count(&peers, i, PCCL_COMPLETE, TRADE_OP) == 1);
        CHECK(trade_has_rows(&trade, 1));
        CHECK(trade_end(&peers, PCCL_COMMIT));
        trade_close(&peers, &trade);
    }
}

enum outcome { TAKEN, DROPPED, FATAL };

/* A row of 64 floats from position 0 to position 1. */
static struct wire_header good_row(void)
{
    struct wire_header header = {0};
    header.kind = WIRE_ROW;
    header.members = 3;
    header.step = 1;
    header.nonce = TEST_NONCE;
    header.run = TEST_RUN;
    header.seq = TRADE_SEQ;
    header.tag = TRADE_TAG;
    header.length = 64;
    return header;
}

/* Gives peer 1 a message, `times` times, before or after its START, and checks the outcome. */
static void try_message(const struct wire_header *header, uint64_t bytes, int times, bool early,
                        enum outcome outcome, const char *what)
{
    struct trade trade = trade_plain(ALL_TO_ALL, 64, false);
    uint64_t dropped;
    int i, failed;
    trade_make(&trade, 3, 1);
    trade_open(&peers, &trade, 4);
    if (!early)
        trade_start(&peers, 1, &trade);
    peers_run(&peers);
    for (i = 0; i < times; i++)
        peers_inject(&peers, 1, header, (size_t)bytes);
    peers_run(&peers);
    if (early)
        trade_start(&peers, 1, &trade);
    peers_run(&peers);
    dropped = pccl_engine_dropped(peers.peer[1].engine);
    failed = peers_count(&peers, 1, PCCL_FAILED, TRADE_OP);
    if (!CHECK(dropped == (outcome == DROPPED) && failed == (outcome == FATAL)))
        fprintf(stderr, "  %s, %s START\n", what, early ? "before" : "after");
    if (failed)
        CHECK(peers_event(&peers, 1, PCCL_FAILED, TRADE_OP)->status == PCCL_EPROTO);
    CHECK(trade_end(&peers, PCCL_ABORT));
    CHECK(trade_is_unharmed(&trade, 1));
    trade_close(&peers, &trade);
}

#define TRY(outcome, change) \
    do { \
        struct wire_header header = good_row(); \
        uint64_t bytes = 64; \
        int times = 1; \
        change; \
        try_message(&header, bytes, times, false, outcome, #change); \
        try_message(&header, bytes, times, true, outcome, #change); \
    } while (0)

static void test_hostile_messages(void)
{
    TRY(TAKEN, (void)0);
    TRY(TAKEN, header.offset = 192);
    TRY(TAKEN, bytes = header.length = 256);
    TRY(TAKEN, header.segment = 2; header.step = 1);  /* by way of position 0 */
    TRY(TAKEN, header.step = 2);                      /* to be sent on */
    TRY(DROPPED, header.run++);
    TRY(DROPPED, header.tag++);
    TRY(DROPPED, header.seq--);
    TRY(DROPPED, header.seq++);
    TRY(DROPPED, header.nonce++);
    TRY(DROPPED, header.kind = WIRE_CHUNK);
    TRY(DROPPED, header.kind = WIRE_REQUEST);
    TRY(FATAL, times = 2);
    TRY(FATAL, header.ring = 1);
    TRY(FATAL, header.members = 2);
    TRY(FATAL, header.segment = 1);                  /* ours: it would have gone around */
    TRY(FATAL, header.segment = 3);
    TRY(FATAL, header.step = 3);
    TRY(FATAL, header.step = 0);                      /* from itself to itself, */
    TRY(FATAL, header.segment = 2; header.step = 0);  /* or not by way of us */
    TRY(FATAL, header.piece = 1);
    TRY(FATAL, header.length = 0; bytes = 0);
    TRY(FATAL, header.length = 63);
    TRY(FATAL, header.length = 128);
    TRY(FATAL, header.length = UINT32_MAX);
    TRY(FATAL, bytes = header.length = 65);          /* not aligned, and not the last ones */
    TRY(FATAL, header.offset = 1);
    TRY(FATAL, header.offset = 256);
    TRY(FATAL, header.offset = UINT64_MAX - 63);
    TRY(FATAL, header.offset = 192; bytes = header.length = 128);
}

int main(void)
{
    test_sizes();
    test_types();
    test_two_rings();
    test_direct();
    test_lost_direct_stream();
    test_early_messages();
    test_aborts();
    test_how_far_rows_travel();
    test_a_send();
    test_wrong_commands();
    test_wrong_starts();
    test_hostile_messages();
    return check_report("exchange");
}
