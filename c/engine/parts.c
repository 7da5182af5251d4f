/* parts.c - see parts.h. */
#include "engine/parts.h"

#include <stdlib.h>
#include <string.h>

#include "engine/bitmap.h"

/* ---- where things lie ---- */

static uint64_t slice_offset(const struct parts *parts, uint64_t offset)
{
    return offset % parts->span;
}

const struct part *part_at(const struct parts *parts, uint64_t offset)
{
    uint64_t inside = slice_offset(parts, offset);
    uint32_t low = 0, high = parts->n;
    while (high - low > 1) {         /* parts[low].begin <= inside < parts[high].begin */
        uint32_t middle = low + (high - low) / 2;
        if (parts->part[middle].begin <= inside)
            low = middle;
        else
            high = middle;
    }
    return &parts->part[low];
}

/* The number of elements in the slice of a rank. */
static uint64_t slice_count(const struct parts *parts, const struct part *part, uint64_t rank)
{
    if (parts->rows_at == NULL)
        return part->count;
    return (parts->rows_at[rank + 1] - parts->rows_at[rank]) * part->row;
}

uint64_t parts_reach(const struct parts *parts, uint64_t offset)
{
    const struct part *part = part_at(parts, offset);
    uint64_t inside = slice_offset(parts, offset), end = part->limit;
    if (parts->rows_at != NULL)
        end = part->begin + slice_count(parts, part, offset / parts->span);
    return inside < end ? end - inside : 0;
}

/* Bytes from the beginning of a buffer of `slices` slices to the element at an offset. */
static size_t bytes_to(const struct parts *parts, const struct part *part, uint32_t slices,
                       uint64_t offset)
{
    uint64_t element = slice_offset(parts, offset) - part->begin;
    if (slices > 1 && parts->rows_at != NULL)
        element += parts->rows_at[offset / parts->span] * part->row;
    else if (slices > 1)
        element += offset / parts->span * part->count;
    return (size_t)element * part->width;
}

const unsigned char *part_send(const struct parts *parts, const struct part *part,
                               uint64_t offset)
{
    return part->send + bytes_to(parts, part, parts->send_slices, offset);
}

unsigned char *part_recv(const struct parts *parts, const struct part *part, uint64_t offset)
{
    return part->recv + bytes_to(parts, part, parts->recv_slices, offset);
}

bool parts_next(const struct parts *parts, uint64_t *offset, uint64_t end,
                struct stretch *stretch)
{
    const struct part *part;
    uint64_t begin = *offset, stop;
    if (begin >= end)
        return false;
    part = part_at(parts, begin);
    stop = begin - slice_offset(parts, begin) + part->begin
        + slice_count(parts, part, begin / parts->span);
    stretch->part = part;
    stretch->offset = begin;
    stretch->length = (stop < end ? stop : end) - begin;
    stretch->send = part_send(parts, part, begin);
    stretch->recv = part_recv(parts, part, begin);
    stretch->bytes = (size_t)stretch->length * part->width;
    *offset = begin + aligned_blocks(stretch->length) * PCCL_ALIGNMENT;
    return true;
}

bool parts_whole(const struct parts *parts, uint64_t offset, uint64_t length,
                 struct stretch *whole)
{
    uint64_t at = offset;
    return parts_next(parts, &at, offset + length, whole) && at >= offset + length;
}

uint64_t parts_elements(const struct parts *parts, uint64_t offset, uint64_t length)
{
    uint64_t at = offset, elements = 0;
    struct stretch stretch;
    while (parts_next(parts, &at, offset + length, &stretch))
        elements += stretch.length;
    return elements;
}

void parts_written(const struct parts *parts, uint64_t offset, uint64_t length, uint64_t *from,
                   uint64_t *to)
{
    uint64_t begin = parts->recv_slices > 1 ? offset : slice_offset(parts, offset);
    *from = begin / PCCL_ALIGNMENT;
    *to = aligned_blocks(begin + length);
}

/* ---- the arrays of a command ---- */

/* The number of slices in the larger buffers. */
static uint32_t most_slices(const struct parts *parts)
{
    return parts->send_slices > parts->recv_slices ? parts->send_slices : parts->recv_slices;
}

/* Whether `bytes` bytes at `part` are exactly one slice of a buffer (sets *inside), or lie outside
 * the buffer. */
