// The scaled sign over rows and blocks. The wire format is stated in commopt/ops/__init__.py.
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "kernels.hpp"
#include "parallel.hpp"
#include "runs.hpp"

namespace commopt {
namespace {

// Elements that one call of a kernel works on, so that what its first pass wrote is in cache for the second. Longer
// blocks are cut at multiples of it: partial sums are added in order, whoever computed them.
constexpr int64_t kChunk = 1 << 14;

// Outputs from this size on (in floats) bypass the caches: one optimizer step writes many such buffers before it reads
// the first of them again.
constexpr int64_t kStream = 1 << 18;

struct Layout {
    int64_t rows, n, block, nblocks, nbytes;

    Layout(int64_t rows_, int64_t n_, int64_t block_) : rows(rows_), n(n_), block(block_ ? block_ : n_) {
        nblocks = n ? (n + block - 1) / block : 0;
        nbytes = (4 * nblocks + (n + 7) / 8 + 15) / 16 * 16;
    }
    int64_t block_size(int64_t b) const { return b + 1 < nblocks ? block : n - b * block; }
    int64_t mask_bytes() const { return (n + 7) / 8; }
    int64_t signs() const { return 4 * nblocks; }
};

float scale_of(Partial total, int norm) {
    if (total.count == 0) return 0.0f;
    const double mean = total.sum / double(total.count);
    return float(norm == 2 ? std::sqrt(mean) : mean);
}

void put_scale(uint8_t* row, int64_t block, float s) { std::memcpy(row + 4 * block, &s, 4); }

float get_scale(const uint8_t* row, int64_t block) {
    float s;
    std::memcpy(&s, row + 4 * block, 4);
    return s;
}

// Calls use(block, start, n) for each run of one block in chunk number c of a row.
template <class Use>
void runs_of_chunk(const Layout& at, int64_t c, const Use& use) {
    const int64_t end = (c + 1) * kChunk < at.n ? (c + 1) * kChunk : at.n;
    for (int64_t i = c * kChunk; i < end;) {
        const int64_t b = i / at.block, stop = (b + 1) * at.block < end ? (b + 1) * at.block : end;
        use(b, i, stop - i);
        i = stop;
    }
}

// What is compressed: a source gives n elements from element i of a row on, all in one block, either where they lie or
// in scratch.
struct Given {
    const float* x;
    int64_t n;

    const float* operator()(int64_t row, int64_t i, int64_t, float*) const { return x + row * n + i; }
};

struct MomentumRows {
    Momentum momentum;
    int64_t n;

    const float* operator()(int64_t row, int64_t i, int64_t count, float* scratch) const {
        momentum.write(row * n + i, row * n + i + count, scratch);
        return scratch;
    }
};

struct Mean {
    Layout at;  // its rows are the ranks
    const uint8_t* wires;
    const Kernels& k = kernels();

    void write(int64_t i, int64_t n, float* out, bool stream) const {
        float shares[kMaxRanks];
        for (int64_t first = 0; first < at.rows; first += kMaxRanks) {
            const int some = int(at.rows - first < kMaxRanks ? at.rows - first : kMaxRanks);
            const uint8_t* row = wires + first * at.nbytes;
            for (int j = 0; j < some; ++j) shares[j] = get_scale(row + j * at.nbytes, i / at.block) / float(at.rows);
            k.decode_mean(row + at.signs() + i / 8, at.nbytes, shares, some, first == 0, out, n, stream);
        }
    }
    const float* operator()(int64_t, int64_t i, int64_t n, float* scratch) const {
        write(i, n, scratch, false);
        return scratch;
    }
};

template <class Source>
struct Compression {
    Layout at;
    Source source;
    const float* error;  // null without feedback, and so is new_error
    float* new_error;
    uint8_t* wire;
    const uint8_t* live;  // null: all
    int norm, threads;
    bool stream;  // the new residual
    const Kernels& k = kernels();

    const uint8_t* live_at(int64_t row, int64_t i) const {
        return live ? live + row * at.mask_bytes() + i / 8 : nullptr;
    }
    uint8_t* row(int64_t r) const { return wire + r * at.nbytes; }

    float* new_error_at(int64_t row, int64_t i) const { return error ? new_error + row * at.n + i : nullptr; }

