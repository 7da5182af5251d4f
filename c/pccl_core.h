/* pccl_core.h - the C core of pccl: reduce kernels, the outer optimizer step and the lane engine.
 *
 * This header is the manual and, between the two "cdef" marks, the declaration that cffi binds:
 * no preprocessor directive may stand between them.
 *
 * Conventions. C99, no globals, no threads, no errno of our own: functions that can fail return 0
 * or a negative PCCL_E... code. The caller owns all memory it passes, for as long as each
 * function says. Buffers may have any alignment. Everything on the wire is little-endian.
 *
 * SIMPLE USE
 *
 * Two peers sum up an array. Each makes an engine and enters it with a thread:
 *
 *     pccl_options options = {.io_threads = 1, .forward_max = 256, .recv_hwm = 4, .copy_max =
 *     16384,
 *                             .connect_timeout_ms = 5000, .fetch_window = 64};
 *     pccl_engine *engine = pccl_engine_new(&table, &options, &error);
 *     pccl_engine_bind(engine, "tcp://10.0.0.1:*", bound, sizeof bound);
 *     pccl_engine_run(engine);                                      (in the thread)
 *
 * connects a PAIR socket of pccl_engine_context() to "inproc://pccl-engine", and sends four
 * commands, in which everything else is 0:
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
 * The other peer says the same, with `position` 1 and the first one's endpoint. Then a
 * PCCL_COMPLETE event says that y has the sum. If its `settled` is 0, PCCL_COMMIT follows, which is
 * answered by PCCL_SETTLED; from then on the engine refers to neither array. The rest of this
 * comment is the manual.
 *
 * THE ENGINE
 *
 * An engine moves the bulk data of one peer. It owns a ZeroMQ context, one PULL socket on which all
 * chunks of other peers arrive, and one PUSH socket for each STREAM: one neighbour, reached by one
 * or more connections, its LANES. A thread of the caller enters pccl_engine_run() and stays there,
 * without the GIL, until it is told to stop. Everything else is messages: the caller connects a
 * PAIR socket of the engine's own context to "inproc://pccl-engine", sends pccl_command structs,
 * one or more in a message, and receives pccl_event structs, one in each, in native layout.
 *
 * An OP is one peer's part in one collective or state transfer:
 *
 *     REGISTER -> (START) -> COMPLETE event -> COMMIT or ABORT -> SETTLED event
 *
 * The caller registers it before its peer votes to start it, so that a chunk from a neighbour that
 * has heard of the start first finds the buffers. The caller starts it, with its place in the
 * rings, when the start is agreed. COMPLETE says that this peer holds the whole result; the op goes
 * on forwarding what others need. COMMIT keeps the result, ABORT restores what an in-place op has
 * overwritten. After SETTLED the engine refers to no memory of that op (no queued message, no
 * zero-copy send) and has forgotten it. When a COMPLETE event has `settled` set, all that is true
 * already and neither command is needed. From COMMIT or ABORT on, the op's tag is free for another.
 *
 * ABORT is legal at any time after REGISTER and is always answered by SETTLED, even when it has
 * crossed a COMPLETE event with `settled`. It closes the streams on which bytes of the op are still
 * queued: each of these gives a STREAM_LOST event, and other ops on it get a FAILED event.
 *
 * A FAILED op does nothing more and waits for its ABORT. If it was COMPLETE before (then its stream
 * was lost, and others may lack what it forwarded) COMMIT is legal as well. What a settled op has
 * forwarded can be lost, too. Only STREAM_LOST tells of that, and only the caller of the peer that
 * has lost the stream can tell those who wait for it.
 *
 * Two kinds of op outlive a FAILED event with PCCL_ESTREAM. For SERVE it says that one requester
 * can no longer be answered; the op goes on serving the others. A FETCH that loses a holder asks
 * the others for what that one owes; the event says that no holder is left, and the op waits for a
 * START with a greater seq, or for its ABORT. An op that could not be registered for want of memory
 * is FAILED, and its ABORT is answered by SETTLED.
 *
 * Where recv is also send, or part of it, the engine saves what recv held in an undo buffer before
 * it overwrites it: as many bytes as recv has, until SETTLED. It keeps one such buffer, the
 * largest, for later ops. (ALL_GATHER in place overwrites no contribution, so nothing is saved.) An
 * engine that stops, or is freed, restores what every op has overwritten that is not SETTLED.
 *
 * WHO MAY CONNECT
 *
 * If the options hold keys, the PULL socket is a CURVE server and every PUSH socket a CURVE client,
 * over ipc too, and whoever holds a key that an ADMIT command names may connect. Without keys both
 * use PLAIN: the PUSH socket sends the number of the peer that it wants to reach as the user name
 * (decimal) and the nonce of the epoch as the password (16 hexadecimal digits), both from
 * CONNECT_STREAM; the PULL socket compares them with those of EXPECT commands. A connection that
 * names another peer is refused. One with another nonce or another key may be from an epoch that we
 * do not know of yet: it waits for the next EXPECT or ADMIT until libzmq's handshake time-out. So a
 * stream knows whom it has reached, and strangers can send nothing at all.
 *
 * The master, which dials to see whether we can be reached, may connect as well: with the public
 * key `dialler`, or as user "dial" with the password `dialler`. An engine without keys and without
 * `dialler` lets everybody in.
 *
 * MEETING POINTS
 *
 * A neighbour behind NAT cannot be connected to, so it connects itself: PUSH and PULL both connect
 * to a meeting point, which joins the two connections of each lane and from then on copies bytes.
 * The meeting point speaks SOCKS 5 (RFC 1928), as libzmq does (ZMQ_SOCKS_PROXY). Both sides request
 * the endpoint of the command as their destination, and connections that request the same one are
 * joined. The endpoint has the form of an IPv6 address, because libzmq would look up a name and
 * block the engine meanwhile. Authentication is unchanged: the handshakes are those of PUSH and
 * PULL. Such a neighbour counts as distant, and a stream to it has 8 lanes unless the command says
 * otherwise.
 *
 * COLLECTIVES AND THEIR OFFSETS
 *
 * A collective is over one or more arrays, its PARTS, which complete or fail together. They lie
 * one after the other in a space of offsets: a part of `count` elements takes `count` offsets, and
 * the rest up to the next multiple of Q = PCCL_ALIGNMENT (an ALIGNMENT BLOCK) is empty. The offsets
 * of all parts together are a SLICE; a buffer has one, or one for each member.
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
 * RANK is the same in all rings; it is its position in a ring that names no ranks.
 *
 * The slices of an ALL_GATHER may be unlike: then the command has the rows of each rank's slice,
 * and the count of a part is that of a row. In the space of offsets all slices are as long as the
 * longest one; nothing travels of what is behind a shorter one, and in memory there is no gap.
 *
 * THE RING
 *
 * In a ring of n members, the ring's share of a slice, `count` offsets from `begin`, is cut into n
 * SEGMENTS. The OWNER of segment s is position s - 1 (mod n): the last one to add to it, or the one
 * that has it from the beginning. Segment s is
 *
 *     ALL_REDUCE:   [bound(s), bound(s+1)) with
 *                   bound(s) = begin + min(count, Q * (ceil(count / Q) * s / n)), rounded down
 *     REDUCE_SCATTER, ALL_GATHER: the ring's share of the slice of the owner's rank
 *     BROADCAST, REDUCE: the ring's share, if the owner is the root; else empty.
 *
 * A chunk is a piece of one segment, and of one part; or, unquantized and in buffers of one slice,
 * of neighbours of one type that have up to 128 KiB each: in the message their elements follow each
 * other without gaps. It travels from position to position:
 *
 *     h <= n-2:  a partial result of h+1 contributors. The receiver adds its own contribution. If
 *                that makes n (h == n-2) it is final and stored (AVG divides floats here).
 *     h >= n-1:  final. Stored.
 *
 * It is sent on with step h+1, unless h is the last step. ALL_REDUCE has the steps 0 to 2n-3,
 * REDUCE_SCATTER and REDUCE those up to n-2, ALL_GATHER and BROADCAST those from n-1. Position r
 * begins with its own chunks of the segment that its successor sees at the first step; a receiver
 * at position p only ever sees segment (p - h - 1) mod n at step h. There is no barrier: each chunk
 * is handled when it comes, over whichever lane. So a REDUCE is a chain that begins behind the root
 * and ends at it: every link carries the data once, and the root's link to its successor nothing.
 *
 * ONE-SHOT. Two members may ALL_REDUCE without a ring: each sends the other one all of its
 * contribution, in chunks whose step is 65535 and whose segment is the sender's position, and
 * reduces both, that of position 0 on the left. As many bytes, in one step. Quantized, each reduces
 * what both have sent, its own bytes too, and does not quantize the result again.
 *
 * A stream first sends what was received and is to be sent on (forwards). It sends a chunk of the
 * peer's own only when no forward waits; own chunks of several ops take turns. The engine stops
 * receiving when `forward_max` forwards wait, or forwards of 32 MiB that are not the ops' own
 * memory. Because own chunks enter only an empty queue, the ring always has free space and cannot
 * deadlock on its own back-pressure. Several rings could block each other, so these limits are
 * lifted while an op has rings that lead to different neighbours.
 *
 * If the command names a format, a payload is a chunk's elements as pccl_quantize() writes them.
 * Each partial result is quantized anew. A final one is quantized once and sent on unchanged, and
 * all members, its owner included, store what these bytes say. Chunks are whole blocks of the
 * format, counted from the beginning of the part or segment, so results do not depend on
 * chunk_bytes.
 *
 * Several rings divide a slice in their order: the first begins at 0, each other where the one
 * before it ends, and the last ends where the slice does. Shares begin at multiples of Q.
 *
 * BEFORE START
 *
 * An op with an EAGER command sends copies of own chunks before START. Their receiver holds them,
 * and changes no memory, until a START names the sender's op number as the `call` of that ring: see
 * engine/unexpected.h. So an ABORT settles such an op at once.
 *
 * PROGRESSIVELY
 *
 * An ALL_REDUCE whose REGISTER has a `window` may begin before its memory is filled: nothing of
 * send is read before a READY command says that the contribution is there. What comes for other
 * places waits, counts like forwards, and keeps own chunks back meanwhile. The offsets are cut into
 * windows; when the last element of a window of recv holds the result, a WRITTEN event says so, and
 * nobody writes there any more, unless by ABORT. So a caller whose arrays are elsewhere, as on a
 * GPU, copies both ways meanwhile. (Where there is one member alone, there are no WRITTEN events.)
 *
 * EXCHANGES
 *
 * An EXCHANGE moves ROWS between members: of each array, each member has a number of rows for each
 * other one, which may be 0. It is a scatter where one member has rows for all, a gather where all
 * have rows for one. An array of rows for several members, or from several, has them in the order
 * of the ranks. Nothing is computed, and bytes are all that counts.
 *
 * A message is a piece of the rows of one array, from one member to another. It travels along the
 * ring, unchanged, from position to position until it is where it belongs; if there are several
 * rings, on the one with the fewest steps. So a link carries only what has no shorter way. A member
 * first sends the rows with the longest way. COMPLETE says that a member has sent all its rows and
 * holds all that are for it; it sends on those of others until its COMMIT. ABORT restores nothing:
 * what was received is then unspecified, and what is sent is never overwritten.
 *
 * THE WIRE
 *
 * A message is a 64-byte header and a payload: one frame (header, payload) where the payload was
 * copied, two frames where it was not. Fields, with byte offsets:
 *      0 u32 magic 0x4c434350 ("PCCL")   4 u8 kind   5 u8 ring   6 u16 version 3
 *      8 u64 run      16 u64 seq      24 u64 tag      32 u64 nonce
 *     40 u16 segment (chunk), slot (request, data) or position of the sender (row)
 *     42 u16 step (chunk; 65535: oneshot), position of the receiver (row), or of a request any
 *        number, which its data repeats
 *     44 u16 members   46 u16 1 if a chunk was sent before START, else 0
 *     48 u64 offset   56 u32 length   60 u32 piece (request, data) or number of the array (row)
 * Kinds: 1 chunk, 2 request, 3 data, 4 row. Fields that a kind does not use are 0. A chunk's offset
 * is one of its op's, and its length counts offsets; those of a request and of data are bytes of a
 * piece, those of a row bytes of the rows for its receiver, and the offset a multiple of Q. The seq
 * of a chunk that was sent before START is its sender's op number, its nonce that of the epoch.
 *
 * A message is stale or foreign if it belongs to another run or an unknown op, or if its sequence
 * number or nonce differs from those in the op's START. Such a message is dropped and counted.
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
    PCCL_I128 = 12                  /* sums of 64-bit integers: no other operation has them */
};

