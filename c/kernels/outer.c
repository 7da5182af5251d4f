/* outer.c - the outer optimizer step and the pseudo-gradient.
 *
 * DESIGN. Computations that advance the shared state of a run must give the same bits on every
 * machine. So they are written operation by operation, each rounded once (see exact.h). */
#include "pccl_core.h"

#include "kernels/exact.h"

static PCCL_INLINE float load(const float *array, size_t i)
{
    float value;
    memcpy(&value, (const unsigned char *)array + i * sizeof value, sizeof value);
    return value;
}

static PCCL_INLINE void store(float *array, size_t i, float value)
{
    uint32_t bits = f32_to_bits(value);
    memcpy((unsigned char *)array + i * sizeof bits, &bits, sizeof bits);
}

static PCCL_INLINE void outer_step(float *theta, float *v, const float *g, size_t n, float lr,
                                   float mu, int nesterov)
{
    size_t i;
    PCCL_ANY_ORDER
    for (i = 0; i < n; i++) {
        float gradient = load(g, i);
        float momentum = mu * load(v, i) + gradient;
        float direction = nesterov ? gradient + mu * momentum : momentum;
        store(v, i, momentum);
        store(theta, i, load(theta, i) - lr * direction);
    }
}

static PCCL_INLINE void pccl_outer_sgd_body(float *theta, float *v, const float *g, size_t n,
                                            float lr, float mu, int nesterov)
{
    if (nesterov)
        outer_step(theta, v, g, n, lr, mu, 1);
    else
        outer_step(theta, v, g, n, lr, mu, 0);
}

VARIANTS(pccl_outer_sgd,
         (float *theta, float *v, const float *g, size_t n, float lr, float mu, int nesterov),
         (theta, v, g, n, lr, mu, nesterov))

void pccl_outer_sgd(float *theta, float *v, const float *g, size_t n, float lr, float mu,
                    int nesterov)
{
    CALL_BEST(pccl_outer_sgd, (theta, v, g, n, lr, mu, nesterov));
}

static PCCL_INLINE void pccl_divide_f32_body(float *x, size_t n, uint32_t divisor)
{
    size_t i;
    for (i = 0; i < n; i++)
        store(x, i, load(x, i) / (float)divisor);
}

VARIANTS(pccl_divide_f32, (float *x, size_t n, uint32_t divisor), (x, n, divisor))

void pccl_divide_f32(float *x, size_t n, uint32_t divisor)
{
    CALL_BEST(pccl_divide_f32, (x, n, divisor));
}

static PCCL_INLINE void pccl_subtract_f32_body(float *out, const float *a, const float *b,
                                               size_t n)
{
    size_t i;
    PCCL_ANY_ORDER
    for (i = 0; i < n; i++)
        store(out, i, load(a, i) - load(b, i));
}

VARIANTS(pccl_subtract_f32, (float *out, const float *a, const float *b, size_t n), (out, a, b, n))

void pccl_subtract_f32(float *out, const float *a, const float *b, size_t n)
{
    CALL_BEST(pccl_subtract_f32, (out, a, b, n));
}
