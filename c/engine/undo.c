/* undo.c - see undo.h. */
#include "engine/undo.h"

#include <stdlib.h>

bool undo_open(struct undo *undo, size_t bytes, struct undo *spare)
{
    if (spare->bytes >= bytes) {
        *undo = *spare;
        spare->memory = NULL;
        spare->bytes = 0;
    } else {
        undo->memory = malloc(bytes);
        undo->bytes = bytes;
    }
    return undo->memory != NULL;
}

void undo_close(struct undo *undo, struct undo *spare)
{
    if (undo->memory != NULL && spare->bytes < undo->bytes) {
        free(spare->memory);
        *spare = *undo;
    } else {
        free(undo->memory);
    }
    undo->memory = NULL;
    undo->bytes = 0;
}
