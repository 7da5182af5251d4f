/* pieces.c - see pieces.h. */
#include "engine/pieces.h"

bool pieces_enter(struct pieces *pieces, struct op *op, const pccl_command *command)
{
    uint32_t i;
    for (i = 0; i < command->n_pieces; i++) {
        const pccl_piece *piece = &command->pieces[i];
        if ((i > 0 && piece->piece <= piece[-1].piece) || (piece->data == NULL && piece->bytes > 0)
            || piece->bytes > SIZE_MAX / 2) {
            op_fail(op, PCCL_EINVAL, "pieces must ascend in number and have memory");
            return false;
        }
    }
    pieces->piece = command->pieces;
    pieces->n = command->n_pieces;
    return true;
}

uint32_t pieces_find(const struct pieces *pieces, uint32_t number)
{
    uint32_t low = 0, high = pieces->n;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (pieces->piece[middle].piece < number)
            low = middle + 1;
        else
            high = middle;
    }
    return low < pieces->n && pieces->piece[low].piece == number ? low : pieces->n;
}

struct wire_header pieces_header(const struct pieces *pieces, const struct op *op,
                                 enum wire_kind kind, uint32_t slot, uint32_t index)
{
    struct wire_header header = op_header(op, kind);
    header.segment = (uint16_t)slot;
    header.piece = pieces->piece[index].piece;
    return header;
}
