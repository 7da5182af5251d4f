/* test_lanes.c - lanes that adapt while they run. The test plays the operating system: the linker
 * replaces functions of transport.c by those that begin with __wrap_. */
#include "check.h"
#include "engine/lanes.h"
#include "engine/transport.h"
#include "harness.h"

#include <string.h>

enum {
    ROUND_TRIP_US = 100000,
    WINDOW = 400000,         /* bytes */
    KNOWN_MAX = 256,
    MANY = 3 << 20           /* elements: a dozen looks at 16 lanes */
};

/* The state of each connection, by descriptor, and the limits that were set on it. */
static struct {
    bool known;
    struct tcp_state state;
    uint32_t limit;
    int changes;
} told[KNOWN_MAX];

bool __wrap_tcp_know(int fd, uint32_t port, struct tcp_connection *connection);
bool __wrap_tcp_look(const struct tcp_connection *connection, struct tcp_state *state);
void __wrap_tcp_limit_unsent(const struct tcp_connection *connection, uint32_t bytes);
uint32_t __wrap_tcp_round_trip_us(const struct tcp_connection *connection);

bool __wrap_tcp_know(int fd, uint32_t port, struct tcp_connection *connection)
{
    memset(connection, 0, sizeof *connection);
    connection->fd = fd;
    (void)port;
    return true;
}

bool __wrap_tcp_look(const struct tcp_connection *connection, struct tcp_state *state)
{
    *state = told[connection->fd % FAKE_DESCRIPTOR].state;
    return told[connection->fd % FAKE_DESCRIPTOR].known;
}

void __wrap_tcp_limit_unsent(const struct tcp_connection *connection, uint32_t bytes)
{
    told[connection->fd % FAKE_DESCRIPTOR].limit = bytes;
    told[connection->fd % FAKE_DESCRIPTOR].changes++;
}

uint32_t __wrap_tcp_round_trip_us(const struct tcp_connection *connection)
{
    (void)connection;
    return ROUND_TRIP_US;
}

static void add(struct lanes *lanes, int fd)
{
    struct tcp_connection connection = {0};
    connection.fd = fd;
    lanes_add(lanes, &connection);
}

/* Gives a connection a full window, on a link whose queue is empty. */
static void tell(int lane, uint64_t window)
{
    told[lane].known = true;
    told[lane].state.round_trip_us = told[lane].state.least_us = ROUND_TRIP_US;
    told[lane].state.window = told[lane].state.unacked = window;
    told[lane].state.unsent = 1;
}

/* `n` lanes with that window. */
static struct lanes make(int n, uint64_t window)
{
    struct lanes lanes = {0};
    int i;
    memset(told, 0, sizeof told);
    for (i = 0; i < n; i++) {
        tell(i, window);
        add(&lanes, i);
    }
    return lanes;
}

/* Looks `times` times. Returns the number of lanes that this asks for. */
static uint32_t look(struct lanes *lanes, int times)
{
    uint32_t more = 0;
    while (times-- > 0)
        more += lanes_look(lanes);
    return more;
}

/* ---- unsent bytes and chunks ---- */

static void test_what_a_lane_holds_is_little_in_time(void)
{
    struct lanes lanes = make(3, WINDOW);
    tell(1, 10 * WINDOW);
    tell(2, WINDOW / 100);
    told[0].state.round_trip_us *= 2;                /* it has to wait in a queue on the way */
    (void)lanes_look(&lanes);
    CHECK(told[0].limit == WINDOW * 16 / 200);
    CHECK(told[1].limit == TCP_UNSENT_MAX);
    CHECK(told[2].limit == 1 << 14);
}

static void test_a_lane_that_has_lost_holds_less(void)
{
    struct lanes lanes = make(2, WINDOW);
    (void)look(&lanes, 3);
    CHECK(told[0].changes == 1 && told[1].changes == 1);
    told[0].state.window = WINDOW * 9 / 10;      /* not worth a system call */
    told[1].state.window = WINDOW / 2;
    (void)look(&lanes, 3);
    CHECK(told[0].changes == 1 && told[0].limit == WINDOW * 16 / 100);
    CHECK(told[1].changes == 2 && told[1].limit == WINDOW * 8 / 100);
}

