/* tcp.c - see tcp.h. Where the operating system cannot be asked (an ipc socket, a system without
 * the option) nothing happens, and the lane works with TCP's defaults.
 *
 * Two settings make several connections share a long link well. First, little waits unsent in the
 * kernel: otherwise each connection takes up to megabytes, which a slow one still sends long after
 * the others have finished, with every new collective queued behind it. Second, packets leave
 * paced: otherwise a window that opens after a pause leaves as one burst, which overflows the queue
 * before the link and costs the windows it came from. */
#if defined __linux__
#define _GNU_SOURCE
#elif defined __APPLE__
#define _DARWIN_C_SOURCE
#endif

#include "engine/tcp.h"

#include <limits.h>

#if defined __linux__ || defined __APPLE__
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#endif

enum { UNHEARD = 6 };            /* heartbeat time-outs */

#if defined __linux__
/* The kernel's struct tcp_info as words of 32 bits: it only ever grows at its end, and not every
 * libc declares all of it. */
enum {
    SEGMENT = 4,
    UNACKED = 6,
    ROUND_TRIP = 17,
    WINDOW = 20,
    UNSENT = 36,
    LEAST_ROUND_TRIP = 37,
    WORDS
};

/* Reads the first words of it. False: it has fewer, or it is no TCP connection. */
static bool read_info(int fd, uint32_t *info, uint32_t words)
{
    const socklen_t whole = (socklen_t)(words * sizeof *info);
    socklen_t size = whole;
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &size) == 0 && size == whole;
}
#endif

uint32_t tcp_round_trip_us(int fd)
{
#if defined __linux__
    uint32_t info[ROUND_TRIP + 1];
    if (read_info(fd, info, ROUND_TRIP + 1))
        return info[ROUND_TRIP];
#endif
    (void)fd;
    return 0;
}

bool tcp_look(int fd, struct tcp_state *state)
{
#if defined __linux__
    uint32_t info[WORDS];
    if (read_info(fd, info, WORDS)) {
        state->round_trip_us = info[ROUND_TRIP];
        state->least_us = info[LEAST_ROUND_TRIP];
        state->window = (uint64_t)info[WINDOW] * info[SEGMENT];
        state->unacked = (uint64_t)info[UNACKED] * info[SEGMENT];
        state->unsent = info[UNSENT];
        return true;
    }
#endif
    (void)fd;
    (void)state;
    return false;
}

void tcp_limit_unsent(int fd, uint32_t bytes)
{
#if defined TCP_NOTSENT_LOWAT
    int unsent = (int)bytes;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
#endif
    (void)fd;
    (void)bytes;
}

void tcp_prepare_distant(int fd)
{
    tcp_limit_unsent(fd, TCP_UNSENT_MAX);
#if defined SO_MAX_PACING_RATE
    {                            /* any limit turns pacing on; this one is never reached */
        unsigned int rate = 0xfffffffe;
        (void)setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate);
    }
#endif
    (void)fd;
}

int tcp_unheard_ms(uint32_t heartbeat_timeout_ms)
{
    const uint32_t most = INT_MAX / UNHEARD;
    return (int)(UNHEARD * (heartbeat_timeout_ms < most ? heartbeat_timeout_ms : most));
}
