/* kinds.h - the kinds of ops that there are. */
#ifndef PCCL_KINDS_H
#define PCCL_KINDS_H

#include "engine/op.h"

/* The kind of that number (a pccl_op_kind), or NULL. */
const struct op_kind *op_kind_numbered(uint32_t number);

/* The kind that takes such messages. */
const struct op_kind *op_kind_taking(enum wire_kind message);

#endif