/* Reduce operations, as pccl.ReduceOp. */
enum pccl_redop { PCCL_SUM = 0, PCCL_AVG = 1, PCCL_PROD = 2, PCCL_MAX = 3, PCCL_MIN = 4 };

enum pccl_error {
    PCCL_OK = 0,
    PCCL_EINVAL = -1,    /* an argument is out of range */
    PCCL_ENOMEM = -2,
    PCCL_EZMQ = -3,      /* a call of the table failed; pccl_engine_errno() has its errno. Of
                          * STREAM_LOST: our own fault, the peer is not to blame */
    PCCL_ESTREAM = -4,   /* a stream was lost, or could not be connected */
    PCCL_EPROTO = -5,    /* a neighbour sent an impossible message */
    PCCL_EREACH = -6,    /* of STREAM_LOST: no lane has ever stood */
    PCCL_EOTHER = -7     /* of STREAM_LOST: another process than the peer's answers there */
};

enum {
    PCCL_ALIGNMENT = 64,           /* elements; segments and chunks begin at its multiples */
    PCCL_CHUNK_MAX = 1 << 20,    /* bytes of a payload; larger messages end their connection */
    PCCL_RINGS_MAX = 8, PCCL_ENDS_MAX = 8,   /* of one command */
    PCCL_PEERS_MAX = 4096,   /* members of one ring */
    PCCL_PARTS_MAX = 65536,  /* arrays of one collective */
    PCCL_ENDPOINT_MAX = 256,
    PCCL_KEY_CHARS = 40,     /* of a CURVE key, which is text: Z85 */
    PCCL_TEXT_MAX = 160
};

