/* kinds.c - see kinds.h. A new kind of op is a new row. */
#include "engine/kinds.h"

#include "engine/chunk.h"
#include "engine/collective.h"
#include "engine/exchange.h"
#include "engine/fetch.h"
#include "engine/serve.h"

static const struct op_kind kinds[] = {
    [PCCL_COLLECTIVE] = {
        .message = WIRE_CHUNK,
        .bytes = sizeof(struct collective),
        .flow_bytes = sizeof(struct ring),
        .enter = collective_enter,
        .eager = collective_eager,
        .start = collective_start,
        .progress = collective_progress,
        .command = chunk_command,
        .take = chunk_take,
        .send = chunk_send,
        .drop = collective_drop,
        .lose = collective_lose,
        .end = collective_end,
        .free = collective_free,
    },
    [PCCL_SERVE] = {
        .message = WIRE_REQUEST,
        .bytes = sizeof(struct serve),
        .flow_bytes = sizeof(struct requester),
        .urgent = true,
        .rounds = true,
        .early_rounds = true,
        .endless = true,
        .enter = serve_enter,
        .start = serve_start,
        .command = serve_command,
        .take = serve_take,
        .send = serve_send,
        .drop = serve_drop,
        .lose = serve_lose,
    },
    [PCCL_FETCH] = {
        .message = WIRE_DATA,
        .bytes = sizeof(struct fetch),
        .flow_bytes = sizeof(struct holder),
        .urgent = true,
        .rounds = true,
        .enter = fetch_enter,
        .start = fetch_start,
        .progress = fetch_progress,
        .command = fetch_command,
        .take = fetch_take,
        .send = fetch_send,
        .lose = fetch_lose,
        .free = fetch_free,
    },
    [PCCL_EXCHANGE] = {
        .message = WIRE_ROW,
        .bytes = sizeof(struct exchange),
        .flow_bytes = sizeof(struct route),
        .obliging = true,
        .enter = exchange_enter,
        .start = exchange_start,
        .progress = exchange_progress,
        .take = exchange_take,
        .send = exchange_send,
        .drop = exchange_drop,
        .lose = exchange_lose,
        .free = exchange_free,
    },
};

const struct op_kind *op_kind_numbered(uint32_t number)
{
    const uint32_t n = sizeof kinds / sizeof kinds[0];
    return number > 0 && number < n ? &kinds[number] : NULL;
}

const struct op_kind *op_kind_taking(enum wire_kind message)
{
    static const enum pccl_op_kind taking[] = {
        [WIRE_CHUNK] = PCCL_COLLECTIVE, [WIRE_REQUEST] = PCCL_SERVE, [WIRE_DATA] = PCCL_FETCH,
        [WIRE_ROW] = PCCL_EXCHANGE};
    return &kinds[taking[message]];
}
