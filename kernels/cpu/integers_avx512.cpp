// Integers and floats of 8 bits with AVX512.
#include <cmath>
#include <cstring>

#include "integers.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)  // after what others may share
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,popcnt")
#endif

namespace commopt {
namespace {

constexpr int kLanes = 16, kWidth = 4;
typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t IntLanes __attribute__((vector_size(64)));
typedef uint32_t WordLanes __attribute__((vector_size(64)));

}  // namespace
}  // namespace commopt

#include "floats8.inc"

namespace commopt {
namespace {

inline void stream(float* p, Lanes x) { _mm512_stream_ps(p, __m512(x)); }
inline Lanes signed_sum(Lanes v, Lanes s, Lanes w) { return Lanes(_mm512_fmadd_ps(__m512(v), __m512(s), __m512(w))); }

template <int BITS>
inline void put_codes(const IntLanes (&q)[kWidth], uint8_t* to) {
    for (int k = 0; k < kWidth; ++k, to += 2 * BITS) {
        const __m512i codes = __m512i(q[k]);
        if (BITS == 8) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(codes));
            continue;
        }
        const __m512i low = _mm512_and_si512(codes, _mm512_set1_epi32((1 << BITS) - 1));
        const __m512i pairs = _mm512_or_si512(low, _mm512_srli_epi64(low, 32 - BITS));
        if (BITS == 4) {
            _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm512_cvtepi64_epi8(pairs));
            continue;
        }
        const __m256i fours = _mm512_cvtepi64_epi32(pairs);
        const int bytes = _mm_cvtsi128_si32(_mm256_cvtepi64_epi8(_mm256_or_si256(fours, _mm256_srli_epi64(fours, 28))));
        std::memcpy(to, &bytes, 4);
    }
}

template <int KIND>
struct Values {
    static constexpr int BITS = bits_of(KIND);
    __m512 table;  // 8 bits: the scale; else what each code stands for, which is found by the code

    explicit Values(float scale) {
        const __m512 s = _mm512_set1_ps(scale);
        if (BITS == 8) {
            table = s;
        } else if (BITS == 4) {
            table = _mm512_mul_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1), s);
        } else {
            table = _mm512_mul_ps(_mm512_broadcast_f32x4(_mm_setr_ps(-1.5f, -0.5f, 0.5f, 1.5f)), s);
        }
    }
    __m512 get(const uint8_t* codes) const {
        if (BITS == 8) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
            const __m512i q = _mm512_cvtepi8_epi32(bytes);
            if constexpr (is_float(KIND)) return _mm512_mul_ps(__m512(Float8<KIND>::decode(IntLanes(q))), table);
            return _mm512_mul_ps(_mm512_cvtepi32_ps(q), table);
        }
        int word;
        std::memcpy(&word, codes, 4);
        __m512i words = _mm512_set1_epi32(word);
        if (BITS == 4) {
            std::memcpy(&word, codes + 4, 4);
            words = _mm512_mask_set1_epi32(words, 0xFF00, word);
        }
        const __m512i shifts =
            BITS == 4 ? _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28)
                      : _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        return _mm512_permutexvar_ps(_mm512_srlv_epi32(words, shifts), table);
    }
    void set(const uint8_t* codes, Lanes (&sums)[kWidth]) const {
        for (int k = 0; k < kWidth; ++k) sums[k] = Lanes(get(codes + 2 * BITS * k));
    }
    void add(const uint8_t* codes, Lanes (&sums)[kWidth]) const {
        for (int k = 0; k < kWidth; ++k) sums[k] += Lanes(get(codes + 2 * BITS * k));
    }
};

}  // namespace
}  // namespace commopt

#include "integers.inc"

namespace commopt {
extern const IntegerKernels integers_avx512 = integer_table;
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
