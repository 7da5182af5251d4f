/* collective.h - a COLLECTIVE op: its arrays, which elements of them are done, what ABORT restores
 * (pccl_core.h, COLLECTIVES AND THEIR OFFSETS).
 *
 * How its data travels is a struct algorithm: around a ring (ring.h) or in one shot (oneshot.h).
 * start.h starts it, eagerly or not; progressive.h has memory filled and read meanwhile; chunk.h
 * sends and takes the chunks. */
#ifndef PCCL_COLLECTIVE_H
#define PCCL_COLLECTIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/op.h"
#include "engine/parts.h"

struct collective;
struct ring;

/* What is to be done with a chunk that has come. */
struct role {
    bool partial;            /* it lacks our contribution */
    bool stored;             /* what becomes of it is the result */
    bool last;               /* nobody gets it from us */
};

/* How the chunks of a collective travel. */
struct algorithm {
    /* Whether a collective among `members` has such a step. */
    bool (*has_step)(const struct collective *collective, uint32_t members, uint32_t step);

    /* The offsets of our own chunks, and their step and segment. */
    void (*own_range)(const struct ring *ring, uint64_t *from, uint64_t *to);
    void (*own_place)(const struct ring *ring, struct wire_header *header);

    /* Whether an own chunk of a part can be sent from our memory, as it is; else `write` makes its
     * payload. */
    bool (*in_memory)(const struct collective *collective, const struct part *part);
    void (*write)(const struct collective *collective, uint64_t offset, uint64_t length,
                  unsigned char *to);

    /* The position that a chunk is for. Whether a chunk of valid shape is for our place, and may
     * come now: why not, or NULL. */
    uint32_t (*receiver)(const struct wire_header *chunk);
    const char *(*check_place)(const struct ring *ring, const struct wire_header *chunk);
    const char *(*check_turn)(const struct collective *collective,
                              const struct wire_header *chunk);

    struct role (*role)(const struct collective *collective, const struct wire_header *chunk);

    /* Reduces or stores it, and makes of it what is sent on: 0 or PCCL_ENOMEM. */
    int (*apply)(struct collective *collective, const struct wire_header *chunk,
                 struct packet *packet);
};

/* What the first early chunk of a ring said of our place in it. */
struct claim {
    const struct algorithm *algorithm;   /* NULL: none has come */
    uint32_t members, position;
};

struct collective {
    struct op op;
    struct shape shape;
    int redop, format;
    bool is_spread;          /* its rings lead to different neighbours */
    const struct algorithm *algorithm;   /* once it has started, eagerly or not */
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

/* The rank of a position. */
static inline uint32_t rank_at(const pccl_ring *ring, uint32_t position)
{
    return ring->ranks != NULL ? ring->ranks[position] : position;
}

/* What the last step of an AVG divides by. Integers are only added: their callers register wide
 * ones, in which sums do not wrap, and divide these. */
static inline uint32_t collective_divisor(int dtype, uint32_t members)
{
    return dtype < PCCL_F16 || dtype == PCCL_I128 ? 1 : members;
}

/* For struct op_kind. */
void collective_enter(struct op *op, const pccl_command *command);
void collective_progress(const struct op *op, uint64_t *done, uint64_t *wanted);
void collective_drop(struct op *op, struct flow *flow);
void collective_lose(struct op *op, const struct stream *stream);
void collective_end(struct op *op, bool keep);
void collective_free(struct op *op);

/* The bytes that `n` elements of a part take in a message; the bytes of the payload of a chunk: its
 * elements, of however many parts, without gaps. */
uint64_t collective_element_bytes(const struct collective *collective, const struct part *part,
                                  uint64_t n);
uint64_t collective_payload_bytes(const struct collective *collective, uint64_t offset,
                                  uint64_t length);

/* Makes our own contribution the result, if it is there: there is no other member. */
void collective_conclude_alone(struct collective *collective);

/* Whether all that there is to give is given and all of recv is written: then no chunk will come
 * any more. */
bool collective_is_complete(const struct collective *collective);

/* Counts the elements of a chunk as given. */
void collective_count_given(struct collective *collective, uint64_t offset, uint64_t length);

/* Counts them as written, and saves what recv holds there if ABORT must restore it: 0 or
 * PCCL_ENOMEM. */
int collective_overwrite(struct collective *collective, uint64_t offset, uint64_t length);

/* Notes a chunk that we have sent: it is given, or it is part of the result. */
void collective_note_sent(struct collective *collective, uint64_t offset, uint64_t length);

/* Moves the cursor on to the next element that there is: slices may be shorter than others. */
void collective_skip(struct ring *ring);

/* Queues the rings that have chunks to send. */
void collective_request_turns(const struct collective *collective);

#endif