static void test_chunks_are_as_large_as_lanes_are_fast(void)
{
    static const struct { uint64_t window, chunk; } cases[] = {
        {10 * WINDOW, 1 << 16}, {WINDOW, 1 << 15}, {WINDOW / 2, 1 << 14}, {WINDOW / 100, 1 << 14}};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct lanes lanes = make(4, cases[i].window);
        CHECK(lanes_chunk(&lanes, 1 << 20) == LANES_CHUNK);
        (void)lanes_look(&lanes);
        CHECK(lanes_chunk(&lanes, 1 << 20) == cases[i].chunk);
        CHECK(lanes_chunk(&lanes, 1000) == 1000);
        told[2].known = told[3].known = false;       /* they count as fast as the others */
        (void)lanes_look(&lanes);
        CHECK(lanes_chunk(&lanes, 1 << 20) == cases[i].chunk);
    }
}

static void test_the_next_look_is_a_round_trip_later(void)
{
    struct lanes lanes = make(4, WINDOW);
    CHECK(lanes_count(&lanes, 1));
    (void)lanes_look(&lanes);
    CHECK(!lanes_count(&lanes, 4 * WINDOW - 1) && lanes_count(&lanes, 1));
    told[0].known = told[1].known = told[2].known = told[3].known = false;
    (void)lanes_look(&lanes);
    CHECK(!lanes_count(&lanes, 4 * 65536 - 1) && lanes_count(&lanes, 1));
}

/* ---- the number of lanes ---- */

static void test_windows_that_are_held_down_ask_for_more_lanes(void)
{
    struct lanes lanes = make(16, WINDOW);
    CHECK(look(&lanes, 4) == 0);
    CHECK(lanes_look(&lanes) == 8);
    CHECK(look(&lanes, 4) == 0);
    CHECK(lanes_look(&lanes) == 8);
}

/* The limits of each condition: windows nearly full, a queue nearly empty, windows nearly equal. */
static void test_what_is_nearly_so_counts(void)
{
    static const uint64_t windows[] = {
        WINDOW, WINDOW * 4 / 5, WINDOW * 4 / 3, WINDOW * 4 / 5, WINDOW * 4 / 3};
    struct lanes lanes = make(4, WINDOW);
    int i;
    told[0].state.unsent = 0;
    for (i = 1; i < 4; i++)
        told[i].state.unacked = WINDOW * 3 / 4;
    told[1].state.round_trip_us = ROUND_TRIP_US * 9 / 8;
    told[2].state.round_trip_us = ROUND_TRIP_US * 17 / 16;
    for (i = 0; i < 5; i++) {
        told[3].state.window = told[3].state.unacked = windows[i];
        CHECK(lanes_look(&lanes) == (i == 4 ? 2 : 0));
    }
}

static void test_windows_that_still_change_ask_for_none(void)
{
    struct lanes lanes = make(2, WINDOW);
    int i;
    for (i = 0; i < 20; i++) {
        uint32_t more = lanes_look(&lanes);
        CHECK(more == 0);
        tell(i % 2, i < 10 ? told[i % 2].state.window * 3 / 2 : told[i % 2].state.window / 2);
    }
}

static void test_a_full_link_asks_for_none(void)
{
    struct lanes lanes = make(4, WINDOW);
    int i;
    CHECK(look(&lanes, 4) == 0);
    for (i = 0; i < 2; i++)
        told[i].state.round_trip_us = ROUND_TRIP_US * 5 / 4;
    CHECK(look(&lanes, 10) == 0);
    told[0].state.round_trip_us = ROUND_TRIP_US;     /* earlier looks no longer count */
    CHECK(look(&lanes, 4) == 0 && lanes_look(&lanes) == 2);
}

