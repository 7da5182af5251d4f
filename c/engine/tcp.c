/* tcp.c - what is asked of the operating system about a lane's connection. Where it cannot be
 * asked (ipc, a system without the option) nothing happens and lanes work as TCP comes.
 *
 * On a long link two things make several connections share it well. First, little waits in the
 * kernel unsent: it would take up to megabytes for each connection, which a slow one then sends
 * long after all others have finished, and behind which a new collective would wait. Second,
 * packets leave paced: a window that opens after a pause would leave as one burst, which overflows
 * the queue before the link, and costs the windows that it came from. */
#if defined __linux__
#define _GNU_SOURCE
#elif defined __APPLE__
#define _DARWIN_C_SOURCE
#endif

#include "engine/engine.h"

#if defined __linux__ || defined __APPLE__
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

enum { UNSENT_MAX = 1 << 17 };   /* bytes: some milliseconds of a fast link's share */
#endif

uint32_t tcp_round_trip_us(int fd)
{
#if defined __linux__
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0)
        return info.tcpi_rtt;
#endif
    (void)fd;
    return 0;
}

void tcp_prepare_distant(int fd)
{
#if defined TCP_NOTSENT_LOWAT
    int unsent = UNSENT_MAX;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
#endif
#if defined SO_MAX_PACING_RATE
    {                            /* any limit turns pacing on; this one is never reached */
        unsigned int rate = 0xfffffffe;
        (void)setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate);
    }
#endif
    (void)fd;
}
