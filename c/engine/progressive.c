/* progressive.c - see progressive.h. */
#include "engine/progressive.h"

#include "engine/bitmap.h"

bool progressive_is_ready(const struct collective *collective, uint64_t offset, uint64_t length)
{
    return collective->unready == 0
        || bitmap_all(collective->ready_set, offset / PCCL_ALIGNMENT,
                      aligned_blocks(offset + length));
}

bool progressive_ready(struct collective *collective, const pccl_command *command)
{
    uint64_t from = command->offset / PCCL_ALIGNMENT, n = command->length / PCCL_ALIGNMENT;
    uint64_t all = aligned_blocks(collective->parts.span);
    if (collective->window == 0 || command->offset % PCCL_ALIGNMENT != 0
        || command->length % PCCL_ALIGNMENT != 0 || n == 0 || from >= all || n > all - from
        || bitmap_any(collective->ready_set, from, from + n)) {
        op_fail(&collective->op, PCCL_EINVAL, "READY for offsets that were, or do not exist");
        return false;
    }
    bitmap_set(collective->ready_set, from, from + n);
    collective->unready -= n;
    return true;
}

void progressive_notify(struct collective *collective, uint64_t offset, uint64_t length)
{
    uint64_t window = collective->window / PCCL_ALIGNMENT,
        all = aligned_blocks(collective->parts.span);
    uint64_t i, end = aligned_blocks(offset + length);
    if (window == 0 || collective->op.failed)
        return;
    for (i = offset / collective->window; i * window < end; i++) {
        uint64_t from = i * window, to = from + window < all ? from + window : all;
        pccl_event event = op_event(&collective->op, PCCL_WRITTEN);
        if (!bitmap_all(collective->written_set, from, to))
            continue;
        event.done = i;
        (void)events_emit(collective->op.ops->events, &event);
    }
}
