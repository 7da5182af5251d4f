/* harness.h - several engines on the fake network, with the caller of each (commands out, events
 * in), and work for them: collectives (struct job) and exchanges (struct trade), with their buffers
 * and expected results. star.h has transfers. */
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
    int error;                       /* of pccl_engine_step() */
    int n_up;                        /* number of STREAM_UP events, which are not stored */
    int n_events;
    pccl_event events[TEST_EVENTS_MAX];
};

struct peers {
    int n;
    struct peer peer[TEST_PEERS_MAX];
};

/* Options with which small data takes every path: payloads over 256 bytes are not copied. */
pccl_options peers_options(void);

/* Creates `n` engines in a new world. */
void peers_open(struct peers *peers, int n, const pccl_options *options, uint64_t seed);

/* Creates `n` engines that call the fake network through that table. */
void peers_open_by(struct peers *peers, int n, const pccl_options *options, const pccl_zmq *zmq);

/* Frees the engines. Checks that no socket or context is left. */
void peers_close(struct peers *peers);

/* Opens stream `number` from one peer to another. */
void peers_stream(struct peers *peers, int from, int to, uint32_t number, uint32_t lanes,
                  uint32_t hwm);

/* Opens stream 1 from each peer to the next. */
void peers_connect_ring(struct peers *peers, uint32_t lanes, uint32_t hwm);

void peers_command(struct peers *peers, int who, const pccl_command *command);

void peers_close_stream(struct peers *peers, int who, uint32_t stream);

/* LOSE_STREAM. */
void peers_lose_stream(struct peers *peers, int who, uint32_t stream);

/* EXPECT of an epoch with that nonce. */
void peers_expect(struct peers *peers, int who, uint64_t nonce);

/* Delivers a message of one frame to a peer: the header, and `payload` bytes that are 0. */
void peers_inject(struct peers *peers, int who, const struct wire_header *header, size_t payload);

/* COMMIT or ABORT. */
void peers_end(struct peers *peers, int who, enum pccl_command_kind kind, uint64_t op);

/* Receives a peer's events. */
void peers_read(struct peer *peer);

/* Runs one pass of every engine, in random order. Returns whether anything moved or may still move
 * by itself. */
bool peers_step(struct peers *peers);

/* Steps until nothing moves any more. */
void peers_run(struct peers *peers);

/* The number of events of a kind for an op (STREAM_LOST: for a stream). */
int peers_count(const struct peers *peers, int who, enum pccl_event_kind kind, uint64_t op);

/* The last of these events, or NULL. */
const pccl_event *peers_event(const struct peers *peers, int who, enum pccl_event_kind kind,
                              uint64_t op);

/* The event that counts an op's bytes: SETTLED, or COMPLETE of an op that settled with it. */
const pccl_event *peers_last_event(const struct peers *peers, int who, uint64_t op);

enum { TEST_DIRECT = 10 };                   /* the number of the stream to peer 0, and so on */

/* ---- collectives ---- */

enum { TEST_PARTS_MAX = 12 };

struct job {
    uint64_t op, tag, seq;
    enum pccl_collective what;
    int redop, format;
    uint32_t root;
    bool in_place, oneshot, twostage;
    bool direct;                             /* each member has a stream to each other one */
    uint32_t rings;                          /* 1 or 2; 0: 1 */
    bool alternating;                        /* with in_place: only every second array is */
    bool eager;                              /* START names calls of others that sent before it */
    uint32_t chunk_bytes;
    uint64_t window;                         /* not 0: progressive; job_fill() fills send */
    int n_parts;                             /* 0: one part, of this dtype and count: */
    struct { int dtype; uint64_t count; } part[TEST_PARTS_MAX];
    int dtype;
    uint64_t count;
    bool unlike;                             /* all-gather: the slices differ in their rows */
    uint64_t rows[TEST_PEERS_MAX];           /* by rank; the count of a part is that of a row */
    int n;
    uint64_t span;                           /* offsets of a slice */
    pccl_part parts[TEST_PEERS_MAX][TEST_PARTS_MAX];
    unsigned char *given[TEST_PEERS_MAX][TEST_PARTS_MAX];   /* initial content of send */
    unsigned char *expected[TEST_PEERS_MAX][TEST_PARTS_MAX];
};

/* An all-reduce of `count` floats under op 1. */
struct job job_plain(uint64_t count, bool in_place);

/* An all-reduce of TEST_PARTS_MAX arrays, most of which are smaller than a chunk: `count` floats,
 * then floats, doubles and floats again, with empty arrays in between. */
struct job job_crowd(uint64_t count, bool in_place);

/* Allocates the buffers, at odd addresses and filled with small whole numbers, and computes the
 * expected results. */
void job_make(struct job *job, int n);
void job_free(struct job *job);

