/* oneshot.h - the all-reduce of two members without a ring: each sends the other one all that it
 * contributes, and both reduce both contributions in the order of their positions (pccl_core.h,
 * ONE-SHOT). As many bytes as around a ring, in one step. */
#ifndef PCCL_ONESHOT_H
#define PCCL_ONESHOT_H

#include "engine/collective.h"

enum { ONESHOT_STEP = UINT16_MAX };    /* of the chunks, where rings count their steps */

extern const struct algorithm oneshot_algorithm;

#endif
