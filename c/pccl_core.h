/* pccl_core.h - the C core of pccl: reduce kernels, the outer optimizer step and the lane engine.
 *
 * This header is the manual. Its part between the two "cdef" marks is also the declaration that
 * cffi binds, so that part must contain no preprocessor directives.
 *
 * Conventions. C99, no globals, no threads, no errno of our own: functions that can fail return 0
 * or a negative PCCL_E... code. The caller owns all memory it passes, for as long as each
 * function says. Buffers may have any alignment. Everything on the wire is little-endian.
 *
 * EXAMPLE
 *
 * Two peers add up an array. Each creates an engine and starts a thread that runs it:
 *
 *     pccl_options options = {.io_threads = 1, .forward_max = 256, .recv_hwm = 4,
 *                             .copy_max = 16384, .connect_timeout_ms = 5000, .fetch_window = 64};
 *     pccl_engine *engine = pccl_engine_new(&table, &options, &error);
 *     pccl_engine_bind(engine, "tcp://10.0.0.1:*", bound, sizeof bound);
 *     pccl_engine_run(engine);                                      (in the thread)
 *
 * Each then connects a PAIR socket of pccl_engine_context() to "inproc://pccl-engine" and sends
 * four commands, whose other members are 0:
 *
 *     pccl_part part = {.send = x, .recv = y, .count = n, .dtype = PCCL_F32};
 *
 *     {.kind = PCCL_OPEN_STREAM, .stream = 1}
 *     {.kind = PCCL_CONNECT_STREAM, .stream = 1, .hwm = 4, .endpoint = "tcp://10.0.0.2:48150"}
 *     {.kind = PCCL_REGISTER, .op = 1, .op_kind = PCCL_COLLECTIVE, .run = 7,
 *      .collective = PCCL_ALL_REDUCE, .redop = PCCL_SUM, .parts = &part, .n_parts = 1}
 *     {.kind = PCCL_START, .op = 1, .seq = 1, .nonce = 5, .chunk_bytes = 1 << 18, .n_rings = 1,
 *      .rings = {{.stream = 1, .members = 2, .position = 0, .count = n rounded up to 64}}}
 *
 * The other peer sends the same commands, with `position` 1 and the endpoint of the first peer. A
 * PCCL_COMPLETE event then says that y holds the sum. If its `settled` is 0, the caller sends
 * PCCL_COMMIT, and the engine answers with PCCL_SETTLED. From then on the engine refers to neither
 * array.
 *
 * THE ENGINE
 *
 * An engine moves the bulk data of one peer. It owns a ZeroMQ context, one PULL socket on which all
 * chunks of other peers arrive, and one PUSH socket for each STREAM. A stream leads to one
 * neighbor, over one or more connections, its LANES. A thread of the caller enters
 * pccl_engine_run() and stays there, without the GIL, until it is told to stop. The caller and the
 * engine exchange messages: the caller connects a PAIR socket of the engine's own context to
 * "inproc://pccl-engine", sends pccl_command structs, one or more in a message, and receives
 * pccl_event structs, one in each message, in native layout.
 *
 * An OP is one peer's part in one collective or state transfer:
 *
 *     REGISTER -> (START) -> COMPLETE event -> COMMIT or ABORT -> SETTLED event
 *
 * The caller registers the op before its peer votes to start it, because a neighbor may hear of
 * the start first, and its chunks must find the buffers. When the start is agreed, the caller
 * starts the op, with its place in the rings. COMPLETE says that this peer holds the whole result;
 * the op keeps forwarding what others need. COMMIT keeps the result. ABORT restores what an
 * in-place op has overwritten. After SETTLED the engine has forgotten the op and refers to none of
 * its memory, neither in a queued message nor in a zero-copy send. If a COMPLETE event has
 * `settled` set, the op is in that state already and needs neither command. COMMIT and ABORT free
 * the op's tag for another op.
 *
 * ABORT is legal at any time after REGISTER. SETTLED always answers it, even if it crosses a
 * COMPLETE event with `settled`. ABORT closes the streams that still have bytes of the op queued:
 * each of them gives a STREAM_LOST event, and other ops that use it get a FAILED event.
 *
 * A FAILED op does nothing more and waits for its ABORT. If it was COMPLETE before it failed, its
 * stream was lost and others may lack what it forwarded; COMMIT is then legal as well. Data that a
 * settled op has forwarded can be lost, too. Only STREAM_LOST reports that, and the caller must
 * tell the peers that wait for the data.
 *
 * Two kinds of op continue after a FAILED event with PCCL_ESTREAM. For a SERVE op the event says
 * that one requester can no longer be answered; the op keeps serving the others. A FETCH op that
 * loses a holder requests the missing bytes from the other holders. For it the event says that no
 * holder is left; the op waits for a START with a greater seq, or for its ABORT. An op that could
 * not be registered for lack of memory is FAILED, and SETTLED answers its ABORT.
 *
 * If recv is also send, or part of it, the engine saves the old content of recv in an undo buffer
 * before it overwrites it. The buffer has as many bytes as recv, and stays until SETTLED. The
 * engine keeps one such buffer, the largest, for later ops. (ALL_GATHER in place overwrites no
 * contribution, so it needs no buffer.) An engine that stops, or is freed, restores the memory of
 * every op that is not SETTLED.
 *
 * WHO MAY CONNECT
 *
 * If the options hold keys, the PULL socket is a CURVE server and every PUSH socket a CURVE client,
 * over ipc too, and every peer whose key is in an ADMIT command may connect. Without keys both use
 * PLAIN: the PUSH socket sends the number of the peer that it wants to reach as the user name
 * (decimal) and the nonce of the epoch as the password (16 hexadecimal digits), both from
 * CONNECT_STREAM; the PULL socket compares them with those of EXPECT commands. A connection that
 * names another peer is refused. A connection with an unknown nonce or key may belong to an epoch
 * that this engine has not heard of yet: it waits for the next EXPECT or ADMIT, until libzmq's
 * handshake timeout. So the sender of a stream knows which peer it has reached, and strangers
 * cannot send anything.
 *
 * The master connects once to check that this engine can be reached. It uses the public key
 * `dialler`, or the user name "dial" with the password `dialler`. An engine without keys and
 * without `dialler` accepts every connection.
 *
 * RENDEZVOUS POINTS
 *
 * Other peers cannot connect to a neighbor behind NAT, so it connects itself: PUSH and PULL both
 * connect to a rendezvous point, which joins the two connections of each lane and from then on
 * copies bytes. It speaks SOCKS 5 (RFC 1928), as libzmq does (ZMQ_SOCKS_PROXY). Both sides request
 * the endpoint of the command as their destination; the rendezvous point joins connections that
 * request the same one. The endpoint has the form of an IPv6 address, because libzmq would look up
 * a name and block the engine during the lookup. Authentication is unchanged: PUSH and PULL do
 * their usual handshakes. Such a neighbor counts as distant, and a stream to it has 8 lanes unless
 * the command says otherwise.
 *
 * COLLECTIVES AND THEIR OFFSETS
 *
 * A collective works on one or more arrays, its PARTS, which complete or fail together. They lie
 * one after the other in a space of offsets: a part of `count` elements takes `count` offsets, and
 * the rest up to the next multiple of Q = PCCL_ALIGNMENT (an ALIGNMENT BLOCK) is empty. The offsets
 * of all parts together are a SLICE. A buffer has one slice, or one slice for each member:
 *
 *                   send, slices   recv, slices
 *     ALL_REDUCE    1              1              recv = the reduction of all sends
 *     REDUCE_SCATTER  members      1              recv = slice r of that reduction
 *     ALL_GATHER    1              members        slice r of recv = the send of rank r
 *     BROADCAST     1              1              recv = the send of the root; send is recv
 *     REDUCE        1              1              recv of the root = the reduction of all sends
 *
 * The slices of a buffer follow each other in the space of offsets. In memory they do so for each
 * part separately: a part of a buffer with m slices is m * count elements without gaps. A peer's
 * RANK is the same in all rings; in a ring that lists no ranks it is the peer's position.
 *
 * The slices of an ALL_GATHER may differ in length: then the command has the number of rows of each
 * rank's slice, and the count of a part is the number of elements in a row. In the space of offsets
 * every slice is as long as the longest one. The unused offsets of a shorter slice are never sent,
 * and leave no gap in memory.
 *
 * THE RING
 *
 * In a ring of n members, the ring's share of a slice, `count` offsets from `begin`, is cut into n
 * SEGMENTS. The OWNER of segment s is position s - 1 (mod n): the last member to add to it, or the
 * member that has its final content from the start. Segment s is
 *
 *     ALL_REDUCE:   [bound(s), bound(s+1)) with
 *                   bound(s) = begin + min(count, Q * (ceil(count / Q) * s / n)), rounded down
 *     REDUCE_SCATTER, ALL_GATHER: the ring's share of the slice of the owner's rank
 *     BROADCAST, REDUCE: the ring's share, if the owner is the root; else empty.
 *
 * A chunk is a piece of one segment. It lies within one part, or, if it is not quantized and the
 * buffers have one slice, in adjacent parts of the same type that have up to 512 KiB each. In the
 * message the elements of these parts follow each other without gaps. A chunk travels from position
 * to position:
 *
 *     h <= n-2:  a partial result of h+1 contributors. The receiver adds its own contribution. If
 *                that makes n (h == n-2) it is final and stored (AVG divides floats here).
 *     h >= n-1:  final. Stored.
 *
 * The receiver sends it on with step h+1, unless h is the last step. ALL_REDUCE has the steps 0 to
 * 2n-3, REDUCE_SCATTER and REDUCE have those up to n-2, ALL_GATHER and BROADCAST those from n-1.
 * Position r begins by sending chunks of the segment that its successor sees at the first step; a
 * receiver at position p only ever sees segment (p - h - 1) mod n at step h. There is no barrier:
 * each chunk is handled when it arrives, over any lane. So a REDUCE is a chain that begins behind
 * the root and ends at it: every link carries the data once, except the link from the root to its
 * successor, which carries nothing.
 *
 * ONE-SHOT. Two members may ALL_REDUCE without a ring: each sends its whole contribution to the
 * other, in chunks whose step is 65535 and whose segment is the sender's position. Each reduces
 * both contributions, with that of position 0 on the left. This takes as many bytes as the ring,
 * and one step. If the data is quantized, each member reduces the quantized form of both
 * contributions, its own included, and does not quantize the result again.
 *
 * TWO STAGES. Three members or more may ALL_REDUCE quantized data so that each contribution is
 * quantized once, and the result once. For every segment, each member sends its contribution to
 * the segment's owner, on the stream that START names or unchanged around the ring, in chunks whose
 * step is 65534 and whose segment is the sender's position. All cut a segment alike: where parts
 * begin, and within a part after the same numbers of whole blocks of the format. The owner decodes
 * the contributions, its own included, reduces them in the order of ranks, quantizes the result,
 * and sends it around the ring as a final chunk. This takes as many bytes as the ring.
 *
 * A stream sends FORWARDS first: received messages that must be sent on. It sends a chunk of the
 * peer's own only when no forward waits; own chunks of several ops take turns. The engine stops
 * receiving when `forward_max` forwards wait, or when the waiting forwards hold 32 MiB outside the
 * ops' own memory. Because own chunks enter only an empty queue, the ring always has free space and
 * cannot deadlock on its own back-pressure. Several rings could block each other, so these limits
 * are lifted while an op has rings that lead to different neighbors.
 *
 * If the command names a format, a payload is a chunk's elements as pccl_quantize() writes them.
 * Each partial result is quantized again. A final one is quantized once and sent on unchanged, and
 * all members, its owner included, store the numbers that these bytes stand for. Chunks are whole
 * blocks of the format, counted from the beginning of the part or segment, so results do not depend
 * on chunk_bytes.
 *
 * Several rings divide a slice in their order: the first begins at 0, each other one where its
 * predecessor ends, and the last ends where the slice does. Shares begin at multiples of Q.
 *
 * BEFORE START
 *
 * An op with an EAGER command sends copies of own chunks before START. Their receiver holds them,
 * and changes no memory, until a START names the sender's op number as the `call` of that ring: see
 * engine/unexpected.h. Because the chunks are copies, an ABORT settles such an op at once.
 *
 * PROGRESSIVE COLLECTIVES
 *
 * An ALL_REDUCE whose REGISTER has a `window` may begin before its memory is filled: the engine
 * reads no part of send until a READY command says that the contribution is there. Chunks that
 * arrive for other places are held. They count like forwards, and no own chunks are sent while any
 * is held. The offsets are cut into windows. When a whole window of recv holds the result, the
 * engine emits a WRITTEN event, and writes there again only if the op is aborted. So a caller whose
 * arrays are elsewhere, as on a GPU, can copy in both directions while the collective runs. (An op
 * with one member emits no WRITTEN events.)
 *
 * EXCHANGES
 *
 * An EXCHANGE moves ROWS between members: of each array, each member has a number of rows for each
 * other member, which may be 0. It is a scatter if one member has rows for all, and a gather if all
 * have rows for one. In memory, rows for several members, or from several, lie in the order of the
 * ranks. Nothing is computed: element types matter only for their size.
 *
 * A message is a piece of the rows of one array, from one member to another. If its sender has a
 * stream to its receiver, it travels on that stream. Otherwise, or if that stream is lost before it
 * has carried anything, it travels unchanged from position to position; if there are several rings,
 * on the one with the fewest steps. On a ring a member first sends the rows with the longest path.
 * COMPLETE says that a member has sent all its rows and holds all rows that are for it; it forwards
 * the rows of others until its COMMIT. ABORT restores nothing: recv is then unspecified. The engine
 * never overwrites rows of send.
 *
 * THE WIRE
 *
 * A message is a 64-byte header and a payload: one frame (header, payload) if the payload was
 * copied, two frames if it was not. Fields, with byte offsets:
 *      0 u32 magic 0x4c434350 ("PCCL")   4 u8 kind   5 u8 ring   6 u16 version 3
 *      8 u64 run      16 u64 seq      24 u64 tag      32 u64 nonce
 *     40 u16 segment (chunk), slot (request, data) or position of the sender (row)
 *     42 u16 step (chunk; 65535: one-shot, 65534: to its owner), position of the receiver (row), or
 *        any number in a request, which its data repeats
 *     44 u16 members   46 u16 1 if a chunk was sent before START, else 0
 *     48 u64 offset   56 u32 length   60 u32 piece (request, data) or number of the array (row)
 * Kinds: 1 chunk, 2 request, 3 data, 4 row. Fields that a kind does not use are 0. The offset of a
 * chunk is an offset of its op, and its length a number of offsets. In a request and in data they
 * are bytes of a piece. In a row they are bytes of the rows for its receiver, and the offset is a
 * multiple of Q. A chunk that was sent before START has its sender's op number as its seq, and the
 * nonce of the epoch as its nonce.
 *
 * A message is stale or foreign if it belongs to another run or an unknown op, or if its sequence
 * number or nonce differs from those in the op's START. The engine drops and counts such a message.
 * The first message that arrives before START fixes the sequence number and nonce; if START has
 * others, a collective fails, and requests are discarded. A message for a known op fails that op if
 * its position, size or alignment is impossible, or if it repeats a chunk. An impossible request is
 * only dropped, so that the other requesters are still served. */
