/* lanes.c - see lanes.h.
 *
 * Any lane with room takes the next chunk, so a faster lane carries more. But a collective ends
 * with the last byte on the slowest lane. So the unsent bytes that each lane holds are limited by
 * the time that they take to send. A lane that has lost packets has a small window and is slow for
 * many round trips, and so it holds less.
 *
 * There are too few lanes if packet losses keep all windows small on a link that could carry more.
 * The signs of that: all lanes have data that waits, all windows are full and no longer grow, and
 * round trips are as short as on an empty link. On a full link packets wait in its queue, and round
 * trips are longer. A link that has no queue, and drops packets above some rate, looks like one
 * that loses packets. More lanes do not help there; their number stops growing when the windows
 * become too small to recover well.
 *
 * No clock is needed: the lanes are looked at each time that about as many bytes were sent as all
 * windows hold, which takes a round trip. If the operating system has no data about connections,
 * they keep their initial settings. */
#include "engine/lanes.h"

enum {
    HOLD_US = 16000,         /* unsent data of a lane: several wake-ups of a busy machine */
    UNSENT_MIN = 1 << 14,    /* bytes */
    CHUNK_MIN = 1 << 14,     /* bytes */
    LOOK_MIN = 1 << 16,      /* bytes of each lane between two looks */
    WINDOW_MIN = 1 << 15,    /* bytes: no more lanes if the average window is smaller */
    LOOKS = 4                /* round trips within which windows grow, unless losses prevent it */
};

void lanes_add(struct lanes *lanes, const struct tcp_connection *connection)
{
    if (lanes->n == LANES_MOST)
        return;
    lanes->at[lanes->n] = *connection;
    lanes->unsent_max[lanes->n++] = 0;
}

void lanes_drop(struct lanes *lanes, int fd)
{
    uint32_t i;
    for (i = 0; i < lanes->n; i++)
        if (lanes->at[i].fd == fd) {
            lanes->at[i] = lanes->at[--lanes->n];
            lanes->unsent_max[i] = lanes->unsent_max[lanes->n];
            return;
        }
}

bool lanes_count(struct lanes *lanes, uint64_t bytes)
{
    lanes->sent += bytes;
    return lanes->sent >= lanes->look_at;
}

static uint64_t clamp(uint64_t value, uint64_t least, uint64_t most)
{
    return value < least ? least : value < most ? value : most;
}

/* Limits the unsent bytes of a connection to what it sends in HOLD_US. Returns the limit. */
static uint64_t limit_unsent(struct lanes *lanes, uint32_t lane, const struct tcp_state *state)
{
    uint64_t bytes = state->window * HOLD_US / state->round_trip_us;
    uint32_t limit = (uint32_t)clamp(bytes, UNSENT_MIN, TCP_UNSENT_MAX);
    uint32_t was = lanes->unsent_max[lane];
    if (limit < was - was / 4 || limit > was + was / 4) {   /* each change is a system call */
        tcp_limit_unsent(&lanes->at[lane], limit);
        lanes->unsent_max[lane] = limit;
    }
    return limit;
}

/* The largest power of two up to `bytes`, within the limits of a chunk. */
static uint64_t chunk_of(uint64_t bytes)
{
    uint64_t chunk = CHUNK_MIN;
    while (chunk < LANES_CHUNK && 2 * chunk <= bytes)
        chunk *= 2;
    return chunk;
}

/* Whether losses keep windows small, of `total` bytes together, on a link that could carry more.
 * `full` lanes have full windows, and `clear` ones the round trips of an empty link. */
static bool are_held(struct lanes *lanes, uint64_t total, uint32_t full, uint32_t clear)
{
    if (2 * clear <= lanes->n) {
        lanes->held = 0;
        return false;
    }
    if (4 * full < 3 * lanes->n)
        return false;        /* a call begins or ends: no conclusion */
    if (lanes->held == 0 || total > lanes->base + lanes->base / 8
        || total < lanes->base - lanes->base / 8) {
        lanes->held = 1;
        lanes->base = total;
        return false;
    }
    return ++lanes->held > LOOKS;
}

uint32_t lanes_look(struct lanes *lanes)
{
    uint64_t windows = 0, unsent = 0;
    uint32_t i, more, known = 0, full = 0, clear = 0;
    struct tcp_state state;
    for (i = 0; i < lanes->n; i++) {
        if (!tcp_look(&lanes->at[i], &state) || state.round_trip_us == 0)
            continue;
        known++;
        windows += state.window;
        unsent += limit_unsent(lanes, i, &state);
        full += state.unsent > 0 && 4 * state.unacked >= 3 * state.window;
        clear += state.round_trip_us <= state.least_us + state.least_us / 8;
    }
    lanes->sent = 0;
    lanes->look_at = (uint64_t)LOOK_MIN * lanes->n;
    if (windows > lanes->look_at)
        lanes->look_at = windows;
    if (known == 0)
        return 0;
    lanes->chunk = chunk_of(unsent / known);
    if (known < lanes->n || windows < (uint64_t)WINDOW_MIN * lanes->n
        || !are_held(lanes, windows, full, clear))
        return 0;
    lanes->held = 0;
    more = lanes->n > 1 ? lanes->n / 2 : 1;
    return more < LANES_MOST - lanes->n ? more : LANES_MOST - lanes->n;
}

uint64_t lanes_chunk(const struct lanes *lanes, uint64_t chunk)
{
    uint64_t most = lanes->chunk > 0 ? lanes->chunk : LANES_CHUNK;
    return chunk < most ? chunk : most;
}
