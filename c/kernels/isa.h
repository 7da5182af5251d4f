/* isa.h - functions that are built for several instruction sets. A call runs the best one that the
 * processor has.
 *
 * DESIGN. DISPATCH makes the static function `name` of name_body(), which must be PCCL_INLINE, as
 * must all that it calls: what is not inlined is built for the lowest instruction set only. So the
 * same C is vectorized for each. VARIANTS and CALL_BEST are its two halves. Where the compiler
 * cannot vectorize, name_v3() and name_v4() are written with intrinsics, and CHOOSE makes `name`.
 *
 * The instruction sets are levels of the x86-64 psABI: v3 has AVX2 and F16C, v4 has AVX-512. If the
 * compiler does not know them, or with PCCL_ONE_ISA, there is only name_body(), built for the
 * target of the whole build. */
#ifndef PCCL_ISA_H
#define PCCL_ISA_H

#if defined __GNUC__
#define PCCL_INLINE inline __attribute__((always_inline))
#elif defined _MSC_VER
#define PCCL_INLINE __forceinline
#else
#define PCCL_INLINE inline
#endif

#if defined __x86_64__ && !defined PCCL_ONE_ISA && !defined __apple_build_version__
#if (defined __clang__ && __clang_major__ >= 18) || (!defined __clang__ && __GNUC__ >= 12)
#define PCCL_X86_LEVELS
#endif
#endif

/* Before a loop whose iterations do not depend on each other, whatever its arrays overlap: without
 * it the compiler checks that they do not overlap, and has a slow loop in case they do. */
#if defined __clang__
#define PCCL_ANY_ORDER _Pragma("clang loop vectorize(assume_safety)")
#pragma clang diagnostic ignored "-Wpass-failed"     /* no loop has to be vectorized */
#elif defined __GNUC__
#define PCCL_ANY_ORDER _Pragma("GCC ivdep")
#elif defined _MSC_VER
#define PCCL_ANY_ORDER __pragma(loop(ivdep))
#else
#define PCCL_ANY_ORDER
#endif

/* Begins to bring an address into the cache, which need not be one of an object. */
#if defined __GNUC__
#define PCCL_PREFETCH(address) __builtin_prefetch(address)
#else
#define PCCL_PREFETCH(address) ((void)0)
#endif

enum isa { ISA_BASE, ISA_V3, ISA_V4 };

/* The best one that the processor and the operating system have. */
enum isa pccl_isa(void);

/* Only for the target of the whole build. */
#define BUILD_ONCE(name, parameters, arguments)                                                    \
    static void name parameters { name##_body arguments; }

#if defined PCCL_X86_LEVELS

#if defined __clang__
#define PCCL_V3 __attribute__((target("avx2,f16c")))
#define PCCL_V4 __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512cd,avx512dq,avx512vl")))
#else
#define PCCL_V3 __attribute__((target("arch=x86-64-v3")))
#define PCCL_V4 __attribute__((target("arch=x86-64-v4")))
#endif

#define VARIANTS(name, parameters, arguments)                                                      \
    PCCL_V3 static void name##_v3 parameters { name##_body arguments; }                            \
    PCCL_V4 static void name##_v4 parameters { name##_body arguments; }

#define CALL_BEST(name, arguments)                                                                 \
    do {                                                                                           \
        const enum isa isa = pccl_isa();                                                           \
        if (isa == ISA_V4)                                                                         \
            name##_v4 arguments;                                                                   \
        else if (isa == ISA_V3)                                                                    \
            name##_v3 arguments;                                                                   \
        else                                                                                       \
            name##_body arguments;                                                                 \
    } while (0)

#else
#define VARIANTS(name, parameters, arguments)
#define CALL_BEST(name, arguments) name##_body arguments
#endif

#define CHOOSE(name, parameters, arguments)                                                        \
    static void name parameters { CALL_BEST(name, arguments); }

#define DISPATCH(name, parameters, arguments)                                                      \
    VARIANTS(name, parameters, arguments)                                                          \
    CHOOSE(name, parameters, arguments)

#endif