#ifndef PCCL_CORE_H
#define PCCL_CORE_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin */

/* Element types, as pccl.DataType. */
enum pccl_dtype {
    PCCL_U8 = 0, PCCL_I8 = 1, PCCL_I16 = 2, PCCL_U16 = 3, PCCL_U32 = 4, PCCL_I32 = 5,
    PCCL_U64 = 6, PCCL_I64 = 7, PCCL_F16 = 8, PCCL_BF16 = 9, PCCL_F32 = 10, PCCL_F64 = 11,
    PCCL_I128 = 12                  /* sums of 64-bit integers; only PCCL_SUM takes them */
};

/* Reduce operations, as pccl.ReduceOp. */
enum pccl_redop { PCCL_SUM = 0, PCCL_AVG = 1, PCCL_PROD = 2, PCCL_MAX = 3, PCCL_MIN = 4 };

enum pccl_error {
    PCCL_OK = 0,
    PCCL_EINVAL = -1,    /* an argument is out of range */
    PCCL_ENOMEM = -2,
    PCCL_EZMQ = -3,      /* a call of the table failed; pccl_engine_errno() has its errno. In
                          * STREAM_LOST: this process failed, not the peer */
    PCCL_ESTREAM = -4,   /* a stream was lost, or could not be connected */
    PCCL_EPROTO = -5,    /* a neighbor sent an impossible message */
    PCCL_EREACH = -6,    /* in STREAM_LOST: no lane was ever connected */
    PCCL_EOTHER = -7     /* in STREAM_LOST: another process than the peer answers there */
};

