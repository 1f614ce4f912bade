// Integers and floats of 8 bits with AVX2.
#include <cmath>
#include <cstring>

#include "integers.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)  // after what others may share
#pragma clang attribute push(__attribute__((target("avx2,fma,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,popcnt")
#endif

namespace commopt {
namespace {

constexpr int kLanes = 8, kWidth = 4;
typedef float Lanes __attribute__((vector_size(32)));
typedef int32_t IntLanes __attribute__((vector_size(32)));
typedef uint32_t WordLanes __attribute__((vector_size(32)));

}  // namespace
}  // namespace commopt

#include "floats8.inc"

namespace commopt {
namespace {

inline void stream(float* p, Lanes x) { _mm256_stream_ps(p, __m256(x)); }
inline Lanes signed_sum(Lanes v, Lanes s, Lanes w) { return Lanes(_mm256_fmadd_ps(__m256(v), __m256(s), __m256(w))); }

// Of neighbouring bytes a and b, a | b << BITS, one behind the other. x: no more than BITS of each byte.
template <int BITS>
inline __m128i joined(__m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(x, _mm256_set1_epi16(int16_t(1 | 256 << BITS)));
    return _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}

template <int BITS>
inline void put_codes(const IntLanes (&q)[kWidth], uint8_t* to) {
    const __m256i low = _mm256_packs_epi32(__m256i(q[0]), __m256i(q[1]));
    const __m256i high = _mm256_packs_epi32(__m256i(q[2]), __m256i(q[3]));
    __m256i bytes = _mm256_packs_epi16(low, high);  // four of each in turns
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    if (BITS == 8) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
    const __m128i pairs = joined<BITS>(_mm256_and_si256(bytes, _mm256_set1_epi8((1 << BITS) - 1)));
    if (BITS == 4) return _mm_storeu_si128(reinterpret_cast<__m128i*>(to), pairs);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), joined<4>(_mm256_castsi128_si256(pairs)));
}

template <int KIND>
struct Values {
    static constexpr int BITS = bits_of(KIND);
    __m256 table;  // the scale; 2 bits: what each code stands for, which is found by the code

    explicit Values(float scale) : table(_mm256_set1_ps(scale)) {
        const __m256 levels = _mm256_setr_ps(-1.5f, -0.5f, 0.5f, 1.5f, -1.5f, -0.5f, 0.5f, 1.5f);
        if (BITS == 2) table = _mm256_mul_ps(levels, table);
    }
    __m256 get(const uint8_t* codes) const {
        if (BITS == 8) {
            const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
            const __m256i q = _mm256_cvtepi8_epi32(bytes);
            if constexpr (is_float(KIND)) return _mm256_mul_ps(__m256(Float8<KIND>::decode(IntLanes(q))), table);
            return _mm256_mul_ps(_mm256_cvtepi32_ps(q), table);
        }
        if (BITS == 4) {
            int word;
            std::memcpy(&word, codes, 4);
            const __m256i shifts = _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0);
            const __m256i q = _mm256_srai_epi32(_mm256_sllv_epi32(_mm256_set1_epi32(word), shifts), 28);
            return _mm256_mul_ps(_mm256_cvtepi32_ps(q), table);
        }
        uint16_t word;
        std::memcpy(&word, codes, 2);
        const __m256i shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
        return _mm256_permutevar8x32_ps(table, _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts));
    }
    void set(const uint8_t* codes, Lanes (&sums)[kWidth]) const {
        for (int k = 0; k < kWidth; ++k) sums[k] = Lanes(get(codes + BITS * k));
    }
    void add(const uint8_t* codes, Lanes (&sums)[kWidth]) const {
        for (int k = 0; k < kWidth; ++k) sums[k] += Lanes(get(codes + BITS * k));
    }
};

}  // namespace
}  // namespace commopt

#include "integers.inc"

namespace commopt {
extern const IntegerKernels integers_avx2 = integer_table;
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