void job_register(struct peers *peers, int who, const struct job *job);

/* Creates the engines of a job in its rings, with lanes and limits that depend on the seed, and
 * registers the job on all. */
void job_open(struct peers *peers, const struct job *job, uint64_t seed);

/* The same, always in one ring of two lanes. */
void job_open_ring(struct peers *peers, const struct job *job, int n, uint64_t seed);

/* peers_close() and job_free(). */
void job_close(struct peers *peers, struct job *job);

/* Fills a peer's send between two offsets of its only part, and sends READY. */
void job_fill(struct peers *peers, int who, const struct job *job, uint64_t from, uint64_t to);

/* START, for one peer or for all: the first ring is over stream 1, the second one over stream 2 in
 * the opposite direction. */
void job_start(struct peers *peers, int who, const struct job *job);
void job_start_all(struct peers *peers, const struct job *job);

/* Starts the peers that have a 0 in `late`, runs them as far as they come, then starts the others.
 * Returns whether these had no event before. */
bool job_start_late(struct peers *peers, const struct job *job, uint64_t late);

/* START in one ring, over that stream and at that position. `call` is the predecessor's op. */
void job_start_at(struct peers *peers, int who, const struct job *job, uint32_t stream,
                  uint32_t position, uint64_t call);

/* EAGER. */
void job_eager(struct peers *peers, int who, const struct job *job);

/* Whether every peer is complete and holds the result, send is unchanged where it must be, and the
 * errors of quantizing are right. */
bool job_is_right(const struct peers *peers, const struct job *job);

/* Whether the peer's send has its initial content, as after an ABORT. */
bool job_is_restored(const struct job *job, int who);

/* Whether no byte of the peer's memory has changed since job_make(). */
bool job_is_untouched(const struct job *job, int who);

/* Whether the peer's recv holds the result. */
bool job_has_result(const struct job *job, int who);

/* Commits the op on the peers that need it. Returns whether the job was right, and stays so, and all
 * are settled. */
bool job_commit(struct peers *peers, const struct job *job);

/* Aborts the op on all peers. Returns whether all are settled and restored. */
bool job_abort(struct peers *peers, const struct job *job);

/* ---- exchanges ---- */

enum { TRADE_PARTS_MAX = 4, TRADE_OP = 3, TRADE_TAG = 41, TRADE_SEQ = 20 };

/* Which members have rows for which: the root for all, all for the root, all for all, or any for
 * any. */
enum trade_kind { SCATTER, GATHER, ALL_TO_ALL, ANY, TRADE_KINDS };

struct trade {
    enum trade_kind kind;
    int n;
    uint32_t root;
    bool in_place;                   /* SCATTER, GATHER: send and recv share the root's own rows */
    bool direct;                     /* each member has a stream to each other one */
    uint32_t rings;                  /* 1 or 2; 0: 1 */
    uint32_t chunk_bytes;
    int n_parts;
    int dtype[TRADE_PARTS_MAX];
    uint64_t count[TRADE_PARTS_MAX]; /* elements of a row */
    uint64_t send_rows[TEST_PEERS_MAX][TEST_PEERS_MAX];
    uint64_t recv_rows[TEST_PEERS_MAX][TEST_PEERS_MAX];
    pccl_part parts[TEST_PEERS_MAX][TRADE_PARTS_MAX];
    unsigned char *memory[TEST_PEERS_MAX][TRADE_PARTS_MAX][2];   /* of send and recv */
};

/* An exchange of one array, with `count` floats in a row. */
struct trade trade_plain(enum trade_kind kind, uint64_t count, bool in_place);

/* Allocates and fills the rows. The seed chooses the root, and the numbers of rows of ANY. */
void trade_make(struct trade *trade, int n, uint64_t seed);
void trade_free(struct trade *trade);

void trade_register(struct peers *peers, int who, const struct trade *trade);

/* As job_open() and so on. */
void trade_open(struct peers *peers, const struct trade *trade, uint64_t seed);
void trade_close(struct peers *peers, struct trade *trade);
void trade_start(struct peers *peers, int who, const struct trade *trade);
void trade_start_all(struct peers *peers, const struct trade *trade);
bool trade_start_late(struct peers *peers, const struct trade *trade, uint64_t late);

/* Whether the peer holds all rows that are for it. */
bool trade_has_rows(const struct trade *trade, int who);

/* Whether the peer's send is unchanged. */
bool trade_is_unharmed(const struct trade *trade, int who);

/* Whether every peer is complete and has its rows, and send is unchanged. */
bool trade_is_right(const struct peers *peers, const struct trade *trade);

/* Commits, or aborts, the exchange on all peers. Returns whether all are settled. */
bool trade_end(struct peers *peers, enum pccl_command_kind kind);

#endif
