/* gradual.h - an all-reduce whose memory is filled, and read, while it runs (pccl.h, GRADUALLY). */
#ifndef PCCL_GRADUAL_H
#define PCCL_GRADUAL_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/collective.h"

/* Whether our contribution of these elements is there. */
bool gradual_is_ready(const struct collective *collective, uint64_t offset, uint64_t length);

/* READY: whether it was possible; else the op has failed. */
bool gradual_allow(struct collective *collective, const pccl_order *order);

/* These elements of recv hold the result: tells of each step that is complete by that. */
void gradual_tell(struct collective *collective, uint64_t offset, uint64_t length);

#endif
