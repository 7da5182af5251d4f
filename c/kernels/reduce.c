/* reduce.c - element-wise reduction of two arrays, for each element type and operation.
 *
 * DESIGN. An element is handled as its bits: an integer of its size, loaded and stored by memcpy,
 * so that buffers may have any alignment. Each type has functions of two elements (sum, prod, max,
 * min, mean). From these, DEFINE_KERNEL makes one function of arrays, with a plain loop for each
 * operation, which the compiler vectorizes.
 *
 * Maximum and minimum of floats compare their bits as integers (sign and magnitude, so -0 < +0).
 * This is the maximum of IEEE 754-2019, needs no conversion of 16-bit floats, and does not depend
 * on the order of operands. */
#include "pccl_core.h"

#include "kernels/half.h"

/* ---- two elements ---- */

/* Integers. Sums and products are modulo 2^bits. The mean divides and truncates. */
#define DEFINE_INTEGER(type, storage)                                                              \
    static inline storage sum_##type(storage x, storage y)                                         \
    {                                                                                              \
        return (storage)((uint64_t)x + (uint64_t)y);                                               \
    }                                                                                              \
    static inline storage prod_##type(storage x, storage y)                                        \
    {                                                                                              \
        return (storage)((uint64_t)x * (uint64_t)y);                                               \
    }                                                                                              \
    static inline storage max_##type(storage x, storage y)                                         \
    {                                                                                              \
        return x > y ? x : y;                                                                      \
    }                                                                                              \
    static inline storage min_##type(storage x, storage y)                                         \
    {                                                                                              \
        return x < y ? x : y;                                                                      \
    }

DEFINE_INTEGER(u8, uint8_t)
DEFINE_INTEGER(i8, int8_t)
DEFINE_INTEGER(u16, uint16_t)
DEFINE_INTEGER(i16, int16_t)
DEFINE_INTEGER(u32, uint32_t)
DEFINE_INTEGER(i32, int32_t)
DEFINE_INTEGER(u64, uint64_t)
DEFINE_INTEGER(i64, int64_t)

/* Divides in `wide`. That may be a float type, which vectorizes, if its significand has more bits
 * than the dividend: a quotient that is not an integer differs from the nearest integer by at least
 * 1/divisor, and rounding changes it by less. */
