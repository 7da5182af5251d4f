/* progressive.c - see progressive.h. */
#include "engine/progressive.h"

#include <assert.h>

#include "engine/bitmap.h"

bool progressive_is_ready(const struct collective *collective, uint64_t offset, uint64_t length)
{
    return collective->unready == 0
        || bitmap_all(collective->ready_set, offset / PCCL_ALIGNMENT,
                      aligned_blocks(offset + length));
}

/* READY: whether it was possible; else the op has failed. */
static bool note_ready(struct collective *collective, const pccl_command *command)
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

void progressive_hold(struct collective *collective, struct packet **packet)
{
    struct op *op = &collective->op;
    op_forward(op, NULL, &collective->held, packet);
    if (op->failed)
        return;
    collective->n_held++;
    op->ops->n_held++;
}

/* Takes the chunks that have waited; those that still must wait once more. It can free the op, when
 * the last of them was what it lacked. */
static void take_held(struct op *op)
{
    const pccl_zmq *zmq = op->source.zmq;
    struct packets *held = &collective_of(op)->held;
    struct packet *packet;
    uint32_t n = collective_of(op)->n_held;
    while (n-- > 0 && (packet = packets_take(held)) != NULL) {
        struct wire_header header;
        bool valid = wire_decode(&header, packet_header(zmq, packet));
        assert(valid);
        (void)valid;
        packet_unawait(packet);
        collective_of(op)->n_held--;
        op->ops->n_held--;
        op->kind->take(op, &header, &packet);
        packet_free(zmq, packet);
    }
}

void progressive_command(struct op *op, const pccl_command *command)
{
    struct collective *collective = collective_of(op);
    if (command->kind != PCCL_READY || !note_ready(collective, command))
        return;
    collective_request_turns(collective);
    if (collective->unready == 0 && op->started
        && collective_ring(collective, 0)->place.members == 1) {
        collective_conclude_alone(collective);
        op_complete(op);
        return;
    }
    take_held(op);
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
