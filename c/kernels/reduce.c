/* reduce.c - element-wise reduction of two arrays, for each element type and operation.
 *
 * DESIGN. An element is handled as its bits: an integer of its size, loaded and stored by memcpy,
 * so that buffers may have any alignment. Each type has five functions of two elements (sum, prod,
 * max, min, mean). From these, DEFINE_KERNEL makes one function of arrays, with a plain loop for
 * each operation, which the compiler vectorises. All five are commutative to the bit, so one loop
 * is enough where `out` is an operand: that operand is put first.
 *
 * Maximum and minimum of floats compare their bits as integers (sign and magnitude, so -0 < +0).
 * This is the maximum of IEEE 754-2019, needs no conversion of 16-bit floats, and does not depend
 * on the order of operands. */
#include "pccl_core.h"

#include "kernels/half.h"

/* ---- two elements ---- */

/* Integers. Sums and products are modulo 2^bits. The mean divides in `wide` and truncates. `wide`
 * may be a float type, which vectorises, if its significand has more bits than the dividend: a
 * quotient that is not an integer differs from the nearest integer by at least 1/divisor, and
 * rounding changes it by less. */
#define DEFINE_INTEGER(type, storage, wide)                                                        \
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
    }                                                                                              \
    static inline storage mean_##type(storage x, storage y, uint32_t divisor)                      \
    {                                                                                              \
        return (storage)((wide)sum_##type(x, y) / (wide)divisor);                                  \
    }

DEFINE_INTEGER(u8, uint8_t, float)
DEFINE_INTEGER(i8, int8_t, float)
DEFINE_INTEGER(u16, uint16_t, float)
DEFINE_INTEGER(i16, int16_t, float)
DEFINE_INTEGER(u32, uint32_t, double)
DEFINE_INTEGER(i32, int32_t, double)
DEFINE_INTEGER(u64, uint64_t, uint64_t)
DEFINE_INTEGER(i64, int64_t, int64_t)

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

#define LOOP(storage, first, second, expression)                                                   \
    for (i = 0; i < n; i++) {                                                                      \
        storage x;                                                                                 \
        storage y;                                                                                 \
        storage z;                                                                                 \
        memcpy(&x, (first) + i * sizeof x, sizeof x);                                              \
        memcpy(&y, (second) + i * sizeof y, sizeof y);                                             \
        z = expression;                                                                            \
        memcpy(out + i * sizeof z, &z, sizeof z);                                                  \
    }

/* Two loops: before a vector loop the compiler checks for overlap, and with out == a it would find
 * one and use the slow loop. */
#define EACH(storage, expression)                                                                  \
    if (out == a) {                                                                                \
        LOOP(storage, out, b, expression)                                                          \
    } else {                                                                                       \
        LOOP(storage, a, b, expression)                                                            \
    }                                                                                              \
    break

#define DEFINE_KERNEL(clones, type, storage)                                                       \
    clones static void reduce_##type(int redop, unsigned char *out, const unsigned char *a,        \
                                     const unsigned char *b, size_t n, uint32_t divisor)           \
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

DEFINE_KERNEL(PCCL_FEW_CLONES, u8, uint8_t)
DEFINE_KERNEL(PCCL_FEW_CLONES, i8, int8_t)
DEFINE_KERNEL(PCCL_FEW_CLONES, i16, int16_t)
DEFINE_KERNEL(PCCL_FEW_CLONES, u16, uint16_t)
DEFINE_KERNEL(PCCL_FEW_CLONES, u32, uint32_t)
DEFINE_KERNEL(PCCL_FEW_CLONES, i32, int32_t)
DEFINE_KERNEL(PCCL_FEW_CLONES, u64, uint64_t)
DEFINE_KERNEL(PCCL_FEW_CLONES, i64, int64_t)
DEFINE_KERNEL(PCCL_CLONES, f16, uint16_t)
DEFINE_KERNEL(PCCL_CLONES, bf16, uint16_t)
DEFINE_KERNEL(PCCL_CLONES, f32, uint32_t)
DEFINE_KERNEL(PCCL_FEW_CLONES, f64, uint64_t)

/* Sums of 64-bit integers, as a lower and an upper word. */
static void reduce_i128(int redop, unsigned char *out, const unsigned char *a,
                        const unsigned char *b, size_t n, uint32_t divisor)
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
    void (*reduce)(int redop, unsigned char *out, const unsigned char *a, const unsigned char *b,
                   size_t n, uint32_t divisor);
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
    if (out == b)
        type->reduce(redop, out, b, a, n, divisor);
    else
        type->reduce(redop, out, a, b, n, divisor);
    return PCCL_OK;
}
