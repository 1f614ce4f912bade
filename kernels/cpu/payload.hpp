// Rows of a payload. The format is stated in commopt/ops/sign.py.
#pragma once

#include <cstring>

#include "kernels.hpp"
#include "parallel.hpp"

namespace commopt {

// Elements that one call of a kernel works on, so that what its first pass wrote is in cache for the second. Longer
// blocks are cut at multiples of it: partial sums are added in order, whoever computed them.
constexpr int64_t kChunk = 1 << 14;

// Outputs from this size on (in floats) bypass the caches: one optimizer step writes many such buffers before it reads
// the first of them again.
constexpr int64_t kStream = 1 << 18;

// Rows of n elements in blocks, and where their bytes lie. In memory a row begins pitch elements after the one before:
// n, or more where the rows are some columns of longer ones.
struct Layout {
    int64_t rows, n, block, pitch, nblocks, nbytes;

    Layout(int64_t rows_, int64_t n_, int64_t block_) : Layout(rows_, n_, block_, n_) {}
    Layout(int64_t rows_, int64_t n_, int64_t block_, int64_t pitch_)
        : rows(rows_), n(n_), block(block_ ? block_ : n_), pitch(pitch_) {
        nblocks = n ? (n + block - 1) / block : 0;
        nbytes = (4 * nblocks + (n + 7) / 8 + 15) / 16 * 16;
    }
    int64_t block_size(int64_t b) const { return b + 1 < nblocks ? block : n - b * block; }
    int64_t mask_bytes() const { return (n + 7) / 8; }
    int64_t mask_pitch() const { return (pitch + 7) / 8; }
    int64_t signs() const { return 4 * nblocks; }
};

inline float get_scale(const uint8_t* row, int64_t block) {
    float s;
    std::memcpy(&s, row + 4 * block, 4);
    return s;
}

// Calls use(block, i, n) for each run of one block in the elements [start, end) of a row.
template <class Use>
void each_block(const Layout& at, int64_t start, int64_t end, const Use& use) {
    for (int64_t i = start; i < end;) {
        const int64_t b = i / at.block, stop = (b + 1) * at.block < end ? (b + 1) * at.block : end;
        use(b, i, stop - i);
        i = stop;
    }
}

// Calls use(row, start, end) for runs of kChunk elements (the last of a row may be shorter), each a task.
template <class Use>
void each_chunk(int64_t rows, int64_t n, int64_t work, int threads, const Use& use) {
    const int64_t chunks = (n + kChunk - 1) / kChunk;
    parallel_for(rows * chunks, work, threads, [&](int64_t task) {
        const int64_t start = task % chunks * kChunk;
        use(task / chunks, start, n - start < kChunk ? n : start + kChunk);
    });
}

// The mean of rows, in rank order.
struct Mean {
    Layout at;  // its rows are the ranks
    const uint8_t* payloads;
    const Kernels& k = kernels();

    void write(int64_t i, int64_t n, float* out, bool stream) const {
        float shares[kMaxRanks];
        for (int64_t first = 0; first < at.rows; first += kMaxRanks) {
            const int some = int(at.rows - first < kMaxRanks ? at.rows - first : kMaxRanks);
            const uint8_t* row = payloads + first * at.nbytes;
            for (int j = 0; j < some; ++j) shares[j] = get_scale(row + j * at.nbytes, i / at.block) / float(at.rows);
            k.decode_mean(row + at.signs() + i / 8, at.nbytes, shares, some, first == 0, out, n, stream);
        }
    }
};

}  // namespace commopt
