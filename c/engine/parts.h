/* parts.h - the arrays of a collective in memory: where an offset lies in them, and how ABORT
 * restores them (pccl_core.h, COLLECTIVES AND THEIR OFFSETS). */
#ifndef PCCL_PARTS_H
#define PCCL_PARTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "pccl_core.h"

/* Parts of up to this many bytes share chunks. Larger ones cost more to copy than to send in
 * separate messages (measured). Receivers check it, so it is part of the protocol. */
enum { SMALL_BYTES = 1 << 19 };

/* Memory for the data that an op overwrites in place, until the op is settled. */
struct undo {
    unsigned char *memory;   /* NULL: not open */
    size_t bytes;
};

/* Opens an undo buffer of at least `bytes` bytes. Takes the spare one if it is large enough, else
 * allocates a new one. False without memory. */
bool undo_open(struct undo *undo, size_t bytes, struct undo *spare);

/* Closes an undo buffer if it is open. The larger of the two buffers becomes the spare one, because
 * the page faults of fresh memory cost more than the copies into it. */
void undo_close(struct undo *undo, struct undo *spare);

/* An array of a collective. */
struct part {
    const unsigned char *send;
    unsigned char *recv;
    float *error;            /* where the errors of quantizing go; NULL: nowhere */
    int dtype;
    size_t width;            /* bytes of an element in memory */
    uint64_t count;          /* elements of a slice; of the longest one if slices differ */
    uint64_t row;            /* elements of a row, if slices differ */
    uint64_t begin;          /* its first offset in a slice */
    uint64_t limit;          /* a chunk that begins in the part must end at this offset */
    bool overwrites;         /* recv holds data that ABORT must restore */
    size_t undo_at;          /* where that data is in the undo buffer */
};

/* Consecutive elements of one part, and where they are. */
struct stretch {
    const struct part *part;
    uint64_t offset, length;
    const unsigned char *send;
    unsigned char *recv;
    size_t bytes;            /* in memory */
};

/* The properties of a collective. */
struct shape {
    bool reduces;            /* if not, chunks are final from the start */
    bool scatters;           /* send has a slice for each member */
    bool gathers;            /* recv has a slice for each member */
    bool rooted;             /* only the root has the result, or, if it does not reduce, the data
                              * (in recv, which is also send) */
};

struct parts {
    struct part *part;
    uint32_t n;
    uint32_t send_slices, recv_slices;
    uint64_t *rows_at;       /* by rank: the first row of its slice in recv; at the end the number
                              * of all rows. NULL: all slices are equally long */
    uint64_t span;           /* offsets of a slice */
    uint64_t total;          /* elements of a slice */
    uint64_t received;       /* elements of all slices of recv */
    size_t undo_bytes;       /* bytes of all data that ABORT must restore */
};

/* Gives the slice of rank r in recv rows[r] rows. Call it before parts_enter(). Returns PCCL_OK,
 * PCCL_ENOMEM, or PCCL_EINVAL if there are too many rows. */
int parts_divide(struct parts *parts, const uint64_t *rows);

/* Stores the arrays of a command in `parts`, which has the memory for them and the numbers of
 * slices. Returns why they are invalid, or NULL. */
const char *parts_enter(struct parts *parts, const struct shape *shape,
                        const pccl_command *command);

/* The part that an offset below slices * span belongs to. */
const struct part *part_at(const struct parts *parts, uint64_t offset);

/* The most offsets of a chunk that begins at an offset. 0: there are no elements, because the slice
 * is shorter than others. */
uint64_t parts_reach(const struct parts *parts, uint64_t offset);

/* Finds the next stretch of a chunk between `*offset` and `end`, and moves *offset behind it.
 * Returns false if there is none. */
bool parts_next(const struct parts *parts, uint64_t *offset, uint64_t end,
                struct stretch *stretch);

/* Whether all elements of a chunk lie in one part; stores their stretch in *whole. */
bool parts_whole(const struct parts *parts, uint64_t offset, uint64_t length,
                 struct stretch *whole);

/* The number of elements in a chunk of `length` offsets. */
uint64_t parts_elements(const struct parts *parts, uint64_t offset, uint64_t length);

/* Where the element at an offset is in send and in recv. If a buffer has one slice, the offsets of
 * all slices lead to it. */
const unsigned char *part_send(const struct parts *parts, const struct part *part,
                               uint64_t offset);
unsigned char *part_recv(const struct parts *parts, const struct part *part, uint64_t offset);

/* The blocks from <= i < to of recv that a chunk takes. */
void parts_written(const struct parts *parts, uint64_t offset, uint64_t length, uint64_t *from,
                   uint64_t *to);

/* Whether every part that is in place is in the slice of that rank. */
bool parts_lie_at(const struct parts *parts, uint32_t rank);

/* Copies the elements of a chunk from send to `out`, without gaps. */
void parts_gather(const struct parts *parts, uint64_t offset, uint64_t length,
                  unsigned char *out);

/* Copies the elements of a chunk from `in`, without gaps, to recv. */
void parts_scatter(const struct parts *parts, uint64_t offset, uint64_t length,
                   const unsigned char *in);

/* Copies send to recv. */
void parts_copy(const struct parts *parts);

/* Where the undo buffer holds the old content of recv at an offset. */
unsigned char *part_saved(const struct parts *parts, const struct part *part,
                          const struct undo *undo, uint64_t offset);

/* Saves what recv holds of a stretch. */
void parts_save(const struct parts *parts, const struct stretch *stretch, struct undo *undo);

/* Restores the blocks of recv that are in the set `written`. */
void parts_restore(const struct parts *parts, const struct undo *undo, const uint64_t *written);

#endif