enum {
    PCCL_ALIGNMENT = 64,           /* elements; segments and chunks begin at its multiples */
    PCCL_CHUNK_MAX = 1 << 20,      /* bytes of a payload; larger messages end their connection */
    PCCL_RINGS_MAX = 8, PCCL_ENDS_MAX = 8,   /* in one command */
    PCCL_PEERS_MAX = 4096,         /* members of one ring */
    PCCL_PARTS_MAX = 65536,        /* arrays of one collective */
    PCCL_ENDPOINT_MAX = 256,
    PCCL_KEY_CHARS = 40,           /* of a CURVE key as Z85 text */
    PCCL_TEXT_MAX = 160
};

/* ---- kernels ---- */

/* Bytes of one element, or 0 for an unknown type. */
size_t pccl_dtype_size(int dtype);

/* out[i] = a[i] op b[i] for i < n. out may be a or b; otherwise it must not overlap them. Integers
 * wrap; fp16 and bf16 are computed in fp32 and rounded once, to nearest even; MAX and MIN give NaN
 * when either side is NaN. AVG needs `divisor` >= 1. With 1 it only adds. With a larger divisor it
 * adds and then divides, as the last step of a mean; integers are rounded towards zero. Other
 * operations ignore the divisor. Returns 0, or PCCL_EINVAL for an unknown type or operation, or an
 * invalid divisor. */