/* ---- kernels ---- */

/* Bytes of one element, or 0 for an unknown type. */
size_t pccl_dtype_size(int dtype);

/* out[i] = a[i] op b[i] for i < n. out may be a or b, or not overlap them at all. Integers wrap;
 * fp16 and bf16 are computed in fp32 and rounded once, to nearest even; MAX and MIN give NaN when
 * either side is NaN. AVG needs `divisor` >= 1: with 1 it adds; else it adds and divides,
 * integers towards zero: the last step of a mean. Other operations ignore the divisor. Returns 0,
 * or PCCL_EINVAL for an unknown type, operation or divisor. */
int pccl_reduce(int dtype, int redop, void *out, const void *a, const void *b, size_t n,
                uint32_t divisor);

/* How an array of floats is quantized: docs/internals/quantization.md says what each does. A block
 * is a header of one number (BLOCK: step) or two (MIN_MAX: step, offset; ZERO_POINT: step, zero
 * code, or -step, offset), fp64 for fp64 elements and fp32 for all others, and a code of so many
 * bits for each element; the last block of an array may be shorter. Of n codes of 4 bits, byte i
 * has code i in its lower half and code (n + 1) / 2 + i in its upper one. */
enum pccl_format {
    PCCL_UNQUANTIZED = 0, PCCL_BLOCK_8 = 1, PCCL_BLOCK_4 = 2, PCCL_MIN_MAX_8 = 3,
    PCCL_MIN_MAX_16 = 4, PCCL_ZERO_POINT_8 = 5, PCCL_ZERO_POINT_16 = 6
};

