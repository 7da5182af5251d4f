/* unexpected.h - chunks whose senders have not heard of a START yet, held until ours says which of
 * their calls it is about (pccl_core.h, BEFORE START).
 *
 * START frees those of smaller calls for the tag, which were taken back; EXPECT those of an epoch
 * that is over. If START comes with other streams than EAGER, the op begins anew, and what it has
 * sent was void with the old ones; on the same streams it must say what EAGER has said, and the op
 * goes on where it is.
 *
 * On one stream, ops that have had no START may send 1 MiB, or 16 MiB over a long link. START gives
 * that credit back; the end of an op without START does not, because what it has sent may be held
 * until the epoch is over. So a receiver holds no more than 16 MiB of each ring for tags that it
 * has not registered, and drops what exceeds that. */
#ifndef PCCL_UNEXPECTED_H
#define PCCL_UNEXPECTED_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/packet.h"
#include "engine/wire.h"

enum {
    EAGER_MAX = 16 << 20,    /* bytes, as eager_cost() counts them */
    EAGER_COST = 4096        /* of a chunk besides its payload */
};

struct batch;                /* the chunks of one call of one neighbour */

struct unexpected {
    struct batch *first;
    uint64_t nonce;          /* of the epoch in force: no other chunk is held */
    bool torn;               /* a chunk was dropped for lack of memory */
};

/* What a chunk counts, at its sender and here. */
uint64_t eager_cost(uint64_t bytes);

/* An epoch is in force: chunks of any other are void. */
void unexpected_expect(struct unexpected *unexpected, const pccl_zmq *zmq, uint64_t nonce);

/* Whether a START for that tag is awaited: then its sender may have heard of it, and may send more
 * chunks of other calls before they start. */
void unexpected_await(struct unexpected *unexpected, uint64_t run, uint64_t tag, bool awaited);

/* Holds a chunk and leaves an empty packet, or says false: it is of another epoch, or more than an
 * honest sender sends. `awaited`: as above. */
bool unexpected_hold(struct unexpected *unexpected, const struct wire_header *header,
                     struct packet **packet,
                bool awaited);

/* Takes a chunk of that call out of it, or NULL. */
struct packet *unexpected_take(struct unexpected *unexpected, const struct wire_header *call);

/* Frees the chunks of that call, and of smaller ones with the same tag on the same ring: they were
 * taken back. */
void unexpected_forget(struct unexpected *unexpected, const pccl_zmq *zmq,
                       const struct wire_header *call);

/* Frees everything. */
void unexpected_free(struct unexpected *unexpected, const pccl_zmq *zmq);

#endif
