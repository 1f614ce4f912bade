// The scaled sign over rows and blocks: what is sent, and what stays.
#include <cmath>
#include <cstdlib>

#include "runs.hpp"
#include "payload.hpp"

namespace commopt {
namespace {

float scale_of(Partial total, int norm) {
    if (total.count == 0) return 0.0f;
    const double mean = total.sum / double(total.count);
    return float(norm == 2 ? std::sqrt(mean) : mean);
}

void put_scale(uint8_t* row, int64_t block, float s) { std::memcpy(row + 4 * block, &s, 4); }

// What is compressed: a source gives n elements from element i of a row on, all in one block, either where they lie or
// in scratch.
struct Given {
    const float* x;
    int64_t n;

    const float* operator()(int64_t row, int64_t i, int64_t, float*) const { return x + row * n + i; }
};

struct MomentumRows {
    Momentum momentum;
    int64_t pitch, first;

    const float* operator()(int64_t row, int64_t i, int64_t count, float* scratch) const {
        const int64_t start = row * pitch + first + i;
        momentum.write(start, start + count, scratch);
        return scratch;
    }
};

struct MeanOfRows {
    Mean mean;

    const float* operator()(int64_t, int64_t i, int64_t n, float* scratch) const {
        mean.write(i, n, scratch, false);
        return scratch;
    }
};

template <class Source>
struct Compression {
    Layout at;
    Source source;
    const float* error;  // null without feedback, and so is new_error
    float* new_error;
    uint8_t* payload;
    const uint8_t* active;  // null: all
    int norm, threads;
    bool stream;  // the new residual
    const Kernels& k = kernels();

    const uint8_t* active_at(int64_t row, int64_t i) const {
        return active ? active + row * at.mask_pitch() + i / 8 : nullptr;
    }
    uint8_t* row(int64_t r) const { return payload + r * at.nbytes; }

    float* new_error_at(int64_t row, int64_t i) const { return error ? new_error + row * at.pitch + i : nullptr; }

    Partial encode(int64_t r, int64_t i, int64_t n, float* scratch, float* z) const {
        return k.encode(source(r, i, n, scratch), error ? error + r * at.pitch + i : nullptr, active_at(r, i), z,
                        row(r) + at.signs() + i / 8, n, norm);
    }
    void residual(int64_t r, int64_t i, int64_t n, const float* z, float s) const {
        if (error) k.residual(z, active_at(r, i), s, new_error_at(r, i), n, stream);
    }

    // Blocks that fit into the cache: both passes over one before the next.
    void small_blocks() const {
        const int64_t group = kChunk / at.block;
        const int64_t blocks = at.rows * at.nblocks;
        parallel_for((blocks + group - 1) / group, at.rows * at.n, threads, [&](int64_t task) {
            alignas(64) float z[kChunk];
            const int64_t end = (task + 1) * group < blocks ? (task + 1) * group : blocks;
            for (int64_t g = task * group; g < end; ++g) {
                const int64_t r = g / at.nblocks, b = g % at.nblocks, i = b * at.block, n = at.block_size(b);
                const float s = scale_of(encode(r, i, n, z, z), norm);
                put_scale(row(r), b, s);
                residual(r, i, n, z, s);
            }
        });
    }

    // Larger ones: first all sums, with z in the place of the new residual, then all residuals.
    int large_blocks() const {
        const int64_t per_block = (at.block + kChunk - 1) / kChunk;
        const int64_t blocks = at.rows * at.nblocks, chunks = blocks * per_block;
        Partial* partials = static_cast<Partial*>(std::malloc(size_t(chunks) * sizeof(Partial)));
        if (partials == nullptr) return 1;
        const auto on_chunk = [&](int64_t chunk, auto&& use) {
            const int64_t g = chunk / per_block, r = g / at.nblocks, b = g % at.nblocks;
            const int64_t start = chunk % per_block * kChunk, left = at.block_size(b) - start;
            if (left > 0) use(r, b, b * at.block + start, left < kChunk ? left : kChunk);
        };
        parallel_for(chunks, at.rows * at.n, threads, [&](int64_t chunk) {
            alignas(64) float scratch[kChunk];
            partials[chunk] = {0.0, 0};
            on_chunk(chunk, [&](int64_t r, int64_t, int64_t i, int64_t n) {
                partials[chunk] = encode(r, i, n, scratch, new_error_at(r, i));
            });
        });
        for (int64_t g = 0; g < blocks; ++g) {
            Partial total = {0.0, 0};
            for (int64_t c = g * per_block; c < (g + 1) * per_block; ++c) {
                total.sum += partials[c].sum;
                total.count += partials[c].count;
            }
            put_scale(row(g / at.nblocks), g % at.nblocks, scale_of(total, norm));
        }
        std::free(partials);
        if (error == nullptr) return 0;
        parallel_for(chunks, at.rows * at.n, threads, [&](int64_t chunk) {
            on_chunk(chunk, [&](int64_t r, int64_t b, int64_t i, int64_t n) {
                residual(r, i, n, new_error_at(r, i), get_scale(row(r), b));
            });
        });
        return 0;
    }

    int run() const {
        if (at.rows == 0 || at.n == 0) return 0;
        for (int64_t r = 0; r < at.rows; ++r) {
            const int64_t used = at.signs() + at.mask_bytes();
            std::memset(row(r) + used, 0, size_t(at.nbytes - used));
        }
        if (at.block > kChunk) return large_blocks();
        small_blocks();
        return 0;
    }
};

template <class Source>
int compress(const Layout& at, const Source& source, const float* error, float* new_error, uint8_t* payload,
             const uint8_t* active, int norm, int threads, bool stream) {
    return Compression<Source>{at, source, error, new_error, payload, active, norm, threads, stream}.run();
}

}  // namespace
}  // namespace commopt

using namespace commopt;

extern "C" {

int commopt_sign_compress(const float* x, const float* error, float* new_error, uint8_t* payload, const uint8_t* active,
                          int64_t rows, int64_t n, int64_t block, int32_t norm, int32_t threads) {
    const bool stream = rows * n >= kStream && new_error != error && new_error != x;
    return compress(Layout(rows, n, block), Given{x, n}, error, new_error, payload, active, norm, threads, stream);
}

// Of the rows of n elements, only the columns [start, stop).
int commopt_sign_compress_momentum(const float* m, const Run* grads, int64_t count, float beta, float alpha,
                                   const float* error, float* new_error, uint8_t* payload, const uint8_t* active,
                                   int64_t rows, int64_t n, int64_t start, int64_t stop, int64_t block, int32_t norm,
                                   int32_t threads) {
    const MomentumRows source = {{m, grads, count, beta, alpha}, n, start};
    const Layout at(rows, stop - start, block, n);
    const bool stream = rows * n >= kStream && new_error != error;
    return compress(at, source, error + start, new_error + start, payload, active ? active + start / 8 : nullptr, norm,
                    threads, stream);
}

int commopt_sign_reduce(const uint8_t* payloads, const float* error, float* new_error, uint8_t* own, const uint8_t* active,
                        int64_t ranks, int64_t n, int64_t block, int32_t norm, int32_t threads) {
    const MeanOfRows source = {{Layout(ranks, n, block), payloads}};
    const bool stream = n >= kStream && new_error != error;
    return compress(Layout(1, n, block), source, error, new_error, own, active, norm, threads, stream);
}
}