/* Elements of a block, 0 for an unknown format; bytes of n elements that are quantized, 0 for an
 * unknown format or elements that are no floats. */
size_t pccl_quantized_block(int format);
uint64_t pccl_quantized_size(int format, int dtype, uint64_t n);

/* Quantizes n elements, and back. Arrays do not overlap. A block with a NaN or an infinity becomes
 * all NaN. 0, or PCCL_EINVAL for an unknown format or elements that are no floats. */
int pccl_quantize(int format, int dtype, void *out, const void *in, size_t n);
int pccl_dequantize(int format, int dtype, void *out, const void *in, size_t n);

/* The same, added to what out holds; a NaN stays one. */
int pccl_dequantize_add(int format, int dtype, void *out, const void *in, size_t n);

/* One step of a ring, in one pass: partial = quantized(partial op own), where partial is quantized
 * and own is not, and op is SUM, AVG (which adds, and then divides), MAX or MIN. With MAX and MIN a
 * NaN or an infinity of either side spoils its block, as ever. If out is not NULL it receives
 * partial, no longer quantized; out may be own. What is wrong gives PCCL_EINVAL: PROD, and a
 * divisor of 0 for AVG. Other operations ignore the divisor. */
int pccl_quantized_reduce(int format, int dtype, int redop, void *partial, const void *own,
                          size_t n, uint32_t divisor, void *out);

/* out = a op b of two quantized arrays, read and not quantized again: what two members do who send
 * each other everything. NaNs and what is wrong as above; out does not overlap a or b. */
int pccl_quantized_combine(int format, int dtype, int redop, void *out, const void *a,
                           const void *b, size_t n, uint32_t divisor);

