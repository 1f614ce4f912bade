// 16 floats in four registers: 64-bit ARM.
#include "kernels.hpp"

#if COMMOPT_NEON
#include <arm_neon.h>

namespace commopt {
namespace {

struct F16 {
    float32x4_t part[4];
};
struct D16 {
    float64x2_t part[8];
};

template <class Function>
inline F16 each(Function function) {
    return {{function(0), function(1), function(2), function(3)}};
}

inline F16 load(const float* p) {
    return each([=](int i) { return vld1q_f32(p + 4 * i); });
}
inline F16 load(const uint16_t* p) {
    return each([=](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(p + 4 * i)), 16)); });
}
inline void store(float* p, F16 x) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.part[i]);
}
inline void stream(float* p, F16 x) { store(p, x); }
inline F16 splat(float x) {
    return each([=](int) { return vdupq_n_f32(x); });
}
inline F16 add(F16 a, F16 b) {
    return each([=](int i) { return vaddq_f32(a.part[i], b.part[i]); });
}
inline F16 sub(F16 a, F16 b) {
    return each([=](int i) { return vsubq_f32(a.part[i], b.part[i]); });
}
inline F16 mul(F16 a, F16 b) {
    return each([=](int i) { return vmulq_f32(a.part[i], b.part[i]); });
}
inline F16 multiply_add(F16 a, F16 b, F16 c) {
    return each([=](int i) { return vfmaq_f32(c.part[i], a.part[i], b.part[i]); });
}
inline float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline F16 magnitude(F16 x) {
    return each([=](int i) { return vabsq_f32(x.part[i]); });
}
inline uint32x4_t as_bits(float32x4_t x) { return vreinterpretq_u32_f32(x); }
inline F16 larger(F16 a, F16 b) {
    return each([=](int i) { return vreinterpretq_f32_u32(vmaxq_u32(as_bits(a.part[i]), as_bits(b.part[i]))); });
}
inline void store(uint32_t* p, F16 x) {
    for (int i = 0; i < 4; ++i) vst1q_u32(p + 4 * i, as_bits(x.part[i]));
}

inline uint32x4_t weights(int i) {  // the bits of the lanes of part i
    const uint32x4_t first = {1, 2, 4, 8};
    return vshlq_u32(first, vdupq_n_s32(4 * i));
}
inline uint32_t gather(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {  // comparison results to bits
    const uint32x4_t low = vorrq_u32(vandq_u32(a, weights(0)), vandq_u32(b, weights(1)));
    const uint32x4_t high = vorrq_u32(vandq_u32(c, weights(2)), vandq_u32(d, weights(3)));
    return vaddvq_u32(vorrq_u32(low, high));
}
inline uint32_t ge0(F16 x) {
    return gather(vcgezq_f32(x.part[0]), vcgezq_f32(x.part[1]), vcgezq_f32(x.part[2]), vcgezq_f32(x.part[3]));
}
inline uint32_t ne0(F16 x) {
    return 0xFFFF ^ gather(vceqzq_f32(x.part[0]), vceqzq_f32(x.part[1]), vceqzq_f32(x.part[2]), vceqzq_f32(x.part[3]));
}
inline uint32_t reach(F16 x, uint32_t least) {
    const uint32x4_t bound = vdupq_n_u32(least);
    return gather(vcgeq_u32(as_bits(x.part[0]), bound), vcgeq_u32(as_bits(x.part[1]), bound),
                  vcgeq_u32(as_bits(x.part[2]), bound), vcgeq_u32(as_bits(x.part[3]), bound));
}
inline F16 select_ge0(F16 x, F16 a, F16 b) {
    return each([=](int i) { return vbslq_f32(vcgezq_f32(x.part[i]), a.part[i], b.part[i]); });
}
inline F16 select(uint32_t bits, F16 a, F16 b) {
    const uint32x4_t copies = vdupq_n_u32(bits);
    return each([=](int i) { return vbslq_f32(vtstq_u32(copies, weights(i)), a.part[i], b.part[i]); });
}

inline D16 zero_lanes() {
    D16 sums;
    for (int i = 0; i < 8; ++i) sums.part[i] = vdupq_n_f64(0.0);
    return sums;
}
inline void store_lanes(double* p, D16 x) {
    for (int i = 0; i < 8; ++i) vst1q_f64(p + 2 * i, x.part[i]);
}
inline float64x2_t eighth(F16 x, int i) {
    return i % 2 ? vcvt_high_f64_f32(x.part[i / 2]) : vcvt_f64_f32(vget_low_f32(x.part[i / 2]));
}
// The square of a float is exact in double, so that the fused form rounds like the separate one.
inline void add_squares(D16& sums, F16 x) {
    for (int i = 0; i < 8; ++i) {
        const float64x2_t value = eighth(x, i);
        sums.part[i] = vfmaq_f64(sums.part[i], value, value);
    }
}
inline void add_values(D16& sums, F16 x) {
    for (int i = 0; i < 8; ++i) sums.part[i] = vaddq_f64(sums.part[i], eighth(x, i));
}

}  // namespace
}  // namespace commopt

#include "segments.inc"

namespace commopt {
extern const Kernels kernels_neon = table;
}
#endif
