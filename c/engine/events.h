/* events.h - sends events to the caller, and has the state that all modules share: the function
 * table, the caller's socket, and the reason why the engine cannot continue. */
#ifndef PCCL_EVENTS_H
#define PCCL_EVENTS_H

#include <stdbool.h>

#include "pccl_core.h"

struct events {
    const pccl_zmq *zmq;
    void *socket;            /* PAIR: commands come in, events go out. NULL until it is open */
    int status;              /* why the engine cannot go on, or 0 */
    int error;               /* errno of the last call of the table that failed */
    bool emitted;            /* an event was sent in this pass */
};

/* Sends an event to the caller. Returns false if it could not be sent; then the engine stops, or
 * the caller has closed its socket. */
bool events_emit(struct events *events, const pccl_event *event);

/* Notes why the engine cannot go on. The first reason counts. */
void events_stop(struct events *events, int status);

#endif