/* Encodings of an fp32 array as a whole, for who sends one once and adds up what others have sent:
 * payloads, which nobody reduces on the way. Each has the bytes of n elements; writes them; reads
 * them, the same numbers on every machine; and adds what it reads to `out`. Arrays do not overlap.
 *
 *     e3m0     blocks of 64: a scale (fp32) and 4-bit codes, packed as those of PCCL_BLOCK_4. Bit 3
 *              of a code is the sign, the others are e: 0 if e is 0, else scale * 2^(e - 7). An
 *              element has the nearest level, of two the larger; the scale is the largest magnitude
 *     stat2    blocks of 1,024: four levels (fp32) and codes of 2 bits, their numbers. Byte i of q
 *              has those of the elements i, q + i, 2q + i, 3q + i, the lowest bits first. The
 *              elements are divided by their mean m, and by m -/+ 0.9816 standard deviations; a
 *              level is the mean of those between two bounds, 0 if there are none
 *     sparse   groups of 16 chunks of 4,096. Of each chunk the 64 of largest magnitude are kept, of
 *              equal ones the first; of a last one of m elements m / 64, rounded up. A group is
 *              four levels (fp32), by the same rule, for what it keeps; then of each chunk the
 *              places (12 bits each, increasing) and codes (2 bits), the lowest bits first. The
 *              others are read as 0
 *
 * A last block or group may be shorter. One with a NaN or an infinity is read as all NaN; so is one
 * with such a scale or level. PCCL_EPROTO: a place is not below the size of its chunk, or not above
 * the one before it; then `out` holds anything. All others cannot fail. */
uint64_t pccl_e3m0_size(uint64_t n);
void pccl_e3m0_encode(void *out, const float *in, size_t n);
void pccl_e3m0_decode(float *out, const void *in, size_t n);
void pccl_e3m0_add(float *out, const void *in, size_t n);
uint64_t pccl_stat2_size(uint64_t n);
void pccl_stat2_encode(void *out, const float *in, size_t n);
void pccl_stat2_decode(float *out, const void *in, size_t n);
void pccl_stat2_add(float *out, const void *in, size_t n);
uint64_t pccl_sparse_size(uint64_t n);
void pccl_sparse_encode(void *out, const float *in, size_t n);
int pccl_sparse_decode(float *out, const void *in, size_t n);
int pccl_sparse_add(float *out, const void *in, size_t n);

/* One outer step of SGD with Nesterov momentum, PyTorch's form with dampening 0, in four
 * separately rounded operations for each element, so that every machine computes the same bits:
 *     v = mu * v + g;    theta = theta - lr * (g + mu * v)
 * (nesterov == 0: theta = theta - lr * v). All arrays are fp32 of n elements and do not overlap.
 * Cannot fail. */
void pccl_outer_sgd(float *theta, float *v, const float *g, size_t n, float lr, float mu,
                    int nesterov);

/* x[i] = x[i] / divisor, fp32; divisor >= 1. A mean from a sum. Cannot fail. */
void pccl_divide_f32(float *x, size_t n, uint32_t divisor);

/* out[i] = a[i] - b[i], fp32; out may be a or b. The pseudo-gradient. Cannot fail. */
void pccl_subtract_f32(float *out, const float *a, const float *b, size_t n);

/* How two buffers differ: bytes that do; the largest distance of two elements that are no NaN, in
 * units in the last place (of integers: their difference); the NaNs in each. */
typedef struct pccl_difference {
    uint64_t bytes, ulp, nans_a, nans_b;
} pccl_difference;

/* Compares `n` elements. Returns 0, or PCCL_EINVAL for an unknown type. */
int pccl_compare(int dtype, const void *a, const void *b, size_t n, pccl_difference *out);

/* Runs every kernel over fixed inputs and writes all result bits, at most `size` bytes, to `out`.
 * Two machines whose bytes differ do arithmetic differently and must not meet in one run. Returns
 * the number of bytes it has to say; call it with size 0 to learn how many. */
size_t pccl_self_test(unsigned char *out, size_t size);

/* ---- the table: all that is known of ZeroMQ ---- */

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

/* Sends a message of one frame without waiting, and sets *sent to 1 once it is gone, so that a
 * caller that is interrupted between two of its own steps can tell. Returns 1 if the socket has
 * something to be read (this call has consumed the notification), 0 if not, or a negative error. */
