/* transport.h - reads the operating system's data about a connection, and sets its options. */
#ifndef PCCL_TRANSPORT_H
#define PCCL_TRANSPORT_H

#include <stdbool.h>
#include <stdint.h>

enum {
    TCP_UNSENT_MAX = 1 << 17,        /* bytes: a lane of a fast link sends them in milliseconds */
    TCP_NAME_MAX = 28                /* bytes: of an address and a port */
};

/* A connection of libzmq. libzmq may close its descriptor at any moment, and the number may then
 * belong to any other part of the process. So these functions duplicate the descriptor, and use the
 * duplicate only if it still has the connection's own address and port. */
struct tcp_connection {
    int fd;
    uint32_t name_bytes;
    unsigned char name[TCP_NAME_MAX];
};

/* The state of a connection. */
struct tcp_state {
    uint32_t round_trip_us;  /* now */
    uint32_t least_us;       /* shortest recent round trip */
    uint64_t window;         /* most bytes that may be on the way */
    uint64_t unacked;        /* bytes that are on the way */
    uint64_t unsent;         /* bytes that wait to be sent */
};

/* The port at the end of `tcp://address:port` or `address:port`. 0: there is none. */
uint32_t tcp_port(const char *where);

/* Whether a descriptor belongs to a connection to that port; if so, describes it. On a system
 * without such data the answer is always true. */
bool tcp_know(int fd, uint32_t port, struct tcp_connection *connection);

/* The current round trip of a connection. 0: not known. */
uint32_t tcp_round_trip_us(const struct tcp_connection *connection);

/* Prepares a connection over a long link: it holds few unsent bytes, and its packets are paced.
 * Cannot fail. */
void tcp_prepare_distant(const struct tcp_connection *connection);

/* Reads the state of a connection. False: the operating system has no data about it. */
bool tcp_look(const struct tcp_connection *connection, struct tcp_state *state);

/* Lets a connection take no more data while it holds `bytes` unsent bytes. Cannot fail. */
void tcp_limit_unsent(const struct tcp_connection *connection, uint32_t bytes);

/* How long the other side of a TCP connection may be silent before the connection counts as lost.
 * It is several times the heartbeat timeout, because TCP cannot always tell a receiver that reads
 * nothing from a lost one. */
int tcp_unheard_ms(uint32_t heartbeat_timeout_ms);

/* Lets a connection to an `ipc://` endpoint take whole chunks at once. Does nothing if the
 * descriptor belongs to another connection, or the operating system does not allow it. Cannot
 * fail. */
void ipc_prepare(int fd, const char *endpoint);

#endif
