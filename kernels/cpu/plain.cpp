// 16 floats in four vectors of the compiler's own kind: any machine. It makes of them what the build's baseline has
// (SSE2, NEON), or scalars.
#include "kernels.hpp"

namespace commopt {
namespace {

typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

struct F16 {
    F4 part[4];
};
struct D16 {
    double lane[16];
};

template <class Function>
inline F16 each(Function function) {
    return {{function(0), function(1), function(2), function(3)}};
}

inline F16 load(const float* p) {
    F16 x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}
inline F16 load(const uint16_t* p) {
    uint32_t wide[16];
    for (int i = 0; i < 16; ++i) wide[i] = uint32_t(p[i]) << 16;
    F16 x;
    __builtin_memcpy(&x, wide, sizeof x);
    return x;
}
inline void store(float* p, const F16& x) { __builtin_memcpy(p, &x, sizeof x); }
inline void stream(float* p, const F16& x) { store(p, x); }
inline F16 splat(float x) {
    return each([=](int) { return F4{x, x, x, x}; });
}
inline F16 add(const F16& a, const F16& b) {
    return each([&](int i) { return a.part[i] + b.part[i]; });
}
inline F16 sub(const F16& a, const F16& b) {
    return each([&](int i) { return a.part[i] - b.part[i]; });
}
inline F16 mul(const F16& a, const F16& b) {
    return each([&](int i) { return a.part[i] * b.part[i]; });
}
inline float multiply_add(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
inline F16 multiply_add(const F16& a, const F16& b, const F16& c) {
    F16 sum;
    for (int i = 0; i < 16; ++i) {
        sum.part[i / 4][i % 4] = multiply_add(a.part[i / 4][i % 4], b.part[i / 4][i % 4], c.part[i / 4][i % 4]);
    }
    return sum;
}
inline F16 magnitude(const F16& x) {
    return each([&](int i) { return F4(I4(x.part[i]) & 0x7FFFFFFF); });
}
inline F16 larger(const F16& a, const F16& b) {
    return each([&](int i) {
        const I4 first = I4(a.part[i]) > I4(b.part[i]);
        return F4((first & I4(a.part[i])) | (~first & I4(b.part[i])));
    });
}
inline void store(uint32_t* p, const F16& x) { __builtin_memcpy(p, &x, sizeof x); }
inline I4 weights(int i) { return I4{1, 2, 4, 8} << (4 * i); }  // the bits of the lanes of part i
inline F16 select_ge0(const F16& x, const F16& a, const F16& b) {
    return each([&](int i) {
        const I4 yes = x.part[i] >= F4{};
        return F4((yes & I4(a.part[i])) | (~yes & I4(b.part[i])));
    });
}
inline F16 select(uint32_t bits, const F16& a, const F16& b) {
    const I4 copies = I4{} + int32_t(bits);
    return each([&](int i) {
        const I4 yes = (copies & weights(i)) == weights(i);
        return F4((yes & I4(a.part[i])) | (~yes & I4(b.part[i])));
    });
}
inline uint32_t gather(I4 a, I4 b, I4 c, I4 d) {  // comparison results to bits
    const I4 bits = ((a & weights(0)) | (b & weights(1))) | ((c & weights(2)) | (d & weights(3)));
    return uint32_t((bits[0] | bits[1]) | (bits[2] | bits[3]));
}
inline uint32_t ge0(const F16& x) {
    return gather(x.part[0] >= F4{}, x.part[1] >= F4{}, x.part[2] >= F4{}, x.part[3] >= F4{});
}
inline uint32_t ne0(const F16& x) {
    return gather(x.part[0] != F4{}, x.part[1] != F4{}, x.part[2] != F4{}, x.part[3] != F4{});
}
inline uint32_t reach(const F16& x, uint32_t least) {
    const I4 below = I4{} + int32_t(least - 1);  // -1 below 0
    return gather(I4(x.part[0]) > below, I4(x.part[1]) > below, I4(x.part[2]) > below, I4(x.part[3]) > below);
}

inline D16 zero_lanes() { return {}; }
inline void store_lanes(double* p, const D16& x) { __builtin_memcpy(p, &x, sizeof x); }
inline void add_squares(D16& sums, const F16& x) {
    for (int i = 0; i < 16; ++i) {
        const double value = x.part[i / 4][i % 4];
        sums.lane[i] += value * value;
    }
}
inline void add_values(D16& sums, const F16& x) {
    for (int i = 0; i < 16; ++i) sums.lane[i] += double(x.part[i / 4][i % 4]);
}

}  // namespace
}  // namespace commopt

#include "segments.inc"

namespace commopt {
extern const Kernels kernels_plain = table;
}
