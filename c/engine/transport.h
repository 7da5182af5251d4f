/* transport.h - what the engine asks of the operating system about a connection, and sets on it. */
#ifndef PCCL_TRANSPORT_H
#define PCCL_TRANSPORT_H

#include <stdbool.h>
#include <stdint.h>

enum {
    TCP_UNSENT_MAX = 1 << 17,        /* bytes: some milliseconds of a fast link's share */
    TCP_NAME_MAX = 28                /* bytes: of an address and a port */
};

/* A connection of libzmq, which may close its descriptor at any moment; then it may belong to any
 * other part of the process. So it is never used itself: what follows uses a copy of it, and only
 * if that still has the connection's own address and port. */
struct tcp_connection {
    int fd;
    uint32_t name_bytes;
    unsigned char name[TCP_NAME_MAX];
};

/* A connection: bytes, and microseconds. */
struct tcp_state {
    uint32_t round_trip_us, least_us;    /* as it is now, and the least lately */
    uint64_t window;         /* as much may be on the way, */
    uint64_t unacked;        /* is, */
    uint64_t unsent;         /* and waits */
};

/* The port at the end of `tcp://address:port` or `address:port`. 0: there is none. */
uint32_t tcp_port(const char *where);

/* Whether a descriptor is that of a connection to the port; if so, describes it. Where the
 * operating system cannot be asked about connections, it is. */
bool tcp_know(int fd, uint32_t port, struct tcp_connection *connection);

/* The round trip of a connection as of its handshake. 0: not known. */
uint32_t tcp_round_trip_us(const struct tcp_connection *connection);

/* Makes a connection over a long link keep little unsent and pace what it sends. Cannot fail. */
void tcp_prepare_distant(const struct tcp_connection *connection);

/* What the operating system knows of a connection. False: it does not tell. */
bool tcp_look(const struct tcp_connection *connection, struct tcp_state *state);

/* Makes a connection take no more while it holds that many unsent bytes. Cannot fail. */
void tcp_limit_unsent(const struct tcp_connection *connection, uint32_t bytes);

/* How long TCP may hear nothing from the other side before the connection is lost, given the
 * heartbeat time-out. It is several times that long because TCP does not always tell a receiver
 * that takes nothing from one that is gone. */
int tcp_unheard_ms(uint32_t heartbeat_timeout_ms);

/* Lets a connection to an `ipc://` endpoint take whole chunks at once. Does nothing if the
 * descriptor is that of another connection, and where the operating system does not allow it.
 * Cannot fail. */
void ipc_prepare(int fd, const char *endpoint);

#endif
