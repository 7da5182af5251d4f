/* plain.c - messages and counters without libzmq, for other backends of the table (pccl_core.h,
 * pccl_plain_fill).
 *
 * A pccl_msg holds the address and the number of the bytes of a plain message, and the function
 * that releases them. */
#include "pccl_core.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct plain {
    void *data;
    size_t size;
    void (*release)(void *data, void *hint);
    void *hint;
    int more;
};

/* A struct plain must fit into a pccl_msg. */
typedef char plain_fits[sizeof(struct plain) <= sizeof(pccl_msg) ? 1 : -1];

static struct plain load(const pccl_msg *msg)
{
    struct plain plain;
    memcpy(&plain, msg, sizeof plain);
    return plain;
}

static void store(pccl_msg *msg, const struct plain *plain)
{
    memset(msg, 0, sizeof *msg);
    memcpy(msg, plain, sizeof *plain);
}

static void free_data(void *data, void *hint)
{
    (void)hint;
    free(data);
}

static int msg_init(pccl_msg *msg)
{
    memset(msg, 0, sizeof *msg);
    return 0;
}

static int msg_init_data(pccl_msg *msg, void *data, size_t size,
                         void (*release)(void *, void *), void *hint)
{
    struct plain plain = {0};
    plain.data = data;
    plain.size = size;
    plain.release = release;
    plain.hint = hint;
    store(msg, &plain);
    return 0;
}

static int msg_init_size(pccl_msg *msg, size_t size)
{
    void *data = malloc(size > 0 ? size : 1);
    if (data == NULL)
        return -1;
    return msg_init_data(msg, data, size, free_data, NULL);
}

static int msg_close(pccl_msg *msg)
{
    struct plain plain = load(msg);
    if (plain.release != NULL)
        plain.release(plain.data, plain.hint);
    return msg_init(msg);
}

static void *msg_data(pccl_msg *msg)
{
    return load(msg).data;
}

static size_t msg_size(const pccl_msg *msg)
{
    return load(msg).size;
}

static int msg_more(const pccl_msg *msg)
{
    return load(msg).more;
}

static int msg_get(const pccl_msg *msg, int property)
{
    (void)msg;
    (void)property;
    return -1;
}

static const char *msg_gets(const pccl_msg *msg, const char *property)
{
    (void)msg;
    (void)property;
    return NULL;
}

static void *counter_new(void)
{
    return calloc(1, sizeof(int));
}

static int counter_inc(void *counter)
{
    return (*(int *)counter)++;
}

static int counter_dec(void *counter)
{
    assert(*(int *)counter > 0);
    return --*(int *)counter > 0;
}

static int counter_value(void *counter)
{
    return *(int *)counter;
}

static void counter_destroy(void **counter)
{
    free(*counter);
    *counter = NULL;
}

void pccl_plain_fill(pccl_zmq *table)
{
    table->msg_init = msg_init;
    table->msg_init_size = msg_init_size;
    table->msg_init_data = msg_init_data;
    table->msg_close = msg_close;
    table->msg_data = msg_data;
    table->msg_size = msg_size;
    table->msg_more = msg_more;
    table->msg_get = msg_get;
    table->msg_gets = msg_gets;
    table->atomic_counter_new = counter_new;
    table->atomic_counter_inc = counter_inc;
    table->atomic_counter_dec = counter_dec;
    table->atomic_counter_value = counter_value;
    table->atomic_counter_destroy = counter_destroy;
}

void pccl_plain_set_more(pccl_msg *msg, int more)
{
    struct plain plain = load(msg);
    plain.more = more;
    store(msg, &plain);
}