int pccl_reduce(int dtype, int redop, void *out, const void *a, const void *b, size_t n,
                uint32_t divisor);

/* The formats of quantized floats; docs/internals/quantization.md describes each of them. A block
 * is a header and a code for each element; the last block of an array may be shorter. The header is
 * one number (BLOCK: step) or two (MIN_MAX: step, offset; ZERO_POINT: step, zero code, or -step,
 * offset), fp64 for fp64 elements and fp32 for all others. The name of a format ends with the bits
 * of its codes. Among n codes of 4 bits, byte i has code i in its lower half and code (n + 1) / 2 +
 * i in its upper half. */
enum pccl_format {
    PCCL_UNQUANTIZED = 0, PCCL_BLOCK_8 = 1, PCCL_BLOCK_4 = 2, PCCL_MIN_MAX_8 = 3,
    PCCL_MIN_MAX_16 = 4, PCCL_ZERO_POINT_8 = 5, PCCL_ZERO_POINT_16 = 6
};

/* Elements of a block; 0 for an unknown format. */
size_t pccl_quantized_block(int format);

/* Bytes of n quantized elements; 0 for an unknown format, or if `dtype` is not a float type. */
uint64_t pccl_quantized_size(int format, int dtype, uint64_t n);

/* Quantizes n elements, and decodes quantized ones. Arrays must not overlap. A block with a NaN or
 * an infinity becomes all NaN. Returns 0, or PCCL_EINVAL for an unknown format, or if `dtype` is
 * not a float type. */
int pccl_quantize(int format, int dtype, void *out, const void *in, size_t n);
int pccl_dequantize(int format, int dtype, void *out, const void *in, size_t n);

/* Like pccl_dequantize(), but adds the elements to those of out. A NaN in out stays NaN. */
int pccl_dequantize_add(int format, int dtype, void *out, const void *in, size_t n);

/* One step of a ring, in one pass: partial = quantized(partial op own), where partial is quantized
 * and own is not, and op is SUM, AVG (which adds, and then divides), MAX or MIN. A NaN or an
 * infinity in either operand makes its block all NaN, with MAX and MIN too. If out is not NULL it
 * receives partial, no longer quantized; out may be own. Returns 0, or PCCL_EINVAL as above, for
 * PROD, and for AVG with a divisor of 0. Other operations ignore the divisor. */
int pccl_quantized_reduce(int format, int dtype, int redop, void *partial, const void *own,
                          size_t n, uint32_t divisor, void *out);

/* out = a op b, where a and b are quantized and out is not: the reduction of a one-shot. NaNs,
 * infinities and errors are handled as in pccl_quantized_reduce(). out must not overlap a or b. */
int pccl_quantized_combine(int format, int dtype, int redop, void *out, const void *a,
                           const void *b, size_t n, uint32_t divisor);

/* Encodings of a whole fp32 array. A peer sends its encoded array once, and adds up the arrays of
 * the others; no peer reduces them on the way.
 *
 *     E3M0     Blocks of 64 elements: a scale (fp32), then codes of 4 bits, packed like those of
 *              PCCL_BLOCK_4. The scale is the largest magnitude of the block. Bit 3 of a code is
 *              the sign, the other bits are e, which stands for the level 0 if e is 0, else for
 *              scale * 2^(e - 7). An element becomes the nearest level, the larger of two that are
 *              equally near.
 *     STAT2    Blocks of 1,024 elements: four levels (fp32), then for each element the number of
 *              its level, in 2 bits. Byte i of q has those of the elements i, q + i, 2q + i and
 *              3q + i, the lowest bits first. The mean m of the block, m - d and m + d divide the
 *              elements among the levels, where d is 0.9816 standard deviations. A level is the
 *              mean of its elements, or 0 if it has none.
 *     SPARSE   Groups of 16 chunks of 4,096 elements. Each chunk keeps its 64 elements of largest
 *              magnitude, the first of equal ones; a shorter last chunk of m elements keeps m / 64,
 *              rounded up. All other elements decode to 0. A group is four levels (fp32), as in
 *              STAT2 but of the elements that it keeps, then for each chunk their places (12 bits
 *              each, increasing) and the numbers of their levels (2 bits each), the lowest bits
 *              first.
 *
 * The last block or group may be shorter. A block or group with a NaN or an infinity, or with such
 * a scale or level, decodes to all NaN. */
