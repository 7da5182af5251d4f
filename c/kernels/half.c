/* half.c - arrays of float16 and bfloat16 to fp32 and back. */
#include "kernels/half.h"

#define DEFINE_ARRAYS(type)                                                                        \
    static PCCL_INLINE void load_##type##_body(void *numbers, const unsigned char *in, size_t n)   \
    {                                                                                              \
        float *x = numbers;                                                                        \
        size_t i;                                                                                  \
        for (i = 0; i < n; i++) {                                                                  \
            uint16_t half;                                                                         \
            memcpy(&half, in + i * sizeof half, sizeof half);                                      \
            x[i] = type##_to_f32(half);                                                            \
        }                                                                                          \
    }                                                                                              \
    static PCCL_INLINE void store_##type##_body(unsigned char *out, const void *numbers, size_t n) \
    {                                                                                              \
        const float *x = numbers;                                                                  \
        size_t i;                                                                                  \
        for (i = 0; i < n; i++) {                                                                  \
            uint16_t half = f32_to_##type(x[i]);                                                   \
            memcpy(out + i * sizeof half, &half, sizeof half);                                     \
        }                                                                                          \
    }

DEFINE_ARRAYS(f16)
DEFINE_ARRAYS(bf16)

VARIANTS(load_bf16, (void *numbers, const unsigned char *in, size_t n), (numbers, in, n))
VARIANTS(store_bf16, (unsigned char *out, const void *numbers, size_t n), (out, numbers, n))

/* The rest, which fills no vector, is for the portable function. */
#define DEFINE_VECTORS(target, load, store, lanes, get, put, load_vector, store_vector)            \
    target static void load(void *numbers, const unsigned char *in, size_t n)                      \
    {                                                                                              \
        float *x = numbers;                                                                        \
        size_t i;                                                                                  \
        for (i = 0; i + lanes <= n; i += lanes)                                                    \
            put(x + i, load_vector(in + i * sizeof(uint16_t)));                                    \
        load_f16_body(x + i, in + i * sizeof(uint16_t), n - i);                                    \
    }                                                                                              \
    target static void store(unsigned char *out, const void *numbers, size_t n)                    \
    {                                                                                              \
        const float *x = numbers;                                                                  \
        size_t i;                                                                                  \
        for (i = 0; i + lanes <= n; i += lanes)                                                    \
            store_vector(out + i * sizeof(uint16_t), get(x + i));                                  \
        store_f16_body(out + i * sizeof(uint16_t), x + i, n - i);                                  \
    }

#if defined PCCL_X86_LEVELS
DEFINE_VECTORS(PCCL_V3, load_f16_v3, store_f16_v3, 8, _mm256_loadu_ps, _mm256_storeu_ps,
               f16_load_v3, f16_store_v3)
DEFINE_VECTORS(PCCL_V4, load_f16_v4, store_f16_v4, 16, _mm512_loadu_ps, _mm512_storeu_ps,
               f16_load_v4, f16_store_v4)
#elif defined PCCL_NEON
DEFINE_VECTORS(, load_f16_neon, store_f16_neon, 4, vld1q_f32, vst1q_f32,
               f16_load_neon, f16_store_neon)
#endif

void load_f16(void *numbers, const unsigned char *in, size_t n)
{
    CALL_BEST_F16(load_f16, (numbers, in, n));
}

void store_f16(unsigned char *out, const void *numbers, size_t n)
{
    CALL_BEST_F16(store_f16, (out, numbers, n));
}

void load_bf16(void *numbers, const unsigned char *in, size_t n)
{
    CALL_BEST(load_bf16, (numbers, in, n));
}

void store_bf16(unsigned char *out, const void *numbers, size_t n)
{
    CALL_BEST(store_bf16, (out, numbers, n));
}
