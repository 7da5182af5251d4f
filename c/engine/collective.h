/* collective.h - a COLLECTIVE op: which elements of its arrays are done, what ABORT restores, and
 * its start (pccl_core.h, COLLECTIVES, THE RING). chunk.h moves its data. */
#ifndef PCCL_COLLECTIVE_H
#define PCCL_COLLECTIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/op.h"
#include "engine/parts.h"

/* What the first early chunk of a ring said of our place in it. */
struct claim {
    bool made, oneshot;
    uint32_t members, position;
};

struct collective {
    struct op op;
    struct shape shape;
    int redop, format;
    bool is_spread;          /* its rings lead to different neighbours */
    bool oneshot;             /* two members send each other everything (oneshot.h) */
    uint32_t members;        /* slices of the larger buffers; 0: all have one */
    struct parts parts;
    uint64_t chunk;          /* bytes of a message, about */
    uint64_t done, wanted;   /* elements given and written, and how many there are */
    uint64_t *given_set;     /* blocks of send that have been given: our contribution */
    uint64_t *written_set;   /* blocks of recv that hold the result */
    uint64_t window;         /* offsets between WRITTEN events; 0: not progressive.h */
    uint64_t *ready_set;     /* if it is: blocks of send that hold the contribution, */
    uint64_t unready;        /* how many do not yet, */
    struct packets held;     /* and the chunks that came for those */
    uint32_t n_held;
    struct undo undo;        /* what recv held in those blocks, where ABORT must restore it */
    struct packets early;    /* to be sent on once START names the stream */
    bool claimed;            /* early chunks have fixed seq and nonce */
    struct claim claims[PCCL_RINGS_MAX];
};

/* A ring of a collective. */
struct ring {
    struct flow flow;
    pccl_ring place;         /* ours in it */
    uint64_t first, cursor, end;     /* where our own chunks begin, what is left of them: offsets */
    uint64_t lent;           /* what was sent before START counts so much in the stream's credit */
};

static inline struct collective *collective_of(struct op *op)
{
    return (struct collective *)op;
}

static inline struct ring *collective_ring(const struct collective *collective, uint32_t index)
{
    return (struct ring *)collective->op.flows[index];
}

/* For struct op_kind. */
void collective_enter(struct op *op, const pccl_command *command);
void collective_eager(struct op *op, const pccl_command *command);
void collective_start(struct op *op, const pccl_command *command);
void collective_progress(const struct op *op, uint64_t *done, uint64_t *wanted);
void collective_drop(struct op *op, struct flow *flow);
void collective_lose(struct op *op, const struct stream *stream);
void collective_end(struct op *op, bool keep);
void collective_free(struct op *op);

/* Stores a quantized chunk of the result. */
void collective_store_quantized(const struct collective *collective, uint64_t offset,
                                uint64_t length, const unsigned char *in);

/* Makes our own contribution the result: there is no other member. */
void collective_conclude_alone(struct collective *collective);

/* Whether all that there is to give is given and all of recv is written: then no chunk will come
 * any more. */
bool collective_is_complete(const struct collective *collective);

/* Counts the elements of a chunk as given; as written. */
void collective_count_given(struct collective *collective, uint64_t offset, uint64_t length);
void collective_count_written(struct collective *collective, uint64_t offset, uint64_t length);

/* Notes a chunk that we have sent: it is given, or it is part of the result. */
void collective_note_sent(struct collective *collective, uint64_t offset, uint64_t length);

/* Saves what recv holds where a chunk is to be stored, if ABORT must restore it: 0 or
 * PCCL_ENOMEM. */
int collective_save(struct collective *collective, uint64_t offset, uint64_t length);

/* The offsets from <= i < to of a segment of a ring. */
void collective_range(const struct ring *ring, uint32_t segment, uint64_t *from, uint64_t *to);

/* Moves the cursor on to the next element that there is: slices may be shorter than others. */
void collective_skip(struct ring *ring);

/* Whether `members` may send each other everything instead (oneshot.h). */
bool collective_may_be_oneshot(const struct collective *collective, uint32_t members);

/* The first and the last step of a chunk, among `members` > 1. */
uint32_t collective_first_step(const struct collective *collective, uint32_t members);
/* What the last step of an AVG divides by. Integers are only added: their callers register wide
 * ones, in which sums do not wrap, and divide these. */
static inline uint32_t collective_divisor(int dtype, uint32_t members)
{
    return dtype < PCCL_F16 || dtype == PCCL_I128 ? 1 : members;
}

uint32_t collective_last_step(const struct collective *collective, uint32_t members);

#endif