typedef enum pccl_encoding {
    PCCL_E3M0,
    PCCL_STAT2,
    PCCL_SPARSE,
    PCCL_ENCODINGS               /* their number */
} pccl_encoding;

/* The bytes of n encoded elements. */
uint64_t pccl_encoded_size(int encoding, uint64_t n);

/* Encodes n elements. The arrays must not overlap. Cannot fail. */
void pccl_encode(int encoding, void *out, const float *in, size_t n);

/* Decodes n elements, to the same numbers on every machine, or adds them to `out`. The arrays must
 * not overlap. Returns 0, or with SPARSE PCCL_EPROTO if a place is beyond its chunk or not above the
 * place before it; the content of `out` is then unspecified. */
int pccl_decode(int encoding, float *out, const void *in, size_t n);
int pccl_decode_add(int encoding, float *out, const void *in, size_t n);

/* One outer step of SGD with Nesterov momentum, in PyTorch's form with dampening 0. Each operation
 * is rounded separately, so that every machine computes the same bits:
 *     v = mu * v + g;    theta = theta - lr * (g + mu * v)
 * (nesterov == 0: theta = theta - lr * v). All arrays are fp32 of n elements and do not overlap.
 * Cannot fail. */
void pccl_outer_sgd(float *theta, float *v, const float *g, size_t n, float lr, float mu,
                    int nesterov);

/* x[i] = x[i] / divisor, fp32; divisor >= 1: turns a sum into a mean. Cannot fail. */
void pccl_divide_f32(float *x, size_t n, uint32_t divisor);

/* out[i] = a[i] - b[i], fp32, as for the pseudo-gradient; out may be a or b. Cannot fail. */
void pccl_subtract_f32(float *out, const float *a, const float *b, size_t n);

/* How two buffers differ. */
typedef struct pccl_difference {
    uint64_t bytes;              /* number of differing bytes */
    uint64_t ulp;                /* largest distance of two elements, excluding NaNs, in units in
                                  * the last place (integers: the difference) */
    uint64_t nans_a, nans_b;     /* number of NaNs in each buffer */
} pccl_difference;

/* Compares `n` elements. Returns 0, or PCCL_EINVAL for an unknown type. */
int pccl_compare(int dtype, const void *a, const void *b, size_t n, pccl_difference *out);

/* Runs every kernel over fixed inputs and writes all result bits, at most `size` bytes, to `out`.
 * Two machines whose bytes differ have different arithmetic and must not be in one run. Returns the
 * number of bytes of the whole result, even if `size` is smaller (such as 0). */
size_t pccl_self_test(unsigned char *out, size_t size);

/* ---- the table: every ZeroMQ function that the core calls ---- */

typedef struct pccl_msg { uint64_t opaque[8]; } pccl_msg;  /* a zmq_msg_t: 64 bytes everywhere */

typedef struct pccl_pollitem pccl_pollitem;     /* a zmq_pollitem_t; defined after the cdef */

/* Each member has the signature and the contract of the zmq_ function of that name. */
typedef struct pccl_zmq {
    void *(*ctx_new)(void);
    int (*ctx_set)(void *ctx, int option, int value);
    int (*ctx_term)(void *ctx);
    void *(*socket)(void *ctx, int type);
    int (*close)(void *socket);
    int (*setsockopt)(void *socket, int option, const void *value, size_t size);
    int (*getsockopt)(void *socket, int option, void *value, size_t *size);
    int (*bind)(void *socket, const char *endpoint);
    int (*connect)(void *socket, const char *endpoint);
    int (*socket_monitor)(void *socket, const char *endpoint, int events);
    int (*poll)(pccl_pollitem *items, int n, long timeout_ms);
    int (*msg_init)(pccl_msg *msg);
    int (*msg_init_size)(pccl_msg *msg, size_t size);
    int (*msg_init_data)(pccl_msg *msg, void *data, size_t size,
                         void (*release)(void *data, void *hint), void *hint);
    int (*msg_send)(pccl_msg *msg, void *socket, int flags);
    int (*msg_recv)(pccl_msg *msg, void *socket, int flags);
    int (*msg_close)(pccl_msg *msg);
    void *(*msg_data)(pccl_msg *msg);
    size_t (*msg_size)(const pccl_msg *msg);
    int (*msg_more)(const pccl_msg *msg);
    int (*msg_get)(const pccl_msg *msg, int property);
    const char *(*msg_gets)(const pccl_msg *msg, const char *property);
    int (*errno_)(void);
    void *(*atomic_counter_new)(void);
    int (*atomic_counter_inc)(void *counter);
    int (*atomic_counter_dec)(void *counter);
    int (*atomic_counter_value)(void *counter);
    void (*atomic_counter_destroy)(void **counter);
} pccl_zmq;

/* For a table without libzmq: fills in the msg_ and atomic_counter_ members, except msg_send and
 * msg_recv. Their messages are plain blocks of memory, without properties. Only one thread at a
 * time may use them. */
void pccl_plain_fill(pccl_zmq *table);

/* Sets whether another frame follows a plain message: for the msg_recv of such a table. */
void pccl_plain_set_more(pccl_msg *msg, int more);

/* Received messages. Their bytes are valid until the next call with the same mail. The struct
 * begins as all zeros. */
enum { PCCL_MAIL_MAX = 32 };
typedef struct pccl_mail {
    pccl_msg message[PCCL_MAIL_MAX];
    const void *data[PCCL_MAIL_MAX];
    size_t size[PCCL_MAIL_MAX];
    uint32_t n;
} pccl_mail;

