/* undo.h - memory for what an op overwrites in place, until the op is settled. */
#ifndef PCCL_UNDO_H
#define PCCL_UNDO_H

#include <stdbool.h>
#include <stddef.h>

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

#endif