int pccl_send_now(const pccl_zmq *table, void *socket, const void *data, size_t size,
                  int32_t *sent);

/* For a table without libzmq: fills in the msg_ and atomic_counter_ members, except msg_send and
 * msg_recv, with messages that are plain blocks of memory, without properties. They may be used by
 * one thread at a time only. */
void pccl_plain_fill(pccl_zmq *table);

/* Says of a plain message whether another frame follows it: for the msg_recv of such a table. */
void pccl_plain_set_more(pccl_msg *msg, int more);

/* Received messages: their bytes, which are valid until the next call with the same mail. Begins as
 * all zeros. */
enum { PCCL_MAIL_MAX = 32 };
typedef struct pccl_mail {
    pccl_msg message[PCCL_MAIL_MAX];
    const void *data[PCCL_MAIL_MAX];
    size_t size[PCCL_MAIL_MAX];
    uint32_t n;
} pccl_mail;

/* Receives all messages that wait, up to PCCL_MAIL_MAX and to `most`: fewer mean that the socket
 * was found empty. Each frame counts. Returns their number, or a negative errno; never waits. */
int pccl_mail_take(const pccl_zmq *zmq, void *socket, pccl_mail *mail, uint32_t most);

/* Receives the next message of a ROUTER: the name of its connection, and its first frame. Others,
 * of which there may be millions (libzmq bounds only their sizes), are dropped. Returns 1, or 2 if
 * there were any; 0: no message waits; or a negative errno. */
int pccl_mail_take_from(const pccl_zmq *zmq, void *router, pccl_mail *mail);

/* Releases the messages. */
void pccl_mail_drop(const pccl_zmq *zmq, pccl_mail *mail);

/* Sends a copy of these bytes, returns as pccl_send_now; -EAGAIN instead of waiting. */
int pccl_mail_send(const pccl_zmq *zmq, void *socket, const void *data, size_t size);

/* Sends them to one of the connections of a ROUTER: 0 or a negative errno. */
int pccl_mail_send_to(const pccl_zmq *zmq, void *router, const void *to, size_t to_size,
                      const void *data, size_t size);

/* ---- commands and events ---- */

enum pccl_op_kind {
    PCCL_COLLECTIVE = 1,
    PCCL_SERVE = 2,          /* answer requests for the bytes of `pieces` */
    PCCL_FETCH = 3,          /* request the bytes of `pieces` from whoever START names */
    PCCL_EXCHANGE = 4        /* rows of each member for each other one */
};

enum pccl_collective {
    PCCL_ALL_REDUCE = 1, PCCL_REDUCE_SCATTER = 2, PCCL_ALL_GATHER = 3, PCCL_BROADCAST = 4,
    PCCL_REDUCE = 5
};

/* An array of a collective: `count` elements for each slice. In place is
 *     ALL_REDUCE, REDUCE   send == recv
 *     REDUCE_SCATTER       recv is the slice of our rank in send
 *     ALL_GATHER           send is the slice of our rank in recv
 * and otherwise the two do not overlap; BROADCAST uses recv alone, and REDUCE writes to that of the
 * root alone. In an EXCHANGE `count` is that of a row, and recv and send may have the member's own
 * rows in common where one of them consists of these. */
typedef struct pccl_part {
    const void *send;
    void *recv;
    uint64_t count;
    uint32_t dtype;
} pccl_part;

/* Some memory and its number, by which the other side asks for it. Bytes of what is `uncounted` do
 * not count in tx_bytes and rx_bytes. */
typedef struct pccl_piece {
    void *data;
    uint64_t bytes;
    uint32_t piece;
    uint32_t uncounted;
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
    uint64_t call;           /* START: our predecessor's op number; 0: it has sent nothing yet */
} pccl_ring;

/* An end of a transfer: the requesters of a holder differ in their slots, below 65536. */
typedef struct pccl_end {
    uint32_t stream, slot;
} pccl_end;

