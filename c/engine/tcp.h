/* tcp.h - what the engine asks of the operating system about a TCP connection. */
#ifndef PCCL_TCP_H
#define PCCL_TCP_H

#include <stdint.h>

/* The round trip of a connection as of its handshake. 0: not known, as for a socket that is not
 * TCP. */
uint32_t tcp_round_trip_us(int fd);

/* Makes a connection over a long link keep little unsent and pace what it sends. Cannot fail. */
void tcp_prepare_distant(int fd);

/* How long TCP may hear nothing from the other side before the connection is lost, given the
 * heartbeat time-out. It is several times that long because TCP does not always tell a receiver
 * that takes nothing from one that is gone. */
int tcp_unheard_ms(uint32_t heartbeat_timeout_ms);

#endif
