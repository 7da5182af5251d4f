/* stash.c - see stash.h.
 *
 * A sender may have sent STASH_MAX bytes before START, on each of its streams. Those of tags that
 * we have not joined are therefore at most as many. For a tag that we have joined, the sender may
 * have heard of the START before us, and then have begun another call: so its bytes count by
 * themselves, twice because earlier calls for the tag may have been taken back. */
#include "engine/stash.h"

#include <stdlib.h>

struct batch {
    struct batch *next;
    uint64_t run, tag, call;
    uint8_t ring;
    bool awaited;
    uint64_t cost;
    struct packets packets;
};

uint64_t stash_cost(uint64_t bytes)
{
    return bytes + STASH_COST;
}

static void free_batch(const pccl_zmq *zmq, struct batch *batch)
{
    struct packet *packet;
    while ((packet = packets_take(&batch->packets)) != NULL)
        packet_free(zmq, packet);
    free(batch);
}

void stash_free(struct stash *stash, const pccl_zmq *zmq)
{
    struct batch *batch;
    while ((batch = stash->first) != NULL) {
        stash->first = batch->next;
        free_batch(zmq, batch);
    }
}

void stash_expect(struct stash *stash, const pccl_zmq *zmq, uint64_t nonce)
{
    if (stash->nonce == nonce)
        return;
    stash_free(stash, zmq);
    stash->nonce = nonce;
    stash->torn = false;
}

void stash_await(struct stash *stash, uint64_t run, uint64_t tag, bool awaited)
{
    struct batch *batch;
    for (batch = stash->first; batch != NULL; batch = batch->next)
        if (batch->run == run && batch->tag == tag)
            batch->awaited = awaited;
}

/* Whether a batch is of the run, the tag and the ring in a header. */
static bool concerns(const struct batch *batch, const struct wire_header *header)
{
    return batch->run == header->run && batch->tag == header->tag && batch->ring == header->ring;
}

static struct batch *find(const struct stash *stash, const struct wire_header *header)
{
    struct batch *batch = stash->first;
    while (batch != NULL && (!concerns(batch, header) || batch->call != header->seq))
        batch = batch->next;
    return batch;
}

/* What is held already of that with which a chunk shares its limit. */
static uint64_t held(const struct stash *stash, const struct wire_header *header, bool awaited)
{
    const struct batch *batch;
    uint64_t cost = 0;
    for (batch = stash->first; batch != NULL; batch = batch->next)
        if (awaited ? concerns(batch, header) : batch->ring == header->ring && !batch->awaited)
            cost += batch->cost;
    return cost;
}

static struct batch *new_batch(struct stash *stash, const struct wire_header *header, bool awaited)
{
    struct batch *batch = calloc(1, sizeof *batch);
    if (batch == NULL)
        return NULL;
    batch->run = header->run;
    batch->tag = header->tag;
    batch->call = header->seq;
    batch->ring = header->ring;
    batch->awaited = awaited;
    batch->next = stash->first;
    stash->first = batch;
    return batch;
}

bool stash_hold(struct stash *stash, const struct wire_header *header, struct packet **packet,
                bool awaited)
{
    uint64_t cost = stash_cost((*packet)->bytes);
    struct packet *fresh;
    struct batch *batch;
    if (header->nonce != stash->nonce || header->ring >= PCCL_RINGS_MAX
        || held(stash, header, awaited) + cost > (awaited ? 2 : 1) * (uint64_t)STASH_MAX)
        return false;
    batch = find(stash, header);
    if (batch == NULL)
        batch = new_batch(stash, header, awaited);
    fresh = batch != NULL ? packet_new() : NULL;
    if (fresh == NULL) {
        stash->torn = true;
        return false;
    }
    packets_append(&batch->packets, *packet);
    batch->cost += cost;
    *packet = fresh;
    return true;
}

struct packet *stash_take(struct stash *stash, const struct wire_header *call)
{
    struct batch *batch = call->nonce == stash->nonce ? find(stash, call) : NULL;
    return batch != NULL ? packets_take(&batch->packets) : NULL;
}

void stash_forget(struct stash *stash, const pccl_zmq *zmq, const struct wire_header *call)
{
    struct batch **at = &stash->first, *batch;
    while ((batch = *at) != NULL) {
        if (!concerns(batch, call) || batch->call > call->seq) {
            at = &batch->next;
            continue;
        }
        *at = batch->next;
        free_batch(zmq, batch);
    }
}
