// 16 floats in an array: any machine. The compiler vectorises with what the build's baseline has (SSE2, NEON).
#include "kernels.hpp"

namespace commopt {
namespace {

struct F16 {
    float lane[16];
};
struct D16 {
    double lane[16];
};

template <class Function>
inline F16 each(Function function) {
    F16 out;
    for (int i = 0; i < 16; ++i) out.lane[i] = function(i);
    return out;
}

inline F16 load(const float* p) {
    F16 x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}
inline void store(float* p, const F16& x) { __builtin_memcpy(p, &x, sizeof x); }
inline void stream(float* p, const F16& x) { store(p, x); }
inline void flush_streams() {}
inline F16 splat(float x) {
    return each([=](int) { return x; });
}
inline F16 add(const F16& a, const F16& b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline F16 sub(const F16& a, const F16& b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline F16 magnitude(const F16& x) {
    return each([&](int i) { return __builtin_fabsf(x.lane[i]); });
}
inline F16 select(uint32_t bits, const F16& a, const F16& b) {
    return each([&](int i) { return bits >> i & 1 ? a.lane[i] : b.lane[i]; });
}
inline uint32_t ge0(const F16& x) {
    uint32_t bits = 0;
    for (int i = 0; i < 16; ++i) bits |= uint32_t(x.lane[i] >= 0.0f) << i;
    return bits;
}
inline uint32_t ne0(const F16& x) {
    uint32_t bits = 0;
    for (int i = 0; i < 16; ++i) bits |= uint32_t(x.lane[i] != 0.0f) << i;
    return bits;
}

inline D16 zero_lanes() { return {}; }
inline void store_lanes(double* p, const D16& x) { __builtin_memcpy(p, &x, sizeof x); }
inline void add_squares(D16& sums, const F16& x) {
    for (int i = 0; i < 16; ++i) sums.lane[i] += double(x.lane[i]) * double(x.lane[i]);
}
inline void add_values(D16& sums, const F16& x) {
    for (int i = 0; i < 16; ++i) sums.lane[i] += double(x.lane[i]);
}

}  // namespace
}  // namespace commopt

#if defined(__FP_FAST_FMAF)
#define COMMOPT_FUSED 1
#else
#define COMMOPT_FUSED 0
#endif
#include "segments.inc"

namespace commopt {
extern const Kernels kernels_plain = table;
}
