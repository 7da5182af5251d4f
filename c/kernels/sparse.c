/* sparse.c - the largest elements of an fp32 array, as places and 2-bit codes of their levels.
 *
 * DESIGN. A chunk of 4,096 elements keeps its 64 elements of largest magnitude, the first of equal
 * ones; a shorter last chunk of m elements keeps m / 64, rounded up (SparseLoCo, arXiv 2508.15706,
 * as in arXiv 2603.08163; its chunks of a matrix are squares of 64 by 64, ours are runs). The kept
 * elements of 16 chunks, a GROUP, share four levels (levels.h).
 *
 * A group is its levels and then its chunks. A chunk is the places within it, 12 bits each,
 * increasing, and then as many codes of 2 bits. Data from other peers is checked: a place beyond
 * the chunk, or not above the place before it, is refused.
 *
 * The k-th largest magnitude is found bit by bit: as integers, magnitudes have the same order as
 * the numbers, and a loop without branches counts those above a bound. NaNs and infinities are
 * larger than any number, so they are kept; the group's levels are then NaN, and it is read as all
 * NaN. */
#include "pccl_core.h"

#include "kernels/encodings.h"
#include "kernels/levels.h"

enum {
    CHUNK = 4096,            /* elements */
    KEPT = 64,               /* of a chunk */
    CHUNKS = 16,             /* of a group */
    GROUP = CHUNKS * CHUNK,
    LANES = 16,
    HEADER = LEVELS * sizeof(float)
};

/* The kept elements of one group. */
struct kept {
    float value[CHUNKS * KEPT];
    uint16_t place[CHUNKS * KEPT];
    unsigned char code[CHUNKS * KEPT];
};

static PCCL_INLINE size_t kept_of(size_t n)
{
    return (n + CHUNK / KEPT - 1) / (CHUNK / KEPT);
}

static PCCL_INLINE size_t place_bytes(size_t kept)
{
    return (kept * 12 + 7) / 8;
}

static PCCL_INLINE size_t chunk_bytes(size_t n)
{
    return place_bytes(kept_of(n)) + (kept_of(n) + 3) / 4;
}

static uint64_t size_of(uint64_t n)
{
    const size_t rest = (size_t)(n % CHUNK);
    return (n + GROUP - 1) / GROUP * HEADER + n / CHUNK * chunk_bytes(CHUNK)
        + (rest > 0 ? chunk_bytes(rest) : 0);
}

static PCCL_INLINE size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* ---- choosing the elements to keep ---- */

/* The number of magnitudes above `bound`, compared as integers. */
static PCCL_INLINE size_t count_above(const int32_t *magnitude, size_t n, int32_t bound)
{
    int32_t count = 0;
    size_t i;
    for (i = 0; i < n; i++)
        count += magnitude[i] > bound;
    return (size_t)count;
}

/* The same for the upper halves of magnitudes: a vector holds twice as many. */
static PCCL_INLINE size_t count_upper(const int16_t *upper, size_t n, int16_t bound)
{
    int16_t count = 0;       /* n <= CHUNK */
    size_t i;
    for (i = 0; i < n; i++)
        count = (int16_t)(count + (upper[i] > bound));
    return (size_t)count;
}

/* The k-th largest magnitude. Finds its upper half among all magnitudes, then its lower half among
 * those with the same upper half, which are few. */
static PCCL_INLINE int32_t find_bound(const int32_t *magnitude, size_t n, size_t k)
{
    int16_t upper[CHUNK], high = 0;
    int32_t alike[CHUNK], bound, bit;
    size_t i, j, used = 0;
    for (i = 0; i < n; i++)
        upper[i] = (int16_t)(magnitude[i] >> 16);
    for (bit = 1 << 14; bit > 0; bit >>= 1)
        if (count_upper(upper, n, (int16_t)((high | bit) - 1)) >= k)
            high = (int16_t)(high | bit);
    k -= count_upper(upper, n, high);
    for (i = 0; i < n; i += LANES) {
        const size_t m = least(n - i, LANES);
        int16_t any = 0;
        for (j = 0; j < m; j++)
            any = (int16_t)(any | (upper[i + j] == high));
        for (j = 0; any != 0 && j < m; j++) {
            alike[used] = magnitude[i + j];
            used += upper[i + j] == high;
        }
    }
    bound = (int32_t)high << 16;
    for (bit = 1 << 15; bit > 0; bit >>= 1)
        if (count_above(alike, used, (bound | bit) - 1) >= k)
            bound |= bit;
    return bound;
}

/* Writes the k elements of largest magnitude of a chunk of n elements, in the order of their
 * places. Most groups of LANES elements have none, and are skipped with one branch. */
