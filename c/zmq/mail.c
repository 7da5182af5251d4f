/* mail.c - see pccl.h: one call for all messages that wait. */
#include "pccl.h"

#include <errno.h>
#include <string.h>

#include "zmq/zmqdefs.h"

void pccl_mail_drop(const pccl_zmq *zmq, pccl_mail *mail)
{
    while (mail->n > 0)
        (void)zmq->msg_close(&mail->message[--mail->n]);
}

int pccl_mail_take(const pccl_zmq *zmq, void *socket, pccl_mail *mail)
{
    pccl_mail_drop(zmq, mail);
    while (mail->n < PCCL_MAIL_MAX) {
        pccl_msg *message = &mail->message[mail->n];
        zmq->msg_init(message);
        if (zmq->msg_recv(message, socket, ZMQ_DONTWAIT) < 0) {
            int error = zmq->errno_();
            (void)zmq->msg_close(message);
            if (error == EINTR)
                continue;
            return error == EAGAIN ? (int)mail->n : -error;
        }
        mail->data[mail->n] = zmq->msg_data(message);
        mail->size[mail->n++] = zmq->msg_size(message);
    }
    return PCCL_MAIL_MAX;
}

int pccl_mail_send(const pccl_zmq *zmq, void *socket, const void *data, size_t size)
{
    pccl_msg message;
    int error = 0;
    if (zmq->msg_init_size(&message, size) < 0)
        return -ENOMEM;
    memcpy(zmq->msg_data(&message), data, size);
    while (zmq->msg_send(&message, socket, ZMQ_DONTWAIT) < 0) {
        error = zmq->errno_();
        if (error == EINTR)
            continue;
        (void)zmq->msg_close(&message);
        return -error;
    }
    return 0;
}
