/* test_transfer.c - SERVE and FETCH on the fake network: peer 0 fetches pieces that all others
 * hold. */
#include "check.h"
#include "star.h"

#include <string.h>

static void test_fetch(void)
{
    uint64_t seed, sent;
    int holders, i, late;
    for (seed = 1; seed <= 30; seed++) {
        holders = 1 + (int)(seed % 3);
        late = (int)(seed / 2 % 2);
        sent = 0;
        open_star(holders, seed);
        fake_refuse(seed % 4 == 0 ? 40 : 0);
        enroll(0, FETCH_OP, PCCL_FETCH, wanted, PIECES);
        for (i = 1; i <= holders; i++)
            enroll(i, SERVE_OP, PCCL_SERVE, offered, PIECES);
        if (!late)
            for (i = 1; i <= holders; i++)
                start(i, SERVE_OP, 1, 7);
        peers_run(&peers);
        start(0, FETCH_OP, (uint32_t)holders, 7);
        peers_run(&peers);
        if (late) {
            CHECK(peers.peer[0].n_events == 0);
            for (i = 1; i <= holders; i++)
                start(i, SERVE_OP, 1, 7);
            peers_run(&peers);
        }
        CHECK(has_arrived());
        CHECK(peers_count(&peers, 0, PCCL_COMPLETE, FETCH_OP) == 1);
        CHECK(peers.peer[0].events[0].settled && peers.peer[0].events[0].rx_bytes == total());
        for (i = 1; i <= holders; i++) {
            CHECK(peers.peer[i].n_events == 0);
            peers_end(&peers, i, PCCL_COMMIT, SERVE_OP);
            peers_run(&peers);
            CHECK(peers_count(&peers, i, PCCL_SETTLED, SERVE_OP) == 1);
            sent += peers_event(&peers, i, PCCL_SETTLED, SERVE_OP)->tx_bytes;
            CHECK(holders > 2
                  || peers_event(&peers, i, PCCL_SETTLED, SERVE_OP)->tx_bytes > total() / 8);
        }
        CHECK(sent == total());
        peers_close(&peers);
    }
}

/* START on stream 1 with chunks that hold a whole piece. */
static void start_wide(int who, uint64_t op)
{
    pccl_command command = {0};
    command.kind = PCCL_START;
    command.op = op;
    command.seq = SEQ;
    command.nonce = TEST_NONCE;
    command.chunk_bytes = 2 * PIECE_MAX;
    command.n_ends = 1;
    command.ends[0].stream = 1;
    command.ends[0].slot = 7;
    peers_command(&peers, who, &command);
}

/* A piece that one lane carries in one message is divided among several. */
static void test_little_is_divided_among_lanes(void)
{
    static const unsigned messages[] = {1, 2, 2, 2};     /* of 20,001 bytes; none is tiny */
    pccl_options options = peers_options();
    uint32_t lanes;
    for (lanes = 1; lanes <= 4; lanes++) {
        open_star(1, 1);
        peers_close(&peers);
        peers_open(&peers, 2, &options, lanes);
        peers_stream(&peers, 0, 1, 1, lanes, 2);
        peers_stream(&peers, 1, 0, 1, lanes, 2);
        enroll(0, FETCH_OP, PCCL_FETCH, wanted + PIECES - 1, 1);
        enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
        start_wide(0, FETCH_OP);
        start_wide(1, SERVE_OP);
        peers_run(&peers);
        CHECK(is_complete() && memcmp(held[PIECES - 1], got[PIECES - 1], PIECE_MAX) == 0);
        CHECK(fake_delivered() == 2 * messages[lanes - 1]);      /* a request for each */
        peers_close(&peers);
    }
}

