/* op.h - the life of an op, whatever its kind: registered, started, complete, ended, settled.
 *
 * A kind of op is a struct that begins with a struct op, and a row of functions (struct op_kind).
 * Nothing here knows which kinds there are. */
#ifndef PCCL_OP_H
#define PCCL_OP_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/events.h"
#include "engine/packet.h"
#include "engine/parts.h"
#include "engine/unexpected.h"
#include "engine/stream.h"
#include "engine/wire.h"

enum { INDEX_BUCKETS = 1024 };   /* thousands of ops may be outstanding: chains of a few */

struct op;

/* What a kind of op does. `eager`, `progress`, `command`, `drop`, `end` and `free` may be NULL.
 * Only `drop`, `end` and `free` are called for an op that has failed or ended. */
struct op_kind {
    enum wire_kind message;      /* that ops of this kind take */
    size_t bytes;                /* of the struct that begins with the struct op, */
    size_t flow_bytes;           /* and of the one that begins with the struct flow */
    bool urgent;                 /* its flows send before those of other kinds */
    bool rounds;                 /* it can be started again, with a greater sequence number, */
    bool early_rounds;           /* and takes messages of such a round before it is */
    bool endless;                /* it never completes; COMMIT ends it at any time */
    bool obliging;               /* others may need it after it is complete, until its COMMIT */

    /* REGISTER and START: take over what the command says, or fail the op. */
    void (*enter)(struct op *op, const pccl_command *command);
    void (*start)(struct op *op, const pccl_command *command);

    /* EAGER: may send what START is expected to ask for, or fails the op. */
    void (*eager)(struct op *op, const pccl_command *command);

    /* QUERY: how much is done, and of how much. NULL: that cannot be said. */
    void (*progress)(const struct op *op, uint64_t *done, uint64_t *wanted);

    /* A command for this kind only: VERIFIED, ALLOW, REMIND or READY. */
    void (*command)(struct op *op, const pccl_command *command);

    /* Handles a message. Whoever keeps the packet puts an empty one in its place. */
    void (*take)(struct op *op, const struct wire_header *header, struct packet **packet);

    /* Uses the turn of a flow. */
    enum turn (*send)(struct flow *flow);

    /* Drops what waits for a flow's turn, or what waits without a flow (NULL). */
    void (*drop)(struct op *op, struct flow *flow);

    /* A stream of the op is lost. Its flows lead nowhere by now. */
    void (*lose)(struct op *op, const struct stream *stream);

    /* The result stays (`keep`), or what was there before it is restored. */
    void (*end)(struct op *op, bool keep);

    /* Frees what the kind has allocated. */
    void (*free)(struct op *op);
};

enum ending { LIVING, COMMITTED, ABORTED };

struct op {
    struct source source;    /* first: see op_of() */
    struct ops *ops;
    const struct op_kind *kind;
    struct op *next, *prev;  /* among the ops that live, or among those that are ending */
    struct op *next_by_id, *next_by_tag;
    uint64_t id, run, tag;
    uint64_t min_seq, seq;
    uint64_t nonce;          /* of the call, which no stranger can know */
    uint64_t epoch;          /* the nonce of the epoch in which it has begun, if it has, */
    uint64_t calls[PCCL_RINGS_MAX];  /* and of each ring the predecessor's call; 0: none */
    enum ending ending;
    bool by_tag;             /* in the index: messages find it */
    bool started, complete, failed;
    bool reversible;         /* it holds what ABORT restores, so COMPLETE does not settle it */
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
    uint32_t n_held;         /* chunks that wait for READY: no own ones enter meanwhile */
    uint32_t n_spread;       /* ops over several neighbours; while there are any, no limit holds */
    struct unexpected unexpected;      /* chunks that came before START */
    uint64_t dropped;        /* messages that were of use to no op */
    struct undo spare;       /* of an earlier op, for the next one that needs an undo buffer */
};

/* REGISTER, EAGER, START, QUERY, COMMIT and ABORT, EXPECT, and the commands of one kind of op. */
void ops_register(struct ops *ops, const struct op_kind *kind, const pccl_command *command);
void ops_eager(struct ops *ops, const pccl_command *command);
void ops_start(struct ops *ops, const pccl_command *command);
void ops_command(struct ops *ops, const pccl_command *command);
void ops_query(const struct ops *ops, const pccl_command *command);
void ops_end(struct ops *ops, const pccl_command *command);
void ops_expect(struct ops *ops, const pccl_command *command);

/* The op of this kind, run and tag, or NULL. */
struct op *ops_find(const struct ops *ops, const struct op_kind *kind, uint64_t run, uint64_t tag);

/* Gives a message to an op, holds it for a START, or drops it. `op` may be NULL. */
void ops_take(struct ops *ops, struct op *op, const struct wire_header *header,
              struct packet **packet);

/* A stream is gone: drops all flows to it, and tells the ops. */
void ops_lose_stream(struct ops *ops, struct stream *stream);

/* Settles ops that have ended and to which nothing refers any more. Whether there were any. */
bool ops_settle(struct ops *ops);

/* Whether an op waits for nothing but libzmq to release its bytes. */
bool ops_await_release(const struct ops *ops);

/* Ends and frees all ops, when the context is gone. */
void ops_free(struct ops *ops);

/* The op of a flow. */
static inline struct op *op_of(const struct flow *flow)
{
    return (struct op *)flow->source;        /* the first member of a struct op */
}

/* An event of that kind about an op. */
pccl_event op_event(const struct op *op, enum pccl_event_kind kind);

/* Emits FAILED, once; the op does nothing more until its ABORT. */
void op_fail(struct op *op, int status, const char *format, ...) PRINTF_LIKE(3, 4);

/* Likewise, with PCCL_ESTREAM and the number of the stream that the text is about. */
void op_fail_stream(struct op *op, uint32_t stream, const char *text);

/* Emits FAILED, but the op goes on: it has lost one of those it deals with. */
void op_report(struct op *op, int status, const char *format, ...) PRINTF_LIKE(3, 4);
void op_report_stream(struct op *op, uint32_t stream, const char *text);

/* A new flow of the op to a stream (may be NULL), or NULL without memory. */
struct flow *op_add_flow(struct op *op, struct stream *stream);

/* Takes all flows off their streams, for another round with others; drops what they wait for. */
void op_forget_flows(struct op *op);

/* The same, and frees them. */
void op_remove_flows(struct op *op);

/* Sends a received message on: now if none waits before it and there is room, else later. Without a
 * stream it waits in `early`, for one to be known. Without memory the op fails. */
void op_forward(struct op *op, struct stream *stream, struct packets *early,
                struct packet **packet);

/* Emits COMPLETE, and frees the op if it is settled too. */
void op_complete(struct op *op);

/* The beginning of the header of a message of that op. */
struct wire_header op_header(const struct op *op, enum wire_kind kind);

#endif
