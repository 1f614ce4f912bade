// Integers of 8, 4 and 2 bits, and floats of 8: what an instruction set provides. commopt/ops/integers.py states the
// format.
//
// integers_avx512.cpp, integers_avx2.cpp and integers_plain.cpp each define vectors, and compile integers.inc with them;
// all tables give the same bits.
#pragma once

#include <cstdint>

namespace commopt {

constexpr int64_t kLargestIntegerBlock = 8192;

// Elements whose blocks are made into codes together, in cache: what one block waits for, the others need not.
constexpr int64_t kTogether = 1 << 11;

// Kinds of codes: 8, 4 and 2, integers of so many bits; floats of 8, by their bits of exponent and of mantissa.
constexpr int kE4M3 = 43, kE5M2 = 52;
constexpr bool is_float(int kind) { return kind > 8; }
constexpr int bits_of(int kind) { return is_float(kind) ? 8 : kind; }
constexpr float largest_of(int kind) {
    return kind == kE4M3 ? 448.0f : kind == kE5M2 ? 57344.0f : kind == 8 ? 127.0f : kind == 4 ? 7.0f : 1.5f;
}

// How blocks are made into codes.
struct Coding {
    int64_t block;
    int kind;
    bool stochastic, rotated;
    uint32_t seed;
};

// Each function works on n elements from the beginning of a block on: whole blocks, but that the last may be shorter.
// active may be null. streamed: what is written bypasses the caches; then it begins at a multiple of 64 bytes.
struct IntegerKernels {
    // z = x + e (e null: x); C[z] -> scales and codes; rest = z - C[z] (null with e). rest may be x or e itself.
    // later: n floats that will be needed kTogether elements later, and may come into the cache.
    void (*encode)(const float* x, const float* e, const uint8_t* active, float* rest, int64_t n, const Coding& coding,
                   uint8_t* scales, uint8_t* codes, bool streamed, const float* later);
    // The mean of ranks rows, which lie stride bytes apart; 0 at the inactive elements.
    void (*decode_mean)(const uint8_t* scales, const uint8_t* codes, int64_t stride, int64_t ranks, const uint8_t* active,
                        float* out, int64_t n, const Coding& coding, bool streamed);
};

extern const IntegerKernels integers_avx512;
extern const IntegerKernels integers_avx2;
extern const IntegerKernels integers_plain;

}  // namespace commopt
