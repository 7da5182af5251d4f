/* test_ipc.c - options are set on the connections of an engine's streams, and on no others. */
#if defined __linux__
#define _GNU_SOURCE
#elif defined __APPLE__
#define _DARWIN_C_SOURCE
#endif

#include "check.h"

#include "engine/transport.h"

#if defined __linux__ || defined __APPLE__
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int room(int fd)
{
    int bytes = 0;
    socklen_t size = sizeof bytes;
    CHECK(getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, &size) == 0);
    return bytes;
}

/* Connects over a path and stores both ends. Returns whether that worked. */
static bool join(const char *path, int *ends)
{
    struct sockaddr_un address = {0};
    int listening = socket(AF_UNIX, SOCK_STREAM, 0);
    bool well;
    address.sun_family = AF_UNIX;
    (void)snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    ends[0] = socket(AF_UNIX, SOCK_STREAM, 0);
    well = bind(listening, (struct sockaddr *)&address, sizeof address) == 0
        && listen(listening, 1) == 0
        && connect(ends[0], (struct sockaddr *)&address, sizeof address) == 0
        && (ends[1] = accept(listening, NULL, NULL)) >= 0;
    (void)close(listening);
    (void)unlink(path);
    return well;
}

static void test_rooms(void)
{
    char path[64], endpoint[80];
    int ends[2] = {-1, -1}, before, tcp = socket(AF_INET, SOCK_STREAM, 0);
    (void)snprintf(path, sizeof path, "/tmp/pccl-test-ipc-%ld", (long)getpid());
    (void)snprintf(endpoint, sizeof endpoint, "ipc://%s", path);
    if (!CHECK(join(path, ends) && tcp >= 0))
        return;
    before = room(ends[0]);
    ipc_prepare(ends[0], "tcp://127.0.0.1:1");
    ipc_prepare(ends[0], "ipc:///tmp/another");      /* it is a socket of something else */
    CHECK(room(ends[0]) == before);
    ipc_prepare(ends[0], endpoint);
    CHECK(room(ends[0]) > before);
    CHECK(room(ends[1]) == before);
    before = room(tcp);
    ipc_prepare(tcp, endpoint);      /* its buffer grows by itself, unless it was set */
    CHECK(room(tcp) == before);
    (void)close(ends[0]);
    (void)close(ends[1]);
    ipc_prepare(ends[0], endpoint);  /* it is closed by now */
    (void)close(tcp);
}

/* Connects over TCP on this machine, and stores both ends and the port of the second one. Returns
 * whether that worked. */
static bool join_tcp(int *ends, uint32_t *port)
{
    struct sockaddr_in address = {0};
    socklen_t size = sizeof address;
    int listening = socket(AF_INET, SOCK_STREAM, 0);
    bool well;
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    well = bind(listening, (struct sockaddr *)&address, sizeof address) == 0
        && listen(listening, 1) == 0
        && getsockname(listening, (struct sockaddr *)&address, &size) == 0
        && connect(ends[0], (struct sockaddr *)&address, size) == 0
        && (ends[1] = accept(listening, NULL, NULL)) >= 0;
    *port = ntohs(address.sin_port);
    (void)close(listening);
    return well;
}

#if defined __linux__ && defined SO_MAX_PACING_RATE
static bool is_paced(int fd)
{
    unsigned int rate = 0;
    socklen_t size = sizeof rate;
    return getsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, &size) == 0 && rate == 0xfffffffe;
}

/* A descriptor that belongs to another connection by now is left alone, in every function. */
static void test_descriptors_of_others(void)
{
    struct tcp_connection connection;
    struct tcp_state state;
    uint32_t port, other_port;
    int ends[2] = {-1, -1}, other[2] = {-1, -1};
    if (!CHECK(join_tcp(ends, &port) && join_tcp(other, &other_port)))
        return;
    CHECK(tcp_port("tcp://[::1]:48148") == 48148 && tcp_port("10.0.0.1:7") == 7);
    CHECK(tcp_port("ipc:///tmp/x") == 0 && tcp_port("none") == 0 && tcp_port("a:70000") == 0);
    CHECK(!tcp_know(other[0], port, &connection));
    CHECK(!tcp_know(-1, port, &connection) && !tcp_know(0, 0, &connection));
    CHECK(tcp_know(ends[0], port, &connection));
    CHECK(tcp_look(&connection, &state) && tcp_round_trip_us(&connection) > 0);
    CHECK(dup2(other[0], ends[0]) == ends[0]);       /* libzmq has closed it; we open another */
    CHECK(!tcp_look(&connection, &state) && tcp_round_trip_us(&connection) == 0);
    tcp_prepare_distant(&connection);
    CHECK(!is_paced(other[0]));
    CHECK(tcp_know(ends[0], other_port, &connection));
    tcp_prepare_distant(&connection);
    CHECK(is_paced(other[0]));
    (void)close(ends[0]);
    CHECK(!tcp_look(&connection, &state));
    (void)close(ends[1]);
    (void)close(other[0]);
    (void)close(other[1]);
}
#else
static void test_descriptors_of_others(void)
{
    uint32_t port;
    int ends[2];
    CHECK(join_tcp(ends, &port));
}
#endif
#else
static void test_rooms(void)
{
    ipc_prepare(0, "");
}
static void test_descriptors_of_others(void) { }
#endif

int main(void)
{
    test_rooms();
    test_descriptors_of_others();
    return check_report("ipc");
}
