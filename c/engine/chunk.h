/* chunk.h - the chunks of a collective: sends our own, and checks, reduces or stores, and forwards
 * those of others (pccl_core.h, THE RING). */
#ifndef PCCL_CHUNK_H
#define PCCL_CHUNK_H

#include "engine/op.h"

/* For struct op_kind. */
void chunk_take(struct op *op, const struct wire_header *header, struct packet **packet);
enum turn chunk_send(struct flow *flow);

#endif
