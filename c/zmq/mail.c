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

int pccl_mail_take(const pccl_zmq *zmq, void *socket, pccl_mail *mail, uint32_t most)
{
    pccl_mail_drop(zmq, mail);
    while (mail->n < most && mail->n < PCCL_MAIL_MAX) {
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
    return (int)mail->n;
}

/* Sends a frame, or releases it: 0 or a negative errno. */
static int send_frame(const pccl_zmq *zmq, void *socket, pccl_msg *frame, int flags)
{
    while (zmq->msg_send(frame, socket, flags) < 0) {
        int error = zmq->errno_();
        if (error == EINTR)
            continue;
        (void)zmq->msg_close(frame);
        return -error;
    }
    return 0;
}

int pccl_mail_send(const pccl_zmq *zmq, void *socket, const void *data, size_t size)
{
    pccl_msg message;
    int got;
    if (zmq->msg_init_size(&message, size) < 0)
        return -ENOMEM;
    memcpy(zmq->msg_data(&message), data, size);
    got = send_frame(zmq, socket, &message, ZMQ_DONTWAIT);
    if (got == 0)
        got = pccl_mail_option(zmq, socket, ZMQ_EVENTS);
    return got < 0 ? got : (got & ZMQ_POLLIN) != 0;
}

int pccl_mail_send_to(const pccl_zmq *zmq, void *router, const void *to, size_t to_size,
                      const void *data, size_t size)
{
    pccl_msg address, message;
    int error;
    if (zmq->msg_init_size(&address, to_size) < 0)
        return -ENOMEM;
    if (zmq->msg_init_size(&message, size) < 0) {
        (void)zmq->msg_close(&address);
        return -ENOMEM;
    }
    memcpy(zmq->msg_data(&address), to, to_size);
    memcpy(zmq->msg_data(&message), data, size);
    error = send_frame(zmq, router, &address, ZMQ_DONTWAIT | ZMQ_SNDMORE);
    if (error == 0)
        return send_frame(zmq, router, &message, ZMQ_DONTWAIT);
    (void)zmq->msg_close(&message);
    return error;
}

int pccl_mail_option(const pccl_zmq *zmq, void *socket, int option)
{
    int value = 0;
    size_t size = sizeof value;
    return zmq->getsockopt(socket, option, &value, &size) < 0 ? -zmq->errno_() : value;
}