static PCCL_INLINE void keep_largest_body(const unsigned char *in, size_t n, size_t k, float *value,
                                          uint16_t *place)
{
    int32_t magnitude[CHUNK], bound, ties;
    size_t i, j, used = 0;
    for (i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, in + i * sizeof bits, sizeof bits);
        magnitude[i] = (int32_t)(bits & 0x7fffffffu);
    }
    bound = find_bound(magnitude, n, k);
    ties = (int32_t)(k - count_above(magnitude, n, bound));
    for (i = 0; i < n; i += LANES) {
        const size_t m = least(n - i, LANES);
        int32_t any = 0;
        for (j = 0; j < m; j++)
            any |= magnitude[i + j] >= bound;
        for (j = 0; any != 0 && used < k && j < m; j++) {
            const int32_t equal = magnitude[i + j] == bound;
            place[used] = (uint16_t)(i + j);
            used += (size_t)((magnitude[i + j] > bound) | (equal & (ties > 0)));
            ties -= equal;
        }
    }
    for (i = 0; i < k; i++)
        memcpy(&value[i], in + place[i] * sizeof *value, sizeof *value);
}

DISPATCH(keep_largest,
         (const unsigned char *in, size_t n, size_t k, float *value, uint16_t *place),
         (in, n, k, value, place))

/* ---- encoding ---- */

static PCCL_INLINE void write_place(unsigned char *out, size_t i, unsigned place)
{
    unsigned char *to = out + i / 2 * 3;
    if (i % 2 == 0) {
        to[0] = (unsigned char)(place & 255u);
        to[1] = (unsigned char)(place >> 8);
    } else {
        to[1] = (unsigned char)(to[1] | (place & 15u) << 4);
        to[2] = (unsigned char)(place >> 4);
    }
}

static PCCL_INLINE unsigned read_place(const unsigned char *in, size_t i)
{
    const unsigned char *from = in + i / 2 * 3;
    if (i % 2 == 0)
        return from[0] | (from[1] & 15u) << 8;
    return from[1] >> 4 | (unsigned)from[2] << 4;
}

static void write_chunk(unsigned char *out, const uint16_t *place, const unsigned char *code,
                        size_t k)
{
    unsigned char *codes = out + place_bytes(k);
    size_t i;
    for (i = 0; i < k; i++)
        write_place(out, i, place[i]);
    memset(codes, 0, (k + 3) / 4);
    for (i = 0; i < k; i++)
        codes[i / 4] = (unsigned char)(codes[i / 4] | code[i] << i % 4 * 2);
}

static PCCL_INLINE void measure_body(const float *value, size_t n, float *level,
                                     unsigned char *code)
{
    levels_measure(value, n, level, code);
}

DISPATCH(measure, (const float *value, size_t n, float *level, unsigned char *code),
         (value, n, level, code))

static unsigned char *encode_group(unsigned char *out, const unsigned char *in, size_t n)
{
    struct kept kept;
    float level[LEVELS];
    size_t at, m, used = 0;
    for (at = 0; at < n; at += m) {
        m = least(n - at, CHUNK);
        keep_largest(in + at * sizeof(float), m, kept_of(m), kept.value + used, kept.place + used);
        used += kept_of(m);
    }
    measure(kept.value, used, level, kept.code);
    memcpy(out, level, sizeof level);
    out += sizeof level;
    for (at = 0, used = 0; at < n; at += m) {
        m = least(n - at, CHUNK);
        write_chunk(out, kept.place + used, kept.code + used, kept_of(m));
        used += kept_of(m);
        out += chunk_bytes(m);
    }
    return out;
}

static void encode(void *out, const float *in, size_t n)
{
    unsigned char *to = out;
    const unsigned char *from = (const unsigned char *)in;
    size_t m;
    for (; n > 0; n -= m) {
        m = least(n, GROUP);
        to = encode_group(to, from, m);
        from += m * sizeof(float);
    }
}

/* ---- decoding ---- */

/* Writes, or adds, the kept elements of a chunk of n elements; false if a place is invalid. */
static bool decode_chunk(unsigned char *out, const unsigned char *in, const uint32_t *level,
                         size_t n, bool adds)
{
    const size_t k = kept_of(n);
    const unsigned char *codes = in + place_bytes(k);
    size_t i, next = 0;
    for (i = 0; i < k; i++) {
        const size_t place = read_place(in, i);
        if (place < next || place >= n)
            return false;
        level_put(out, place, level[codes[i / 4] >> i % 4 * 2 & 3], adds);
        next = place + 1;
    }
    return true;
}

static int decode(float *out, const void *in, size_t n, bool adds)
{
    unsigned char *to = (unsigned char *)out;
    const unsigned char *from = in;
    uint32_t level[LEVELS] = {0};
    size_t at, m;
    bool finite = false;
    if (!adds)
        memset(out, 0, n * sizeof(float));
    for (at = 0; at < n; at += m) {
        m = least(n - at, CHUNK);
        if (at % GROUP == 0) {
            finite = levels_read(from, level);
            from += HEADER;
        }
        if (!decode_chunk(to, from, level, m, adds))
            return PCCL_EPROTO;
        if (!finite)
            levels_spoil(to, m);
        from += chunk_bytes(m);
        to += m * sizeof(float);
    }
    return PCCL_OK;
}

const struct encoding pccl_sparse = {GROUP, LEVELS, size_of, encode, decode};
