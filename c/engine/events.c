/* events.c - see events.h. */
#include "engine/events.h"

#include <errno.h>
#include <string.h>

#include "zmq/zmqdefs.h"

void events_stop(struct events *events, int status)
{
    if (events->status == PCCL_OK)
        events->status = status;
}

bool events_emit(struct events *events, const pccl_event *event)
{
    const pccl_zmq *zmq = events->zmq;
    pccl_msg message;
    events->emitted = true;
    if (zmq->msg_init_size(&message, sizeof *event) < 0) {
        events_stop(events, PCCL_ENOMEM);
        return false;
    }
    memcpy(zmq->msg_data(&message), event, sizeof *event);
    while (zmq->msg_send(&message, events->socket, ZMQ_DONTWAIT) < 0) {
        events->error = zmq->errno_();
        if (events->error == EINTR)
            continue;
        /* The queue is unbounded, so EAGAIN means that the caller has closed its socket. */
        if (events->error != EAGAIN)
            events_stop(events, PCCL_EZMQ);
        (void)zmq->msg_close(&message);
        return false;
    }
    return true;
}
