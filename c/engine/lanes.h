/* lanes.h - adapts the lanes of a stream over a long link while they run: the unsent bytes of each,
 * the size of chunks, and the number of lanes. */
#ifndef PCCL_LANES_H
#define PCCL_LANES_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/transport.h"

enum {
    LANES_MOST = 64,         /* of a stream that opens more while it runs */
    LANES_CHUNK = 1 << 16    /* bytes: small, because all wait for the last chunk of a slow lane */
};

struct lanes {
    uint32_t n;              /* connected lanes */
    struct tcp_connection at[LANES_MOST];
    uint32_t unsent_max[LANES_MOST];     /* bytes, the limit set last; 0: none yet */
    uint64_t sent;           /* bytes since the last look */
    uint64_t look_at;        /* value of `sent` at which to look again */
    uint64_t chunk;          /* bytes; 0: not known */
    uint32_t held;           /* looks since the windows have last changed */
    uint64_t base;           /* bytes in all windows then */
};

/* Adds a connection. Cannot fail: with more than LANES_MOST, the connection keeps its settings. */
void lanes_add(struct lanes *lanes, const struct tcp_connection *connection);

/* Removes a lost connection. */
void lanes_drop(struct lanes *lanes, int fd);

/* Notes bytes that were sent. Returns whether it is time to look. */
bool lanes_count(struct lanes *lanes, uint64_t bytes);

/* Looks at the connections, and limits the unsent bytes of each to what it sends within some
 * milliseconds. Returns how many more lanes to open, because they would carry more. */
uint32_t lanes_look(struct lanes *lanes);

/* The size of a chunk in bytes, at most `chunk`. */
uint64_t lanes_chunk(const struct lanes *lanes, uint64_t chunk);

#endif
