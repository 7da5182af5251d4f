/* transport.c - see transport.h. If the operating system has no such data or option (an ipc socket,
 * another system), nothing is set, and the lane works with TCP's defaults.
 *
 * Two settings let several connections share a long link well. First, few bytes wait unsent in the
 * kernel. Otherwise each connection takes up to megabytes; a slow one still sends them long after
 * the others have finished, and every new collective queues behind them. Second, packets are paced.
 * Otherwise a window that opens after a pause is sent as one burst, which overflows the queue
 * before the link and shrinks the windows. */
#if defined __linux__
#define _GNU_SOURCE
#elif defined __APPLE__
#define _DARWIN_C_SOURCE
#endif

#include "engine/transport.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#if defined __linux__ || defined __APPLE__
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#endif

enum { UNHEARD = 6 };            /* heartbeat time-outs */

uint32_t tcp_port(const char *where)
{
    const char *colon = strrchr(where, ':');
    unsigned long port = colon != NULL ? strtoul(colon + 1, NULL, 10) : 0;
    return port < 65536 ? (uint32_t)port : 0;
}

#if defined __linux__ || defined __APPLE__
/* Stores the address of this side of a socket. Returns its size, or 0 if it is not a TCP socket. */
static uint32_t read_name(int fd, unsigned char *name)
{
    struct sockaddr_storage own;
    socklen_t size = sizeof own;
    memset(&own, 0, sizeof own);
    if (getsockname(fd, (struct sockaddr *)&own, &size) != 0 || size > TCP_NAME_MAX
        || (own.ss_family != AF_INET && own.ss_family != AF_INET6))
        return 0;
    memcpy(name, &own, size);
    return (uint32_t)size;
}

/* Duplicates the descriptor of a connection; the caller closes the duplicate. -1: the descriptor
 * belongs to another connection now. */
static int hold(const struct tcp_connection *connection)
{
    unsigned char name[TCP_NAME_MAX];
    int fd = fcntl(connection->fd, F_DUPFD_CLOEXEC, 0);
    if (fd >= 0 && (read_name(fd, name) != connection->name_bytes
                    || memcmp(name, connection->name, connection->name_bytes) != 0)) {
        (void)close(fd);
        return -1;
    }
    return fd;
}

bool tcp_know(int fd, uint32_t port, struct tcp_connection *connection)
{
    struct sockaddr_storage other;
    socklen_t size = sizeof other;
    int held = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    uint32_t found = 0;
    memset(&other, 0, sizeof other);
    memset(connection, 0, sizeof *connection);
    connection->fd = fd;
    if (held < 0)
        return false;
    if (getpeername(held, (struct sockaddr *)&other, &size) == 0) {
        if (other.ss_family == AF_INET)
            found = ntohs(((struct sockaddr_in *)&other)->sin_port);
        else if (other.ss_family == AF_INET6)
            found = ntohs(((struct sockaddr_in6 *)&other)->sin6_port);
    }
    connection->name_bytes = read_name(held, connection->name);
    (void)close(held);
    return found != 0 && found == port && connection->name_bytes > 0;
}
#else
bool tcp_know(int fd, uint32_t port, struct tcp_connection *connection)
{
    memset(connection, 0, sizeof *connection);
    connection->fd = fd;
    (void)port;
    return true;
}
#endif

#if defined __linux__
/* The kernel's struct tcp_info as 32-bit words, because not every libc declares all of it. It only
 * ever grows at its end. */
enum {
    SEGMENT = 4,
    UNACKED = 6,
    ROUND_TRIP = 17,
    WINDOW = 20,
    UNSENT = 36,
    LEAST_ROUND_TRIP = 37,
    WORDS
};

/* Reads its first words. False: it has fewer, or the descriptor is not ours any more. */
static bool read_info(const struct tcp_connection *connection, uint32_t *info, uint32_t words)
{
    const socklen_t whole = (socklen_t)(words * sizeof *info);
    socklen_t size = whole;
    int fd = hold(connection), failed;
    if (fd < 0)
        return false;
    failed = getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &size);
    (void)close(fd);
    return failed == 0 && size == whole;
}
#endif

uint32_t tcp_round_trip_us(const struct tcp_connection *connection)
{
#if defined __linux__
    uint32_t info[ROUND_TRIP + 1];
    if (read_info(connection, info, ROUND_TRIP + 1))
        return info[ROUND_TRIP];
#endif
    (void)connection;
    return 0;
}

bool tcp_look(const struct tcp_connection *connection, struct tcp_state *state)
{
#if defined __linux__
    uint32_t info[WORDS];
    if (read_info(connection, info, WORDS)) {
        state->round_trip_us = info[ROUND_TRIP];
        state->least_us = info[LEAST_ROUND_TRIP];
        state->window = (uint64_t)info[WINDOW] * info[SEGMENT];
        state->unacked = (uint64_t)info[UNACKED] * info[SEGMENT];
        state->unsent = info[UNSENT];
        return true;
    }
#endif
    (void)connection;
    (void)state;
    return false;
}

void tcp_limit_unsent(const struct tcp_connection *connection, uint32_t bytes)
{
#if defined TCP_NOTSENT_LOWAT && (defined __linux__ || defined __APPLE__)
    int unsent = (int)bytes, fd = hold(connection);
    if (fd >= 0) {
        (void)setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
        (void)close(fd);
    }
#endif
    (void)connection;
    (void)bytes;
}

void tcp_prepare_distant(const struct tcp_connection *connection)
{
    tcp_limit_unsent(connection, TCP_UNSENT_MAX);
#if defined SO_MAX_PACING_RATE && defined __linux__
    {                            /* any limit turns pacing on; this one is never reached */
        unsigned int rate = 0xfffffffe;
        int fd = hold(connection);
        if (fd >= 0) {
            (void)setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate);
            (void)close(fd);
        }
    }
#endif
}

int tcp_unheard_ms(uint32_t heartbeat_timeout_ms)
{
    const uint32_t most = INT_MAX / UNHEARD;
    return (int)(UNHEARD * (heartbeat_timeout_ms < most ? heartbeat_timeout_ms : most));
}

/* ---- ipc ---- */

/* By default the kernel buffers about 200 KiB of unreceived data (Linux), or 8 KiB (macOS). So a
 * chunk of 1 MiB takes many turns of two threads: one fills the buffer and waits until the other
 * has emptied it. With room for two chunks, large arrays take 0.75 to 0.9 of the time (measured).
 * Linux allows at most twice net.core.wmem_max; with its default, they take 0.8 to 1.0. */
void ipc_prepare(int fd, const char *endpoint)
{
    static const char scheme[] = "ipc://";
#if defined __linux__ || defined __APPLE__
    struct sockaddr_un other;
    socklen_t size = sizeof other;
    const int bytes = 2 << 20;
    int held;
    if (strncmp(endpoint, scheme, sizeof scheme - 1) != 0)
        return;
    held = fcntl(fd, F_DUPFD_CLOEXEC, 0);    /* stays valid when libzmq closes its descriptor */
    memset(&other, 0, sizeof other);
    if (held >= 0 && getpeername(held, (struct sockaddr *)&other, &size) == 0
        && other.sun_family == AF_UNIX
        && strncmp(other.sun_path, endpoint + sizeof scheme - 1, sizeof other.sun_path) == 0)
        (void)setsockopt(held, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    if (held >= 0)
        (void)close(held);
#else
    (void)fd;
    (void)endpoint;
    (void)scheme;
#endif
}
