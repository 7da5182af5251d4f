/* test_pump.c - the pump copies all bytes between two connections, in order, until one of them
 * ends. It runs in its own thread; the main thread has the outer ends. */
#define _POSIX_C_SOURCE 200809L

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "pccl_core.h"

enum { PATIENCE_S = 120, QUIET_MS = 100, PAIRS = 100, PIECE = 10000, LARGE = 3 << 20 };

/* ---- an allocation that fails ---- */

static bool no_memory;

void *__real_realloc(void *memory, size_t size);
void *__wrap_realloc(void *memory, size_t size);

void *__wrap_realloc(void *memory, size_t size)
{
    return no_memory ? NULL : __real_realloc(memory, size);
}

/* ---- a pump, and pairs of connections ---- */

struct run {
    int control;
    int its;                 /* the pump's end of the control */
    int status;
    pthread_t thread;
};

/* Two connections: their outer ends, and the inner ends, which belong to the pump. */
struct pair {
    int outer[2], inner[2];
};

static void *pump(void *argument)
{
    struct run *run = argument;
    run->status = pccl_pump_run(run->its);
    return NULL;
}

static void start(struct run *run)
{
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    run->control = ends[0];
    run->its = ends[1];
    CHECK(fcntl(run->its, F_SETFL, O_NONBLOCK) == 0);
    CHECK(pthread_create(&run->thread, NULL, pump, run) == 0);
}

static int end(struct run *run)
{
    (void)close(run->control);
    CHECK(pthread_join(run->thread, NULL) == 0);
    (void)close(run->its);
    return run->status;
}

/* Connects over TCP: `near` is blocking, `far` is not. */
static void connect_tcp(int *near, int *far)
{
    struct sockaddr_in address = {0};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(bind(listener, (struct sockaddr *)&address, size) == 0 && listen(listener, 1) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&address, &size) == 0);
    *near = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(*near, (struct sockaddr *)&address, size) == 0);
    *far = accept(listener, NULL, NULL);
    CHECK(*far >= 0 && fcntl(*far, F_SETFL, O_NONBLOCK) == 0);
    (void)close(listener);
}

static struct pair connect_pair(void)
{
    struct pair pair;
    int i;
    for (i = 0; i < 2; i++)
        connect_tcp(&pair.outer[i], &pair.inner[i]);
    return pair;
}

/* Lets the pump join a pair. The message to the pump is sent in two pieces. */
static void hand_over(const struct run *run, const struct pair *pair)
{
    pccl_joint joint;
    const char *bytes = (const char *)&joint;
    memset(&joint, 0, sizeof joint);
    joint.fd[0] = pair->inner[0];
    joint.fd[1] = pair->inner[1];
    CHECK(send(run->control, bytes, 3, 0) == 3);
    CHECK(send(run->control, bytes + 3, sizeof joint - 3, 0) == (ssize_t)sizeof joint - 3);
}

static struct pair joined(const struct run *run)
{
    struct pair pair = connect_pair();
    hand_over(run, &pair);
    return pair;
}

static unsigned char byte_at(size_t place, int from)
{
    return (unsigned char)(place * 2654435761u >> 13 ^ (unsigned)from * 85u);
}

static size_t fill(unsigned char *bytes, size_t begin, size_t n, int from)
{
    size_t i;
    for (i = 0; i < n; i++)
        bytes[i] = byte_at(begin + i, from);
    return n;
}

/* Sends the n bytes from place `begin` on. Returns whether that worked. */
static bool say(int fd, size_t begin, size_t n, int from)
{
    unsigned char bytes[PIECE];
    while (n > 0) {
        ssize_t put = send(fd, bytes, fill(bytes, begin, n < PIECE ? n : PIECE, from),
                           MSG_NOSIGNAL);
        if (put <= 0)
            return false;
        begin += (size_t)put;
        n -= (size_t)put;
    }
    return true;
}

