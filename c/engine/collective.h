/* collective.h - a COLLECTIVE op: its arrays, which elements of them are done, what ABORT restores
 * (pccl_core.h, COLLECTIVES AND THEIR OFFSETS).
 *
 * A struct algorithm defines how its data travels: around a ring (ring.h), in one shot (oneshot.h)
 * or in two stages (twostage.h). start.h starts it, eagerly or not; progressive.h lets the caller
 * fill and read its memory while it runs; chunk.h sends and receives the chunks. */
#ifndef PCCL_COLLECTIVE_H
#define PCCL_COLLECTIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/op.h"
#include "engine/parts.h"

struct collective;
struct ring;

/* How a received chunk is handled. */
struct role {
    bool partial;            /* it lacks our contribution */
    bool stored;             /* with our contribution it is final, and is stored in recv */
    bool last;               /* it is not sent on */
};

/* How the chunks of a collective travel. */
struct algorithm {
    /* Whether a collective of `members` has that step. */
    bool (*has_step)(const struct collective *collective, uint32_t members, uint32_t step);

    /* The offsets of our own chunks, and their step and segment. */
    void (*own_range)(const struct ring *ring, uint64_t *from, uint64_t *to);
    void (*own_place)(const struct ring *ring, struct wire_header *header);

    /* Whether our own chunk can be sent directly from the memory of its part. If not, `write`
     * builds its payload. */
    bool (*in_memory)(const struct collective *collective, const struct part *part);
    void (*write)(const struct collective *collective, uint64_t offset, uint64_t length,
                  unsigned char *to);

    /* The position that receives a chunk. */
    uint32_t (*receiver)(const struct wire_header *chunk);

    /* Why a chunk of valid shape is not for our place, or must not arrive now; or NULL. */
    const char *(*check_place)(const struct ring *ring, const struct wire_header *chunk);
    const char *(*check_turn)(const struct collective *collective,
                              const struct wire_header *chunk);

    struct role (*role)(const struct collective *collective, const struct wire_header *chunk);

    /* Reduces or stores a chunk, and turns the packet into the one to send on: 0 or PCCL_ENOMEM.
     * To keep the packet, it puts an empty one in its place. */
    int (*apply)(struct collective *collective, const struct wire_header *chunk,
                 struct packet **packet);
};

/* Two stages: the contributions to a piece of our segment. */
struct piece {
    struct piece *next;
    uint64_t offset;
    uint32_t members;
    uint32_t n;              /* contributions that are there */
    struct packet *from[];   /* by rank */
};

/* Our place in a ring, according to the first early chunk of that ring. */
struct claim {
    const struct algorithm *algorithm;   /* NULL: no chunk has arrived */
    uint32_t members, position;
};

struct collective {
    struct op op;
    struct shape shape;
    int redop, format;
    const struct algorithm *algorithm;   /* set at START or EAGER */
    uint32_t members;        /* slices of the larger buffers; 0: all buffers have one */
    uint32_t n_rings;        /* the first flows; others lead from the rings to one receiver each */
    struct parts parts;
    uint64_t chunk;          /* bytes of a message, about */
    uint64_t done, wanted;   /* elements given and written so far, and in all */
    uint64_t *given_set;     /* blocks of send that have been given: sent, or added to a chunk */
    uint64_t *written_set;   /* blocks of recv that hold the result */
    uint64_t window;         /* offsets between WRITTEN events; 0: not progressive */
    uint64_t *ready_set;     /* progressive: blocks of send that hold the contribution */
    uint64_t unready;        /* progressive: number of the other blocks */
    struct packets held;     /* progressive: chunks that wait for a block to be ready */
    uint32_t n_held;
    struct undo undo;        /* old content of the written blocks, where ABORT must restore it */
    struct packets early;    /* chunks to be sent on once START names the stream */
    struct packets unread;   /* contributions that came before START */
    struct piece *pieces;    /* contributions that wait for those of other members */
    bool claimed;            /* early chunks have fixed seq and nonce */
    struct claim claims[PCCL_RINGS_MAX];
};

/* A ring of a collective, or the way from it to one receiver. */
struct ring {
    struct flow flow;
    pccl_ring place;         /* our place in it */
    uint32_t index;          /* of the ring */
    uint32_t receiver;       /* two stages: the position for which our own chunks are */
    uint64_t first, end;     /* offsets of our own chunks */
    uint64_t cursor;         /* where the next one begins */
    uint64_t lent;           /* credit of the stream that chunks sent before START have used */
    struct packets finals;   /* two stages: results of our segment that are to be sent */
};

enum { STRIP = 1024 };       /* elements; a multiple of every format's block */

static inline struct collective *collective_of(struct op *op)
{
    return (struct collective *)op;
}

static inline struct ring *collective_ring(const struct collective *collective, uint32_t index)
{
    return (struct ring *)collective->op.flows[index];
}

/* The divisor in the last step of an AVG. Integers are only added: callers register wider integers,
 * whose sums do not wrap, and divide these themselves. */
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

/* Quantizes `n` elements of a part, whose first one is at an offset. Their errors, `times` as large,
 * become those of the part, or are added to them. */
void collective_quantize(const struct collective *collective, const struct part *part,
                         uint64_t offset, const void *values, uint64_t n, unsigned char *to,
                         uint32_t times, bool added);

/* The bytes that `n` elements of a part take in a message. */
uint64_t collective_element_bytes(const struct collective *collective, const struct part *part,
                                  uint64_t n);

/* The bytes in the payload of a chunk: its elements, of one or more parts, without gaps. */
uint64_t collective_payload_bytes(const struct collective *collective, uint64_t offset,
                                  uint64_t length);

/* For a collective with one member: copies send to recv, if send holds the whole contribution. */
void collective_conclude_alone(struct collective *collective);

/* Adds an empty piece behind the others, or returns NULL without memory; removes one, with its
 * contributions. */
struct piece *collective_new_piece(struct collective *collective, uint64_t offset,
                                   uint32_t members);
void collective_free_piece(struct collective *collective, struct piece *piece);

/* Whether all of our contribution is given and all of recv is written. Then no chunk arrives any
 * more. */
bool collective_is_complete(const struct collective *collective);

/* Counts the elements of a chunk as given. */
void collective_count_given(struct collective *collective, uint64_t offset, uint64_t length);

/* Counts the elements of a chunk as written, after saving what recv holds there if ABORT must
 * restore it: 0 or PCCL_ENOMEM. */
int collective_overwrite(struct collective *collective, uint64_t offset, uint64_t length);

/* Notes that we have sent a chunk of our own: if the collective reduces it counts as given, else it
 * is part of the result and is copied to recv. */
void collective_note_sent(struct collective *collective, uint64_t offset, uint64_t length);

/* Moves the cursor to the next offset that holds an element: a slice may be shorter than others. */
void collective_skip(struct ring *ring);

/* Queues the rings that have chunks to send. */
void collective_request_turns(const struct collective *collective);

#endif