/* Several STARTs, each of which adds a holder; and a fetch of nothing. */
static void test_starts_add_up(void)
{
    pccl_command command = {0};
    open_star(2, 1);
    enroll(0, FETCH_OP, PCCL_FETCH, wanted, PIECES);
    enroll(0, 9, PCCL_FETCH, wanted, PIECES);      /* with the same tag */
    start(0, FETCH_OP, 1, 7);
    enroll(2, SERVE_OP, PCCL_SERVE, offered, PIECES);
    start(2, SERVE_OP, 1, 7);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_FAILED, 9) == 1);
    CHECK(peers_count(&peers, 0, PCCL_COMPLETE, FETCH_OP) == 0);
    command.kind = PCCL_START;       /* the nonce and chunk_bytes of the first START count */
    command.op = FETCH_OP;
    command.seq = SEQ;
    command.n_ends = 1;
    command.ends[0].stream = 2;
    command.ends[0].slot = 7;
    peers_command(&peers, 0, &command);
    peers_run(&peers);
    enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
    start(1, SERVE_OP, 1, 7);
    peers_run(&peers);
    CHECK(pccl_engine_dropped(peers.peer[1].engine) == 4);   /* too late for its requests, */
    CHECK(!has_arrived());                                   /* and there was no REMIND */
    peers_end(&peers, 0, PCCL_ABORT, FETCH_OP);
    peers_end(&peers, 0, PCCL_ABORT, 9);
    enroll(0, 3, PCCL_FETCH, &wanted[2], 1);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_SETTLED, FETCH_OP) == 1);
    start(0, 3, 0, 0);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_COMPLETE, 3) == 1);
    peers_close(&peers);
}

/* Runs `k` passes of a fetch from two holders. */
static void run_until(int k, uint32_t leaf_bytes)
{
    start_star(2, (uint64_t)k + 1, leaf_bytes, 0);
    while (k-- > 0)
        (void)peers_step(&peers);
}

/* Aborts on both sides after every possible number of passes. */
static void test_abort_anywhere(void)
{
    bool done = false;
    int k, i;
    for (k = 0; !done; k++) {
        run_until(k, 0);
        done = peers_count(&peers, 0, PCCL_COMPLETE, FETCH_OP) == 1;
        for (i = 0; i < 3; i++)
            peers_end(&peers, i, PCCL_ABORT, i == 0 ? FETCH_OP : SERVE_OP);
        peers_run(&peers);
        for (i = 0; i < 3; i++)
            CHECK(peers_count(&peers, i, PCCL_SETTLED, i == 0 ? FETCH_OP : SERVE_OP) == 1);
        peers_close(&peers);
    }
}

/* The lane to a holder is lost after every possible number of passes: the rest comes from the other
 * holder, and no data arrives twice. */
static void test_holder_lost(void)
{
    bool done = false;
    int k, hits = 0;
    for (k = 0; !done; k++) {
        run_until(k, 0);
        done = is_complete();
        if (!done && fake_cut(peers.peer[2].endpoint)) {
            peers_run(&peers);
            CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 2) == 1);
            CHECK(peers_count(&peers, 0, PCCL_FAILED, FETCH_OP) == 0);
            CHECK(is_complete() && has_arrived());
            CHECK(peers_event(&peers, 0, PCCL_COMPLETE, FETCH_OP)->rx_bytes == total());
            hits++;
        }
        peers_close(&peers);
    }
    CHECK(hits > 3);
}

/* START of another round, with stream 3 to holder 1. */
static void start_again(void)
{
    peers_stream(&peers, 0, 1, 3, 1, 2);
    start_round(0, FETCH_OP, 1, 3, 5);
    start_round(1, SERVE_OP, 1, 1, 5);
    peers_run(&peers);
}

/* Both lanes are lost: the fetch waits, and another round fetches only the rest; unless the missing
 * data was on its way already. */
