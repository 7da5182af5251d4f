/* collective.c - see collective.h.
 *
 * Two sets of blocks record progress: `given` has the blocks of send that were sent as own chunks
 * or added to partial results, `written` the blocks of recv that hold the result. A collective that
 * does not reduce gives nothing: its chunks are final from the start. Both sets are indexed like
 * the buffers: a buffer of one slice has the blocks of one slice.
 *
 * Where recv holds what ABORT must restore, the old bytes go into an undo buffer before they are
 * overwritten. */
#include "engine/collective.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/bitmap.h"

static const struct shape shapes[] = {
    [PCCL_ALL_REDUCE] = {.reduces = true},
    [PCCL_REDUCE_SCATTER] = {.reduces = true, .scatters = true},
    [PCCL_ALL_GATHER] = {.gathers = true},
    [PCCL_BROADCAST] = {.rooted = true},
    [PCCL_REDUCE] = {.reduces = true, .rooted = true},
};

bool collective_is_complete(const struct collective *collective)
{
    return collective->op.started && collective->done == collective->wanted
        && collective->unready == 0;
}

/* ---- where things lie ---- */

void collective_skip(struct ring *ring)
{
    const struct parts *parts = &collective_of(op_of(&ring->flow))->parts;
    while (ring->cursor < ring->end) {
        const struct part *part = part_at(parts, ring->cursor);
        if (parts_reach(parts, ring->cursor) > 0)
            return;
        ring->cursor -= ring->cursor % parts->span;
        ring->cursor += part->begin + aligned_blocks(part->count) * PCCL_ALIGNMENT;
    }
}

uint64_t collective_element_bytes(const struct collective *collective, const struct part *part,
                                  uint64_t n)
{
    if (collective->format == PCCL_UNQUANTIZED)
        return n * part->width;
    return pccl_quantized_size(collective->format, part->dtype, n);
}

uint64_t collective_payload_bytes(const struct collective *collective, uint64_t offset,
                                  uint64_t length)
{
    return collective_element_bytes(collective, part_at(&collective->parts, offset),
                                    parts_elements(&collective->parts, offset, length));
}

/* ---- quantizing ---- */

void collective_quantize(const struct collective *collective, const struct part *part,
                         uint64_t offset, const void *values, uint64_t n, unsigned char *to,
                         uint32_t times, bool added)
{
    const unsigned char *from = values;
    float value[STRIP], read[STRIP], *error;
    uint64_t at, i, m;
    int status = pccl_quantize(collective->format, part->dtype, to, values, (size_t)n);
    assert(status == PCCL_OK);
    error = part->error == NULL ? NULL : part->error + (offset - part->begin);
    for (at = 0; error != NULL && at < n; at += m) {
        m = n - at < STRIP ? n - at : STRIP;
        memcpy(value, from + at * sizeof *value, (size_t)m * sizeof *value);   /* not aligned */
        status |= pccl_dequantize(collective->format, part->dtype, read, to, (size_t)m);
        for (i = 0; i < m; i++) {
            float lost = (float)times * (value[i] - read[i]);
            lost += added ? error[at + i] : 0.0f;
            error[at + i] = lost - lost == 0.0f ? lost : 0.0f;
        }
        to += pccl_quantized_size(collective->format, part->dtype, m);
    }
    assert(status == PCCL_OK);
    (void)status;
}

/* ---- what is done ---- */

void collective_count_given(struct collective *collective, uint64_t offset, uint64_t length)
{
    bitmap_set(collective->given_set, offset / PCCL_ALIGNMENT, aligned_blocks(offset + length));
    collective->done += parts_elements(&collective->parts, offset, length);
}

static void count_written(struct collective *collective, uint64_t offset, uint64_t length)
{
    uint64_t from, to;
    parts_written(&collective->parts, offset, length, &from, &to);
    bitmap_set(collective->written_set, from, to);
    collective->done += parts_elements(&collective->parts, offset, length);
}

/* Saves what recv holds where a chunk is to be stored: 0 or PCCL_ENOMEM. */
static int save(struct collective *collective, uint64_t offset, uint64_t length)
{
    struct op *op = &collective->op;
    uint64_t at = offset;
    struct stretch stretch;
    while (parts_next(&collective->parts, &at, offset + length, &stretch)) {
        if (!stretch.part->overwrites)
            continue;
        if (collective->undo.memory == NULL)
            op->reversible = undo_open(&collective->undo, collective->parts.undo_bytes,
                                       &op->ops->spare);
        if (!op->reversible)
            return PCCL_ENOMEM;
        parts_save(&collective->parts, &stretch, &collective->undo);
    }
    return PCCL_OK;
}

int collective_overwrite(struct collective *collective, uint64_t offset, uint64_t length)
{
    int status = save(collective, offset, length);
    if (status == PCCL_OK)
        count_written(collective, offset, length);
    return status;
}

void collective_note_sent(struct collective *collective, uint64_t offset, uint64_t length)
{
    uint64_t at = offset;
    struct stretch stretch;
    if (collective->shape.reduces) {
        collective_count_given(collective, offset, length);
        return;
    }
    while (parts_next(&collective->parts, &at, offset + length, &stretch))
        if (stretch.recv != stretch.send)
            memcpy(stretch.recv, stretch.send, stretch.bytes);
    count_written(collective, offset, length);
}

void collective_conclude_alone(struct collective *collective)
{
    if (collective->unready == 0)
        parts_copy(&collective->parts);
}

void collective_request_turns(const struct collective *collective)
{
    const struct op *op = &collective->op;
    uint32_t i;
    for (i = 0; i < op->n_flows; i++)
        if (collective_ring(collective, i)->cursor < collective_ring(collective, i)->end)
            flow_request_turn(op->flows[i]);
}