/* One command. Which members count:
 *   OPEN_STREAM   stream (a number that was never used before). Ops can be started on it at once.
 *   CONNECT_STREAM  stream, an open one, once; lanes (0: as many as the link asks for), hwm
 *                 (messages queued for each lane), endpoint, peer (its number); curve_server, the
 *                 neighbour's public key, if the engine has keys, else nonce, the epoch's.
 *                 The host of a TCP endpoint must be an address: libzmq would look up a name in its
 *                 I/O thread, and move nothing meanwhile. libzmq reports nothing when it gets no
 *                 socket for a lane, so the caller sets each stream a deadline for its STREAM_UP.
 *                 via: empty, or the `address:port` of a meeting point (MEETING POINTS).
 *   MEET          lanes, endpoint, via: the PULL socket connects to a sender there. The sender
 *                 notices when that fails, and tells; we need not.
 *   CLOSE_STREAM  stream. What is queued there is dropped; ops that use it get FAILED.
 *   LOSE_STREAM   stream, endpoint: a text that says why. The same, but with a STREAM_LOST event
 *                 (PCCL_EREACH) with that text.
 *   EXPECT        peer (our own number), nonce (of an epoch): who may connect by PLAIN. The nonce
 *                 of the previous EXPECT remains valid. Forgets the keys of all ADMITs, and what
 *                 came before START in an epoch with another nonce.
 *   ADMIT         curve_server: whoever has this public key may connect.
 *   REGISTER      op (a number that was never used before), op_kind, run, tag, min_seq: the op's
 *                 sequence number will be greater.
 *                 COLLECTIVE: collective, redop, format (if not 0: floats that are summed or
 *                 averaged), members (REDUCE_SCATTER and ALL_GATHER: slices of the larger buffers),
 *                 parts, n_parts, an array that stays valid until SETTLED. ALL_GATHER: recv_rows,
 *                 the rows of each rank's slice, which are read at once; NULL: slices are alike.
 *                 ALL_REDUCE: window, 0 or the offsets of a window, in whole blocks
 *                 (PROGRESSIVELY). EXCHANGE: members, parts, n_parts, an array; send_rows and
 *                 recv_rows, the numbers of rows for each rank and from each (NULL: none). They are
 *                 read at once. SERVE, FETCH: pieces, n_pieces, an array in ascending order of
 *                 piece numbers that stays valid until SETTLED. SERVE: limit, 0 or the bytes that
 *                 it may send before the first ALLOW. FETCH: leaf_bytes, 0 or the size of the
 *                 leaves into which each piece is cut: a leaf that has arrived gives a LEAF event
 *                 and waits for its VERIFIED.
 *   EAGER         op, a COLLECTIVE, once, before its START: n_rings, rings, oneshot, chunk_bytes as
 *                 START will say. Nothing happens if one of the streams is not open.
 *   START         op, seq, nonce (of the call, the same for all who take part);
 *                 COLLECTIVE, EXCHANGE and FETCH: chunk_bytes (of a message, in whole blocks, or in
 *                 whole blocks if it is quantized).
 *                 COLLECTIVE, EXCHANGE: n_rings, rings (THE RING), all with the same members;
 *                 `ranks` are the ranks by position, valid until SETTLED; NULL: the positions. A
 *                 ring of one member needs no stream. COLLECTIVE: oneshot, whether its two members
 *                 send each other everything. BROADCAST, REDUCE: the position of the root in each.
 *                 EXCHANGE: begin and count are not used; who has nothing to send, and nothing to
 *                 send on, needs no stream (0).
 *                 SERVE: n_ends, ends: the stream leads to a requester, which has that slot.
 *                 FETCH: n_ends, ends: the stream leads to a holder, where we have that slot.
 *                 SERVE and FETCH take any number of START commands, which add to each other; seq,
 *                 nonce and chunk_bytes are those of the first. A START with a greater seq begins
 *                 another round of the transfer: earlier requesters or holders are forgotten, what
 *                 has been fetched stays.
 *   ALLOW         op, limit: a SERVE with a limit may send about `limit` bytes more. What is left
 *                 of earlier allowances lapses, and an answer that exceeds the rest is deducted
 *                 from the next one: so a caller that sends ALLOW regularly bounds a rate.
 *   REMIND        op, limit: lets a FETCH request again, from other holders first, what is late: a
 *                 request that a later one to the same holder has overtaken (its lane is stuck),
 *                 what a holder owes that is silent while others answer, and everything if nothing
 *                 comes at all, which a holder may have dropped (it keeps 1024 of each requester).
 *                 Late is what is so for 2 REMINDs, or for more where answers have been slower
 *                 before; then again after twice as many, and so on. After `limit` REMINDs in
 *                 which nothing has come, it reports FAILED with PCCL_ESTREAM, as when no holder
 *                 is left. The caller, who has a clock, sends one twice a second.
 *   VERIFIED      op, piece, leaf (its index in that piece), good. A leaf that is not good is
 *                 fetched again; if one holder gave all of it, that one is asked no more, and its
 *                 stream is closed with a STREAM_LOST event. A FETCH is COMPLETE when every leaf is
 *                 good.
 *   READY         op, a COLLECTIVE with a window; offset, length (both in whole blocks): send holds
 *                 the contribution there. Each offset once; in vain after COMMIT or ABORT.
 *   QUERY         op: a PROGRESS event follows if it has been started and is not COMPLETE, FAILED
 *                 or ended. A SERVE has none.
 *   COMMIT        op. It must be COMPLETE; SERVE: at any time.
 *   ABORT         op
 *   STOP          pccl_engine_run() returns. */
