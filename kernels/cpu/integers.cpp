// Integers of 8, 4 and 2 bits, and floats of 8, over rows and blocks.
#include "integers.hpp"

#include <cstring>

#include "kernels.hpp"
#include "parallel.hpp"
#include "runs.hpp"
#include "payload.hpp"

namespace commopt {
namespace {

constexpr int64_t kRun = 1 << 14;   // elements of a task: whole blocks

const IntegerKernels& table() {
#if COMMOPT_X86
    if (&kernels() == &kernels_avx512) return integers_avx512;
    if (&kernels() == &kernels_avx2) return integers_avx2;
#endif
    return integers_plain;
}

// Rows of n elements in the payload.
struct Rows {
    int64_t n, used, nbytes, codes;

    Rows(int64_t n_, const Coding& coding) : n(n_) {
        codes = 4 * ((n + coding.block - 1) / coding.block);
        used = codes + (n * bits_of(coding.kind) + 7) / 8;
        nbytes = (used + 15) / 16 * 16;
    }
    const uint8_t* scales_at(const uint8_t* row, int64_t i, const Coding& c) const { return row + i / c.block * 4; }
    const uint8_t* codes_at(const uint8_t* row, int64_t i, const Coding& c) const {
        return row + codes + i * bits_of(c.kind) / 8;
    }
    uint8_t* scales_at(uint8_t* row, int64_t i, const Coding& c) const { return row + i / c.block * 4; }
    uint8_t* codes_at(uint8_t* row, int64_t i, const Coding& c) const { return row + codes + i * bits_of(c.kind) / 8; }
    void clear_tail(uint8_t* row) const { std::memset(row + used, 0, size_t(nbytes - used)); }
};

// Calls use(row, i, n) for runs of n elements from element i of a row on, each a task.
template <class Use>
void each_run(int64_t rows, int64_t n, int64_t work, int threads, const Use& use) {
    const int64_t runs = (n + kRun - 1) / kRun;
    parallel_for(rows * runs, work, threads, [&](int64_t task) {
        const int64_t i = task % runs * kRun;
        use(task / runs, i, n - i < kRun ? n - i : kRun);
    });
}

// Calls use(i, n) for pieces of n elements of a run that begins at element i: whole blocks, in scratch of kRun elements.
template <class Use>
void each_near(int64_t i, int64_t n, int64_t block, const Use& use) {
    const int64_t size = block > kTogether ? block : kTogether;
    for (const int64_t end = i + n; i < end; i += size) use(i, end - i < size ? end - i : size);
}

Coding coding_of(int64_t block, int32_t kind, int32_t stochastic, int32_t rotated, int64_t seed) {
    return {block, kind, stochastic != 0, rotated != 0, uint32_t(seed)};
}

// Whether an output of so many elements bypasses the caches, where a run of it begins.
bool streams(const float* out, int64_t elements) {
    return elements >= kStream && (reinterpret_cast<uintptr_t>(out) & 63) == 0;
}

}  // namespace
}  // namespace commopt

using namespace commopt;