    Partial encode(int64_t r, int64_t i, int64_t n, float* scratch, float* z) const {
        return k.encode(source(r, i, n, scratch), error ? error + r * at.n + i : nullptr, live_at(r, i), z,
                        row(r) + at.signs() + i / 8, n, norm);
    }
    void residual(int64_t r, int64_t i, int64_t n, const float* z, float s) const {
        if (error) k.residual(z, live_at(r, i), s, new_error_at(r, i), n, stream);
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

struct Decompression {
    Layout at;
    const uint8_t* wire;
    const uint8_t* live;  // null: all
    const Kernels& k = kernels();

    // Writes chunk c of row r to out.
    void write(int64_t r, int64_t c, float* out, bool stream) const {
        const uint8_t* row = wire + r * at.nbytes;
        runs_of_chunk(at, c, [&](int64_t b, int64_t i, int64_t n) {
            const uint8_t* mask = live ? live + r * at.mask_bytes() + i / 8 : nullptr;
            k.decode(row + at.signs() + i / 8, mask, get_scale(row, b), out + (i - c * kChunk), n, stream);
        });
    }
    // Calls use(row, chunk) for each chunk of each row.
    template <class Use>
    void each_chunk(int threads, const Use& use) const {
        const int64_t chunks = (at.n + kChunk - 1) / kChunk;
        parallel_for(at.rows * chunks, at.rows * at.n, threads,
                     [&](int64_t task) { use(task / chunks, task % chunks); });
    }
};

template <class Source>
int compress(const Layout& at, const Source& source, const float* error, float* new_error, uint8_t* wire,
             const uint8_t* live, int norm, int threads, bool stream) {
    return Compression<Source>{at, source, error, new_error, wire, live, norm, threads, stream}.run();
}

}  // namespace
}  // namespace commopt

using namespace commopt;

extern "C" {

int commopt_sign_compress(const float* x, const float* error, float* new_error, uint8_t* wire, const uint8_t* live,
                          int64_t rows, int64_t n, int64_t block, int32_t norm, int32_t threads) {
    const bool stream = rows * n >= kStream && new_error != error && new_error != x;
    return compress(Layout(rows, n, block), Given{x, n}, error, new_error, wire, live, norm, threads, stream);
}

int commopt_sign_compress_momentum(const float* m, const Run* grads, int64_t count, float beta, float alpha,
                                   const float* error, float* new_error, uint8_t* wire, const uint8_t* live,
                                   int64_t rows, int64_t n, int64_t block, int32_t norm, int32_t threads) {
    const MomentumRows source = {{m, grads, count, beta, alpha}, n};
    const bool stream = rows * n >= kStream && new_error != error;
    return compress(Layout(rows, n, block), source, error, new_error, wire, live, norm, threads, stream);
}

int commopt_sign_reduce(const uint8_t* wires, const float* error, float* new_error, uint8_t* own, const uint8_t* live,
                        int64_t ranks, int64_t n, int64_t block, int32_t norm, int32_t threads) {
    const Mean source = {Layout(ranks, n, block), wires};
    const bool stream = n >= kStream && new_error != error;
    return compress(Layout(1, n, block), source, error, new_error, own, live, norm, threads, stream);
}

int commopt_sign_decompress(const uint8_t* wire, float* out, const uint8_t* live, int64_t rows, int64_t n,
                            int64_t block, int32_t threads) {
    const Decompression source = {Layout(rows, n, block), wire, live};
    const bool stream = rows * n >= kStream;
    source.each_chunk(threads, [&](int64_t r, int64_t c) { source.write(r, c, out + r * n + c * kChunk, stream); });
    return 0;
}

// factors: for each parameter its step size and its correction. Where m bypasses the caches, each chunk of it is
// decoded once more to where the update can read it.
int commopt_sign_decompress_adam(const uint8_t* wire, const uint8_t* live, float* m, const float* v, const Run* params,
                                 int64_t count, const float* factors, float eps, float decay, int64_t rows, int64_t n,
                                 int64_t block, int32_t threads) {
    const Decompression source = {Layout(rows, n, block), wire, live};
    const Kernels& k = kernels();
    const bool stream = rows * n >= kStream;
    source.each_chunk(threads, [&](int64_t r, int64_t c) {
        alignas(64) float scratch[kChunk];
        const int64_t start = r * n + c * kChunk, end = r * n + (n - c * kChunk < kChunk ? n : (c + 1) * kChunk);
        source.write(r, c, m + start, stream);
        if (stream) source.write(r, c, scratch, false);
        const float* near = stream ? scratch : m + start;
        each_piece(params, count, start, end, [&](const Run* p, int64_t i, int64_t size) {
            if (p == nullptr) return;
            const float step = factors[2 * (p - params)], correction = factors[2 * (p - params) + 1];
            if (p->bfloat16) {
                uint16_t* x = static_cast<uint16_t*>(p->data) + (i - p->start);
                k.frozen_adam_bf16(x, near + (i - start), v + i, size, step, correction, eps, decay);
            } else {
                float* x = static_cast<float*>(p->data) + (i - p->start);
                k.frozen_adam(x, near + (i - start), v + i, size, step, correction, eps, decay);
            }
        });
    });
    return 0;
}

int commopt_sign_decompress_mean(const uint8_t* wire, float* out, int64_t ranks, int64_t n, int64_t block,
                                 int32_t threads) {
    if (n == 0) return 0;
    const Mean mean = {Layout(ranks, n, block), wire};
    const bool stream = n >= kStream && ranks <= kMaxRanks;
    const int64_t work = n + n * ranks / 4;  // adding a rank costs less than writing the result
    parallel_for((n + kChunk - 1) / kChunk, work, threads, [&](int64_t task) {
        runs_of_chunk(mean.at, task, [&](int64_t, int64_t i, int64_t count) { mean.write(i, count, out + i, stream); });
    });
    return 0;
}

int commopt_pack_nonzero(const float* x, uint8_t* bits, int64_t n, int32_t threads) {
    const Kernels& k = kernels();
    parallel_for((n + kChunk - 1) / kChunk, n, threads, [&](int64_t c) {
        k.pack_nonzero(x + c * kChunk, bits + c * kChunk / 8, n - c * kChunk < kChunk ? n - c * kChunk : kChunk);
    });
    return 0;
}

int commopt_zero_dead(float* x, const uint8_t* bits, int64_t n, int32_t threads) {
    const Kernels& k = kernels();
    parallel_for((n + kChunk - 1) / kChunk, n, threads, [&](int64_t c) {
        k.zero_dead(x + c * kChunk, bits + c * kChunk / 8, n - c * kChunk < kChunk ? n - c * kChunk : kChunk);
    });
    return 0;
}
}
