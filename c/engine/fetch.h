/* fetch.h - a FETCH op: requests numbered pieces of memory, chunk by chunk, from whoever holds them
 * (serve.h). */
#ifndef PCCL_FETCH_H
#define PCCL_FETCH_H

#include "engine/op.h"
#include "engine/serve.h"

enum leaf_state { LEAF_MISSING, LEAF_ARRIVED, LEAF_PROVEN };

/* A part of a piece that is proven as a whole. */
struct leaf {
    struct leaf *next;       /* among those to be requested again */
    enum leaf_state state;
    bool wrong;              /* it came wrong once */
    uint32_t piece;          /* index into pieces */
    uint32_t source;         /* index of the holder that gave it; or of nobody or several */
    uint64_t offset, bytes;  /* of the piece */
    uint64_t requested;      /* bytes, from its beginning on */
    uint64_t missing;        /* bytes that have not arrived */
    struct holder *owner;    /* the only one that may be asked, as it came wrong from several */
};

/* A request under way, or one to be made again because its holder is gone. */
struct want {
    struct leaf *leaf;       /* NULL: free */
    struct holder *holder;   /* NULL: nobody is asked for it at present */
    struct holder *former;   /* that was asked before, and may still answer; or NULL */
    uint64_t number;         /* of the request, in order */
    uint32_t overtaken;      /* reminders since its holder has answered a later request */
    uint32_t repeated;       /* times that it was asked for again because of that */
    uint64_t offset;         /* of the piece */
    uint32_t length;
};

struct fetch {
    struct op op;
    struct pieces pieces;
    uint32_t chunk;          /* bytes of a request */
    uint32_t leaf_bytes;     /* of leaves that the caller proves; 0: a piece is one leaf */
    uint64_t unproven;       /* bytes */
    struct leaf *leaves;     /* all, in the order of the pieces */
    size_t n_leaves;
    size_t cursor;           /* the first leaf that may not be wholly requested */
    struct leaf *again, *last_again;    /* leaves that came wrong */
    struct want *wants;
    uint32_t n_wants, n_returned;       /* of these, without a holder */
    uint32_t delivered;      /* by all holders lately */
    uint64_t requests;       /* made so far */
    uint32_t reminders;      /* since anything has come */
    uint32_t patience;       /* reminders after which a request is late */
};

/* Whoever holds the pieces. */
struct holder {
    struct flow flow;
    uint32_t slot;           /* ours there */
    uint32_t outstanding;    /* requests under way, */
    uint32_t delivered;      /* and answered lately */
    uint32_t quiet;          /* reminders for which it has owed answers, and given none */
    uint64_t answered;       /* the latest request that it has answered */
    struct leaf *leaf;       /* that nobody else may be asked for, not wholly requested */
    bool silent;             /* it did not answer in time: asked only if no other does either */
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
