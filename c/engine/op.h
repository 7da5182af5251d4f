/* op.h - the life of an op of any kind: registered, started, complete, ended, settled.
 *
 * A kind of op is a struct that begins with a struct op, and a table of functions (struct op_kind).
 * This module is independent of the kinds that exist. */
#ifndef PCCL_OP_H
#define PCCL_OP_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/events.h"
#include "engine/packet.h"
#include "engine/parts.h"
#include "engine/stream.h"
#include "engine/unexpected.h"
#include "engine/wire.h"

enum { INDEX_BUCKETS = 1024 };   /* short chains even for thousands of outstanding ops */

struct op;

/* What a kind of op does. `eager`, `progress`, `command`, `drop`, `end` and `free` may be NULL.
 * Only `drop`, `end` and `free` are called for an op that has failed or ended. */
struct op_kind {
    enum wire_kind message;      /* the messages that ops of this kind receive */
    size_t bytes;                /* of the struct that begins with the struct op */
    size_t flow_bytes;           /* of the struct that begins with the struct flow */
    bool urgent;                 /* its flows send before those of other kinds */
    bool rounds;                 /* it can be started again, with a greater sequence number */
    bool early_rounds;           /* it receives messages of a round before its START */
    bool endless;                /* it never completes; COMMIT ends it at any time */
    bool obliging;               /* when complete it is still needed by others, until its COMMIT */

    /* Carry out REGISTER and START, or fail the op. */
    void (*enter)(struct op *op, const pccl_command *command);
    void (*start)(struct op *op, const pccl_command *command);

    /* Carries out EAGER, or fails the op. */
    void (*eager)(struct op *op, const pccl_command *command);

    /* For QUERY: how much is done, and how much there is in all. NULL: unknown. */
    void (*progress)(const struct op *op, uint64_t *done, uint64_t *wanted);

    /* Carries out a command for this kind only: VERIFIED, ALLOW, REMIND or READY. */
    void (*command)(struct op *op, const pccl_command *command);

    /* Handles a message. To keep the packet, it puts an empty one in its place. */
    void (*take)(struct op *op, const struct wire_header *header, struct packet **packet);

    /* Uses the turn of a flow. */
    enum turn (*send)(struct flow *flow);

    /* Drops what waits for the turn of a flow; NULL: what waits without a flow. */
    void (*drop)(struct op *op, struct flow *flow);

    /* A stream of the op is lost. Its flows have no stream any more. */
    void (*lose)(struct op *op, const struct stream *stream);

    /* Keeps the result (`keep`), or restores the old content of recv. */
    void (*end)(struct op *op, bool keep);

    /* Frees the memory that the kind has allocated. */
    void (*free)(struct op *op);
};

enum ending { LIVING, COMMITTED, ABORTED };

struct op {
    struct source source;    /* first: see op_of() */
    struct ops *ops;
    const struct op_kind *kind;
    struct op *next, *prev;  /* in the list of living ops or in that of ending ones */
    struct op *next_by_id, *next_by_tag;
    uint64_t id, run, tag;
    uint64_t min_seq, seq;
    uint64_t nonce;          /* of the call; strangers do not know it */
    uint64_t epoch;          /* nonce of the epoch at its EAGER or START */
    uint64_t calls[PCCL_RINGS_MAX];  /* the predecessor's call in each ring; 0: none */
    enum ending ending;
    bool by_tag;             /* it is in the index by tag, so messages find it */
    bool started, complete, failed;
    bool reversible;         /* it has an undo buffer for ABORT, so COMPLETE does not settle it */
    bool is_spread;          /* its rings lead to different neighbors */
    uint64_t rx_bytes;
    struct flow **flows;
    uint32_t n_flows;
};

/* All ops of an engine, and what they share. */
struct ops {
    struct events *events;
    const pccl_options *options;
    struct streams *streams;
    struct op *living, *ending;
    struct op *by_id[INDEX_BUCKETS], *by_tag[INDEX_BUCKETS];
    struct backlog backlog;  /* packets that wait to be sent on */
    uint32_t n_held;         /* chunks that wait for READY; no own chunks are sent meanwhile */
    uint32_t n_spread;       /* started ops with `is_spread`, which lift the limits on forwards */
    struct unexpected unexpected;    /* chunks that came before START */
    uint64_t dropped;        /* messages that no op could use */
    struct undo spare;       /* undo buffer of an earlier op, for the next op that needs one */
};

