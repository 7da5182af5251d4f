/* peers.h - several engines on the fake network, and the caller of each: orders out, events in. */
#ifndef PCCL_PEERS_H
#define PCCL_PEERS_H

#include <stdbool.h>
#include <stdint.h>

#include "fake.h"
#include "pccl.h"

enum { TEST_PEERS_MAX = 8, TEST_EVENTS_MAX = 256, TEST_RUN = 77, TEST_EPOCH = 3 };

struct peer {
    pccl_engine *engine;
    void *pair;
    char endpoint[64];
    int error;                       /* of pccl_engine_step */
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

/* Makes `n` engines that call the fake network by way of that table. */
void peers_open_by(struct peers *peers, int n, const pccl_options *options, const pccl_zmq *zmq);

/* Frees the engines; nothing may be left of the world then. */
void peers_close(struct peers *peers);

/* Opens stream `number` from one peer to another. */
void peers_stream(struct peers *peers, int from, int to, uint32_t number, uint32_t lanes,
                  uint32_t hwm);

/* Opens stream 1 from each peer to the next. */
void peers_connect_ring(struct peers *peers, uint32_t lanes, uint32_t hwm);

void peers_order(struct peers *peers, int who, const pccl_order *order);

/* COMMIT or ABORT. */
void peers_end(struct peers *peers, int who, enum pccl_order_kind kind, uint64_t op);

/* Takes in a peer's events. */
void peers_read(struct peer *peer);

/* One pass of every engine, in an order by chance. Whether anything moved or may still move by
 * itself. */
bool peers_step(struct peers *peers);

/* Steps until nothing moves any more. */
void peers_run(struct peers *peers);

/* How many events of a kind there were for an op (or a stream), and the last of them or NULL. */
int peers_count(const struct peers *peers, int who, enum pccl_event_kind kind, uint64_t op);
const pccl_event *peers_event(const struct peers *peers, int who, enum pccl_event_kind kind,
                              uint64_t op);

/* ---- an all-reduce on all peers ---- */

struct job {
    uint64_t op, tag, seq;
    int dtype, redop;
    uint64_t count;
    bool in_place;
    uint32_t chunk_bytes;
    unsigned char *given[TEST_PEERS_MAX];    /* what send held in the beginning */
    unsigned char *send[TEST_PEERS_MAX];
    unsigned char *recv[TEST_PEERS_MAX];
    unsigned char *expected;
    size_t bytes;
};

/* Makes buffers with small whole numbers, at odd addresses, and what must come out. */
void job_make(struct job *job, int n);
void job_free(struct job *job);

void job_register(struct peers *peers, int who, const struct job *job);

/* START in one ring over stream 1. */
void job_start(struct peers *peers, int who, const struct job *job);

/* Whether every peer holds the result, and send is as it was where it must be. */
bool job_is_right(const struct peers *peers, const struct job *job);

/* Whether the peer's buffers that an aborted op must leave alone are as they were. */
bool job_is_restored(const struct job *job, int who);

/* Commits the op where that is asked for, and says whether all is settled. */
bool job_commit(struct peers *peers, const struct job *job);

#endif