static void test_what_says_nothing_is_neither_for_nor_against(void)
{
    struct lanes lanes = make(4, WINDOW);
    int i;
    CHECK(look(&lanes, 4) == 0);
    for (i = 0; i < 2; i++)
        told[i].state.unsent = 0;                    /* a call ends */
    CHECK(look(&lanes, 10) == 0);
    for (i = 0; i < 2; i++) {
        tell(i, WINDOW);
        told[i].state.unacked = WINDOW / 2;          /* and another begins */
    }
    CHECK(look(&lanes, 10) == 0);
    for (i = 0; i < 2; i++)
        tell(i, WINDOW);
    CHECK(lanes_look(&lanes) == 2);
}

static void test_limits(void)
{
    struct lanes lanes = make(LANES_MOST - 1, WINDOW);
    CHECK(look(&lanes, 5) == 1);
    add(&lanes, LANES_MOST);
    add(&lanes, LANES_MOST + 1);
    tell(LANES_MOST, WINDOW);
    tell(LANES_MOST + 1, WINDOW);
    CHECK(lanes.n == LANES_MOST && look(&lanes, 10) == 0);
    CHECK(told[LANES_MOST].changes == 1 && told[LANES_MOST + 1].changes == 0);
    lanes = make(1, WINDOW);
    CHECK(look(&lanes, 5) == 1);
    lanes = make(4, (1 << 15) - 1);                  /* too small to recover well */
    CHECK(look(&lanes, 10) == 0);
}

static void test_without_knowledge_nothing_changes(void)
{
    struct lanes lanes = make(4, WINDOW);
    int i;
    told[2].known = false;
    CHECK(look(&lanes, 10) == 0);                    /* one is unknown: it may have room */
    told[2].known = true;
    told[2].state.round_trip_us = 0;                 /* nothing has been acknowledged yet */
    CHECK(look(&lanes, 10) == 0 && told[2].changes == 0);
    for (i = 0; i < 4; i++)
        told[i].known = false;
    CHECK(look(&lanes, 10) == 0 && told[2].changes == 0);
    lanes = make(4, WINDOW);
    memset(told, 0, sizeof told);
    CHECK(look(&lanes, 10) == 0 && lanes_chunk(&lanes, 1 << 20) == LANES_CHUNK);
}

static void test_a_lane_that_is_gone_is_left_alone(void)
{
    struct lanes lanes = make(3, WINDOW);
    lanes_drop(&lanes, 1);
    lanes_drop(&lanes, 1);
    (void)lanes_look(&lanes);
    CHECK(lanes.n == 2 && told[0].changes == 1 && told[1].changes == 0 && told[2].changes == 1);
    tell(0, 2 * WINDOW);
    (void)lanes_look(&lanes);
    lanes_drop(&lanes, 0);                           /* the other one has its limit */
    (void)lanes_look(&lanes);
    CHECK(lanes.n == 1 && told[0].changes == 2 && told[2].changes == 1);
    tell(3, WINDOW);
    add(&lanes, 3);                            /* takes the place of a lost one, without a limit */
    (void)lanes_look(&lanes);
    CHECK(told[2].changes == 1 && told[3].changes == 1);
}

/* ---- streams ---- */

static struct peers peers;

/* Starts an all-reduce in a ring of two whose number of lanes the engines choose. One lane has
 * stalled; runs until everything waits for that one. */
static struct job begin(uint64_t seed, int deny, int linger)
{
    struct job job = job_plain(MANY, seed % 2 == 0);
    pccl_options options = peers_options();
    int i;
    job.chunk_bytes = 1 << 20;
    job_make(&job, 2);
    memset(told, 0, sizeof told);
    for (i = 0; i < KNOWN_MAX; i++)
        tell(i, 1 << 15);
    peers_open(&peers, 2, &options, seed);
    fake_linger(linger);
    peers_connect_ring(&peers, 0, 2);
    for (i = 0; i < 2; i++)
        job_register(&peers, i, &job);
    peers_run(&peers);
    CHECK(fake_lanes() == 32);
    fake_stall(peers.peer[0].endpoint, true);
    fake_deny(deny);
    job_start_all(&peers, &job);
    peers_run(&peers);
    return job;
}