static bool is_slice_or_apart(const unsigned char *buffer, uint32_t slices,
                              const unsigned char *part, size_t bytes, bool *inside)
{
    const unsigned char *end = buffer + slices * bytes;
    *inside = buffer <= part && part < end && (size_t)(part - buffer) % bytes == 0;
    return *inside || part >= end || part + bytes <= buffer;
}

/* Why the buffers of a part are invalid, or NULL. Notes whether ABORT must restore recv. */
static const char *check_buffers(const struct parts *parts, struct part *part, bool gathers)
{
    size_t bytes = (size_t)part->count * part->width;
    bool apart, inside;
    if (part->count == 0)
        return NULL;
    if (part->recv == NULL || (part->send == NULL && parts->rows_at == NULL))
        return "no buffer";
    if (parts->rows_at != NULL)      /* checked at START, which gives our rank */
        return NULL;
    if (gathers)
        apart = is_slice_or_apart(part->recv, parts->recv_slices, part->send, bytes, &inside);
    else
        apart = is_slice_or_apart(part->send, parts->send_slices, part->recv, bytes, &inside);
    part->overwrites = inside && !gathers;
    return apart ? NULL : "the buffers overlap in part";
}

int parts_divide(struct parts *parts, const uint64_t *rows)
{
    uint32_t i;
    parts->rows_at = calloc(parts->recv_slices + (size_t)1, sizeof *parts->rows_at);
    if (parts->rows_at == NULL)
        return PCCL_ENOMEM;
    for (i = 0; i < parts->recv_slices; i++) {
        if (rows[i] > SIZE_MAX / 4 - parts->rows_at[i])
            return PCCL_EINVAL;
        parts->rows_at[i + 1] = parts->rows_at[i] + rows[i];
    }
    return PCCL_OK;
}

/* Multiplies `*elements` by the rows of the longest slice. False if the product is too large. */
static bool lengthen(const struct parts *parts, uint64_t *elements)
{
    uint64_t most = 0;
    uint32_t i;
    for (i = 0; i < parts->recv_slices; i++) {
        uint64_t rows = parts->rows_at[i + 1] - parts->rows_at[i];
        most = rows > most ? rows : most;
    }
    if (most > 0 && *elements > SIZE_MAX / 4 / most)
        return false;
    *elements *= most;
    return true;
}

static bool is_small(const struct part *part)
{
    return part->count <= SMALL_BYTES / part->width;
}

/* Sets where chunks must end: with their part, or, if chunks may span `several` parts, with the
 * last one of adjacent small parts of the same element type. */
static void set_limits(struct parts *parts, bool several)
{
    uint32_t i;
    for (i = parts->n; i-- > 0;) {
        struct part *part = &parts->part[i];
        const struct part *next = part + 1;
        bool goes_on = several && i + 1 < parts->n && next->dtype == part->dtype
            && is_small(part) && is_small(next) && next->limit > next->begin;
        part->limit = goes_on ? next->limit : part->begin + part->count;
    }
}

const char *parts_enter(struct parts *parts, const struct shape *shape, const pccl_command *command)
{
    uint32_t slices = most_slices(parts), i;
    size_t bytes = 0;
    for (i = 0; i < command->n_parts; i++) {
        const pccl_part *given = &command->parts[i];
        struct part *part = &parts->part[i];
        const char *why;
        part->dtype = (int)given->dtype;
        part->width = pccl_dtype_size(part->dtype);
        if (part->width == 0)
            return "unknown element type";
        if (command->format != PCCL_UNQUANTIZED
            && pccl_quantized_size((int)command->format, part->dtype, 1) == 0)
            return "only floats can be quantized";
        if (given->error != NULL
            && (command->format == PCCL_UNQUANTIZED || part->dtype != PCCL_F32
                || command->redop > PCCL_AVG || !shape->reduces || slices > 1 || shape->rooted))
            return "only a quantized sum or average of fp32 for all has errors";
        part->count = given->count;
        part->row = given->count;
        if ((parts->rows_at != NULL && !lengthen(parts, &part->count))
            || part->count > (SIZE_MAX / 2 / slices - bytes) / part->width)
            return "too many elements";
        part->send = given->send;
        part->recv = given->recv;
        part->error = given->error;
        if (shape->rooted && !shape->reduces)
            part->send = part->recv;
        part->begin = parts->span;
        bytes += (size_t)part->count * part->width;
        parts->total += part->count;
        parts->received += parts->rows_at != NULL
            ? parts->rows_at[parts->recv_slices] * part->row : part->count * parts->recv_slices;
        parts->span += aligned_blocks(part->count) * PCCL_ALIGNMENT;
        why = check_buffers(parts, part, shape->gathers);
        if (why != NULL)
            return why;
        if (part->overwrites) {
            part->undo_at = parts->undo_bytes;
            parts->undo_bytes += (size_t)part->count * part->width;
        }
    }
    set_limits(parts, command->format == PCCL_UNQUANTIZED && slices == 1);
    return NULL;
}

