/* events.h - what the engine tells its caller, and the state that every module shares for that: the
 * function table, the socket of the caller, and why the engine cannot go on. */
#ifndef PCCL_EVENTS_H
#define PCCL_EVENTS_H

#include <stdbool.h>

#include "pccl_core.h"

struct events {
    const pccl_zmq *zmq;
    void *socket;            /* PAIR: commands come in, events go out. NULL until it is open */
    int status;              /* why the engine cannot go on, or 0 */
    int error;               /* errno of the last call of the table that failed */
    bool emitted;            /* something, in this pass */
};

/* Sends an event to the caller; whether it was sent. If it was not, the engine stops. */
bool events_emit(struct events *events, const pccl_event *event);

/* Notes why the engine cannot go on. The first reason counts. */
void events_stop(struct events *events, int status);

#endif
