/* start.h - the commands START and EAGER of a collective, for struct op_kind. EAGER sends before
 * all members have agreed to start (pccl_core.h, BEFORE START). */
#ifndef PCCL_START_H
#define PCCL_START_H

#include "engine/op.h"

void start_collective(struct op *op, const pccl_command *command);
void start_eagerly(struct op *op, const pccl_command *command);

#endif
