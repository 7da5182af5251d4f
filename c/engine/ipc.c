/* ipc.c - see ipc.h.
 *
 * By default the kernel holds about 200 KiB of what was sent and not received yet (Linux), or 8
 * (macOS). So a chunk of 1 MiB takes many turns of two threads, one of which fills the buffer and
 * waits until the other one has emptied it. With room for two chunks large arrays take 0.75 to 0.9
 * of the time (measured). Linux allows net.core.wmem_max, twice over: by default 0.8 to 1.0. */
#include "engine/ipc.h"

#if defined __linux__ || defined __APPLE__
#include <sys/socket.h>
#endif

void ipc_prepare(int fd)
{
#if defined __linux__ || defined __APPLE__
    struct sockaddr_storage own;
    socklen_t size = sizeof own;
    const int bytes = 2 << 20;
    if (getsockname(fd, (struct sockaddr *)&own, &size) == 0 && own.ss_family == AF_UNIX)
        (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
#else
    (void)fd;
#endif
}
