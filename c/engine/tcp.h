/* tcp.h - what the engine asks of the operating system about a TCP connection. */
#ifndef PCCL_TCP_H
#define PCCL_TCP_H

#include <stdbool.h>
#include <stdint.h>

enum { TCP_UNSENT_MAX = 1 << 17 };       /* bytes: some milliseconds of a fast link's share */

/* A connection: bytes, and microseconds. */
struct tcp_state {
    uint32_t round_trip_us, least_us;    /* as it is now, and the least lately */
    uint64_t window;         /* as much may be on the way, */
    uint64_t unacked;        /* is, */
    uint64_t unsent;         /* and waits */
};

/* The round trip of a connection as of its handshake. 0: not known, as for a socket that is not
 * TCP. */
uint32_t tcp_round_trip_us(int fd);

/* Makes a connection over a long link keep little unsent and pace what it sends. Cannot fail. */
void tcp_prepare_distant(int fd);

/* What the operating system knows of a connection. False: it does not tell. */
bool tcp_look(int fd, struct tcp_state *state);

/* Makes a connection take no more while it holds that many unsent bytes. Cannot fail. */
void tcp_limit_unsent(int fd, uint32_t bytes);

/* How long TCP may hear nothing from the other side before the connection is lost, given the
 * heartbeat time-out. It is several times that long because TCP does not always tell a receiver
 * that takes nothing from one that is gone. */
int tcp_unheard_ms(uint32_t heartbeat_timeout_ms);

#endif
