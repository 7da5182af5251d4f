/* fake.h - a network in memory that stands in for ZeroMQ: deterministic, in one thread, and faulty
 * on request.
 *
 * fake_table() fills the engine's function table. Several engines may be made with it; their
 * messages move when they are stepped, in an order that depends on the seed alone. Lanes have room
 * for SNDHWM messages each, a receiver takes from a lane picked at random, connections stand only
 * after a while, and bytes that were sent by reference are released only some time after they have
 * arrived. */
#ifndef PCCL_FAKE_H
#define PCCL_FAKE_H

#include <stdbool.h>
#include <stdint.h>

#include "pccl_core.h"

/* Starts a new world, which must be empty. Faults are off. */
void fake_reset(uint64_t seed);

const pccl_zmq *fake_table(void);

/* True while the fake allocates memory of its own, which no test should make scarce. */
extern volatile bool fake_allocates;

/* A number below `bound`. */
uint32_t fake_random(uint32_t bound);

/* Makes `percent` of 100 sends give EAGAIN without a reason. */
void fake_refuse(unsigned percent);

/* Lets time pass: connections are established, bytes are released. Whether any still has to be. */
bool fake_tick(void);

/* Holds back what the first lane to the endpoint has, and gets from now on; or no more. */
void fake_stall(const char *endpoint, bool stalled);

/* The handshakes of lanes from this number on, in the order in which all are opened, do not come to
 * their end; 0: they do. */
void fake_linger(int first);

/* The next n lanes that connect are turned away in their handshake. */
void fake_deny(int n);

/* Cuts a lane that leads to the endpoint and drops what is queued in it. False if there is none. */
bool fake_cut(const char *endpoint);

/* The nth call from now (0: the next one) of setsockopt, socket, connect, bind or ctx_set fails. */
void fake_fail_call(int nth);

/* True while an engine is at work: set by a test whose linker wraps pccl_engine_step. */
extern volatile bool fake_in_step;

/* The nth call from now that a working engine makes, of those that can fail, fails with that errno;
 * -1: none. Whether it has failed. */
void fake_fail_in_step(int nth, int error);
bool fake_failed_in_step(void);

/* The nth second frame from now is refused, as if its lane were lost just then. */
void fake_fail_second_frame(int nth);

/* Delivers a message of one or two frames (payload not NULL) to the PULL that is bound to the
 * endpoint. */
void fake_inject(const char *endpoint, const void *header, size_t header_bytes, const void *payload,
                 size_t payload_bytes);

/* What the monitor tells as the descriptor of the nth lane that connects in a world: no process has
 * so many open. */
enum { FAKE_DESCRIPTOR = 1 << 20 };

/* Messages that lanes have delivered in this world. */
unsigned fake_delivered(void);

/* Lanes that stand. */
unsigned fake_lanes(void);

/* Sockets and contexts that are open. */
unsigned fake_open(void);

#endif
