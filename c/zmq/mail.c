/* mail.c - see pccl_core.h: receives all waiting messages in one call, sends messages without
 * waiting, and asks: sends one and waits for what comes next. */
#if defined __linux__
#define _GNU_SOURCE
#endif

#include "pccl_core.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#if defined __linux__
#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>
#endif

#include "zmq/zmqdefs.h"

enum { LOOKS_MAX = 4 };      /* while it waits: the socket may have news, but no message */

void pccl_mail_drop(const pccl_zmq *zmq, pccl_mail *mail)
{
    while (mail->n > 0)
        (void)zmq->msg_close(&mail->message[--mail->n]);
}

/* Receives waiting messages behind those that are there, until there are `most`. Returns the number
 * of all, or a negative errno. */
static int receive(const pccl_zmq *zmq, void *socket, pccl_mail *mail, uint32_t most)
{
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

int pccl_mail_take(const pccl_zmq *zmq, void *socket, pccl_mail *mail, uint32_t most)
{
    pccl_mail_drop(zmq, mail);
    return receive(zmq, socket, mail, most);
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

#if defined __linux__
/* Waits until the socket has messages, and receives them. Returns how many, 0 if the alarm, a signal
 * or the end of its patience comes first, or a negative errno. */
static int await(const pccl_zmq *zmq, pccl_ask *ask, int fd)
{
    struct pollfd items[] = {{fd, POLLIN, 0}, {ask->alarm, POLLIN, 0}};
    const uint32_t before = ask->mail->n;
    int looks, got = 0;
    for (looks = 0; looks < LOOKS_MAX && got == 0; looks++) {
        got = receive(zmq, ask->socket, ask->mail, PCCL_MAIL_MAX);
        if (got < 0)
            return got;
        got -= (int)before;
        if (got == 0 && (poll(items, 2, ask->patience_ms) <= 0 || items[1].revents != 0))
            break;
    }
    ask->rung = items[1].revents != 0;
    if (ask->rung) {
        uint64_t times;
        (void)!read(ask->alarm, &times, sizeof times);
    }
    return got;
}

/* Lets a selector watch a descriptor, or not. Returns whether the selector knows it. */
static bool let_watch(int selector, int fd, uint32_t events)
{
    struct epoll_event event = {0};
    event.events = events;
    event.data.fd = fd;
    return epoll_ctl(selector, EPOLL_CTL_MOD, fd, &event) == 0;
}

int pccl_mail_ask(const pccl_zmq *zmq, pccl_ask *ask, const void *data, size_t size,
                  int32_t *sent)
{
    int fd, got, waiting;
    size_t width = sizeof fd;
    bool lent;
    ask->rung = 0;
    lent = ask->patience_ms > 0
        && zmq->getsockopt(ask->socket, ZMQ_FD, &fd, &width) == 0
        && let_watch(ask->selector, fd, 0);
    waiting = pccl_mail_send(zmq, ask->socket, data, size, sent);
    got = waiting > 0 ? -EAGAIN : waiting;
    if (lent && waiting >= 0)
        got = await(zmq, ask, fd);
    if (lent)
        (void)let_watch(ask->selector, fd, EPOLLIN);
    return got;
}
#else
int pccl_mail_ask(const pccl_zmq *zmq, pccl_ask *ask, const void *data, size_t size,
                  int32_t *sent)
{
    int waiting;
    ask->rung = 0;
    waiting = pccl_mail_send(zmq, ask->socket, data, size, sent);
    return waiting > 0 ? -EAGAIN : waiting;
}
#endif
