/* unexpected.c - see unexpected.h.
 *
 * A sender may have sent EAGER_MAX bytes before START on each of its streams, so we hold at most
 * that many for tags that we have not registered. For a tag that we have registered, the sender may
 * have heard of the START before us and have begun another call. So the bytes of that tag have a
 * limit of their own, twice as high because earlier calls with the tag may have been aborted. */
#include "engine/unexpected.h"

#include <stdlib.h>

struct batch {
    struct batch *next;
    uint64_t run, tag, call;
    uint8_t ring;
    bool awaited;
    uint64_t cost;
    struct packets packets;
};

uint64_t eager_cost(uint64_t bytes)
{
    return bytes + EAGER_COST;
}

static void free_batch(const pccl_zmq *zmq, struct batch *batch)
{
    struct packet *packet;
    while ((packet = packets_take(&batch->packets)) != NULL)
        packet_free(zmq, packet);
    free(batch);
}

void unexpected_free(struct unexpected *unexpected, const pccl_zmq *zmq)
{
    struct batch *batch;
    while ((batch = unexpected->first) != NULL) {
        unexpected->first = batch->next;
        free_batch(zmq, batch);
    }
}

void unexpected_expect(struct unexpected *unexpected, const pccl_zmq *zmq, uint64_t nonce)
{
    if (unexpected->nonce == nonce)
        return;
    unexpected_free(unexpected, zmq);
    unexpected->nonce = nonce;
    unexpected->torn = false;
}

void unexpected_await(struct unexpected *unexpected, uint64_t run, uint64_t tag, bool awaited)
{
    struct batch *batch;
    for (batch = unexpected->first; batch != NULL; batch = batch->next)
        if (batch->run == run && batch->tag == tag)
            batch->awaited = awaited;
}

/* Whether a batch has the run, tag and ring of a header. */
static bool concerns(const struct batch *batch, const struct wire_header *header)
{
    return batch->run == header->run && batch->tag == header->tag && batch->ring == header->ring;
}

static struct batch *find(const struct unexpected *unexpected, const struct wire_header *header)
{
    struct batch *batch = unexpected->first;
    while (batch != NULL && (!concerns(batch, header) || batch->call != header->seq))
        batch = batch->next;
    return batch;
}

/* The cost of all held chunks that share their limit with a chunk. */
static uint64_t held(const struct unexpected *unexpected, const struct wire_header *header,
                     bool awaited)
{
    const struct batch *batch;
    uint64_t cost = 0;
    for (batch = unexpected->first; batch != NULL; batch = batch->next)
        if (awaited ? concerns(batch, header) : batch->ring == header->ring && !batch->awaited)
            cost += batch->cost;
    return cost;
}

static struct batch *new_batch(struct unexpected *unexpected, const struct wire_header *header,
                               bool awaited)
{
    struct batch *batch = calloc(1, sizeof *batch);
    if (batch == NULL)
        return NULL;
    batch->run = header->run;
    batch->tag = header->tag;
    batch->call = header->seq;
    batch->ring = header->ring;
    batch->awaited = awaited;
    batch->next = unexpected->first;
    unexpected->first = batch;
    return batch;
}

bool unexpected_hold(struct unexpected *unexpected, const struct wire_header *header,
                     struct packet **packet, bool awaited)
{
    uint64_t cost = eager_cost((*packet)->bytes);
    struct packet *fresh;
    struct batch *batch;
    if (header->nonce != unexpected->nonce || header->ring >= PCCL_RINGS_MAX
        || held(unexpected, header, awaited) + cost > (awaited ? 2 : 1) * (uint64_t)EAGER_MAX)
        return false;
    batch = find(unexpected, header);
    if (batch == NULL)
        batch = new_batch(unexpected, header, awaited);
    fresh = batch != NULL ? packet_new() : NULL;
    if (fresh == NULL) {
        unexpected->torn = true;
        return false;
    }
    packets_append(&batch->packets, *packet);
    batch->cost += cost;
    *packet = fresh;
    return true;
}

struct packet *unexpected_take(struct unexpected *unexpected, const struct wire_header *call)
{
    struct batch *batch = call->nonce == unexpected->nonce ? find(unexpected, call) : NULL;
    return batch != NULL ? packets_take(&batch->packets) : NULL;
}

void unexpected_forget(struct unexpected *unexpected, const pccl_zmq *zmq,
                       const struct wire_header *call)
{
    struct batch **at = &unexpected->first, *batch;
    while ((batch = *at) != NULL) {
        if (!concerns(batch, call) || batch->call > call->seq) {
            at = &batch->next;
            continue;
        }
        *at = batch->next;
        free_batch(zmq, batch);
    }
}
