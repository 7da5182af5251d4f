/* test_reminders.c - requests that are not answered, and requesters that send too many. */
#include "check.h"
#include "star.h"

enum { FLOOD = 5000 };

/* The holder registers too late, and has dropped the requests by then. */
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
        remind(5);                       /* after the end */
        CHECK(peers_count(&peers, 0, PCCL_FAILED, FETCH_OP) == 0);
        peers_close(&peers);
    }
}

/* One of two holders never answers: the other one is asked for everything. */
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

/* Starts a transfer from holders that send one chunk for each allow_one(). */
static void open_slow_star(int holders, uint64_t seed)
{
    start_star(holders, seed, 0, CHUNK);
    peers_run(&peers);
}

static void allow_one(int who)
{
    allow(who, CHUNK);
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

/* One of several lanes stalls while the others go on: the requests in it are repeated long before
 * the end, to any holder, and the end does not wait for that lane. */
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
                allow_one(who);
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

/* One of two holders falls silent in the middle: its requests are repeated to the other one, long
 * before nothing else is left to request. */
static void test_holder_that_falls_silent(void)
{
    int i;
    open_slow_star(2, 4);
    for (i = 0; i < 200 && !is_complete(); i++) {
        if (i < 3)
            allow_one(1);
        allow_one(2);
        if (i < 15)
            remind(1);
    }
    CHECK(is_complete() && has_arrived());
    peers_close(&peers);
}

/* A late answer from the holder that was asked first still counts. */
static void test_late_answer(void)
{
    int i;
    open_slow_star(2, 6);
    remind(3);                           /* each holder is asked for the other's chunks */
    for (i = 0; i < 3; i++)
        allow_one(1);
    CHECK(pccl_engine_dropped(peers.peer[0].engine) == 0);
    for (i = 0; i < 200 && !is_complete(); i++) {
        allow_one(1);
        remind(1);
    }
    CHECK(is_complete() && has_arrived());
    peers_close(&peers);
}

/* Both holders are silent for a while; then one of them answers after all. */
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

/* A request whose answer is only slow is not repeated, whatever reminders come in between. */
static void test_slow_answers(void)
{
    int i;
    open_slow_star(1, 5);
    for (i = 0; i < 200 && !is_complete(); i++) {
        remind(i % 5 == 0 ? 3 : 1);      /* now and then it is too slow for a reminder */
        allow_one(1);
    }
    CHECK(is_complete() && has_arrived());
    peers_end(&peers, 1, PCCL_COMMIT, SERVE_OP);
    peers_run(&peers);
    CHECK(peers_event(&peers, 1, PCCL_SETTLED, SERVE_OP)->tx_bytes == total());
    peers_close(&peers);
}

/* Nobody answers: the fetch reports that, and goes on in another round. */
static void test_no_answer(void)
{
    open_star(1, 7);
    enroll(0, FETCH_OP, PCCL_FETCH, wanted, PIECES);
    remind(3);                           /* before its START */
    start(0, FETCH_OP, 1, 7);
    remind(REMINDERS_MAX);
    CHECK(peers_count(&peers, 0, PCCL_FAILED, FETCH_OP) == 0);
    remind(1);
    CHECK(peers_count(&peers, 0, PCCL_FAILED, FETCH_OP) == 1);
    CHECK(peers_event(&peers, 0, PCCL_FAILED, FETCH_OP)->status == PCCL_ESTREAM);
    enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
    start_round(1, SERVE_OP, 1, 1, 7);
    start_round(0, FETCH_OP, 1, 1, 7);
    peers_run(&peers);
    CHECK(is_complete() && has_arrived());
    peers_close(&peers);
}

/* A flood of small requests from one requester does not delay the others. */
static void test_flood_of_one(void)
{
    struct wire_header header = good_request();
    int i;
    open_star(2, 1);
    peers_stream(&peers, 1, 2, 9, 1, 1);
    enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
    start(1, SERVE_OP, 1, 7);
    start_round(1, SERVE_OP, 0, 9, 9);
    header.segment = 9;
    header.piece = 43;
    header.length = 1;
    for (i = 0; i < FLOOD; i++) {
        header.offset = (uint64_t)i;
        peers_inject(&peers, 1, &header, 0);
    }
    fake_refuse(90);                     /* otherwise each would be answered at once */
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

/* A request that is queued already is not queued again. */
static void test_repeated_request(void)
{
    struct wire_header header = good_request();
    int i;
    open_star(1, 1);
    enroll(1, SERVE_OP, PCCL_SERVE, offered, PIECES);
    peers_run(&peers);
    for (i = 0; i < 6; i++) {
        header.step = (uint16_t)(i == 5); /* the last one counts as another request */
        peers_inject(&peers, 1, &header, 0);
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
