/* test_reminders.c - requests that are never answered, and requesters that ask for too much. */
#include "check.h"
#include "star.h"

enum { LIMIT = 32, FLOOD = 5000 };

static void remind(int times)
{
    pccl_command command = {0};
    command.kind = PCCL_REMIND;
    command.op = FETCH_OP;
    command.limit = LIMIT;
    while (times-- > 0) {
        peers_command(&peers, 0, &command);
        peers_run(&peers);
    }
}

/* The holder learns of the transfer too late, and has dropped the requests by then. */
static void test_lost_requests(void)
{
    uint64_t seed;
    for (seed = 1; seed <= 10; seed++) {
        open_star(1, seed);
        enroll(0, FETCH_OP, PCCL_FETCH, wanted, PIECES);
        start(0, FETCH_OP, 1, 7);
        peers_run(&peers);
        CHECK(pccl_engine_dropped(peers.peer[1].engine) > 0);
        enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
        start(1, SERVE_OP, 1, 7);
        remind(2);
        CHECK(!is_complete());
        remind(1);
        CHECK(is_complete() && has_arrived());
        remind(5);                       /* of what is over */
        CHECK(peers_count(&peers, 0, PCCL_FAILED, FETCH_OP) == 0);
        peers_close(&peers);
    }
}

/* One of two holders never answers: the other one is asked for what it owes, and for all else. */
static void test_silent_holder(void)
{
    uint64_t seed;
    int who;
    for (seed = 1; seed <= 10; seed++) {
        who = 1 + (int)(seed % 2);
        open_star(2, seed);
        enroll(0, FETCH_OP, PCCL_FETCH, wanted, PIECES);
        enroll(who, SERVE_OP, PCCL_SERVE, offered, PIECES);
        start(who, SERVE_OP, 1, 7);
        start(0, FETCH_OP, 2, 7);
        peers_run(&peers);
        CHECK(!is_complete());
        remind(3);
        CHECK(is_complete() && has_arrived());
        peers_close(&peers);
    }
}

/* Registers holders that send one chunk for each ALLOW, and says START to all. */
static void open_slow_star(int holders, uint64_t seed)
{
    pccl_command command = {0};
    int who;
    open_star(holders, seed);
    enroll(0, FETCH_OP, PCCL_FETCH, wanted, PIECES);
    for (who = 1; who <= holders; who++) {
        command.kind = PCCL_REGISTER;
        command.op = SERVE_OP;
        command.op_kind = PCCL_SERVE;
        command.run = TEST_RUN;
        command.tag = TAG;
        command.min_seq = SEQ - 1;
        command.pieces = offered;
        command.n_pieces = PIECES;
        command.limit = CHUNK;
        peers_command(&peers, who, &command);
        start(who, SERVE_OP, 1, 7);
    }
    start(0, FETCH_OP, (uint32_t)holders, 7);
    peers_run(&peers);
}

static void allow(int who)
{
    pccl_command command = {0};
    command.kind = PCCL_ALLOW;
    command.op = SERVE_OP;
    command.limit = CHUNK;
    peers_command(&peers, who, &command);
    peers_run(&peers);
}

static bool is_served(int who)
{
    const pccl_event *event;
    peers_end(&peers, who, PCCL_COMMIT, SERVE_OP);
    peers_run(&peers);
    event = peers_event(&peers, who, PCCL_SETTLED, SERVE_OP);
    return event != NULL && event->tx_bytes > 0;
}

/* One of several lanes stands still, while the others go on: what is in it is asked for again long
 * before the end, whoever holds it. The end does not wait for it. */
static void test_stuck_lane(void)
{
    uint64_t seed;
    int holders, i, who;
    for (seed = 1; seed <= 20; seed++) {
        holders = 1 + (int)(seed / 2 % 2);
        open_slow_star(holders, seed);
        fake_stall(peers.peer[0].endpoint, true);
        for (i = 0; i < 200 && !is_complete(); i++) {
            for (who = 1; who <= holders; who++)
                allow(who);
            if (i < 30)
                remind(1);
        }
        CHECK(is_complete() && has_arrived());
        fake_stall(peers.peer[0].endpoint, false);
        for (who = 1; who <= holders; who++)
            CHECK(is_served(who));
        CHECK(has_arrived());
        peers_close(&peers);
    }
}

/* One of two holders falls silent in the middle: the other one is asked for what it owes, long
 * before there is nothing else to ask for. */
static void test_holder_that_falls_silent(void)
{
    int i;
    open_slow_star(2, 4);
    for (i = 0; i < 200 && !is_complete(); i++) {
        if (i < 3)
            allow(1);
        allow(2);
        if (i < 15)
            remind(1);
    }
    CHECK(is_complete() && has_arrived());
    peers_close(&peers);
}

/* An answer that comes at last from the holder that was asked first counts, too. */
static void test_late_answer(void)
{
    int i;
    open_slow_star(2, 6);
    remind(3);                           /* all that both owe is asked of the other one */
    for (i = 0; i < 3; i++)
        allow(1);
    CHECK(pccl_engine_dropped(peers.peer[0].engine) == 0);
    for (i = 0; i < 200 && !is_complete(); i++) {
        allow(1);
        remind(1);
    }
    CHECK(is_complete() && has_arrived());
    peers_close(&peers);
}

