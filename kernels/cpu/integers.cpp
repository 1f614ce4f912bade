// Integers of 8, 4 and 2 bits over rows and blocks.
#include "integers.hpp"

#include <cstring>

#include "kernels.hpp"
#include "parallel.hpp"

namespace commopt {
namespace {

constexpr int64_t kRun = 1 << 14;  // elements of a task: whole blocks

const IntegerKernels& table() {
#if COMMOPT_X86
    if (&kernels() == &kernels_avx512) return integers_avx512;
    if (&kernels() == &kernels_avx2) return integers_avx2;
#endif
    return integers_plain;
}

// Rows of n elements on the wire.
struct Rows {
    int64_t n, used, nbytes, codes;

    Rows(int64_t n_, const Coding& coding) : n(n_) {
        codes = 4 * ((n + coding.block - 1) / coding.block);
        used = codes + (n * coding.bits + 7) / 8;
        nbytes = (used + 15) / 16 * 16;
    }
    const uint8_t* scales_at(const uint8_t* row, int64_t i, const Coding& c) const { return row + i / c.block * 4; }
    const uint8_t* codes_at(const uint8_t* row, int64_t i, const Coding& c) const {
        return row + codes + i * c.bits / 8;
    }
    uint8_t* scales_at(uint8_t* row, int64_t i, const Coding& c) const { return row + i / c.block * 4; }
    uint8_t* codes_at(uint8_t* row, int64_t i, const Coding& c) const { return row + codes + i * c.bits / 8; }
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

Coding coding_of(int64_t block, int32_t bits, int32_t stochastic, int32_t rotated, int64_t seed) {
    return {block, bits, stochastic != 0, rotated != 0, uint32_t(seed)};
}

}  // namespace
}  // namespace commopt

using namespace commopt;

extern "C" {

// error and new_error: null without feedback.
int commopt_int_compress(const float* x, const float* error, float* new_error, uint8_t* wire, const uint8_t* live,
                         int64_t rows, int64_t n, int64_t block, int32_t bits, int32_t stochastic, int32_t rotated,
                         int64_t seed, int32_t threads) {
    const Coding c = coding_of(block, bits, stochastic, rotated, seed);
    const Rows at(n, c);
    const IntegerKernels& k = table();
    each_run(rows, n, rows * n, threads, [&](int64_t r, int64_t i, int64_t size) {
        uint8_t* row = wire + r * at.nbytes;
        const int64_t place = r * n + i;
        k.encode(x + place, error ? error + place : nullptr, live ? live + r * ((n + 7) / 8) + i / 8 : nullptr,
                 error ? new_error + place : nullptr, size, c, at.scales_at(row, i, c), at.codes_at(row, i, c));
        if (i == 0) at.clear_tail(row);
    });
    return 0;
}

int commopt_int_reduce(const uint8_t* wires, const float* error, float* new_error, uint8_t* own, const uint8_t* live,
                       int64_t ranks, int64_t n, int64_t block, int32_t bits, int32_t stochastic, int32_t rotated,
                       int64_t seed, int32_t threads) {
    const Coding c = coding_of(block, bits, stochastic, rotated, seed);
    const Rows at(n, c);
    const IntegerKernels& k = table();
    each_run(1, n, n + n * ranks / 4, threads, [&](int64_t, int64_t i, int64_t size) {
        alignas(64) float mean[kRun];
        k.decode_mean(at.scales_at(wires, i, c), at.codes_at(wires, i, c), at.nbytes, ranks, mean, size, c);
        k.encode(mean, error + i, live ? live + i / 8 : nullptr, new_error + i, size, c, at.scales_at(own, i, c),
                 at.codes_at(own, i, c));
        if (i == 0) at.clear_tail(own);
    });
    return 0;
}

int commopt_int_decompress(const uint8_t* wire, float* out, const uint8_t* live, int64_t rows, int64_t n, int64_t block,
                           int32_t bits, int32_t rotated, int32_t threads) {
    const Coding c = coding_of(block, bits, 0, rotated, 0);
    const Rows at(n, c);
    const IntegerKernels& k = table();
    each_run(rows, n, rows * n, threads, [&](int64_t r, int64_t i, int64_t size) {
        const uint8_t* row = wire + r * at.nbytes;
        k.decode(at.scales_at(row, i, c), at.codes_at(row, i, c), live ? live + r * ((n + 7) / 8) + i / 8 : nullptr,
                 out + r * n + i, size, c);
    });
    return 0;
}

int commopt_int_decompress_mean(const uint8_t* wires, float* out, int64_t ranks, int64_t n, int64_t block, int32_t bits,
                                int32_t rotated, int32_t threads) {
    const Coding c = coding_of(block, bits, 0, rotated, 0);
    const Rows at(n, c);
    const IntegerKernels& k = table();
    each_run(1, n, n + n * ranks / 4, threads, [&](int64_t, int64_t i, int64_t size) {
        k.decode_mean(at.scales_at(wires, i, c), at.codes_at(wires, i, c), at.nbytes, ranks, out + i, size, c);
    });
    return 0;
}
}