/* Receives waiting frames, at most PCCL_MAIL_MAX and at most `most`, each as a message; never
 * waits. Returns their number, or a negative errno. A smaller number than asked for means that the
 * socket is empty. */
int pccl_mail_take(const pccl_zmq *zmq, void *socket, pccl_mail *mail, uint32_t most);

/* Receives the next message of a ROUTER: the name of its connection, and its first frame. Further
 * frames are dropped; there may be millions, as libzmq bounds only their sizes. Returns 1, or 2 if
 * frames were dropped, 0 if no message waits, or a negative errno. */
int pccl_mail_take_from(const pccl_zmq *zmq, void *router, pccl_mail *mail);

/* Releases the messages. */
void pccl_mail_drop(const pccl_zmq *zmq, pccl_mail *mail);

/* Sends a copy of these bytes as a message of one frame, without waiting. If `sent` is not NULL,
 * sets *sent to whether the message was sent, so that a caller which an exception interrupts right
 * after this call can tell. Returns 1 if the socket has messages to receive (this call consumes
 * their notification), 0 if not, or a negative errno, such as -EAGAIN if there is no room. */
int pccl_mail_send(const pccl_zmq *zmq, void *socket, const void *data, size_t size,
                   int32_t *sent);

/* Sends them to one of the connections of a ROUTER. Returns 0 or a negative errno. */
int pccl_mail_send_to(const pccl_zmq *zmq, void *router, const void *to, size_t to_size,
                      const void *data, size_t size);

/* ---- commands and events ---- */

enum pccl_op_kind {
    PCCL_COLLECTIVE = 1,
    PCCL_SERVE = 2,          /* answer requests for the bytes of `pieces` */
    PCCL_FETCH = 3,          /* request the bytes of `pieces` from the holders that START names */
    PCCL_EXCHANGE = 4        /* rows of each member for each other one (EXCHANGES) */
};

enum pccl_collective {
    PCCL_ALL_REDUCE = 1, PCCL_REDUCE_SCATTER = 2, PCCL_ALL_GATHER = 3, PCCL_BROADCAST = 4,
    PCCL_REDUCE = 5
};
enum { PCCL_COLLECTIVES_N = 5 }; /* number of these */

/* How the data of an ALL_REDUCE travels (THE RING, ONE-SHOT, TWO STAGES). */
enum pccl_algorithm { PCCL_RING = 0, PCCL_ONE_SHOT = 1, PCCL_TWO_STAGE = 2 };

/* An array of a collective: `count` elements for each slice. It is in place if
 *     ALL_REDUCE, REDUCE   send == recv
 *     REDUCE_SCATTER       recv is the slice of our rank in send
 *     ALL_GATHER           send is the slice of our rank in recv
 * and otherwise send and recv must not overlap. BROADCAST uses recv alone, and REDUCE writes only
 * to the recv of the root. In an EXCHANGE `count` is the number of elements in a row. There send
 * and recv may share the member's own rows if one of them holds no other rows.
 *
 * `error` is NULL or, for a quantized SUM or AVG of fp32 by ALL_REDUCE, `count` numbers. They
 * receive the quantization errors of this member: of its contribution, and of the results and
 * partial results that it has quantized for all. So the sum of all contributions is the decoded
 * result, as a sum, plus the errors of all members. An error that is not finite becomes 0. Without
 * success the content of `error` is unspecified. */
typedef struct pccl_part {
    const void *send;
    void *recv;
    uint64_t count;
    uint32_t dtype;
    float *error;
} pccl_part;

/* A block of memory that one side serves and the other fetches. */
typedef struct pccl_piece {
    void *data;
    uint64_t bytes;
    uint32_t piece;          /* its number, which requests use */
    uint32_t uncounted;      /* its bytes do not count in tx_bytes and rx_bytes */
} pccl_piece;

enum pccl_command_kind {
    PCCL_OPEN_STREAM = 1, PCCL_CLOSE_STREAM = 2, PCCL_REGISTER = 3, PCCL_START = 4,
    PCCL_COMMIT = 5, PCCL_ABORT = 6, PCCL_STOP = 7, PCCL_VERIFIED = 8, PCCL_ALLOW = 9,
    PCCL_EXPECT = 10, PCCL_ADMIT = 11, PCCL_CONNECT_STREAM = 12, PCCL_LOSE_STREAM = 13,
    PCCL_REMIND = 14, PCCL_QUERY = 15, PCCL_MEET = 16, PCCL_READY = 17, PCCL_EAGER = 18
};

/* Our place in a ring: its stream leads to the next position (THE RING). */
typedef struct pccl_ring {
    uint32_t stream, members, position, root;
    const uint16_t *ranks;
    uint64_t begin, count;   /* offsets */
    uint64_t call;           /* START: our predecessor's op number, if it may have sent chunks
                              * before START; else 0 */
} pccl_ring;

/* The other end of a transfer. Each requester of a holder has its own slot, below 65536. */
typedef struct pccl_end {
    uint32_t stream, slot;
} pccl_end;

