/* mail.c - see pccl_core.h: receives all waiting messages in one call, and sends messages without
 * waiting. */
#include "pccl_core.h"

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

/* Drops the remaining frames of a message. */
static void drop_rest(const pccl_zmq *zmq, void *socket)
{
    int more = 1;
    while (more) {
        pccl_msg frame;
        zmq->msg_init(&frame);
        more = zmq->msg_recv(&frame, socket, ZMQ_DONTWAIT) >= 0 && zmq->msg_more(&frame);
        (void)zmq->msg_close(&frame);
    }
}

int pccl_mail_take_from(const pccl_zmq *zmq, void *router, pccl_mail *mail)
{
    int n = pccl_mail_take(zmq, router, mail, 2);
    if (n < 2)
        return n < 0 ? n : 0;
    if (!zmq->msg_more(&mail->message[1]))
        return 1;
    drop_rest(zmq, router);
    return 2;
}

/* Sends a frame, or releases it on failure: 0 or a negative errno. */
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

int pccl_mail_send(const pccl_zmq *zmq, void *socket, const void *data, size_t size,
                   int32_t *sent)
{
    pccl_msg message;
    int error, events = 0;
    size_t width = sizeof events;
    if (sent != NULL)
        *sent = 0;
    if (zmq->msg_init_size(&message, size) < 0)
        return -ENOMEM;
    if (size > 0)
        memcpy(zmq->msg_data(&message), data, size);
    error = send_frame(zmq, socket, &message, ZMQ_DONTWAIT);
    if (error < 0)
        return error;
    if (sent != NULL)
        *sent = 1;
    if (zmq->getsockopt(socket, ZMQ_EVENTS, &events, &width) < 0)
        return -zmq->errno_();
    return (events & ZMQ_POLLIN) != 0;
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