/* Carry out the commands about ops. ops_command() has those for one kind of op, ops_end() has
 * COMMIT and ABORT. */
void ops_register(struct ops *ops, const struct op_kind *kind, const pccl_command *command);
void ops_eager(struct ops *ops, const pccl_command *command);
void ops_start(struct ops *ops, const pccl_command *command);
void ops_command(struct ops *ops, const pccl_command *command);
void ops_query(const struct ops *ops, const pccl_command *command);
void ops_end(struct ops *ops, const pccl_command *command);
void ops_expect(struct ops *ops, const pccl_command *command);

/* The op of this kind, run and tag, or NULL. */
struct op *ops_find(const struct ops *ops, const struct op_kind *kind, uint64_t run, uint64_t tag);

/* Gives a message to its op, holds it for a START, or drops it. `op` may be NULL. */
void ops_take(struct ops *ops, struct op *op, const struct wire_header *header,
              struct packet **packet);

/* Takes all flows off a lost stream, and tells their ops. */
void ops_lose_stream(struct ops *ops, struct stream *stream);

/* Settles the ending ops that nothing refers to any more. Returns whether there were any. */
bool ops_settle(struct ops *ops);

/* Whether any ending op waits only until libzmq releases its memory. */
bool ops_await_release(const struct ops *ops);

/* Ends and frees all ops. The context must be terminated. */
void ops_free(struct ops *ops);

/* The op of a flow. */
static inline struct op *op_of(const struct flow *flow)
{
    return (struct op *)flow->source;        /* the first member of a struct op */
}

/* The rank of a position in a ring. */
static inline uint32_t rank_at(const pccl_ring *ring, uint32_t position)
{
    return ring->ranks != NULL ? ring->ranks[position] : position;
}

/* The size of a message that a START asks for. */
static inline uint32_t op_chunk_bytes(const pccl_command *command)
{
    return command->chunk_bytes < PCCL_CHUNK_MAX ? command->chunk_bytes : PCCL_CHUNK_MAX;
}

/* Notes that an op has started, with the sequence number and nonce of its START. */
void op_begin(struct op *op, const pccl_command *command);

/* An event of that kind about an op. */
pccl_event op_event(const struct op *op, enum pccl_event_kind kind);

/* Emits FAILED, once. The op does nothing more until its ABORT. */
void op_fail(struct op *op, int status, const char *format, ...) PRINTF_LIKE(3, 4);

/* Does the same with PCCL_ESTREAM, and the number of the stream that the text describes. */
void op_fail_stream(struct op *op, uint32_t stream, const char *text);

/* Emits FAILED, but lets the op go on, because it has lost only one of its peers. */
void op_report(struct op *op, int status, const char *format, ...) PRINTF_LIKE(3, 4);
void op_report_stream(struct op *op, uint32_t stream, const char *text);

/* Adds a flow to a stream, which may be NULL. Returns NULL without memory. */
struct flow *op_add_flow(struct op *op, struct stream *stream);

/* Adds a flow to a stream that leads directly to a receiver, or to the stream of the flow `around`
 * if the former is not open. On failure the op fails, and this returns NULL. */
struct flow *op_add_direct(struct op *op, uint32_t stream, struct flow *around);

/* Handles the messages that have waited for START, which fixes our place, and drops messages of
 * other calls. */
void op_take_early(struct op *op, struct packets *early);

/* Adds the flow of a ring, to the stream of our place in it or to none. On failure the op fails,
 * and this returns NULL. */
struct flow *op_add_ring(struct op *op, const pccl_ring *place, bool needs_stream);

/* Takes all flows off their streams and drops what they have to send. */
void op_forget_flows(struct op *op);

/* Does the same, and frees the flows. */
void op_remove_flows(struct op *op);

/* Sends a received message on: now if no other one waits and there is room, else later. If `stream`
 * is NULL, the message waits in `early`. Without memory the op fails. */
void op_forward(struct op *op, struct stream *stream, struct packets *early,
                struct packet **packet);

/* Emits COMPLETE, and frees the op if it is settled already. */
void op_complete(struct op *op);

/* A header with the fields that all messages of an op have in common. */
struct wire_header op_header(const struct op *op, enum wire_kind kind);

#endif
