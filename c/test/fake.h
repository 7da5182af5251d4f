/* fake.h - a network in memory that stands in for ZeroMQ: deterministic, in one thread, and faulty
 * on request.
 *
 * fake_table() is the function table for engines on this network. Messages move when the engines
 * are stepped, in an order that depends only on the seed. Each lane has room for SNDHWM messages, a
 * receiver takes from a lane picked at random, handshakes take a while, and the memory of zero-copy
 * sends is released some time after it has arrived. */
#ifndef PCCL_FAKE_H
#define PCCL_FAKE_H

#include <stdbool.h>
#include <stdint.h>

#include "pccl_core.h"

/* Starts a new world without faults. The old one must be empty. */
void fake_reset(uint64_t seed);

const pccl_zmq *fake_table(void);

/* True while the fake itself allocates memory; no test should make that fail. */
extern volatile bool fake_allocates;

/* A number below `bound`. */
uint32_t fake_random(uint32_t bound);

/* Makes `percent` of 100 sends return EAGAIN without a reason. */
void fake_refuse(unsigned percent);

/* Lets time pass: handshakes finish, and sent memory is released. Returns whether there is more. */
bool fake_tick(void);

/* Stalls the first lane to the endpoint, or lets it go on: a stalled lane delivers nothing. */
void fake_stall(const char *endpoint, bool stalled);

/* Lets the handshakes of later lanes never finish: those from number `first` on, in the order in
 * which all lanes are opened. 0: all handshakes finish. */
void fake_linger(int first);

/* Refuses the next n lanes in their handshake. */
void fake_deny(int n);

/* Cuts a lane to the endpoint and drops its messages. False if there is none. */
bool fake_cut(const char *endpoint);

/* Makes the nth call from now (0: the next one) of setsockopt, socket, connect, bind or ctx_set
 * fail. */
void fake_fail_call(int nth);

/* True while an engine is being stepped: set by a test whose linker wraps pccl_engine_step. */
extern volatile bool fake_in_step;

/* Makes the nth call from now that a stepped engine makes fail with that errno, counting only calls
 * that can fail; -1: none. */
void fake_fail_in_step(int nth, int error);

/* Whether that call has been made, and failed. */
bool fake_failed_in_step(void);

/* Refuses the nth second frame from now, as if its lane were lost at that moment. */
void fake_fail_second_frame(int nth);

/* Delivers a message of one or two frames (payload not NULL) to the PULL that is bound to the
 * endpoint. */
void fake_inject(const char *endpoint, const void *header, size_t header_bytes, const void *payload,
                 size_t payload_bytes);

/* Descriptors in monitor events begin with this number, which is so large that no process has such
 * a descriptor open. */
enum { FAKE_DESCRIPTOR = 1 << 20 };

/* Number of messages that lanes have delivered in this world. */
unsigned fake_delivered(void);

/* Number of lanes that lead somewhere: not refused and not cut. */
unsigned fake_lanes(void);

/* Number of open sockets and contexts. */
unsigned fake_open(void);

#endif