#define DEFINE_MEAN(type, storage, wide)                                                           \
    static inline storage mean_##type(storage x, storage y, uint32_t divisor)                      \
    {                                                                                              \
        return (storage)((wide)sum_##type(x, y) / (wide)divisor);                                  \
    }

DEFINE_MEAN(u16, uint16_t, float)
DEFINE_MEAN(i16, int16_t, float)
DEFINE_MEAN(u32, uint32_t, double)
DEFINE_MEAN(i32, int32_t, double)

/* Bytes are divided by a multiplication with 2^16 / divisor, rounded up. The product is too large,
 * by less than 2^8. The next multiple of 2^16 is farther away, by at least 2^16 / divisor, unless
 * the divisor is larger than any byte; then the product is less than 2^16. */
static inline uint8_t mean_u8(uint8_t x, uint8_t y, uint32_t divisor)
{
    const uint16_t inverse = (uint16_t)(0xffff / divisor + 1);
    return (uint8_t)((uint32_t)sum_u8(x, y) * inverse >> 16);
}

static inline int8_t mean_i8(int8_t x, int8_t y, uint32_t divisor)
{
    const int8_t sum = sum_i8(x, y), sign = (int8_t)(sum < 0 ? -1 : 0);
    const uint8_t magnitude = (uint8_t)((sum ^ sign) - sign);
    return (int8_t)((mean_u8(magnitude, 0, divisor) ^ sign) - sign);
}

/* The upper half of a product. */
static inline uint64_t high_product(uint64_t x, uint64_t y)
{
    const uint64_t lower = 0xffffffffu;
    const uint64_t middle = (x & lower) * (y >> 32) + ((x & lower) * (y & lower) >> 32);
    const uint64_t rest = (x >> 32) * (y & lower) + (middle & lower);
    return (x >> 32) * (y >> 32) + (middle >> 32) + (rest >> 32);
}

/* 64-bit words are divided by a multiplication with 2^64 / divisor, rounded down. The inverse is too
 * small by at most 1, so the quotient is too small by at most 1. */
static inline uint64_t mean_u64(uint64_t x, uint64_t y, uint32_t divisor)
{
    const uint64_t sum = x + y, quotient = high_product(sum, UINT64_MAX / divisor);
    return quotient + ((int64_t)(sum - quotient * divisor) >= (int64_t)divisor);
}

static inline int64_t mean_i64(int64_t x, int64_t y, uint32_t divisor)
{
    const uint64_t sum = (uint64_t)x + (uint64_t)y, sign = 0 - (sum >> 63);
    return (int64_t)((mean_u64((sum ^ sign) - sign, 0, divisor) ^ sign) - sign);
}

/* Floats, computed in `real` between `decode` and `encode`. `key` orders bit patterns as signed
 * integers. */
#define DEFINE_FLOAT(type, storage, integer, real, decode, encode, bits, infinity, quiet_nan)      \
    static inline storage sum_##type(storage x, storage y)                                         \
    {                                                                                              \
        return encode(decode(x) + decode(y));                                                      \
    }                                                                                              \
    static inline storage prod_##type(storage x, storage y)                                        \
    {                                                                                              \
        return encode(decode(x) * decode(y));                                                      \
    }                                                                                              \
    static inline storage mean_##type(storage x, storage y, uint32_t divisor)                      \
    {                                                                                              \
        return encode((decode(x) + decode(y)) / (real)divisor);                                    \
    }                                                                                              \
    static inline integer key_##type(storage x)                                                    \
    {                                                                                              \
        storage all_if_negative = (storage)(0 - (x >> (bits - 1)));                                \
        return (integer)(x ^ (storage)(all_if_negative >> 1));                                     \
    }                                                                                              \
    static inline int either_nan_##type(storage x, storage y)                                      \
    {                                                                                              \
        const storage magnitude = (storage)-1 >> 1;                                                \
        return ((x & magnitude) > infinity) | ((y & magnitude) > infinity);                        \
    }                                                                                              \
    static inline storage max_##type(storage x, storage y)                                         \
    {                                                                                              \
        storage larger = key_##type(x) > key_##type(y) ? x : y;                                    \
        return either_nan_##type(x, y) ? quiet_nan : larger;                                       \
    }                                                                                              \
    static inline storage min_##type(storage x, storage y)                                         \
    {                                                                                              \
        storage smaller = key_##type(x) < key_##type(y) ? x : y;                                   \
        return either_nan_##type(x, y) ? quiet_nan : smaller;                                      \
    }

DEFINE_FLOAT(f16, uint16_t, int16_t, float, f16_to_f32, f32_to_f16, 16, 0x7c00, F16_NAN)
DEFINE_FLOAT(bf16, uint16_t, int16_t, float, bf16_to_f32, f32_to_bf16, 16, 0x7f80, BF16_NAN)
DEFINE_FLOAT(f32, uint32_t, int32_t, float, f32_from_bits, f32_to_bits, 32, 0x7f800000u, F32_NAN)
DEFINE_FLOAT(f64, uint64_t, int64_t, double, f64_from_bits, f64_to_bits, 64, 0x7ff0000000000000u,
             F64_NAN)

/* ---- arrays ---- */

/* `out` is an operand or does not overlap them, so elements can be computed in any order. */
#define EACH(storage, expression)                                                                  \
    PCCL_ANY_ORDER                                                                                 \
    for (i = 0; i < n; i++) {                                                                      \
        storage x;                                                                                 \
        storage y;                                                                                 \
        storage z;                                                                                 \
        memcpy(&x, a + i * sizeof x, sizeof x);                                                    \
        memcpy(&y, b + i * sizeof y, sizeof y);                                                    \
        z = expression;                                                                            \
        memcpy(out + i * sizeof z, &z, sizeof z);                                                  \
    }                                                                                              \
    break

#define PARAMETERS                                                                                 \
    (int redop, unsigned char *out, const unsigned char *a, const unsigned char *b, size_t n,      \
     uint32_t divisor)

#define DEFINE_BODY(type, storage)                                                                 \
    static PCCL_INLINE void reduce_##type##_body PARAMETERS                                        \
    {                                                                                              \
        size_t i;                                                                                  \
        switch (redop) {                                                                           \
        case PCCL_SUM: EACH(storage, sum_##type(x, y));                                            \
        case PCCL_PROD: EACH(storage, prod_##type(x, y));                                          \
        case PCCL_MAX: EACH(storage, max_##type(x, y));                                            \
        case PCCL_MIN: EACH(storage, min_##type(x, y));                                            \
        case PCCL_AVG: EACH(storage, mean_##type(x, y, divisor));                                  \
        default: break;                                                                            \
        }                                                                                          \
    }

#define DEFINE_KERNEL(type, storage)                                                               \
    DEFINE_BODY(type, storage)                                                                     \
    DISPATCH(reduce_##type, PARAMETERS, (redop, out, a, b, n, divisor))

DEFINE_KERNEL(u8, uint8_t)
DEFINE_KERNEL(i8, int8_t)
DEFINE_KERNEL(i16, int16_t)
DEFINE_KERNEL(u16, uint16_t)
DEFINE_KERNEL(u32, uint32_t)
DEFINE_KERNEL(i32, int32_t)
DEFINE_KERNEL(u64, uint64_t)
DEFINE_KERNEL(i64, int64_t)
DEFINE_KERNEL(bf16, uint16_t)
DEFINE_KERNEL(f32, uint32_t)
DEFINE_KERNEL(f64, uint64_t)
DEFINE_BODY(f16, uint16_t)

/* fp16, vector by vector. The rest, and MAX and MIN, are for the portable loops. */
#define VECTORS(vector, lanes, load, store, expression)                                            \
    for (; i + lanes <= n; i += lanes) {                                                           \
        const vector x = load(a + i * sizeof(uint16_t));                                           \
        const vector y = load(b + i * sizeof(uint16_t));                                           \
        store(out + i * sizeof(uint16_t), expression);                                             \
    }                                                                                              \
    break

#define DEFINE_VECTORS(target, name, vector, lanes, load, store, broadcast)                        \
    target static void name PARAMETERS                                                             \
    {                                                                                              \
        size_t i = 0;                                                                              \
        switch (redop) {                                                                           \
        case PCCL_SUM: VECTORS(vector, lanes, load, store, x + y);                                 \
        case PCCL_PROD: VECTORS(vector, lanes, load, store, x * y);                                \
        case PCCL_AVG: VECTORS(vector, lanes, load, store, (x + y) / broadcast((float)divisor));   \
        default: break;                                                                            \
        }                                                                                          \
        reduce_f16_body(redop, out + i * sizeof(uint16_t), a + i * sizeof(uint16_t),               \
                        b + i * sizeof(uint16_t), n - i, divisor);                                 \
    }

#if defined PCCL_X86_LEVELS
DEFINE_VECTORS(PCCL_V3, reduce_f16_v3, __m256, 8, f16_load_v3, f16_store_v3, _mm256_set1_ps)
DEFINE_VECTORS(PCCL_V4, reduce_f16_v4, __m512, 16, f16_load_v4, f16_store_v4, _mm512_set1_ps)
#elif defined PCCL_NEON
DEFINE_VECTORS(, reduce_f16_neon, float32x4_t, 4, f16_load_neon, f16_store_neon, vdupq_n_f32)
#endif

static void reduce_f16 PARAMETERS
{
    CALL_BEST_F16(reduce_f16, (redop, out, a, b, n, divisor));
}

/* Sums of 64-bit integers, as a lower and an upper word. */
static void reduce_i128 PARAMETERS
{
    size_t i;
    (void)redop;
    (void)divisor;
    for (i = 0; i < n; i++) {
        uint64_t x[2], y[2];
        memcpy(x, a + i * sizeof x, sizeof x);
        memcpy(y, b + i * sizeof y, sizeof y);
        x[0] += y[0];
        x[1] += y[1] + (x[0] < y[0]);
        memcpy(out + i * sizeof x, x, sizeof x);
    }
}

/* ---- the types, in the order of pccl_dtype ---- */

typedef struct {
    size_t size;
    void (*reduce) PARAMETERS;
} element_type;

static const element_type element_types[] = {
    {1, reduce_u8},  {1, reduce_i8},  {2, reduce_i16}, {2, reduce_u16},
    {4, reduce_u32}, {4, reduce_i32}, {8, reduce_u64}, {8, reduce_i64},
    {2, reduce_f16}, {2, reduce_bf16}, {4, reduce_f32}, {8, reduce_f64},
    {16, reduce_i128},
};

static const element_type *element_type_find(int dtype)
{
    const int types = (int)(sizeof element_types / sizeof element_types[0]);
    return dtype >= 0 && dtype < types ? &element_types[dtype] : NULL;
}

size_t pccl_dtype_size(int dtype)
{
    const element_type *type = element_type_find(dtype);
    return type != NULL ? type->size : 0;
}

int pccl_reduce(int dtype, int redop, void *out, const void *a, const void *b, size_t n,
                uint32_t divisor)
{
    const element_type *type = element_type_find(dtype);

    if (type == NULL || redop < PCCL_SUM || redop > PCCL_MIN || (redop == PCCL_AVG && divisor == 0))
        return PCCL_EINVAL;
    if (redop == PCCL_AVG && divisor == 1)
        redop = PCCL_SUM;
    if (dtype == PCCL_I128 && redop != PCCL_SUM)
        return PCCL_EINVAL;
    type->reduce(redop, out, a, b, n, divisor);
    return PCCL_OK;
}
