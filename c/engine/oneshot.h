/* oneshot.h - the all-reduce of two members without a ring (pccl_core.h, ONE-SHOT). */
#ifndef PCCL_ONESHOT_H
#define PCCL_ONESHOT_H

#include "engine/collective.h"

enum { ONESHOT_STEP = UINT16_MAX };    /* the step of all its chunks; a ring has none so large */

extern const struct algorithm oneshot_algorithm;

#endif
