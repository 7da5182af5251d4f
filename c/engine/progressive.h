/* progressive.h - an all-reduce whose memory is filled, and read, while it runs (pccl_core.h,
 * PROGRESSIVELY). */
#ifndef PCCL_PROGRESSIVE_H
#define PCCL_PROGRESSIVE_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/collective.h"

/* Whether our contribution of these elements is there. */
bool progressive_is_ready(const struct collective *collective, uint64_t offset, uint64_t length);

/* Keeps a chunk until our contribution is there. */
void progressive_hold(struct collective *collective, struct packet **packet);

/* For struct op_kind: READY. */
void progressive_command(struct op *op, const pccl_command *command);

/* These elements of recv hold the result: tells of each window that is complete by that. */
void progressive_notify(struct collective *collective, uint64_t offset, uint64_t length);

#endif
