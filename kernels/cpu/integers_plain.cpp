// Integers and floats of 8 bits with the build's baseline: any machine.
#include <cmath>
#include <cstring>

#include "integers.hpp"

namespace commopt {
namespace {

// Loops over many elements are what compilers make vectors of.
constexpr int kLanes = 4, kWidth = 16, kCodes = kLanes * kWidth;
typedef float Lanes __attribute__((vector_size(16)));
typedef int32_t IntLanes __attribute__((vector_size(16)));
typedef uint32_t WordLanes __attribute__((vector_size(16)));

}  // namespace
}  // namespace commopt

#include "floats8.inc"

namespace commopt {
namespace {

inline void stream(float* p, Lanes x) { std::memcpy(p, &x, sizeof x); }  // not every machine can
inline Lanes signed_sum(Lanes v, Lanes s, Lanes w) { return s * v + w; }  // the product is exact

template <int BITS>
inline void put_codes(const IntLanes (&q)[kWidth], uint8_t* to) {
    int32_t codes[kCodes];
    std::memcpy(codes, q, sizeof codes);
    uint8_t bytes[kCodes];
    for (int i = 0; i < kCodes; ++i) bytes[i] = uint8_t(codes[i] & ((1 << BITS) - 1));
    if (BITS == 8) std::memcpy(to, bytes, sizeof bytes);
    if (BITS == 4) {
        uint16_t pairs[kCodes / 2];
        std::memcpy(pairs, bytes, sizeof pairs);
        for (int i = 0; i < kCodes / 2; ++i) to[i] = uint8_t(pairs[i] | pairs[i] >> 4);
    }
    if (BITS == 2) {
        uint32_t fours[kCodes / 4];
        std::memcpy(fours, bytes, sizeof fours);
        for (int i = 0; i < kCodes / 4; ++i) {
            const uint32_t w = fours[i] | fours[i] >> 6;
            to[i] = uint8_t((w & 15) | (w >> 12 & 0xF0));
        }
    }
}

template <int BITS>
inline void take_codes(const uint8_t* from, uint8_t (&q)[kCodes]) {
    if (BITS == 8) std::memcpy(q, from, sizeof q);
    if (BITS == 4) {
        uint16_t pairs[kCodes / 2];
        for (int i = 0; i < kCodes / 2; ++i) pairs[i] = uint16_t((from[i] & 15) | (from[i] & 0xF0) << 4);
        std::memcpy(q, pairs, sizeof pairs);
    }
    if (BITS == 2) {
        uint32_t fours[kCodes / 4];
        for (int i = 0; i < kCodes / 4; ++i) {
            const uint32_t w = (from[i] & 15u) | (from[i] & 0xF0u) << 12;
            fours[i] = (w & 0x00030003u) | (w & 0x000C000Cu) << 6;
        }
        std::memcpy(q, fours, sizeof fours);
    }
}

template <int KIND>
struct Values {
    static constexpr int BITS = bits_of(KIND);
    float s;

    explicit Values(float scale) : s(scale) {}
    template <bool ADD>
    void write(const uint8_t* codes, Lanes (&sums)[kWidth]) const {
        uint8_t q[kCodes];
        take_codes<BITS>(codes, q);
        if constexpr (is_float(KIND)) {
            for (int k = 0; k < kWidth; ++k) {
                IntLanes code;
                for (int j = 0; j < kLanes; ++j) code[j] = q[k * kLanes + j];
                const Lanes values = Float8<KIND>::decode(code) * s;
                sums[k] = ADD ? sums[k] + values : values;
            }
            return;
        }
        float* out = reinterpret_cast<float*>(sums);
        for (int i = 0; i < kCodes; ++i) {
            const float code = BITS == 8   ? float(int32_t(int8_t(q[i])))
                               : BITS == 4 ? float(int32_t(q[i] ^ 8) - 8)
                                           : float(int32_t(q[i])) - 1.5f;
            out[i] = ADD ? out[i] + code * s : code * s;
        }
    }
    void set(const uint8_t* codes, Lanes (&sums)[kWidth]) const { write<false>(codes, sums); }
    void add(const uint8_t* codes, Lanes (&sums)[kWidth]) const { write<true>(codes, sums); }
};

}  // namespace
}  // namespace commopt

#include "integers.inc"

namespace commopt {
extern const IntegerKernels integers_plain = integer_table;
}
