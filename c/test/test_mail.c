/* test_mail.c - waiting messages are received in order, as many as fit, and released; and sent. */
#include "check.h"
#include "fake.h"
#include "zmq/zmqdefs.h"

#include <errno.h>
#include <string.h>

int main(void)
{
    const char *endpoint = "tcp://mail:1";
    const pccl_zmq *zmq = fake_table();
    pccl_mail mail = {0};
    char text[8] = "message";
    void *ctx, *pull, *push;
    int32_t sent;
    int i;
    fake_reset(1);
    ctx = zmq->ctx_new();
    pull = zmq->socket(ctx, ZMQ_PULL);
    push = zmq->socket(ctx, ZMQ_PUSH);
    CHECK(zmq->bind(pull, endpoint) == 0);
    CHECK(pccl_mail_take(zmq, pull, &mail, PCCL_MAIL_MAX) == 0);
    for (i = 0; i < PCCL_MAIL_MAX + 2; i++) {
        text[0] = (char)i;
        fake_inject(endpoint, text, sizeof text, NULL, 0);
    }
    CHECK(pccl_mail_take(zmq, pull, &mail, 1) == 1);
    CHECK(*(const char *)mail.data[0] == 0);
    CHECK(pccl_mail_take(zmq, pull, &mail, 1000) == PCCL_MAIL_MAX);
    for (i = 0; i < PCCL_MAIL_MAX; i++) {
        text[0] = (char)(i + 1);
        CHECK(mail.size[i] == sizeof text && memcmp(mail.data[i], text, sizeof text) == 0);
    }
    CHECK(pccl_mail_take(zmq, pull, &mail, PCCL_MAIL_MAX) == 1);
    CHECK(*(const char *)mail.data[0] == PCCL_MAIL_MAX + 1);
    pccl_mail_drop(zmq, &mail);
    CHECK(mail.n == 0);
    pccl_mail_drop(zmq, &mail);
    CHECK(pccl_mail_take(zmq, pull, &mail, PCCL_MAIL_MAX) == 0);
    CHECK(pccl_mail_take_from(zmq, pull, &mail) == 0);
    fake_inject(endpoint, "name", 4, "text", 4);
    fake_inject(endpoint, "name", 4, "x", 1);
    CHECK(pccl_mail_take_from(zmq, pull, &mail) == 1 && mail.n == 2);
    CHECK(mail.size[0] == 4 && mail.size[1] == 4 && memcmp(mail.data[1], "text", 4) == 0);
    CHECK(pccl_mail_take_from(zmq, pull, &mail) == 1 && mail.size[1] == 1);
    CHECK(pccl_mail_take_from(zmq, pull, &mail) == 0 && mail.n == 0);
    CHECK(zmq->connect(push, endpoint) == 0);
    while (pccl_mail_send(zmq, push, text, sizeof text, &sent) == -EAGAIN)
        CHECK(!sent && fake_tick());
    CHECK(sent);
    while (pccl_mail_take(zmq, pull, &mail, PCCL_MAIL_MAX) == 0)
        CHECK(fake_tick());
    CHECK(mail.size[0] == sizeof text && memcmp(mail.data[0], text, sizeof text) == 0);
    pccl_mail_drop(zmq, &mail);
    zmq->close(push);
    zmq->close(pull);
    zmq->ctx_term(ctx);
    while (fake_tick())
        ;
    return check_report("mail");
}