static void test_all_holders_lost(void)
{
    bool done = false;
    int k, hits = 0, kept = 0;
    for (k = 0; !done; k++) {
        run_until(k, 0);
        done = is_complete();
        if (!done && fake_cut(peers.peer[2].endpoint) && fake_cut(peers.peer[1].endpoint)) {
            const pccl_event *failed;
            peers_run(&peers);
            failed = peers_event(&peers, 0, PCCL_FAILED, FETCH_OP);
            CHECK((failed != NULL) == !is_complete());
            if (failed != NULL) {
                CHECK(failed->status == PCCL_ESTREAM && failed->seq == SEQ);
                kept += failed->rx_bytes > 0;
                start_again();
                hits++;
            }
            CHECK(is_complete() && has_arrived());
            CHECK(peers_event(&peers, 0, PCCL_COMPLETE, FETCH_OP)->rx_bytes == total());
        }
        peers_close(&peers);
    }
    CHECK(hits > 3 && kept > 3);
}

/* Another round while the holders of the first one still send: their data is stale. */
static void test_another_round_anywhere(void)
{
    bool done = false;
    int k;
    for (k = 0; !done; k++) {
        run_until(k, 0);
        done = is_complete();
        if (!done) {
            start_again();
            CHECK(is_complete() && has_arrived());
            CHECK(peers_count(&peers, 0, PCCL_FAILED, FETCH_OP) == 0);
            CHECK(peers_event(&peers, 0, PCCL_COMPLETE, FETCH_OP)->rx_bytes == total());
        }
        peers_close(&peers);
    }
}

static void verify(uint32_t piece, uint32_t leaf, bool good)
{
    pccl_command command = {0};
    command.kind = PCCL_VERIFIED;
    command.op = FETCH_OP;
    command.piece = piece;
    command.leaf = leaf;
    command.good = good;
    peers_command(&peers, 0, &command);
}

/* Verifies all leaves that have arrived since the last call. Returns how many were wrong. */
static int verify_all(int *seen, uint32_t leaf_bytes)
{
    int wrong = 0;
    for (; *seen < peers.peer[0].n_events; ++*seen) {
        const pccl_event *event = &peers.peer[0].events[*seen];
        uint32_t i = event->piece / 10;
        uint64_t offset = (uint64_t)event->leaf * leaf_bytes, size;
        bool good;
        if (event->kind != PCCL_LEAF)
            continue;
        CHECK(event->op == FETCH_OP && i < PIECES && offset < sizes[i]);
        size = sizes[i] - offset < leaf_bytes ? sizes[i] - offset : leaf_bytes;
        good = memcmp(held[i] + offset, got[i] + offset, (size_t)size) == 0;
        wrong += !good;
        verify(event->piece, event->leaf, good);
    }
    return wrong;
}

/* Leaves are verified. Peer 2 has some wrong bytes; their leaves are fetched from peer 1. */
static void test_leaves(void)
{
    static unsigned char other[20001];
    static pccl_piece others[PIECES];
    const uint32_t leaf_bytes = 2000;
    int variant, tricked = 0;
    for (variant = 0; variant < 30; variant++) {
        int seen = 0, wrong = 0, lies = variant % 3, i;
        uint64_t n = 0;
        open_star(2, (uint64_t)variant + 1);
        memcpy(other, held[4], sizeof other);
        memcpy(others, offered, sizeof others);
        others[4].data = other;
        for (i = 0; i < (int)sizeof other; i += 997)
            other[i] = (unsigned char)(other[i] + (lies == 1 ? i == 9970 : lies));
        enroll_leaves(0, FETCH_OP, PCCL_FETCH, wanted, PIECES, leaf_bytes);
        enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
        enroll(2, SERVE_OP, PCCL_SERVE, others, PIECES);
        for (i = 1; i <= 2; i++)
            start(i, SERVE_OP, 1, 7);
        start(0, FETCH_OP, 2, 7);
        while (peers_run(&peers), seen < peers.peer[0].n_events)
            wrong += verify_all(&seen, leaf_bytes);
        for (i = 0; i < PIECES; i++)
            n += (sizes[i] + leaf_bytes - 1) / leaf_bytes;
        CHECK(peers_count(&peers, 0, PCCL_LEAF, FETCH_OP) == (int)n + wrong);
        CHECK(is_complete() && has_arrived() && peers_count(&peers, 0, PCCL_FAILED, FETCH_OP) == 0);
        CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 1) == 0);
        CHECK(lies == 0 ? wrong == 0 : lies == 1 || wrong > 0);
        tricked += lies == 1 && wrong > 0;
        CHECK(lies != 2 || peers_count(&peers, 0, PCCL_STREAM_LOST, 2) == 1);
        peers_close(&peers);
    }
    CHECK(tricked > 3);      /* the one wrong leaf may come from peer 1 */
}

