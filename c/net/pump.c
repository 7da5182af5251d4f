/* pump.c - see pccl_core.h, pumps: copies bytes between two connections until one of them ends. It
 * runs in its own thread, like the engine, and for the same reason: it must not wait for the
 * interpreter. Its memory is bounded: it reads from a connection only when the other one has taken
 * all earlier bytes. */
#if defined __linux__
#define _GNU_SOURCE
#elif defined __APPLE__
#define _DARWIN_C_SOURCE
#endif

#include "pccl_core.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#if defined _WIN32
#include <winsock2.h>
typedef SOCKET descriptor;
typedef WSAPOLLFD pollitem;
#define poll WSAPoll
#define close_socket closesocket
#define poll_count unsigned long
#define size_of_io int
#else
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
typedef int descriptor;
typedef struct pollfd pollitem;
#define close_socket close
#define poll_count nfds_t
#define size_of_io size_t
#endif

#if defined MSG_NOSIGNAL
enum { SEND_FLAGS = MSG_NOSIGNAL };
#else
enum { SEND_FLAGS = 0 };
#endif

enum { HALF_BYTES = 1 << 16 };   /* a distant chunk; the kernel's buffers hold the rest */

enum moved { MOVED, WAITS, ENDED };

/* One direction: bytes that have been read but not written yet. */
struct half {
    size_t begin, end;
    char bytes[HALF_BYTES];
};

struct joint {
    descriptor fd[2];
    bool ended;              /* one connection has: both are closed once the rest is written */
    struct half *half[2];    /* half[i] has bytes from fd[i] */
};

struct pump {
    descriptor control;
    size_t heard;            /* bytes of `next` that have been read */
    pccl_joint next;         /* the joint that is being read from the control */
    struct joint *joints;
    pollitem *items;         /* one for the control, and two for each joint */
    size_t n, room;
};

static bool is_transient(void)
{
#if defined _WIN32
    int error = WSAGetLastError();
    return error == WSAEWOULDBLOCK || error == WSAEINTR;
#else
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
#endif
}

static enum moved read_half(descriptor fd, struct half *half)
{
    long got = (long)recv(fd, half->bytes, (size_of_io)HALF_BYTES, 0);
    if (got < 0)
        return is_transient() ? WAITS : ENDED;
    half->begin = 0;
    half->end = (size_t)got;
    return got == 0 ? ENDED : MOVED;
}

static enum moved write_half(descriptor fd, struct half *half)
{
    long put = (long)send(fd, half->bytes + half->begin, (size_of_io)(half->end - half->begin),
                          SEND_FLAGS);
    if (put < 0)
        return is_transient() ? WAITS : ENDED;
    half->begin += (size_t)put;
    return MOVED;
}

static bool is_full(const struct half *half)
{
    return half->begin < half->end;
}

/* Copies waiting bytes from fd[from] to the other connection. Returns false when one connection has
 * ended and all its bytes are written. */
static bool move(struct joint *joint, int from)
{
    struct half *half = joint->half[from];
    enum moved read = MOVED;
    if (!is_full(half) && !joint->ended)
        read = read_half(joint->fd[from], half);
    joint->ended |= read == ENDED;
    if (is_full(half) && write_half(joint->fd[1 - from], half) == ENDED) {
        half->begin = half->end;
        joint->ended = true;
    }
    return !joint->ended || is_full(joint->half[0]) || is_full(joint->half[1]);
}

static void watch(const struct joint *joint, int i, pollitem *item)
{
    item->fd = joint->fd[i];
    item->events = item->revents = 0;
    if (!joint->ended && !is_full(joint->half[i]))
        item->events |= POLLIN;
    if (is_full(joint->half[1 - i]))
        item->events |= POLLOUT;
    if (item->events == 0)
        item->fd = (descriptor)-1;   /* otherwise poll would report its hang-up again and again */
}

static void close_joint(struct joint *joint)
{
    int i;
    for (i = 0; i < 2; i++) {
        (void)close_socket(joint->fd[i]);
        free(joint->half[i]);
    }
}

/* Adds the joint that was read from the control: 0 or PCCL_ENOMEM. */
static int join(struct pump *pump)
{
    struct joint *joint;
    int i;
    if (pump->n == pump->room) {
        size_t room = 2 * pump->room + 8;
        struct joint *joints = realloc(pump->joints, room * sizeof *joints);
        pollitem *items;
        if (joints == NULL)
            return PCCL_ENOMEM;
        pump->joints = joints;
        items = realloc(pump->items, (2 * room + 1) * sizeof *items);
        if (items == NULL)
            return PCCL_ENOMEM;
        pump->items = items;
        pump->room = room;
    }
    joint = &pump->joints[pump->n];
    memset(joint, 0, sizeof *joint);
    for (i = 0; i < 2; i++) {
        joint->fd[i] = (descriptor)pump->next.fd[i];
        joint->half[i] = malloc(sizeof *joint->half[i]);
        if (joint->half[i] != NULL)
            joint->half[i]->begin = joint->half[i]->end = 0;
    }
    if (joint->half[0] == NULL || joint->half[1] == NULL)
        close_joint(joint);      /* both ends notice that */
    else
        pump->n++;
    return PCCL_OK;
}

/* Reads from the control: 1, 0 if it has ended, or an error. */
static int listen_control(struct pump *pump)
{
    char *into = (char *)&pump->next;
    long got = (long)recv(pump->control, into + pump->heard,
                          (size_of_io)(sizeof pump->next - pump->heard), 0);
    if (got < 0)
        return is_transient();
    pump->heard += (size_t)got;
    if (got == 0 || pump->heard < sizeof pump->next)
        return got > 0;
    pump->heard = 0;
    if (join(pump) == PCCL_OK)
        return 1;
    (void)close_socket((descriptor)pump->next.fd[0]);
    (void)close_socket((descriptor)pump->next.fd[1]);
    return PCCL_ENOMEM;
}

static void move_all(struct pump *pump)
{
    size_t at = pump->n;
    while (at-- > 0) {
        struct joint *joint = &pump->joints[at];
        const pollitem *items = &pump->items[2 * at + 1];
        if ((items[0].revents | items[1].revents) == 0)
            continue;
        if (!move(joint, 0) || !move(joint, 1)) {
            close_joint(joint);
            *joint = pump->joints[--pump->n];    /* the last one has had its turn already */
        }
    }
}

int pccl_pump_run(int64_t control)
{
    struct pump pump = {0};
    int status = 1;
    pump.control = (descriptor)control;
    pump.items = malloc(sizeof *pump.items);
    if (pump.items == NULL)
        return PCCL_ENOMEM;
    while (status > 0) {
        size_t at;
        pump.items[0].fd = pump.control;
        pump.items[0].events = POLLIN;
        pump.items[0].revents = 0;
        for (at = 0; at < pump.n; at++) {
            watch(&pump.joints[at], 0, &pump.items[2 * at + 1]);
            watch(&pump.joints[at], 1, &pump.items[2 * at + 2]);
        }
        if (poll(pump.items, (poll_count)(2 * pump.n + 1), -1) < 0) {
            status = is_transient() ? 1 : PCCL_EZMQ;
            continue;
        }
        move_all(&pump);
        if (pump.items[0].revents != 0)
            status = listen_control(&pump);
    }
    while (pump.n > 0)
        close_joint(&pump.joints[--pump.n]);
    free(pump.joints);
    free(pump.items);
    return status;
}
