/* start.h - START of a collective, and EAGER, by which it sends before all have agreed to start
 * (pccl_core.h, BEFORE START). For struct op_kind. */
#ifndef PCCL_START_H
#define PCCL_START_H

#include "engine/op.h"

void start_collective(struct op *op, const pccl_command *command);
void start_eagerly(struct op *op, const pccl_command *command);

#endif