/* All holders are wrong, so none is left. A VERIFIED for a leaf that has not arrived fails the
 * fetch. */
static void test_verdicts(void)
{
    run_until(0, 2000);
    peers_run(&peers);
    verify(13, 0, false);
    peers_run(&peers);
    verify(13, 0, false);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 1) + peers_count(&peers, 0, PCCL_STREAM_LOST, 2)
          >= 1);
    verify(13, 0, false);
    peers_run(&peers);
    verify(13, 0, false);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_FAILED, FETCH_OP) >= 1);
    peers_close(&peers);
    run_until(0, 2000);
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_FAILED, FETCH_OP) == 0);
    verify(13, 3, true);      /* it has leaves 0 to 2 */
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_FAILED, FETCH_OP) == 1);
    verify(13, 0, true);
    peers_run(&peers);
    peers_close(&peers);
}

/* When a requester is lost, the others are still served. */
static void test_requester_lost(void)
{
    open_star(2, 5);
    peers_stream(&peers, 1, 2, 2, 1, 2);         /* holder 1 also serves peer 2 */
    peers_stream(&peers, 2, 1, 3, 1, 2);
    enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
    start(1, SERVE_OP, 1, 7);
    start_round(1, SERVE_OP, 0, 2, 9);
    peers_run(&peers);
    peers_close_stream(&peers, 1, 1);
    peers_run(&peers);
    CHECK(peers_count(&peers, 1, PCCL_FAILED, SERVE_OP) == 1);
    CHECK(peers_count(&peers, 1, PCCL_STREAM_LOST, 1) == 0);
    enroll(2, FETCH_OP, PCCL_FETCH, wanted, PIECES);
    start_round(2, FETCH_OP, 0, 3, 9);
    peers_run(&peers);
    CHECK(peers_count(&peers, 2, PCCL_COMPLETE, FETCH_OP) == 1 && has_arrived());
    peers_end(&peers, 1, PCCL_COMMIT, SERVE_OP);
    peers_run(&peers);
    CHECK(peers_count(&peers, 1, PCCL_SETTLED, SERVE_OP) == 1);
    peers_close(&peers);
}

/* A limited holder sends answers as long as it has any allowance left, and then waits for more. */
static void test_allowance(void)
{
    int i;
    start_star(1, 3, 0, 1000);
    peers_run(&peers);
    CHECK(!is_complete());
    for (i = 1; i < 100 && !is_complete(); i++) {
        allow(1, 1000);
        peers_run(&peers);
    }
    CHECK(is_complete() && has_arrived());
    CHECK((uint64_t)i * 1000 + CHUNK >= total() && (uint64_t)i * 1000 <= 2 * total());
    peers_close(&peers);
}

/* ---- hostile messages ---- */

static void try_request(const struct wire_header *header, size_t payload_bytes, int failed,
                        int dropped, const char *what)
{
    open_star(1, 1);
    enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
    start(1, SERVE_OP, 1, 7);
    peers_run(&peers);
    peers_inject(&peers, 1, header, payload_bytes);
    peers_run(&peers);
    if (!CHECK(peers_count(&peers, 1, PCCL_FAILED, SERVE_OP) == failed
               && (int)pccl_engine_dropped(peers.peer[1].engine) == dropped))
        fprintf(stderr, "  %s\n", what);
    peers_end(&peers, 1, PCCL_ABORT, SERVE_OP);
    peers_run(&peers);
    CHECK(peers_count(&peers, 1, PCCL_SETTLED, SERVE_OP) == 1);
    peers_close(&peers);
}

