/* lanes.h - the lanes of a stream over a long link while they run: how much each holds that is not
 * sent, how large chunks are, and when there are too few. */
#ifndef PCCL_LANES_H
#define PCCL_LANES_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/transport.h"

enum {
    LANES_MOST = 64,         /* of a stream that opens more while it runs */
    LANES_CHUNK = 1 << 16    /* bytes: all wait for what a slow lane still has to send */
};

struct lanes {
    uint32_t n;              /* those whose connections have stood */
    struct tcp_connection at[LANES_MOST];
    uint32_t unsent_max[LANES_MOST];     /* bytes, as set last; 0: not yet */
    uint64_t sent, look_at;  /* bytes since the last look, and when to look again; 0: at once */
    uint64_t chunk;          /* bytes; 0: not known */
    uint32_t held;           /* looks since the windows have grown */
    uint64_t base;           /* bytes in all windows then */
};

/* Adds a connection that stands. Cannot fail: what is too many is left as it is. */
void lanes_add(struct lanes *lanes, const struct tcp_connection *connection);

/* Forgets one that is lost. */
void lanes_drop(struct lanes *lanes, int fd);

/* Notes bytes that were sent. Whether it is time to look. */
bool lanes_count(struct lanes *lanes, uint64_t bytes);

/* Looks at the connections, and has each hold what it sends within some milliseconds. How many
 * lanes more would carry more. */
uint32_t lanes_look(struct lanes *lanes);

/* The bytes of a chunk, where at most `chunk` are wanted. */
uint64_t lanes_chunk(const struct lanes *lanes, uint64_t chunk);

#endif