/* One command. Each kind lists the members that it uses:
 *   OPEN_STREAM   stream (a number that was never used before). Ops can be started on it at once.
 *   CONNECT_STREAM  stream (an open one, never connected before); lanes (0: as many as suit the
 *                 link); shares (the streams that send at the same time, and so need fewer lanes
 *                 each; 0: as 1); hwm (messages queued for each lane); endpoint; peer (the
 *                 neighbor's number); curve_server (the neighbor's public key, if the engine has
 *                 keys), else nonce (of the epoch); via (empty, or the `address:port` of a
 *                 rendezvous point).
 *                 The host of a TCP endpoint must be an address: libzmq would look up a name in its
 *                 I/O thread, which moves no data during the lookup. libzmq reports nothing when it
 *                 gets no socket for a lane, so the caller must set each stream a deadline for its
 *                 STREAM_UP.
 *   MEET          lanes, endpoint, via: connects the PULL socket to a sender at a rendezvous point.
 *                 If this fails, the sender notices and reports it.
 *   CLOSE_STREAM  stream: drops the messages queued there; ops that use the stream get FAILED.
 *   LOSE_STREAM   stream, endpoint (a text, the reason): closes the stream like CLOSE_STREAM, and
 *                 emits STREAM_LOST with PCCL_EREACH and that text.
 *   EXPECT        peer (our own number), nonce (of an epoch): sets who may connect by PLAIN. The
 *                 nonce of the previous EXPECT remains valid. Discards the keys of all ADMITs, and
 *                 chunks that came before START in an epoch with another nonce.
 *   ADMIT         curve_server: lets the owner of this public key connect.
 *   REGISTER      op (a number that was never used before), op_kind, run, tag, min_seq (the op's
 *                 sequence number will be greater), and
 *                 COLLECTIVE: collective; redop; format (if not 0, the parts must be floats, and
 *                 redop any but PROD); members (REDUCE_SCATTER and ALL_GATHER: the slices of the
 *                 larger buffers); parts and n_parts (an array, valid until SETTLED).
 *                 ALL_GATHER: recv_rows (the rows of each rank's slice, copied; NULL: all slices
 *                 are equally long).
 *                 ALL_REDUCE: window (0, or the offsets of a window, in whole alignment blocks).
 *                 EXCHANGE: members; parts and n_parts (an array, copied); send_rows and recv_rows
 *                 (the number of rows for each rank and from each rank, copied; NULL: none).
 *                 SERVE, FETCH: pieces and n_pieces (an array in ascending order of piece numbers,
 *                 valid until SETTLED).
 *                 SERVE: limit (0, or the bytes that it may send before the first ALLOW).
 *                 FETCH: leaf_bytes (0, or the size of the LEAVES into which each piece is cut: a
 *                 leaf that has arrived gives a LEAF event and waits for its VERIFIED).
 *   EAGER         op (a COLLECTIVE, before its START, once); n_rings, rings, algorithm and
 *                 chunk_bytes, as START will have them. Has no effect if one of the streams is not
 *                 open, or in two stages.
 *   START         op, seq, nonce (of the call, the same on all members), and
 *                 COLLECTIVE, EXCHANGE, FETCH: chunk_bytes (of a message). COLLECTIVE and EXCHANGE
 *                 round it down to whole alignment blocks, or to whole blocks of the format, but
 *                 send at least one.
 *                 COLLECTIVE, EXCHANGE: n_rings, rings (THE RING), all with the same members;
 *                 `ranks` are the ranks by position, valid until SETTLED; NULL: they are the
 *                 positions. A ring of one member needs no stream.
 *                 ALL_REDUCE: algorithm (if PCCL_TWO_STAGE, chunk_bytes is the same on all
 *                 members).
 *                 BROADCAST, REDUCE: the position of the root in each ring.
 *                 EXCHANGE: begin and count are not used. A member that sends and forwards nothing
 *                 needs no stream (0).
 *                 EXCHANGE, and ALL_REDUCE in two stages: direct (NULL, or the stream to each
 *                 member by rank, copied; 0: data for it goes around a ring).
 *                 SERVE: n_ends, ends: each stream leads to the requester with that slot.
 *                 FETCH: n_ends, ends: each stream leads to a holder, at which we have that slot.
 *                 SERVE and FETCH take any number of START commands, which add to each other; seq,
 *                 nonce and chunk_bytes are those of the first. A START with a greater seq begins
 *                 another round of the transfer: it removes the earlier requesters or holders, and
 *                 keeps the data that has been fetched.
 *   ALLOW         op, limit: a SERVE with a limit may send about `limit` bytes more. The unused
 *                 rest of earlier allowances lapses, and an answer that exceeds its allowance is
 *                 deducted from the next one. So a caller that sends ALLOW regularly bounds a rate.
 *   REMIND        op, limit: lets a FETCH repeat late requests, to other holders first. Three kinds
 *                 are late: a request that a later one to the same holder has overtaken, as its
 *                 lane is stuck; the requests to a holder that is silent while others answer; and
 *                 all requests, if nobody answers, because holders may have dropped them (a holder
 *                 keeps 1024 of each requester). A request must be late for 2 REMINDs, or for more
 *                 if answers have been slower before; each repetition takes twice as many. After
 *                 `limit` REMINDs without any answer the op reports FAILED with PCCL_ESTREAM, as if
 *                 no holder were left. The caller, which has a clock, sends REMIND twice a second.
 *   VERIFIED      op, piece, leaf (its index in that piece), good. A leaf that is not good is
 *                 fetched again. If one holder gave all of it, that holder gets no more requests,
 *                 and its stream is closed with a STREAM_LOST event. A FETCH is COMPLETE when every
 *                 leaf is good.
 *   READY         op (a COLLECTIVE with a window), offset, length (both in whole alignment blocks):
 *                 send holds the contribution there. Each offset once. Has no effect after COMMIT
 *                 or ABORT.
 *   QUERY         op: a PROGRESS event follows if the op has been started and is not COMPLETE,
 *                 FAILED or ended. For a SERVE there is none.
 *   COMMIT        op. It must be COMPLETE; a SERVE may be committed at any time.
 *   ABORT         op
 *   STOP          pccl_engine_run() returns. */
