/* collective.h - a COLLECTIVE op: its arrays, which of their elements are done, what ABORT
 * restores, and its start (pccl.h, COLLECTIVES, THE RING). chunk.h moves its data. */
#ifndef PCCL_COLLECTIVE_H
#define PCCL_COLLECTIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/op.h"

/* What the first early chunk of a ring said of our place in it. */
struct claim {
    bool made;
    uint32_t members, position;
};

/* An array of a collective. */
struct part {
    const unsigned char *send;
    unsigned char *recv;
    int dtype;
    size_t width;            /* bytes of an element in memory */
    uint64_t count;          /* elements of a block */
    uint64_t begin;          /* its first offset in a block */
    bool overwrites;         /* recv holds what ABORT must restore, */
    size_t undo_at;          /* here in the undo buffer */
};

struct collective {
    struct op op;
    enum pccl_collective what;
    int redop, format;
    bool reduces;            /* or else gathers: chunks are final from the start */
    bool is_spread;          /* its rings lead to different neighbours */
    uint32_t members;        /* blocks of the larger buffers; 0: all have one */
    uint32_t send_blocks, recv_blocks;
    struct part *parts;
    uint32_t n_parts;
    uint64_t span;           /* offsets of a block */
    uint64_t total;          /* elements of a block */
    uint64_t chunk;          /* bytes of a message, about */
    uint64_t done, wanted;   /* elements given and written, and how many there are */
    uint64_t *given_set;     /* quanta of send that have been given: our contribution */
    uint64_t *written_set;   /* quanta of recv that hold the result */
    unsigned char *undo;     /* what recv held in those quanta, where that counts */
    size_t undo_needed;      /* bytes */
    size_t undo_bytes;       /* that it has */
    struct packets early;    /* to be sent on once START names the stream */
    bool claimed;            /* early chunks have fixed seq and nonce */
    struct claim claims[PCCL_RINGS_MAX];
};

/* A ring of a collective. */
struct ring {
    struct link link;
    uint64_t cursor, end;    /* what is left of our own chunks, offsets */
};

static inline struct collective *collective_of(struct op *op)
{
    return (struct collective *)op;
}

static inline struct ring *collective_ring(const struct collective *collective, uint32_t index)
{
    return (struct ring *)collective->op.links[index];
}

/* For struct op_kind. */
void collective_enter(struct op *op, const pccl_order *order);
void collective_start(struct op *op, const pccl_order *order);
void collective_drop(struct op *op, struct link *link);
void collective_lose(struct op *op, const struct stream *stream);
void collective_end(struct op *op, bool keep);
void collective_free(struct op *op);

/* Whether all that there is to give is given and all of recv is written: then no chunk will come
 * any more. */
bool collective_is_complete(const struct collective *collective);

/* The part that an offset below blocks * span belongs to; how many elements it has from there
 * on. */
const struct part *part_at(const struct collective *collective, uint64_t offset);
uint64_t part_left(const struct collective *collective, const struct part *part, uint64_t offset);

/* Where the element at an offset is in send and in recv. A buffer with one block has it at the
 * offset within the block, whichever block the offset is of. */
const unsigned char *part_send(const struct collective *collective, const struct part *part,
                               uint64_t offset);
unsigned char *part_recv(const struct collective *collective, const struct part *part,
                         uint64_t offset);

/* The quanta from <= i < to in written_set of the elements from an offset on. */
void written_quanta(const struct collective *collective, uint64_t offset, uint64_t length,
                    uint64_t *from, uint64_t *to);

/* Saves the bytes of recv at an offset, if ABORT must restore them: 0 or PCCL_ENOMEM. */
int collective_save(struct collective *collective, const struct part *part, uint64_t offset,
                    size_t bytes);

/* The offsets from <= i < to of a segment of a ring. */
void ring_range(const struct ring *ring, uint32_t segment, uint64_t *from, uint64_t *to);

/* The first and the last hop of a chunk, among `members` > 1. */
uint32_t collective_first_hop(const struct collective *collective, uint32_t members);
uint32_t collective_last_hop(const struct collective *collective, uint32_t members);

#endif
