// What an instruction set provides: functions on one run of elements, on one thread.
//
// Each of avx512.cpp, avx2.cpp and plain.cpp defines 16-wide vectors and compiles segments.inc with them; dispatch.cpp
// chooses one table at run time. Everything above (blocks, rows, lists, threads) is written once, in sign.cpp and
// lists.cpp. Sums run over 16 lanes in every table, so that all tables give the same bits.
#pragma once

#include <cstdint>

namespace commopt {

// A sum and how many elements are in it.
struct Partial {
    double sum;
    int64_t count;
};

constexpr int kMaxRanks = 64;  // ranks that one call of decode_mean adds up

struct Kernels {
    // z = x + e (z = x where e is null); z -> e; signs -> bits; returns sum z^2 (norm 2) or sum |z| (norm 1).
    // live may be null. bits and live start at a whole byte.
    Partial (*encode)(const float* x, float* e, const uint8_t* live, uint8_t* bits, int64_t n, int norm);
    // e <- e - s or e + s, towards zero; dead elements stay 0.
    void (*residual)(float* e, const uint8_t* live, float s, int64_t n);
    // out = +-s. stream: bypass the caches.
    void (*decode)(const uint8_t* bits, float s, float* out, int64_t n, bool stream);
    // out = (first ? : out +) +-a[0] +-a[1] ..., signs of rank k at bits + k * stride; ranks <= kMaxRanks.
    void (*decode_mean)(const uint8_t* bits, int64_t stride, const float* a, int ranks, bool first, float* out,
                        int64_t n, bool stream);
    void (*pack_nonzero)(const float* x, uint8_t* bits, int64_t n);
    void (*zero_dead)(float* x, const uint8_t* bits, int64_t n);
    double (*square_sum)(const float* x, int64_t n);
    double (*square_sum_bf16)(const uint16_t* x, int64_t n);
    void (*momentum)(float* m, const float* g, int64_t n, float beta, float alpha);
    void (*momentum_bf16)(float* m, const uint16_t* g, int64_t n, float beta, float alpha);
    void (*frozen_adam)(float* p, const float* m, const float* v, int64_t n, float step, float correction, float eps,
                        float decay);
    void (*frozen_adam_bf16)(uint16_t* p, const float* m, const float* v, int64_t n, float step, float correction,
                             float eps, float decay);
};

#if defined(__x86_64__)
#define COMMOPT_X86 1
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx2;
#endif
extern const Kernels kernels_plain;

const Kernels& kernels();  // the chosen table

}  // namespace commopt
