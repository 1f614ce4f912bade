// The bits of floats, and what is chosen by them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace commopt {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The bits of |x|: ordered as |x| is, and NaN above all.
inline uint32_t magnitude(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits & 0x7FFFFFFF;
}

inline float as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// |x|, exactly: also where the processor takes denormals for 0.
inline double wide_magnitude(float x) {
    const uint32_t bits = magnitude(x);
    return bits < 0x00800000 ? double(int32_t(bits)) * 0x1p-149 : double(as_float(bits));
}

// To nearest, ties to even; one NaN for all.
inline uint16_t to_bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return uint16_t(x == x ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : 0x7FC0);
}

// The k-th largest, of at least k; changes their order.
inline uint32_t kth_largest(uint32_t* keys, int64_t count, int64_t k) {
    std::nth_element(keys, keys + (k - 1), keys + count, [](uint32_t a, uint32_t b) { return a > b; });
    return keys[k - 1];
}

}  // namespace commopt
