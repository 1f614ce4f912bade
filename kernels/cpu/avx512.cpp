// 16 floats in one register, comparison results already as bits.
#include "kernels.hpp"

#if COMMOPT_X86
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,popcnt")
#endif

namespace commopt {
namespace {

using F16 = __m512;
struct D16 {
    __m512d low, high;
};

inline F16 load(const float* p) { return _mm512_loadu_ps(p); }
inline F16 load(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void store(float* p, F16 x) { _mm512_storeu_ps(p, x); }
inline void stream(float* p, F16 x) { _mm512_stream_ps(p, x); }
inline F16 splat(float x) { return _mm512_set1_ps(x); }
inline F16 add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
inline F16 sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
inline F16 mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
inline F16 multiply_add(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
inline float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline F16 magnitude(F16 x) { return _mm512_abs_ps(x); }
inline F16 larger(F16 a, F16 b) {
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
inline uint32_t reach(F16 x, uint32_t least) {
    return _mm512_cmpge_epu32_mask(_mm512_castps_si512(x), _mm512_set1_epi32(int(least)));
}
inline void store(uint32_t* p, F16 x) { _mm512_storeu_si512(p, _mm512_castps_si512(x)); }
inline uint32_t ge0(F16 x) { return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ); }
inline uint32_t ne0(F16 x) { return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_UQ); }
inline F16 select(uint32_t bits, F16 a, F16 b) { return _mm512_mask_blend_ps(__mmask16(bits), b, a); }
inline F16 select_ge0(F16 x, F16 a, F16 b) { return select(ge0(x), a, b); }

inline __m512d low_half(F16 x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
inline __m512d high_half(F16 x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
inline D16 zero_lanes() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
inline void store_lanes(double* p, D16 x) {
    _mm512_storeu_pd(p, x.low);
    _mm512_storeu_pd(p + 8, x.high);
}
// The square of a float is exact in double, so that the fused form rounds like the separate one.
inline void add_squares(D16& sums, F16 x) {
    const __m512d low = low_half(x), high = high_half(x);
    sums.low = _mm512_fmadd_pd(low, low, sums.low);
    sums.high = _mm512_fmadd_pd(high, high, sums.high);
}
inline void add_values(D16& sums, F16 x) {
    sums.low = _mm512_add_pd(sums.low, low_half(x));
    sums.high = _mm512_add_pd(sums.high, high_half(x));
}

}  // namespace
}  // namespace commopt

#include "segments.inc"

namespace commopt {
extern const Kernels kernels_avx512 = table;
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
