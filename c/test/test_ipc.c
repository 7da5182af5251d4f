/* test_ipc.c - what is set on a connection within a machine, and on no other one. */
#include "check.h"

#include "engine/ipc.h"

#if defined __linux__ || defined __APPLE__
#include <sys/socket.h>
#include <unistd.h>

static int room(int fd)
{
    int bytes = 0;
    socklen_t size = sizeof bytes;
    CHECK(getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, &size) == 0);
    return bytes;
}

static void test_rooms(void)
{
    int pair[2], before, tcp = socket(AF_INET, SOCK_STREAM, 0);
    if (!CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0 && tcp >= 0))
        return;
    before = room(pair[0]);
    ipc_prepare(pair[0]);
    CHECK(room(pair[0]) > before);
    CHECK(room(pair[1]) == before);
    before = room(tcp);
    ipc_prepare(tcp);                /* whose buffer grows by itself, unless it was set */
    CHECK(room(tcp) == before);
    (void)close(pair[0]);
    (void)close(pair[1]);
    ipc_prepare(pair[0]);            /* is closed by now */
    (void)close(tcp);
}
#else
static void test_rooms(void)
{
    ipc_prepare(0);
}
#endif

int main(void)
{
    test_rooms();
    return check_report("ipc");
}
