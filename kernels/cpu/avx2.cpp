// 16 floats in two registers.
#include "kernels.hpp"

#if COMMOPT_X86
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,popcnt")
#endif

namespace commopt {
namespace {

struct F16 {
    __m256 low, high;
};
struct D16 {
    __m256d part[4];
};

inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 load_half(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F16 load(const uint16_t* p) { return {load_half(p), load_half(p + 8)}; }
inline void store(float* p, F16 x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}
inline void stream(float* p, F16 x) {
    _mm256_stream_ps(p, x.low);
    _mm256_stream_ps(p + 8, x.high);
}
inline F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline F16 sub(F16 a, F16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline F16 mul(F16 a, F16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline F16 multiply_add(F16 a, F16 b, F16 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline F16 magnitude(F16 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline __m256 larger_half(__m256 a, __m256 b) {
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
inline F16 larger(F16 a, F16 b) { return {larger_half(a.low, b.low), larger_half(a.high, b.high)}; }
inline uint32_t reach_half(__m256 x, __m256i below) {
    return uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_castps_si256(x), below))));
}
inline uint32_t reach(F16 x, uint32_t least) {
    const __m256i below = _mm256_set1_epi32(int(least - 1));  // -1 below 0
    return reach_half(x.low, below) | reach_half(x.high, below) << 8;
}
inline void store(uint32_t* p, F16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_castps_si256(x.low));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), _mm256_castps_si256(x.high));
}
template <int PREDICATE>
inline uint32_t compare0(F16 x) {
    const __m256 zero = _mm256_setzero_ps();
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.low, zero, PREDICATE))) |
           uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.high, zero, PREDICATE))) << 8;
}
inline uint32_t ge0(F16 x) { return compare0<_CMP_GE_OQ>(x); }
inline uint32_t ne0(F16 x) { return compare0<_CMP_NEQ_UQ>(x); }

inline F16 select(uint32_t bits, F16 a, F16 b) {  // blendv looks at the top bit of a lane: bit i goes there in lane i
    const __m256i copies = _mm256_set1_epi32(int(bits));
    const __m256i low = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    const __m256i high = _mm256_setr_epi32(23, 22, 21, 20, 19, 18, 17, 16);
    return {_mm256_blendv_ps(b.low, a.low, _mm256_castsi256_ps(_mm256_sllv_epi32(copies, low))),
            _mm256_blendv_ps(b.high, a.high, _mm256_castsi256_ps(_mm256_sllv_epi32(copies, high)))};
}
inline __m256 half_ge0(__m256 x, __m256 a, __m256 b) {
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GE_OQ));
}
inline F16 select_ge0(F16 x, F16 a, F16 b) { return {half_ge0(x.low, a.low, b.low), half_ge0(x.high, a.high, b.high)}; }

inline D16 zero_lanes() {
    const __m256d zero = _mm256_setzero_pd();
    return {{zero, zero, zero, zero}};
}
inline void store_lanes(double* p, D16 x) {
    for (int i = 0; i < 4; ++i) _mm256_storeu_pd(p + 4 * i, x.part[i]);
}
inline __m256d quarter(F16 x, int i) {
    const __m256 half = i < 2 ? x.low : x.high;
    return _mm256_cvtps_pd(i % 2 ? _mm256_extractf128_ps(half, 1) : _mm256_castps256_ps128(half));
}
// The square of a float is exact in double, so that the fused form rounds like the separate one.
inline void add_squares(D16& sums, F16 x) {
    for (int i = 0; i < 4; ++i) {
        const __m256d value = quarter(x, i);
        sums.part[i] = _mm256_fmadd_pd(value, value, sums.part[i]);
    }
}
inline void add_values(D16& sums, F16 x) {
    for (int i = 0; i < 4; ++i) sums.part[i] = _mm256_add_pd(sums.part[i], quarter(x, i));
}

}  // namespace
}  // namespace commopt

#include "segments.inc"

namespace commopt {
extern const Kernels kernels_avx2 = table;
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
