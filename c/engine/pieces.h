/* pieces.h - numbered pieces of memory: what SERVE offers and FETCH asks for. */
#ifndef PCCL_PIECES_H
#define PCCL_PIECES_H

#include "engine/op.h"

struct pieces {
    const pccl_piece *piece; /* in ascending order of their numbers */
    uint32_t n;
};

/* Takes over the pieces of a command; fails the op if they cannot be. Whether they can. */
bool pieces_enter(struct pieces *pieces, struct op *op, const pccl_command *command);

/* The index of a piece by its number, or n. */
uint32_t pieces_find(const struct pieces *pieces, uint32_t number);

/* The beginning of the header of an op's message about a piece, between a holder and the requester
 * with that slot. */
struct wire_header pieces_header(const struct pieces *pieces, const struct op *op,
                                 enum wire_kind kind, uint32_t slot, uint32_t index);

#endif
