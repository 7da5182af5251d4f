/* ipc.c - see ipc.h.
 *
 * By default the kernel holds about 200 KiB of what was sent and not received yet (Linux), or 8
 * (macOS). So a chunk of 1 MiB takes many turns of two threads, one of which fills the buffer and
 * waits until the other one has emptied it. With room for two chunks large arrays take 0.75 to 0.9
 * of the time (measured). Linux allows net.core.wmem_max, twice over: by default 0.8 to 1.0. */
#if defined __linux__
#define _GNU_SOURCE
#elif defined __APPLE__
#define _DARWIN_C_SOURCE
#endif

#include "engine/ipc.h"

#include <string.h>

#if defined __linux__ || defined __APPLE__
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#endif

static const char IPC[] = "ipc://";

void ipc_prepare(int fd, const char *endpoint)
{
#if defined __linux__ || defined __APPLE__
    struct sockaddr_un other;
    socklen_t size = sizeof other;
    const int bytes = 2 << 20;
    int held;
    if (strncmp(endpoint, IPC, sizeof IPC - 1) != 0)
        return;
    held = fcntl(fd, F_DUPFD_CLOEXEC, 0);    /* it stays the same one, whoever closes the other */
    memset(&other, 0, sizeof other);
    if (held >= 0 && getpeername(held, (struct sockaddr *)&other, &size) == 0
        && other.sun_family == AF_UNIX
        && strncmp(other.sun_path, endpoint + sizeof IPC - 1, sizeof other.sun_path) == 0)
        (void)setsockopt(held, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    if (held >= 0)
        (void)close(held);
#else
    (void)fd;
    (void)endpoint;
    (void)IPC;
#endif
}
