/* unexpected.h - chunks that were sent before START. The receiver holds them until its own START
 * names the sender's call, which is the sender's op number (pccl_core.h, BEFORE START).
 *
 * START frees the chunks of smaller calls with the tag, which their sender has aborted. EXPECT
 * frees the chunks of an epoch that is over. If START names other streams than EAGER, the op begins
 * anew, and its chunks on the old streams are void. On the same streams START must repeat what
 * EAGER said, and the op continues.
 *
 * The ops without START may send 1 MiB on one stream, or 16 MiB if the link is long. START returns
 * that credit. The end of an op without START does not, because the receiver may hold its chunks
 * until the epoch is over. So a receiver holds at most 16 MiB of each ring for tags that it has not
 * registered, and drops chunks beyond that. */
#ifndef PCCL_UNEXPECTED_H
#define PCCL_UNEXPECTED_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/packet.h"
#include "engine/wire.h"

enum {
    EAGER_MAX = 16 << 20,    /* bytes, as eager_cost() counts them */
    EAGER_COST = 4096        /* bytes that each chunk counts besides its payload */
};

struct batch;                /* the chunks of one call of one neighbor */

struct unexpected {
    struct batch *first;
    uint64_t nonce;          /* of the current epoch: chunks of other epochs are not held */
    bool torn;               /* a chunk was dropped for lack of memory */
};

/* The bytes that a chunk counts, at its sender and at its receiver. */
uint64_t eager_cost(uint64_t bytes);

/* Sets the current epoch: frees the chunks of any other. */
void unexpected_expect(struct unexpected *unexpected, const pccl_zmq *zmq, uint64_t nonce);

/* Sets whether a START for that tag is awaited. If so, the senders may have heard of it already,
 * and may have sent chunks of further calls. */
void unexpected_await(struct unexpected *unexpected, uint64_t run, uint64_t tag, bool awaited);

/* Holds a chunk and leaves an empty packet. Returns false if the chunk is of another epoch, or
 * exceeds what an honest sender sends. `awaited`: as in unexpected_await(). */
bool unexpected_hold(struct unexpected *unexpected, const struct wire_header *header,
                     struct packet **packet, bool awaited);

/* Takes a chunk of that call; NULL: there is none. */
struct packet *unexpected_take(struct unexpected *unexpected, const struct wire_header *call);

/* Frees the chunks of that call, and of smaller calls with the same tag on the same ring. */
void unexpected_forget(struct unexpected *unexpected, const pccl_zmq *zmq,
                       const struct wire_header *call);

/* Frees everything. */
void unexpected_free(struct unexpected *unexpected, const pccl_zmq *zmq);

#endif
