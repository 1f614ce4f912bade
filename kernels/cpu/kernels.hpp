// What an instruction set provides: functions on one run of elements, on one thread.
//
// Each of avx512.cpp, avx2.cpp, neon.cpp and plain.cpp defines 16-wide vectors and compiles segments.inc with them;
// dispatch.cpp chooses one table at run time. Everything above (blocks, rows, lists, threads) is written once, in the
// other files. Sums run over 16 lanes in every table, so that all tables give the same bits.
//
// An output may be one of the inputs of the same type, element for element; there is no other overlap.
// stream: bypass the caches; parallel_for waits for such stores.
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
    // z = x + e; signs -> bits; returns sum z^2 (norm 2) or sum |z| (norm 1). e and z null: x itself, and z is not
    // kept. active may be null, here and below. bits and active start at a whole byte.
    Partial (*encode)(const float* x, const float* e, const uint8_t* active, float* z, uint8_t* bits, int64_t n,
                      int norm);
    // out = z - s or z + s, towards zero; inactive elements 0.
    void (*residual)(const float* z, const uint8_t* active, float s, float* out, int64_t n, bool stream);
    // out = +-s; inactive elements 0.
    void (*decode)(const uint8_t* bits, const uint8_t* active, float s, float* out, int64_t n, bool stream);
    // out = (first ? : out +) +-a[0] +-a[1] ..., signs of rank k at bits + k * stride; ranks <= kMaxRanks.
    void (*decode_mean)(const uint8_t* bits, int64_t stride, const float* a, int ranks, bool first, float* out,
                        int64_t n, bool stream);
    void (*pack_nonzero)(const float* x, uint8_t* bits, int64_t n);
    void (*zero_inactive)(float* x, const uint8_t* bits, int64_t n);
    double (*square_sum)(const float* x, int64_t n);
    double (*square_sum_bf16)(const uint16_t* x, int64_t n);
    void (*scale)(const float* m, float* out, int64_t n, float beta);
    void (*momentum)(const float* m, const float* g, float* out, int64_t n, float beta, float alpha);
    void (*momentum_bf16)(const float* m, const uint16_t* g, float* out, int64_t n, float beta, float alpha);
    // p = decay p - step m / (sqrt(v) + eps); where v is 0, only decay p.
    void (*frozen_adam)(float* p, const float* m, const float* v, int64_t n, float step, float eps, float decay);
    void (*frozen_adam_bf16)(uint16_t* p, const float* m, const float* v, int64_t n, float step, float eps,
                             float decay);
    // z = x + e, inactive elements 0; e null: x itself; z null: not kept. Of each of 16 lanes the largest magnitude is
    // noted, as bits: NaN is above all, and denormals count whatever the processor takes them for.
    void (*largest)(const float* x, const float* e, const uint8_t* active, float* z, int64_t n, uint32_t* of_lanes);
    // The places of all elements whose magnitude, as bits, is at least that, up to 2^31; returns how many these are.
    int64_t (*at_least)(const float* z, int64_t n, uint32_t least, uint16_t* places);
    // Of 16 keys below 2^31: how many are larger, or equal and before it.
    void (*ranks)(const int32_t* keys, int32_t* out);
    // x = x + e, inactive elements 0.
    void (*add_to)(float* x, const float* e, const uint8_t* active, int64_t n);
    // bits = x as bfloat16; rest = what that loses.
    void (*cast)(const float* x, float* rest, uint16_t* bits, int64_t n, bool stream);
    // sum = (first ? : sum +) what bits stand for.
    void (*uncast)(const uint16_t* bits, bool first, float* sum, int64_t n);
};

#if defined(__x86_64__)
#define COMMOPT_X86 1
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx2;
#elif defined(__aarch64__)
#define COMMOPT_NEON 1
extern const Kernels kernels_neon;
#endif
extern const Kernels kernels_plain;

const Kernels& kernels();  // the chosen table

}  // namespace commopt
