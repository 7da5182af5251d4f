/* peers.h - several engines on the fake network, and the caller of each: commands out, events in.
 * */
#ifndef PCCL_PEERS_H
#define PCCL_PEERS_H

#include <stdbool.h>
#include <stdint.h>

#include "fake.h"
#include "pccl_core.h"

enum { TEST_PEERS_MAX = 8, TEST_EVENTS_MAX = 256, TEST_RUN = 77, TEST_NONCE = 3 };

struct peer {
    pccl_engine *engine;
    void *pair;
    char endpoint[64];
    int error;                       /* of pccl_engine_step */
    int n_up;                        /* STREAM_UP events, which are not kept */
    int n_events;
    pccl_event events[TEST_EVENTS_MAX];
};

struct peers {
    int n;
    struct peer peer[TEST_PEERS_MAX];
};

/* Options that make small data take every path: payloads over 256 bytes are not copied. */
pccl_options peers_options(void);

/* Makes `n` engines in a new world. */
void peers_open(struct peers *peers, int n, const pccl_options *options, uint64_t seed);

/* Makes `n` engines that call the fake network through that table. */
void peers_open_by(struct peers *peers, int n, const pccl_options *options, const pccl_zmq *zmq);

/* Frees the engines; nothing may be left of the world then. */
void peers_close(struct peers *peers);

/* Opens stream `number` from one peer to another. */
void peers_stream(struct peers *peers, int from, int to, uint32_t number, uint32_t lanes,
                  uint32_t hwm);

/* Opens stream 1 from each peer to the next. */
void peers_connect_ring(struct peers *peers, uint32_t lanes, uint32_t hwm);

void peers_command(struct peers *peers, int who, const pccl_command *command);

/* COMMIT or ABORT. */
void peers_end(struct peers *peers, int who, enum pccl_command_kind kind, uint64_t op);

/* Takes in a peer's events. */
void peers_read(struct peer *peer);

/* One pass of every engine, in random order. Whether anything moved or may still move by itself.
 * */
bool peers_step(struct peers *peers);

/* Steps until nothing moves any more. */
void peers_run(struct peers *peers);

/* How many events of a kind there were for an op (or a stream), and the last of them or NULL. */
int peers_count(const struct peers *peers, int who, enum pccl_event_kind kind, uint64_t op);
const pccl_event *peers_event(const struct peers *peers, int who, enum pccl_event_kind kind,
                              uint64_t op);

#endif