extern "C" {

// error and new_error: null without feedback.
int commopt_int_compress(const float* x, const float* error, float* new_error, uint8_t* payload, const uint8_t* active,
                         int64_t rows, int64_t n, int64_t block, int32_t kind, int32_t stochastic, int32_t rotated,
                         int64_t seed, int32_t threads) {
    const Coding c = coding_of(block, kind, stochastic, rotated, seed);
    const Rows at(n, c);
    const IntegerKernels& k = table();
    const bool apart = new_error != error && new_error != x;
    each_run(rows, n, rows * n, threads, [&](int64_t r, int64_t i, int64_t size) {
        uint8_t* row = payload + r * at.nbytes;
        const int64_t place = r * n + i;
        float* rest = error ? new_error + place : nullptr;
        k.encode(x + place, error ? error + place : nullptr, active ? active + r * ((n + 7) / 8) + i / 8 : nullptr, rest,
                 size, c, at.scales_at(row, i, c), at.codes_at(row, i, c), apart && streams(rest, rows * n),
                 x + place + kTogether);
        if (i == 0) at.clear_tail(row);
    });
    return 0;
}

// Of the rows of n elements, only the columns [start, stop).
int commopt_int_compress_momentum(const float* m, const Run* grads, int64_t count, float beta, float alpha,
                                  const float* error, float* new_error, uint8_t* payload, const uint8_t* active,
                                  int64_t rows, int64_t n, int64_t start, int64_t stop, int64_t block, int32_t kind,
                                  int32_t stochastic, int32_t rotated, int64_t seed, int32_t threads) {
    const Coding c = coding_of(block, kind, stochastic, rotated, seed);
    const Rows at(stop - start, c);
    const Momentum momentum = {m, grads, count, beta, alpha};
    const IntegerKernels& k = table();
    each_run(rows, at.n, rows * at.n, threads, [&](int64_t r, int64_t from, int64_t length) {
        uint8_t* row = payload + r * at.nbytes;
        const uint8_t* mask = active ? active + r * ((n + 7) / 8) + start / 8 : nullptr;
        alignas(64) float x[kRun];
        each_near(from, length, block, [&](int64_t i, int64_t size) {
            const int64_t place = r * n + start + i;
            momentum.write(place, place + size, x);
            float* rest = new_error + place;
            k.encode(x, error + place, mask ? mask + i / 8 : nullptr, rest, size, c, at.scales_at(row, i, c),
                     at.codes_at(row, i, c), new_error != error && streams(rest, rows * n),
                     momentum.gradient_at(place + kTogether, error + place + kTogether));
        });
        if (from == 0) at.clear_tail(row);
    });
    return 0;
}

int commopt_int_reduce(const uint8_t* payloads, const float* error, float* new_error, uint8_t* own, const uint8_t* active,
                       int64_t ranks, int64_t n, int64_t block, int32_t kind, int32_t stochastic, int32_t rotated,
                       int64_t seed, int32_t threads) {
    const Coding c = coding_of(block, kind, stochastic, rotated, seed);
    const Rows at(n, c);
    const IntegerKernels& k = table();
    each_run(1, n, n + n * ranks / 4, threads, [&](int64_t, int64_t from, int64_t length) {
        alignas(64) float mean[kRun];
        each_near(from, length, block, [&](int64_t i, int64_t size) {
            k.decode_mean(at.scales_at(payloads, i, c), at.codes_at(payloads, i, c), at.nbytes, ranks, nullptr, mean, size, c,
                          false);
            k.encode(mean, error + i, active ? active + i / 8 : nullptr, new_error + i, size, c, at.scales_at(own, i, c),
                     at.codes_at(own, i, c), new_error != error && streams(new_error + i, n), error + i + kTogether);
        });
        if (from == 0) at.clear_tail(own);
    });
    return 0;
}

int commopt_int_decompress(const uint8_t* payload, float* out, const uint8_t* active, int64_t rows, int64_t n, int64_t block,
                           int32_t kind, int32_t rotated, int32_t threads) {
    const Coding c = coding_of(block, kind, 0, rotated, 0);
    const Rows at(n, c);
    const IntegerKernels& k = table();
    each_run(rows, n, rows * n, threads, [&](int64_t r, int64_t i, int64_t size) {
        const uint8_t* row = payload + r * at.nbytes;
        float* to = out + r * n + i;
        k.decode_mean(at.scales_at(row, i, c), at.codes_at(row, i, c), 0, 1,
                      active ? active + r * ((n + 7) / 8) + i / 8 : nullptr, to, size, c, streams(to, rows * n));
    });
    return 0;
}

// To tensors that lie in rows of n elements, where they are in the columns [start, stop).
int commopt_int_decompress_to(const uint8_t* payload, const Run* outs, int64_t count, const uint8_t* active, int64_t rows,
                              int64_t n, int64_t start, int64_t stop, int64_t block, int32_t kind, int32_t rotated,
                              int32_t threads) {
    const Coding c = coding_of(block, kind, 0, rotated, 0);
    const Rows at(stop - start, c);
    const IntegerKernels& k = table();
    each_run(rows, at.n, rows * at.n, threads, [&](int64_t r, int64_t from, int64_t length) {
        const uint8_t* row = payload + r * at.nbytes;
        const uint8_t* mask = active ? active + r * ((n + 7) / 8) + start / 8 : nullptr;
        alignas(64) float values[kRun];
        each_near(from, length, block, [&](int64_t i, int64_t size) {
            const int64_t place = r * n + start + i;
            k.decode_mean(at.scales_at(row, i, c), at.codes_at(row, i, c), 0, 1, mask ? mask + i / 8 : nullptr, values,
                          size, c, false);
            write_runs(outs, count, place, place + size, values);
        });
    });
    return 0;
}

int commopt_int_decompress_mean(const uint8_t* payloads, float* out, int64_t ranks, int64_t n, int64_t block, int32_t kind,
                                int32_t rotated, int32_t threads) {
    const Coding c = coding_of(block, kind, 0, rotated, 0);
    const Rows at(n, c);
    const IntegerKernels& k = table();
    each_run(1, n, n + n * ranks / 4, threads, [&](int64_t, int64_t i, int64_t size) {
        k.decode_mean(at.scales_at(payloads, i, c), at.codes_at(payloads, i, c), at.nbytes, ranks, nullptr, out + i, size, c,
                      streams(out + i, n));
    });
    return 0;
}
}