typedef struct pccl_command {
    uint32_t kind;
    uint32_t stream;
    uint32_t lanes;
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
    uint32_t oneshot;
    uint32_t n_ends;
    pccl_ring rings[8];
    pccl_end ends[8];
} pccl_command;

enum pccl_event_kind {
    PCCL_COMPLETE = 1,       /* op: this peer holds the whole result */
    PCCL_FAILED = 2,         /* op: it cannot complete; status and text say why */
    PCCL_SETTLED = 3,        /* op: forgotten, no memory of it is referenced */
    PCCL_STREAM_LOST = 4,    /* stream: closed, but not by CLOSE_STREAM; text says why */
    PCCL_LEAF = 5,           /* op: this leaf of that piece is here, for its VERIFIED */
    PCCL_STREAM_UP = 6,      /* stream: its first lane stands */
    PCCL_PROGRESS = 7,       /* op: how far it is */
    PCCL_WRITTEN = 8         /* op: a window of recv holds the result */
};

typedef struct pccl_event {
    uint32_t kind;
    int32_t status;          /* a pccl_error */
    uint64_t op;
    uint32_t stream;         /* FAILED: the lost stream that text is about, or 0 */
    uint32_t settled;        /* COMPLETE: settled already */
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
    uint32_t recv_hwm;               /* messages, for each connection */
    uint32_t heartbeat_ms;           /* interval of heartbeats to whoever sends to us; 0: none */
    uint32_t heartbeat_timeout_ms;   /* a sender that gets none for this long loses its stream */
    uint32_t connect_timeout_ms;     /* for a connection, and for a handshake on either side */
    uint32_t copy_max;               /* bytes; payloads up to this size are copied */
    uint32_t fetch_window;           /* requests under way to one holder, at most */
    char curve_public[48];           /* CURVE keys, zero-terminated; empty: no encryption */
    char curve_secret[48];
    char dialler[48];                /* who may dial, zero-terminated; empty: everybody */
} pccl_options;

/* A new engine, whose "inproc://pccl-engine" is bound. NULL on failure, *error then says why. The
 * table must outlive it. */
pccl_engine *pccl_engine_new(const pccl_zmq *table, const pccl_options *options, int *error);

/* Listens on one more endpoint. `bound` receives the endpoint with wildcards filled in. Before
 * pccl_engine_run(). */
int pccl_engine_bind(pccl_engine *engine, const char *endpoint, char *bound, size_t size);

/* The engine's ZeroMQ context, for the caller's PAIR socket. */
void *pccl_engine_context(pccl_engine *engine);

/* Works until STOP (0) or until its own sockets fail (PCCL_EZMQ). Only one thread at a time may
 * be in it. */
int pccl_engine_run(pccl_engine *engine);

/* One pass of the loop without waiting: 1 when anything was done, 0 when there was nothing to do,
 * 2 after STOP, or an error. */
int pccl_engine_step(pccl_engine *engine);

/* errno of the last failed call of the table; messages that were dropped as stale or foreign. */
int pccl_engine_errno(const pccl_engine *engine);
uint64_t pccl_engine_dropped(const pccl_engine *engine);

/* Closes everything, waits until no memory of any op is referenced, restores in-place buffers of
 * ops that are not settled, terminates the context (the caller's own sockets in it must be closed
 * before) and frees the engine. NULL is allowed. No thread may be in it. */
void pccl_engine_free(pccl_engine *engine);

/* ---- pumps ---- */

/* Two connections that are to be joined: descriptors, non-blocking ones, which belong to the pump
 * from then on. */
typedef struct pccl_joint {
    int64_t fd[2];
} pccl_joint;

/* Joins the connections of every pccl_joint that is read from the connection `control`, until that
 * one is closed by the other side: then all are closed. 0, or PCCL_ENOMEM or PCCL_EZMQ (the system
 * gives no more) at once. */
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