#define TRY(failed, dropped, change) \
    do { \
        struct wire_header header = good_request(); \
        size_t bytes = 0; \
        change; \
        try_request(&header, bytes, failed, dropped, #change); \
    } while (0)

static void test_hostile_requests(void)
{
    TRY(0, 0, (void)0);
    TRY(0, 0, header.segment++);         /* a slot that a later START may name */
    TRY(0, 0, header.seq++);             /* a round that a later START may name */
    TRY(0, 1, header.seq--);
    TRY(0, 1, header.kind = WIRE_DATA);
    TRY(0, 1, header.nonce++);
    TRY(0, 1, header.piece++);
    TRY(0, 1, header.piece = UINT32_MAX);
    TRY(0, 1, header.length++);
    TRY(0, 1, header.length = 0);
    TRY(0, 1, header.length = UINT32_MAX);
    TRY(0, 1, header.offset = 5001);
    TRY(0, 1, header.offset = UINT64_MAX - 100);
    TRY(0, 1, bytes = 1);
}

/* Early requests of a round are kept up to a limit. */
static void test_flood(void)
{
    struct wire_header header = good_request();
    int i;
    open_star(1, 1);
    enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
    peers_run(&peers);
    for (i = 0; i < 16384; i++)
        peers_inject(&peers, 1, &header, 0);
    peers_run(&peers);
    CHECK(peers.peer[1].n_events == 0 && pccl_engine_dropped(peers.peer[1].engine) == 0);
    peers_inject(&peers, 1, &header, 0);
    peers_run(&peers);
    CHECK(peers.peer[1].n_events == 0 && pccl_engine_dropped(peers.peer[1].engine) == 1);
    peers_close(&peers);
}

/* Requests with invented nonces, before START and after it, take no room from those of the
 * round. */
static void test_invented_nonces(void)
{
    struct wire_header header = good_request(), invented = good_request();
    int i, j;
    open_star(1, 1);
    enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
    peers_run(&peers);
    for (i = 0; i < 2; i++) {
        for (j = 0; j < 20000; j++) {                /* more than are kept of one nonce */
            peers_inject(&peers, 1, &invented, 0);
            invented.nonce = TEST_NONCE + 1;
            invented.seq = SEQ + (uint64_t)i;
        }
        peers_run(&peers);
        header.segment += (uint16_t)i;               /* after START: a slot of the next START */
        peers_inject(&peers, 1, &header, 0);
        peers_run(&peers);
        for (j = 0; i == 1 && j < 100; j++) {        /* the round that has begun is kept */
            invented.nonce++;
            peers_inject(&peers, 1, &invented, 0);
        }
        peers_run(&peers);
        start(1, SERVE_OP, 1, 7 + (uint32_t)i);
        peers_run(&peers);
        CHECK(peers.peer[1].n_events == 0);
    }
    peers_end(&peers, 1, PCCL_COMMIT, SERVE_OP);
    peers_run(&peers);
    CHECK(peers_event(&peers, 1, PCCL_SETTLED, SERVE_OP)->tx_bytes == 2 * header.length);
    peers_close(&peers);
}

/* START answers early requests of its round. Those with its number and another nonce are stale.
 * Those of a later round wait for the START of that round, which removes the first requesters. */
static void test_stale_requests(void)
{
    struct wire_header header = good_request();
    int i;
    open_star(1, 1);
    enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
    peers_run(&peers);
    for (i = 0; i < 3; i++) {
        header.seq = SEQ + (i == 1);
        header.nonce = TEST_NONCE + (i > 0);
        peers_inject(&peers, 1, &header, 0);
    }
    peers_run(&peers);
    start(1, SERVE_OP, 1, 7);
    peers_run(&peers);
    CHECK(pccl_engine_dropped(peers.peer[1].engine) == 1);
    CHECK(pccl_engine_dropped(peers.peer[0].engine) == 1);   /* the answer that it got */
    start_round(1, SERVE_OP, 1, 1, 7);
    peers_run(&peers);
    CHECK(pccl_engine_dropped(peers.peer[0].engine) == 2);
    header.seq = SEQ;
    peers_inject(&peers, 1, &header, 0);
    peers_run(&peers);
    CHECK(pccl_engine_dropped(peers.peer[1].engine) == 2);
    CHECK(peers.peer[1].n_events == 0);
    peers_end(&peers, 1, PCCL_COMMIT, SERVE_OP);
    peers_run(&peers);
    CHECK(peers_event(&peers, 1, PCCL_SETTLED, SERVE_OP)->tx_bytes == 2 * header.length);
    peers_close(&peers);
}

/* Data that does not answer a request exactly is dropped. The first request is for all 10 bytes of
 * piece 3. */
static void test_hostile_data(void)
{
    int variant;
    for (variant = 0; variant < 8; variant++) {
        struct wire_header header = good_request();
        size_t payload = 10;
        open_star(1, 1);
        enroll(0, FETCH_OP, PCCL_FETCH, wanted, PIECES);
        start(0, FETCH_OP, 1, 7);
        peers_run(&peers);
        memset(got[0], 0xee, 10);
        header.kind = WIRE_DATA;
        header.piece = 3;
        header.offset = 0;
        header.length = 10;
        switch (variant) {
        case 1: payload++; break;
        case 2: payload--; break;
        case 3: header.offset = 1; break;
        case 4: header.length = 9; payload = 9; break;
        case 5: header.piece = 33; break;
        case 6: header.nonce++; break;
        case 7: header.step = 1; break;           /* it has one holder: 0 */
        }
        peers_inject(&peers, 0, &header, payload);
        peers_run(&peers);
        CHECK(pccl_engine_dropped(peers.peer[0].engine) == (variant != 0));
        CHECK(got[0][0] == (variant == 0 ? 0 : 0xee));
        peers_inject(&peers, 0, &header, payload);
        peers_run(&peers);
        CHECK(pccl_engine_dropped(peers.peer[0].engine) == (uint64_t)1 + (variant != 0));
        CHECK(peers_count(&peers, 0, PCCL_FAILED, FETCH_OP) == 0);
        peers_close(&peers);
    }
}

static void test_wrong_pieces(void)
{
    open_star(1, 1);
    wanted[1].piece = wanted[0].piece;
    enroll(0, FETCH_OP, PCCL_FETCH, wanted, PIECES);
    wanted[1].piece++;
    wanted[3].data = NULL;
    peers_run(&peers);
    enroll(0, 2, PCCL_FETCH, wanted, PIECES);
    peers_run(&peers);
    CHECK(peers_event(&peers, 0, PCCL_FAILED, FETCH_OP)->status == PCCL_EINVAL);
    CHECK(peers_event(&peers, 0, PCCL_FAILED, 2)->status == PCCL_EINVAL);
    enroll(0, 3, PCCL_FETCH, &wanted[4], 1);
    peers_close_stream(&peers, 0, 1);
    start(0, 3, 2, 7);                           /* no stream 1 and no stream 2 */
    peers_run(&peers);
    CHECK(peers_event(&peers, 0, PCCL_FAILED, 3)->status == PCCL_ESTREAM);
    peers_close(&peers);
}

int main(void)
{
    test_fetch();
    test_little_is_divided_among_lanes();
    test_starts_add_up();
    test_abort_anywhere();
    test_holder_lost();
    test_all_holders_lost();
    test_another_round_anywhere();
    test_leaves();
    test_verdicts();
    test_allowance();
    test_requester_lost();
    test_hostile_requests();
    test_flood();
    test_invented_nonces();
    test_stale_requests();
    test_hostile_data();
    test_wrong_pieces();
    return check_report("transfer");
}
