/* send.c - sends a message in one call, so that an interrupted caller can tell whether it was
 * sent. */
#include "pccl_core.h"

#include "zmq/zmqdefs.h"

#include <string.h>

int pccl_send_now(const pccl_zmq *table, void *socket, const void *data, size_t size,
                  int32_t *sent)
{
    pccl_msg msg;
    int events = 0;
    size_t events_size = sizeof events;

    *sent = 0;
    if (table->msg_init_size(&msg, size) < 0)
        return PCCL_ENOMEM;
    if (size != 0)
        memcpy(table->msg_data(&msg), data, size);
    if (table->msg_send(&msg, socket, ZMQ_DONTWAIT) < 0) {
        table->msg_close(&msg);
        return PCCL_EZMQ;
    }
    *sent = 1;
    if (table->getsockopt(socket, ZMQ_EVENTS, &events, &events_size) < 0)
        return PCCL_EZMQ;
    return events & ZMQ_POLLIN ? 1 : 0;
}
