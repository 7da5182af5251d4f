/* fetch.h - a FETCH op: requests numbered pieces of memory, chunk by chunk, from their holders
 * (serve.h). */
#ifndef PCCL_FETCH_H
#define PCCL_FETCH_H

#include "engine/op.h"
#include "engine/serve.h"

enum leaf_state { LEAF_MISSING, LEAF_ARRIVED, LEAF_PROVEN };

/* A section of a piece that the caller verifies as a whole. */
struct leaf {
    struct leaf *next;       /* in the list of leaves to be requested again */
    enum leaf_state state;
    bool wrong;              /* it was wrong once */
    uint32_t piece;          /* index into pieces */
    uint32_t source;         /* index of the holder that gave it, FROM_NOBODY or FROM_SEVERAL */
    uint64_t offset, bytes;  /* in the piece */
    uint64_t requested;      /* number of bytes requested, from its beginning */
    uint64_t missing;        /* number of bytes that have not arrived */
    struct holder *owner;    /* the only holder to request it from, because it was wrong before */
};

/* A request under way; or a returned one, which no holder is asked for at present. */
struct want {
    struct leaf *leaf;       /* NULL: the want is unused */
    struct holder *holder;   /* the one that was asked; NULL: returned */
    struct holder *former;   /* the one that was asked before, and may still answer; or NULL */
    uint64_t number;         /* of the request, in order */
    uint32_t overtaken;      /* reminders since its holder answered a later request */
    uint32_t repeated;       /* number of repetitions because of that */
    uint64_t offset;         /* in the piece */
    uint32_t length;
};

struct fetch {
    struct op op;
    struct pieces pieces;
    uint32_t chunk;          /* most bytes of a request */
    uint32_t leaf_bytes;     /* of each leaf; 0: a piece is one leaf, which is not verified */
    uint64_t unproven;       /* number of bytes that are not verified */
    uint64_t unrequested;    /* number of bytes that are in no want */
    struct leaf *leaves;     /* all leaves, in the order of the pieces */
    size_t n_leaves;
    size_t cursor;           /* all leaves before this one are wholly requested */
    struct leaf *again, *last_again;    /* list of the leaves to be requested again */
    struct want *wants;
    uint32_t n_wants;        /* capacity of wants */
    uint32_t n_returned;     /* wants without a holder */
    uint32_t delivered;      /* recent answers of all holders */
    uint64_t requests;       /* number of requests so far */
    uint32_t reminders;      /* since the last answer */
    uint32_t patience;       /* reminders after which a request is late */
};

/* A peer that holds the pieces. */
struct holder {
    struct flow flow;
    uint32_t slot;           /* our slot at this holder */
    uint64_t outstanding;    /* bytes of the requests under way */
    uint32_t delivered;      /* recent answers */
    uint32_t quiet;          /* reminders in a row at which it owed answers and had sent none */
    uint64_t answered;       /* number of the latest request that it has answered */
    struct leaf *leaf;       /* one that it owns, not wholly requested; or NULL */
    bool silent;             /* it did not answer in time: asked only if all are silent */
};

/* For struct op_kind. */
void fetch_enter(struct op *op, const pccl_command *command);
void fetch_start(struct op *op, const pccl_command *command);
void fetch_command(struct op *op, const pccl_command *command);
void fetch_take(struct op *op, const struct wire_header *header, struct packet **packet);
enum turn fetch_send(struct flow *flow);
void fetch_progress(const struct op *op, uint64_t *done, uint64_t *wanted);
void fetch_lose(struct op *op, const struct stream *stream);
void fetch_free(struct op *op);

#endif