/* Both are silent for a while; then the one that fell silent first answers after all. */
static void test_all_silent(void)
{
    open_star(2, 3);
    enroll(0, FETCH_OP, PCCL_FETCH, wanted, PIECES);
    start(0, FETCH_OP, 2, 7);
    peers_run(&peers);
    remind(4);
    enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
    start(1, SERVE_OP, 1, 7);
    peers_run(&peers);
    CHECK(!is_complete());
    remind(14);
    CHECK(is_complete() && has_arrived());
    peers_close(&peers);
}

/* An answer that is only slow is not asked for twice, and reminders in between cost nothing. */
static void test_slow_answers(void)
{
    int i;
    open_slow_star(1, 5);
    for (i = 0; i < 200 && !is_complete(); i++) {
        remind(i % 5 == 0 ? 3 : 1);      /* now and then it is too slow for a reminder */
        allow(1);
    }
    CHECK(is_complete() && has_arrived());
    peers_end(&peers, 1, PCCL_COMMIT, SERVE_OP);
    peers_run(&peers);
    CHECK(peers_event(&peers, 1, PCCL_SETTLED, SERVE_OP)->tx_bytes == total());
    peers_close(&peers);
}

/* Nobody answers at all: this is reported, and the fetch goes on in another round. */
static void test_no_answer(void)
{
    pccl_command command = {0};
    int who;
    open_star(1, 7);
    enroll(0, FETCH_OP, PCCL_FETCH, wanted, PIECES);
    remind(3);                           /* before its START */
    start(0, FETCH_OP, 1, 7);
    remind(LIMIT);
    CHECK(peers_count(&peers, 0, PCCL_FAILED, FETCH_OP) == 0);
    remind(1);
    CHECK(peers_count(&peers, 0, PCCL_FAILED, FETCH_OP) == 1);
    CHECK(peers_event(&peers, 0, PCCL_FAILED, FETCH_OP)->status == PCCL_ESTREAM);
    enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
    command.kind = PCCL_START;
    command.seq = SEQ + 1;
    command.nonce = TEST_NONCE;
    command.chunk_bytes = CHUNK;
    command.n_ends = 1;
    command.ends[0].stream = 1;
    command.ends[0].slot = 7;
    for (who = 1; who >= 0; who--) {
        command.op = who == 0 ? FETCH_OP : SERVE_OP;
        peers_command(&peers, who, &command);
    }
    peers_run(&peers);
    CHECK(is_complete() && has_arrived());
    peers_close(&peers);
}

/* One requester asks for thousands of small answers: no other one waits for them. */
static void test_flood_of_one(void)
{
    struct wire_header header = good_request();
    unsigned char bytes[WIRE_HEADER_BYTES];
    pccl_command command = {0};
    int i;
    open_star(2, 1);
    peers_stream(&peers, 1, 2, 9, 1, 1);
    enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
    start(1, SERVE_OP, 1, 7);
    command.kind = PCCL_START;
    command.op = SERVE_OP;
    command.seq = SEQ;
    command.nonce = TEST_NONCE;
    command.n_ends = 1;
    command.ends[0].stream = 9;
    command.ends[0].slot = 9;
    peers_command(&peers, 1, &command);
    header.segment = 9;
    header.piece = 43;
    header.length = 1;
    for (i = 0; i < FLOOD; i++) {
        header.offset = (uint64_t)i;
        wire_encode(&header, bytes);
        fake_inject(peers.peer[1].endpoint, bytes, sizeof bytes, NULL, 0);
    }
    fake_refuse(90);                     /* otherwise all would be answered as they come */
    for (i = 0; i < FLOOD / 4; i++)
        (void)pccl_engine_step(peers.peer[1].engine);
    fake_refuse(0);
    CHECK(pccl_engine_dropped(peers.peer[1].engine) > 0);
    enroll(0, FETCH_OP, PCCL_FETCH, wanted, PIECES);
    start(0, FETCH_OP, 1, 7);
    peers_run(&peers);
    CHECK(is_complete() && has_arrived());
    peers_close(&peers);
}

/* A request that waits for its answer already is not taken twice. */
static void test_repeated_request(void)
{
    struct wire_header header = good_request();
    unsigned char bytes[WIRE_HEADER_BYTES];
    int i;
    open_star(1, 1);
    enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
    peers_run(&peers);
    for (i = 0; i < 6; i++) {
        header.step = (uint16_t)(i == 5); /* another attempt of the requester's */
        wire_encode(&header, bytes);
        fake_inject(peers.peer[1].endpoint, bytes, sizeof bytes, NULL, 0);
    }
    peers_run(&peers);
    start(1, SERVE_OP, 1, 7);
    peers_run(&peers);
    CHECK(pccl_engine_dropped(peers.peer[1].engine) == 4);
    peers_end(&peers, 1, PCCL_COMMIT, SERVE_OP);
    peers_run(&peers);
    CHECK(peers_event(&peers, 1, PCCL_SETTLED, SERVE_OP)->tx_bytes == 2 * (uint64_t)header.length);
    peers_close(&peers);
}

int main(void)
{
    test_lost_requests();
    test_silent_holder();
    test_stuck_lane();
    test_holder_that_falls_silent();
    test_late_answer();
    test_all_silent();
    test_slow_answers();
    test_no_answer();
    test_flood_of_one();
    test_repeated_request();
    return check_report("reminders");
}
