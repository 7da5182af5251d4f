/* gradual.c - see gradual.h. */
#include "engine/gradual.h"

#include "engine/quanta.h"

bool gradual_is_ready(const struct collective *collective, uint64_t offset, uint64_t length)
{
    return collective->unready == 0
        || quanta_all(collective->ready_set, offset / PCCL_QUANTUM, quanta_of(offset + length));
}

bool gradual_allow(struct collective *collective, const pccl_order *order)
{
    uint64_t from = order->offset / PCCL_QUANTUM, n = order->length / PCCL_QUANTUM;
    uint64_t all = quanta_of(collective->parts.span);
    if (collective->step == 0 || order->offset % PCCL_QUANTUM != 0
        || order->length % PCCL_QUANTUM != 0 || n == 0 || from >= all || n > all - from
        || quanta_any(collective->ready_set, from, from + n)) {
        op_fail(&collective->op, PCCL_EINVAL, "READY for offsets that were, or do not exist");
        return false;
    }
    quanta_add(collective->ready_set, from, from + n);
    collective->unready -= n;
    return true;
}

void gradual_tell(struct collective *collective, uint64_t offset, uint64_t length)
{
    uint64_t step = collective->step / PCCL_QUANTUM, all = quanta_of(collective->parts.span);
    uint64_t i, end = quanta_of(offset + length);
    if (step == 0 || collective->op.failed)
        return;
    for (i = offset / collective->step; i * step < end; i++) {
        uint64_t from = i * step, to = from + step < all ? from + step : all;
        pccl_event event = op_event(&collective->op, PCCL_WRITTEN);
        if (!quanta_all(collective->written_set, from, to))
            continue;
        event.done = i;
        (void)events_emit(collective->op.ops->events, &event);
    }
}
