/* harness.h - several engines on the fake network, the caller of each (commands out, events in),
 * and what they do: collectives (struct job) and exchanges (struct trade), with their buffers and
 * the expected results. star.h has transfers. */
#ifndef PCCL_HARNESS_H
#define PCCL_HARNESS_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/wire.h"
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

void peers_close_stream(struct peers *peers, int who, uint32_t stream);

/* EXPECT of an epoch with that nonce. */
void peers_expect(struct peers *peers, int who, uint64_t nonce);

/* Delivers a message of one frame to a peer: the header, and `payload` bytes that are 0. */
void peers_inject(struct peers *peers, int who, const struct wire_header *header, size_t payload);

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

/* ---- collectives ---- */

enum { TEST_PARTS_MAX = 12 };

struct job {
    uint64_t op, tag, seq;
    enum pccl_collective what;
    int redop, format;
    uint32_t root;
    bool in_place, oneshot;
    bool alternating;                        /* in place only every second array is */
    bool eager;                              /* START says that the others may have sent before */
    uint32_t chunk_bytes;
    uint64_t window;                         /* not 0: send is filled by job_fill() */
    int n_parts;                             /* 0: one of this type and count */
    struct { int dtype; uint64_t count; } part[TEST_PARTS_MAX];
    int dtype;
    uint64_t count;
    bool unlike;                             /* of an all-gather: the slices differ, by `rows` */
    uint64_t rows[TEST_PEERS_MAX];           /* by rank; a part's count is that of a row then */
    int n;
    uint64_t span;                           /* offsets of a slice */
    pccl_part parts[TEST_PEERS_MAX][TEST_PARTS_MAX];
    unsigned char *given[TEST_PEERS_MAX][TEST_PARTS_MAX];   /* what send held in the beginning */
    unsigned char *expected[TEST_PEERS_MAX][TEST_PARTS_MAX];
};

/* An all-reduce of `count` floats under op 1. */
struct job job_plain(uint64_t count, bool in_place);

/* The same of TEST_PARTS_MAX arrays, most of which are smaller than a chunk: `count` floats, more
 * floats, doubles and floats again, with empty ones in between. */
struct job job_crowd(uint64_t count, bool in_place);

/* Makes buffers with small whole numbers, at odd addresses, and the expected results. */
void job_make(struct job *job, int n);
void job_free(struct job *job);

void job_register(struct peers *peers, int who, const struct job *job);

/* Makes `n` engines in one ring of two lanes, all of which know of the job. */
void job_open_ring(struct peers *peers, const struct job *job, int n, uint64_t seed);

/* Puts a peer's contribution into its memory between two offsets of its only part, and says so. */
void job_fill(struct peers *peers, int who, const struct job *job, uint64_t from, uint64_t to);

/* START in one ring over stream 1; with `rings` 2 in another one over stream 2 as well, in the
 * opposite direction. */
void job_start(struct peers *peers, int who, const struct job *job);
void job_start_all(struct peers *peers, const struct job *job);
void job_start_rings(struct peers *peers, int who, const struct job *job, uint32_t rings);

/* START in one ring, over that stream and at that position. `call` is the predecessor's op. */
void job_start_at(struct peers *peers, int who, const struct job *job, uint32_t stream,
                  uint32_t position, uint64_t call);

/* EAGER, in the same rings as job_start_rings(). */
void job_eager(struct peers *peers, int who, const struct job *job, uint32_t rings);

/* Whether every peer holds the result, and send is as it was where it must be. */
bool job_is_right(const struct peers *peers, const struct job *job);

/* Whether the memory that an aborted op must leave unchanged is as it was. */
bool job_is_restored(const struct job *job, int who);

/* Whether no byte of the peer's memory has changed since job_make(). */
bool job_is_untouched(const struct job *job, int who);

/* Whether the peer's recv holds the result. */
bool job_has_result(const struct job *job, int who);

/* Commits the op where that is asked for, and says whether all is settled. */
bool job_commit(struct peers *peers, const struct job *job);

/* Aborts the op on all peers, and says whether all is settled and as it was. */
bool job_abort(struct peers *peers, const struct job *job);

/* ---- exchanges ---- */

enum { TRADE_PARTS_MAX = 4, TRADE_OP = 3, TRADE_TAG = 41, TRADE_SEQ = 20 };

/* Who has rows for whom: one for all, all for one, all for all, or anybody. */
enum trade_kind { SCATTER, GATHER, ALL_TO_ALL, ANY, TRADE_KINDS };

struct trade {
    enum trade_kind kind;
    int n;
    uint32_t root;
    bool in_place;                   /* what SCATTER and GATHER keep is where it was */
    uint32_t chunk_bytes;
    int n_parts;
    int dtype[TRADE_PARTS_MAX];
    uint64_t count[TRADE_PARTS_MAX]; /* elements of a row */
    uint64_t send_rows[TEST_PEERS_MAX][TEST_PEERS_MAX];
    uint64_t recv_rows[TEST_PEERS_MAX][TEST_PEERS_MAX];
    pccl_part parts[TEST_PEERS_MAX][TRADE_PARTS_MAX];
    unsigned char *memory[TEST_PEERS_MAX][TRADE_PARTS_MAX][2];   /* of send and recv */
};

/* One array of that type and count. */
struct trade trade_plain(enum trade_kind kind, uint64_t count, bool in_place);

/* Makes the rows, whose numbers depend on the seed where there is a choice. */
void trade_make(struct trade *trade, int n, uint64_t seed);
void trade_free(struct trade *trade);

void trade_register(struct peers *peers, int who, const struct trade *trade);

/* START in one ring over stream 1; with `rings` 2 in another one over stream 2 as well, in the
 * opposite direction. */
void trade_start(struct peers *peers, int who, const struct trade *trade, uint32_t rings);

/* Whether the peer holds all rows that are for it; whether those that it gave are as they were. */
bool trade_has_rows(const struct trade *trade, int who);
bool trade_is_unharmed(const struct trade *trade, int who);

/* Whether every peer is complete and has all. */
bool trade_is_right(const struct peers *peers, const struct trade *trade);

/* Commits, or aborts, all; whether everything is settled. */
bool trade_end(struct peers *peers, enum pccl_command_kind kind);

#endif