/* ---- register ---- */

/* Stores the members of a REGISTER except its parts; false if they are invalid. */
static bool take_shape(struct collective *collective, const pccl_command *command)
{
    const struct shape *shape = &collective->shape;
    if (command->collective == 0 || command->collective >= sizeof shapes / sizeof shapes[0])
        return false;
    collective->shape = shapes[command->collective];
    collective->redop = (int)command->redop;
    collective->format = (int)command->format;
    collective->members = shape->scatters || shape->gathers ? command->members : 0;
    collective->parts.n = command->n_parts;
    collective->parts.send_slices = shape->scatters ? command->members : 1;
    collective->parts.recv_slices = shape->gathers ? command->members : 1;
    if (command->format != PCCL_UNQUANTIZED
        && (!shape->reduces || command->redop == PCCL_PROD || command->format > PCCL_ZERO_POINT_16))
        return false;
    if (command->recv_rows != NULL && !shape->gathers)
        return false;
    collective->window = command->window;
    if (command->window > 0
        && (command->collective != PCCL_ALL_REDUCE || command->window % PCCL_ALIGNMENT != 0))
        return false;
    return collective->parts.send_slices > 0 && collective->parts.recv_slices > 0
        && command->members <= PCCL_PEERS_MAX && command->redop <= PCCL_MIN
        && command->n_parts <= PCCL_PARTS_MAX;
}

void collective_enter(struct op *op, const pccl_command *command)
{
    struct collective *collective = collective_of(op);
    struct parts *parts = &collective->parts;
    size_t given, written, ready;
    const char *why;
    if (!take_shape(collective, command)) {
        op_fail(op, PCCL_EINVAL, "unknown collective or operation, or a number out of range");
        return;
    }
    parts->part = calloc(command->n_parts + (size_t)1, sizeof *parts->part);
    if (parts->part == NULL) {
        op_fail(op, PCCL_ENOMEM, "no memory for %lu arrays", (unsigned long)command->n_parts);
        return;
    }
    if (command->recv_rows != NULL) {
        int status = parts_divide(parts, command->recv_rows);
        if (status != PCCL_OK) {
            op_fail(op, status, "too many rows, or no memory to count them");
            return;
        }
    }
    why = parts_enter(parts, &collective->shape, command);
    if (why != NULL) {
        op_fail(op, PCCL_EINVAL, "%s", why);
        return;
    }
    given = bitmap_words(aligned_blocks(parts->span * parts->send_slices));
    written = bitmap_words(aligned_blocks(parts->span * parts->recv_slices));
    ready = collective->window > 0 ? given : 0;
    collective->given_set = calloc(given + written + ready + 1, sizeof(uint64_t));
    if (collective->given_set == NULL) {
        op_fail(op, PCCL_ENOMEM, "no memory to track %llu elements",
                (unsigned long long)parts->total);
        return;
    }
    collective->written_set = collective->given_set + given;
    collective->ready_set = collective->written_set + written;
    collective->unready = collective->window > 0 ? aligned_blocks(parts->span) : 0;
}

/* ---- the end ---- */

void collective_end(struct op *op, bool keep)
{
    struct collective *collective = collective_of(op);
    if (!keep && op->reversible)
        parts_restore(&collective->parts, &collective->undo, collective->written_set);
    op->reversible = false;
    undo_close(&collective->undo, &op->ops->spare);
}

void collective_progress(const struct op *op, uint64_t *done, uint64_t *wanted)
{
    const struct collective *collective = (const struct collective *)op;
    *done = collective->done;
    *wanted = collective->wanted;
}

struct piece *collective_new_piece(struct collective *collective, uint64_t offset,
                                   uint32_t members)
{
    struct piece *piece = calloc(1, sizeof *piece + members * sizeof piece->from[0]);
    struct piece **last = &collective->pieces;
    if (piece == NULL)
        return NULL;
    piece->offset = offset;
    piece->members = members;
    while (*last != NULL)
        last = &(*last)->next;
    return *last = piece;
}

void collective_free_piece(struct collective *collective, struct piece *piece)
{
    struct piece **at = &collective->pieces;
    uint32_t i;
    while (*at != piece)
        at = &(*at)->next;
    *at = piece->next;
    for (i = 0; i < piece->members; i++)
        if (piece->from[i] != NULL)
            packet_free(collective->op.source.zmq, piece->from[i]);
    free(piece);
}

void collective_drop(struct op *op, struct flow *flow)
{
    struct collective *collective = collective_of(op);
    struct packet *packet;
    if (flow != NULL) {
        while ((packet = packets_take(&((struct ring *)flow)->finals)) != NULL)
            packet_free(op->source.zmq, packet);
        return;
    }
    while (collective->pieces != NULL)
        collective_free_piece(collective, collective->pieces);
    packets_drop(op->source.zmq, &collective->unread, NULL);
    packets_drop(op->source.zmq, &collective->early, NULL);
    packets_drop(op->source.zmq, &collective->held, NULL);
    op->ops->n_held -= collective->n_held;
    collective->n_held = 0;
}

/* Before START a lost stream does not fail the op: START may name other streams than EAGER, and
 * checks the streams that it needs. */
void collective_lose(struct op *op, const struct stream *stream)
{
    if (op->started)
        op_fail_stream(op, stream->number, stream->text);
}

void collective_free(struct op *op)
{
    struct collective *collective = collective_of(op);
    assert(collective->early.head == NULL && collective->held.head == NULL);
    assert(collective->unread.head == NULL && collective->pieces == NULL);
    undo_close(&collective->undo, &op->ops->spare);
    free(collective->given_set);
    free(collective->parts.rows_at);
    free(collective->parts.part);
}