/* Whether the smaller buffer is that rank's slice of the larger one, or lies outside it. */
static bool is_own_slice(const struct parts *parts, const struct part *part, uint32_t rank)
{
    bool scatters = parts->send_slices > 1;
    const unsigned char *buffer = scatters ? part->send : part->recv;
    const unsigned char *slice = scatters ? part->recv : part->send;
    size_t bytes = (size_t)part->count * part->width;
    return slice == buffer + rank * bytes || slice < buffer
        || slice >= buffer + most_slices(parts) * bytes;
}

/* The same for slices that differ: whether send is the slice of that rank, or lies outside recv. */
static bool is_own_of_unlike(const struct parts *parts, const struct part *part, uint32_t rank)
{
    size_t row = (size_t)part->row * part->width;
    size_t own = (size_t)slice_count(parts, part, rank) * part->width;
    const unsigned char *end = part->recv + (size_t)parts->rows_at[parts->recv_slices] * row;
    if (own == 0)
        return true;
    return part->send == part->recv + (size_t)parts->rows_at[rank] * row
        || (part->send != NULL && (part->send + own <= part->recv || part->send >= end));
}

bool parts_lie_at(const struct parts *parts, uint32_t rank)
{
    uint32_t i;
    for (i = 0; i < parts->n; i++)
        if (parts->rows_at != NULL ? !is_own_of_unlike(parts, &parts->part[i], rank)
                                   : !is_own_slice(parts, &parts->part[i], rank))
            return false;
    return true;
}

/* ---- contents ---- */

void parts_gather(const struct parts *parts, uint64_t offset, uint64_t length,
                  unsigned char *out)
{
    uint64_t at = offset;
    struct stretch stretch;
    for (; parts_next(parts, &at, offset + length, &stretch); out += stretch.bytes)
        memcpy(out, stretch.send, stretch.bytes);
}

void parts_scatter(const struct parts *parts, uint64_t offset, uint64_t length,
                   const unsigned char *in)
{
    uint64_t at = offset;
    struct stretch stretch;
    for (; parts_next(parts, &at, offset + length, &stretch); in += stretch.bytes)
        memcpy(stretch.recv, in, stretch.bytes);
}

void parts_copy(const struct parts *parts)
{
    uint32_t i;
    for (i = 0; i < parts->n; i++) {
        const struct part *part = &parts->part[i];
        if (part->send != part->recv && part->count > 0)
            memcpy(part->recv, part->send, (size_t)part->count * part->width);
    }
}

unsigned char *part_saved(const struct parts *parts, const struct part *part,
                          const struct undo *undo, uint64_t offset)
{
    return undo->memory + part->undo_at + bytes_to(parts, part, 1, offset);
}

void parts_save(const struct parts *parts, const struct stretch *stretch, struct undo *undo)
{
    memcpy(part_saved(parts, stretch->part, undo, stretch->offset), stretch->recv,
           stretch->bytes);
}

static void restore_part(const struct part *part, const struct undo *undo, const uint64_t *written)
{
    uint64_t first = part->begin / PCCL_ALIGNMENT, end = first + aligned_blocks(part->count);
    uint64_t from = first, to;
    while (bitmap_run(written, &from, &to, end)) {
        uint64_t begin = (from - first) * PCCL_ALIGNMENT, stop = (to - first) * PCCL_ALIGNMENT;
        size_t at = (size_t)begin * part->width;
        if (to == end)
            stop = part->count;
        memcpy(part->recv + at, undo->memory + part->undo_at + at,
               (size_t)(stop - begin) * part->width);
        from = to;
    }
}

void parts_restore(const struct parts *parts, const struct undo *undo, const uint64_t *written)
{
    uint32_t i;
    for (i = 0; i < parts->n; i++)
        if (parts->part[i].overwrites)
            restore_part(&parts->part[i], undo, written);
}

/* ---- undo buffers ---- */

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
