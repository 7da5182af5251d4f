/* progressive.h - an all-reduce whose memory is filled, and read, while it runs (pccl_core.h,
 * PROGRESSIVE COLLECTIVES). */
#ifndef PCCL_PROGRESSIVE_H
#define PCCL_PROGRESSIVE_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/collective.h"

/* Whether send holds our contribution of these elements. */
bool progressive_is_ready(const struct collective *collective, uint64_t offset, uint64_t length);

/* Holds a chunk until send holds our contribution. */
void progressive_hold(struct collective *collective, struct packet **packet);

/* For struct op_kind: READY. */
void progressive_command(struct op *op, const pccl_command *command);

/* Call when these elements of recv hold the result: emits WRITTEN for each window that is complete
 * now. */
void progressive_notify(struct collective *collective, uint64_t offset, uint64_t length);

#endif