typedef struct pccl_command {
    uint32_t kind;
    uint32_t stream;
    uint32_t lanes;
    uint32_t shares;
    uint32_t hwm;
    char endpoint[256];
    char via[128];
    char curve_server[48];           /* zero-terminated */
    uint64_t op;
    uint32_t op_kind;
    uint32_t collective;
    uint32_t redop;
    uint32_t format;                 /* a pccl_format */
    uint64_t peer;
    uint64_t nonce;
    uint64_t run;
    uint64_t tag;
    uint64_t min_seq;
    uint64_t seq;
    const pccl_part *parts;
    const pccl_piece *pieces;
    const uint64_t *send_rows;
    const uint64_t *recv_rows;
    const uint32_t *direct;
    uint64_t limit;
    uint64_t window;
    uint64_t offset;
    uint64_t length;
    uint32_t n_parts;
    uint32_t n_pieces;
    uint32_t members;
    uint32_t chunk_bytes;
    uint32_t leaf_bytes;
    uint32_t piece, leaf, good;
    uint32_t n_rings;
    uint32_t algorithm;              /* a pccl_algorithm */
    uint32_t n_ends;
    pccl_ring rings[8];
    pccl_end ends[8];
} pccl_command;

enum pccl_event_kind {
    PCCL_COMPLETE = 1,       /* op: this peer holds the whole result */
    PCCL_FAILED = 2,         /* op: it cannot complete; status and text say why */
    PCCL_SETTLED = 3,        /* op: the engine has forgotten it and refers to none of its memory */
    PCCL_STREAM_LOST = 4,    /* stream: closed, but not by CLOSE_STREAM; text says why */
    PCCL_LEAF = 5,           /* op: a leaf has arrived and waits for its VERIFIED */
    PCCL_STREAM_UP = 6,      /* stream: its first lane is connected */
    PCCL_PROGRESS = 7,       /* op: how much of it is done */
    PCCL_WRITTEN = 8         /* op: a window of recv holds the result */
};

typedef struct pccl_event {
    uint32_t kind;
    int32_t status;          /* a pccl_error */
    uint64_t op;
    uint32_t stream;         /* FAILED: the lost stream that text describes, or 0 */
    uint32_t settled;        /* COMPLETE: whether the op is settled already */
    uint64_t tx_bytes;       /* payload bytes of this op, so far */
    uint64_t rx_bytes;
    uint64_t seq;            /* of the op's last START */
    uint32_t piece;
    uint32_t leaf;
    uint64_t done;           /* PROGRESS: thousandths, below 1000; WRITTEN: the window */
    char text[160];          /* zero-terminated */
} pccl_event;

/* ---- the engine ---- */

typedef struct pccl_engine pccl_engine;

typedef struct pccl_options {
    uint32_t io_threads;             /* of the context, at least 1 */
    uint32_t forward_max;            /* messages that may wait to be sent on */
    uint32_t recv_hwm;               /* received messages queued for each connection */
    uint32_t heartbeat_ms;           /* interval of heartbeats to all senders to us; 0: none */
    uint32_t heartbeat_timeout_ms;   /* a sender that gets none for this long loses its stream */
    uint32_t connect_timeout_ms;     /* for a connection, and for a handshake on either side */
    uint32_t copy_max;               /* bytes; payloads up to this size are copied */
    uint32_t fetch_window;           /* most outstanding requests to one holder */
    char curve_public[48];           /* CURVE keys, zero-terminated; empty: no encryption */
    char curve_secret[48];
    char dialler[48];                /* WHO MAY CONNECT; zero-terminated */
} pccl_options;

/* Creates an engine and binds its "inproc://pccl-engine". Returns NULL on failure; *error is then
 * the error. The table must outlive the engine. */
pccl_engine *pccl_engine_new(const pccl_zmq *table, const pccl_options *options, int *error);

/* Listens on one more endpoint; only before pccl_engine_run(). `bound` receives the endpoint with
 * wildcards filled in. Returns 0 or PCCL_EZMQ. */
int pccl_engine_bind(pccl_engine *engine, const char *endpoint, char *bound, size_t size);

/* The engine's ZeroMQ context, for the caller's PAIR socket. */
void *pccl_engine_context(pccl_engine *engine);

/* Runs the engine. Returns 0 after STOP, or a negative error if the engine cannot continue. Only
 * one thread at a time may run it. */
int pccl_engine_run(pccl_engine *engine);

/* Runs one pass of the loop without waiting. Returns 1 if it did anything, 0 if there was nothing
 * to do, 2 after STOP, or a negative error. */
int pccl_engine_step(pccl_engine *engine);

/* The errno of the last call of the table that failed. */
int pccl_engine_errno(const pccl_engine *engine);

/* The number of dropped messages and commands: stale, foreign or malformed. */
uint64_t pccl_engine_dropped(const pccl_engine *engine);

/* Closes everything, waits until nothing refers to memory of any op, restores in-place buffers of
 * ops that are not settled, terminates the context (the caller must have closed its own sockets in
 * it) and frees the engine. NULL is allowed. No thread may be running the engine. */
void pccl_engine_free(pccl_engine *engine);

/* ---- pumps ---- */

/* Two connections to be joined: non-blocking descriptors, which belong to the pump once it has
 * received them. */
typedef struct pccl_joint {
    int64_t fd[2];
} pccl_joint;

/* Reads pccl_joint structs from the connection `control`, and copies bytes between the two
 * connections of each. When the other side closes `control`, closes all connections and returns 0.
 * Returns PCCL_ENOMEM or PCCL_EZMQ (a system call failed) at once. */
int pccl_pump_run(int64_t control);

/* cdef end */

#if defined _WIN32
typedef uintptr_t pccl_fd;
#else
typedef int pccl_fd;
#endif

struct pccl_pollitem {
    void *socket;
    pccl_fd fd;
    short events;
    short revents;
};

#endif
