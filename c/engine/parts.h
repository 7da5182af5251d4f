/* parts.h - the arrays of a collective in memory: where an offset lies in them, and what of them
 * ABORT restores (pccl_core.h, COLLECTIVES AND THEIR OFFSETS). Pure functions of memory. */
#ifndef PCCL_PARTS_H
#define PCCL_PARTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "pccl_core.h"

/* Bytes of parts that share chunks: to copy larger ones costs more than messages of their own
 * (measured). Part of the protocol. */
enum { SMALL_BYTES = 1 << 17 };

/* Memory for what an op overwrites in place, until it is settled. */
struct undo {
    unsigned char *memory;   /* NULL: not open */
    size_t bytes;
};

/* Opens an undo buffer of at least `bytes` bytes: the spare one if it is large enough, and leaves
 * none, or a new one. False without memory. */
bool undo_open(struct undo *undo, size_t bytes, struct undo *spare);

/* Closes an undo buffer if it is open. The larger of the two stays as the spare one, because fresh
 * memory costs more, in page faults, than the copies into it. */
void undo_close(struct undo *undo, struct undo *spare);

/* An array of a collective. */
struct part {
    const unsigned char *send;
    unsigned char *recv;
    int dtype;
    size_t width;            /* bytes of an element in memory */
    uint64_t count;          /* elements of a slice, of the longest if they differ */
    uint64_t row;            /* elements of a row, if slices differ */
    uint64_t begin;          /* its first offset in a slice */
    uint64_t limit;          /* the offset in a slice where a chunk that begins in it must end */
    bool overwrites;         /* recv holds what ABORT must restore, */
    size_t undo_at;          /* here in the undo buffer */
};

/* Elements of one part that follow each other, and where they are. */
struct stretch {
    const struct part *part;
    uint64_t offset, length;
    const unsigned char *send;
    unsigned char *recv;
    size_t bytes;            /* in memory */
};

/* What sets a collective apart from the others. */
struct shape {
    bool reduces;            /* or else it gathers: chunks are final from the start */
    bool scatters;           /* send has a slice for each member, */
    bool gathers;            /* or recv has */
    bool rooted;             /* one member has the data, in recv, and send is recv; or, if it
                              * reduces, one has the result */
};

struct parts {
    struct part *part;
    uint32_t n;
    uint32_t send_slices, recv_slices;
    uint64_t *rows_at;       /* by rank: the first row of its slice in recv, and the end of all;
                              * NULL: all slices are alike */
    uint64_t span;           /* offsets of a slice */
    uint64_t total;          /* elements of a slice; */
    uint64_t received;       /* of all slices of recv */
    size_t undo_bytes;       /* of all that ABORT must restore */
};

/* Slices of recv differ: that of rank r has rows[r] rows. Before parts_enter(). PCCL_OK,
 * PCCL_ENOMEM, or PCCL_EINVAL if they are too many. */
int parts_divide(struct parts *parts, const uint64_t *rows);

/* Takes over the arrays of a command, for which `parts` has the room and the numbers of slices. Why
 * it cannot, or NULL. */
const char *parts_enter(struct parts *parts, const struct shape *shape,
                        const pccl_command *command);

/* The part that an offset below slices * span belongs to; how many offsets a chunk that begins
 * there may have: 0 behind the rows of a slice that is shorter than others. */
const struct part *part_at(const struct parts *parts, uint64_t offset);
uint64_t parts_reach(const struct parts *parts, uint64_t offset);

/* The next stretch of a chunk from `*offset` up to `end`, as *stretch; *offset moves on behind it.
 * False when there is none. */
bool parts_next(const struct parts *parts, uint64_t *offset, uint64_t end,
                struct stretch *stretch);

/* Whether the elements of a chunk lie in one part, which is then *whole. */
bool parts_whole(const struct parts *parts, uint64_t offset, uint64_t length,
                 struct stretch *whole);

/* How many elements a chunk of `length` offsets has. */
uint64_t parts_elements(const struct parts *parts, uint64_t offset, uint64_t length);

/* Where the element at an offset is in send and in recv. A buffer with one slice has it at the
 * offset within the slice, whichever slice the offset is of. */
const unsigned char *part_send(const struct parts *parts, const struct part *part,
                               uint64_t offset);
unsigned char *part_recv(const struct parts *parts, const struct part *part, uint64_t offset);

/* The blocks from <= i < to of recv that `length` elements from an offset on take. */
void parts_written(const struct parts *parts, uint64_t offset, uint64_t length, uint64_t *from,
                   uint64_t *to);

/* Whether all parts that are in place lie where that rank's slice is. */
bool parts_lie_at(const struct parts *parts, uint32_t rank);

/* Copies the elements of a chunk from send, where they may lie apart, to `out`, where they follow
 * each other; from `in`, likewise, to recv. */
void parts_gather(const struct parts *parts, uint64_t offset, uint64_t length,
                  unsigned char *out);
void parts_scatter(const struct parts *parts, uint64_t offset, uint64_t length,
                   const unsigned char *in);

/* Makes the contribution the result: recv = send. */
void parts_copy(const struct parts *parts);

/* Where the saved bytes of recv at an offset are. */
unsigned char *part_saved(const struct parts *parts, const struct part *part,
                          const struct undo *undo, uint64_t offset);

/* Saves what recv holds of a stretch; restores all that is in the set of blocks `written`. */
void parts_save(const struct parts *parts, const struct stretch *stretch, struct undo *undo);
void parts_restore(const struct parts *parts, const struct undo *undo, const uint64_t *written);

#endif
