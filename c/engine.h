/* engine.h - what the files of the engine share. Not part of the API.
 *
 * DESIGN
 *
 * engine.c     the loop, orders, events, the PULL socket
 * stream.c     streams: sockets, monitors, queues, what is sent when
 * op.c         the life of an op: registered, started, complete, ended, settled
 * allreduce.c  what ALL_REDUCE does with a chunk
 * transfer.c   SERVE and FETCH
 * packet.c     messages of one or two frames
 *
 * Everything runs in the thread that is in pccl_engine_run(), but for release(), which libzmq calls from its own
 * threads and which touches nothing but an atomic counter.
 *
 * Two things may not happen in the middle of a pass, as callers up the stack hold pointers: a stream is only
 * marked lost where that is noticed, and buried at the end of the pass; an op that fails keeps its memory
 * until its ABORT. An op is freed in ops_settle(), op_order_end() and op_complete() only.
 */
#ifndef PCCL_ENGINE_H
#define PCCL_ENGINE_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "pccl.h"
#include "ring.h"
#include "wire.h"
#include "zmqdefs.h"

#if defined __GNUC__
#define PRINTF_LIKE(format, first) __attribute__((format(printf, format, first)))
#else
#define PRINTF_LIKE(format, first)

/* Sends an event to the caller. Cannot fail, but for memory: then the engine stops. */
void engine_emit(pccl_engine *engine, const pccl_event *event);

#endif