/* Receives and checks up to n bytes. Returns how many came before the connection ended. */
static size_t hear(int fd, size_t begin, size_t n, int from)
{
    unsigned char bytes[PIECE];
    size_t heard = 0;
    while (heard < n) {
        size_t most = n - heard < PIECE ? n - heard : PIECE;
        ssize_t i, got = recv(fd, bytes, most, 0);
        if (got <= 0)
            break;
        for (i = 0; i < got; i++)
            if (!CHECK(bytes[i] == byte_at(begin + heard + (size_t)i, from)))
                return heard;
        heard += (size_t)got;
    }
    return heard;
}

static bool has_ended(int fd)
{
    char byte;
    return recv(fd, &byte, 1, 0) <= 0;
}

/* Sends until no bytes are taken for `quiet_ms`, or far too many were. Returns their number. */
static size_t say_all_that_is_taken(int fd, int from, int quiet_ms)
{
    unsigned char bytes[PIECE];
    struct pollfd item = {fd, POLLOUT, 0};
    size_t said = 0;
    while (said < 16 * LARGE) {
        ssize_t put = send(fd, bytes, fill(bytes, said, PIECE, from), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (put > 0)
            said += (size_t)put;
        else if (quiet_ms == 0 || poll(&item, 1, quiet_ms) == 0)
            break;
    }
    return said;
}

/* ---- tests ---- */

struct speech {
    int fd;
    bool said;
};

static void *speak(void *argument)
{
    struct speech *speech = argument;
    speech->said = say(speech->fd, 0, LARGE, 0);
    return NULL;
}

static void test_bytes_pass_both_ways_at_once(void)
{
    struct run run;
    struct pair pair;
    struct speech speech;
    pthread_t speaker;
    start(&run);
    pair = joined(&run);
    speech.fd = pair.outer[0];
    CHECK(pthread_create(&speaker, NULL, speak, &speech) == 0);
    CHECK(hear(pair.outer[1], 0, LARGE / 2, 0) == LARGE / 2);
    CHECK(say(pair.outer[1], 0, PIECE, 1));
    CHECK(hear(pair.outer[0], 0, PIECE, 1) == PIECE);
    CHECK(hear(pair.outer[1], LARGE / 2, LARGE / 2, 0) == LARGE / 2);
    CHECK(pthread_join(speaker, NULL) == 0 && speech.said);
    (void)close(pair.outer[0]);
    CHECK(has_ended(pair.outer[1]));
    (void)close(pair.outer[1]);
    CHECK(end(&run) == 0);
}

static void test_what_was_said_before_the_end_arrives(void)
{
    struct run run;
    int half;
    start(&run);
    for (half = 0; half < 2; half++) {
        struct pair pair = joined(&run);
        CHECK(say(pair.outer[half], 0, 20 * PIECE, 0));
        CHECK(shutdown(pair.outer[half], SHUT_WR) == 0);
        CHECK(hear(pair.outer[1 - half], 0, LARGE, 0) == 20 * PIECE);
        CHECK(has_ended(pair.outer[half]));     /* the pump ends both directions */
        (void)close(pair.outer[0]);
        (void)close(pair.outer[1]);
    }
    CHECK(end(&run) == 0);
}

static void test_who_does_not_read_makes_the_other_one_wait(void)
{
    struct run run;
    struct pair pair;
    size_t said;
    start(&run);
    pair = joined(&run);
    said = say_all_that_is_taken(pair.outer[0], 0, QUIET_MS);
    CHECK(said > 0 && said < 16 * LARGE);
    CHECK(say(pair.outer[1], 0, PIECE, 1));            /* the other direction goes on */
    CHECK(hear(pair.outer[0], 0, PIECE, 1) == PIECE);
    CHECK(hear(pair.outer[1], 0, said, 0) == said);
    (void)close(pair.outer[0]);
    (void)close(pair.outer[1]);
    CHECK(end(&run) == 0);
}

static void test_a_reset_of_one_ends_the_other(void)
{
    struct run run;
    struct linger abrupt = {1, 0};
    int i;
    start(&run);
    for (i = 0; i < 2; i++) {
        struct pair pair = joined(&run);
        CHECK(say(pair.outer[i], 0, PIECE, 0));
        CHECK(hear(pair.outer[1 - i], 0, PIECE, 0) == PIECE);
        CHECK(setsockopt(pair.outer[i], SOL_SOCKET, SO_LINGER, &abrupt, sizeof abrupt) == 0);
        (void)close(pair.outer[i]);
        CHECK(has_ended(pair.outer[1 - i]));
        (void)close(pair.outer[1 - i]);
    }
    CHECK(end(&run) == 0);
}

/* The pump has bytes for both connections, and neither takes any, when one of them ends. */
static void test_who_ends_while_it_takes_nothing_keeps_nothing_from_the_other(void)
{
    struct run run;
    struct pair pair;
    size_t before[2];
    int i;
    start(&run);
    for (i = 0; i < 2; i++) {
        int ends[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        CHECK(fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0);
        pair.outer[i] = ends[0];
        pair.inner[i] = ends[1];
        before[i] = say_all_that_is_taken(ends[1], 1 - i, 0);
    }
    hand_over(&run, &pair);
    for (i = 0; i < 2; i++) {
        int left = 1;
        CHECK(say(pair.outer[i], before[1 - i], PIECE, i));
        while (left > 0) {                       /* until the pump has read it */
            CHECK(ioctl(pair.inner[i], FIONREAD, &left) == 0);
            (void)sched_yield();
        }
    }
    (void)close(pair.outer[0]);
    CHECK(hear(pair.outer[1], 0, LARGE, 0) == before[1] + PIECE);
    (void)close(pair.outer[1]);
    CHECK(end(&run) == 0);
}

static void test_many_pairs_and_an_end_while_they_are_open(void)
{
    static struct pair pairs[PAIRS];
    struct run run;
    int i;
    start(&run);
    for (i = 0; i < PAIRS; i++) {
        pairs[i] = joined(&run);
        CHECK(say(pairs[i].outer[i % 2], 0, PIECE, i));
    }
    for (i = 0; i < PAIRS; i++)
        CHECK(hear(pairs[i].outer[1 - i % 2], 0, PIECE, i) == PIECE);
    for (i = 0; i < PAIRS; i += 3)
        (void)close(pairs[i].outer[0]);
    for (i = 0; i < PAIRS; i++)
        if (i % 3 == 0)
            CHECK(has_ended(pairs[i].outer[1]));
        else
            CHECK(say(pairs[i].outer[1], 0, PIECE, i));
    for (i = 0; i < PAIRS; i++)
        CHECK(i % 3 == 0 || hear(pairs[i].outer[0], 0, PIECE, i) == PIECE);
    CHECK(end(&run) == 0);
    for (i = 0; i < PAIRS; i++) {
        CHECK(has_ended(pairs[i].outer[1]));
        (void)close(pairs[i].outer[1]);
        if (i % 3 == 0)
            continue;
        CHECK(has_ended(pairs[i].outer[0]));
        (void)close(pairs[i].outer[0]);
    }
}

static void test_without_memory_it_ends_and_so_do_those_that_it_was_given(void)
{
    struct run run;
    struct pair pair = connect_pair();
    no_memory = true;
    start(&run);
    hand_over(&run, &pair);
    CHECK(has_ended(pair.outer[0]) && has_ended(pair.outer[1]));
    CHECK(end(&run) == PCCL_ENOMEM);
    no_memory = false;
    (void)close(pair.outer[0]);
    (void)close(pair.outer[1]);
}

int main(void)
{
    (void)alarm(PATIENCE_S);         /* a hang is a failure */
    test_bytes_pass_both_ways_at_once();
    test_what_was_said_before_the_end_arrives();
    test_who_does_not_read_makes_the_other_one_wait();
    test_a_reset_of_one_ends_the_other();
    test_who_ends_while_it_takes_nothing_keeps_nothing_from_the_other();
    test_many_pairs_and_an_end_while_they_are_open();
    test_without_memory_it_ends_and_so_do_those_that_it_was_given();
    return check_report("pump");
}