static void finish(struct job *job)
{
    int i;
    fake_stall(peers.peer[0].endpoint, false);
    peers_run(&peers);
    for (i = 0; i < 2; i++)
        CHECK(peers_count(&peers, i, PCCL_STREAM_LOST, 1) == 0);
    CHECK(job_is_right(&peers, job) && job_commit(&peers, job));
    job_free(job);
    peers_close(&peers);
}

static void test_lanes_are_added_under_a_collective(void)
{
    uint64_t seed;
    for (seed = 1; seed <= 4; seed++) {
        struct job job = begin(seed, 0, 0);
        CHECK(fake_lanes() > 32);
        finish(&job);
    }
}

/* In the next epoch a stream to the same peer has as many lanes, though nothing asks for them. */
static void test_the_next_stream_has_as_many(void)
{
    struct job job = begin(1, 0, 0), next = job_plain(MANY, false);
    unsigned grown;
    int i;
    fake_stall(peers.peer[0].endpoint, false);
    peers_run(&peers);
    CHECK(job_is_right(&peers, &job) && job_commit(&peers, &job));
    grown = fake_lanes();
    for (i = 0; i < 2; i++)
        peers_close_stream(&peers, i, 1);
    peers_run(&peers);
    CHECK(grown > 32 && fake_lanes() == 0);
    memset(told, 0, sizeof told);
    next.op = next.seq = 2;
    job_make(&next, 2);
    for (i = 0; i < 2; i++) {
        peers_stream(&peers, i, 1 - i, 2, 0, 2);
        job_register(&peers, i, &next);
    }
    peers_run(&peers);
    CHECK(fake_lanes() == 32);
    for (i = 0; i < 2; i++)
        job_start_at(&peers, i, &next, 2, (uint32_t)i, 2);
    peers_run(&peers);
    CHECK(fake_lanes() == grown);
    CHECK(job_is_right(&peers, &next) && job_commit(&peers, &next));
    job_free(&job);
    job_free(&next);
    peers_close(&peers);
}

static void test_lanes_that_are_turned_away_cost_nothing(void)
{
    uint64_t seed;
    for (seed = 1; seed <= 4; seed++) {
        struct job job = begin(seed, 1000, 0);
        CHECK(fake_lanes() == 32);
        finish(&job);
    }
}

/* A handshake that succeeds is never taken for that of a lane that may still fail. */
static void test_a_first_lane_comes_after_lanes_are_wanted(void)
{
    uint64_t seed;
    for (seed = 1; seed <= 4; seed++) {
        struct job job = begin(seed, 0, 31);
        fake_linger(32);                             /* the last of the first ones stands */
        peers_run(&peers);
        fake_deny(1000);
        fake_linger(0);
        peers_run(&peers);
        finish(&job);
    }
}

static void test_a_lane_that_stood_is_lost_beside_those_that_come(void)
{
    struct job job = begin(5, 3, 0);
    CHECK(fake_cut(peers.peer[1].endpoint));
    peers_run(&peers);
    CHECK(peers_count(&peers, 0, PCCL_STREAM_LOST, 1) == 1);
    CHECK(job_abort(&peers, &job));
    job_free(&job);
    peers_close(&peers);
}

int main(void)
{
    test_what_a_lane_holds_is_little_in_time();
    test_a_lane_that_has_lost_holds_less();
    test_chunks_are_as_large_as_lanes_are_fast();
    test_the_next_look_is_a_round_trip_later();
    test_windows_that_are_held_down_ask_for_more_lanes();
    test_what_is_nearly_so_counts();
    test_windows_that_still_change_ask_for_none();
    test_a_full_link_asks_for_none();
    test_what_says_nothing_is_neither_for_nor_against();
    test_limits();
    test_without_knowledge_nothing_changes();
    test_a_lane_that_is_gone_is_left_alone();
    test_lanes_are_added_under_a_collective();
    test_the_next_stream_has_as_many();
    test_lanes_that_are_turned_away_cost_nothing();
    test_a_first_lane_comes_after_lanes_are_wanted();
    test_a_lane_that_stood_is_lost_beside_those_that_come();
    return check_report("lanes");
}
