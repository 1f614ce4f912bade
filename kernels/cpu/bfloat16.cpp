// Rows of bfloat16: the cast, and what it loses.
#include <cstring>

#include "kernels.hpp"
#include "parallel.hpp"
#include "runs.hpp"
#include "payload.hpp"

namespace commopt {
namespace {

constexpr int64_t kPiece = 1 << 12;  // elements that stay in cache
constexpr int64_t kRun = 1 << 15;    // elements of a task: whole pieces

// Where the elements of rows of n lie in the payload.
int64_t pitch_of(int64_t n) { return (n + 7) / 8 * 8; }

// Calls use(row, i, n) for pieces of n elements from element i of a row on.
template <class Use>
void each_row_piece(int64_t rows, int64_t n, int64_t work, int threads, const Use& use) {
    const int64_t runs = (n + kRun - 1) / kRun;
    parallel_for(rows * runs, work, threads, [&](int64_t task) {
        const int64_t from = task % runs * kRun, to = from + kRun < n ? from + kRun : n;
        for (int64_t i = from; i < to; i += kPiece) use(task / runs, i, to - i < kPiece ? to - i : kPiece);
    });
}

void clear_tail(uint16_t* row, int64_t n) { std::memset(row + n, 0, size_t(pitch_of(n) - n) * 2); }

}  // namespace
}  // namespace commopt

using namespace commopt;

extern "C" {

// Of the rows of n elements, only the columns [start, stop), whose rows are in the payload.
int commopt_bf16_compress_momentum(const float* m, const Run* grads, int64_t count, float beta, float alpha,
                                   const float* error, float* new_error, uint16_t* payload, const uint8_t* active,
                                   int64_t rows, int64_t n, int64_t start, int64_t stop, int32_t threads) {
    const int64_t some = stop - start, pitch = pitch_of(some), mask_pitch = (n + 7) / 8;
    const Momentum momentum = {m, grads, count, beta, alpha};
    const Kernels& k = kernels();
    each_row_piece(rows, some, rows * some, threads, [&](int64_t r, int64_t i, int64_t size) {
        alignas(64) float x[kPiece];
        const int64_t place = r * n + start + i;
        momentum.write(place, place + size, x);
        k.add_to(x, error + place, active ? active + r * mask_pitch + (start + i) / 8 : nullptr, size);
        k.cast(x, new_error + place, payload + r * pitch + i, size, new_error != error && rows * n >= kStream);
        if (i == 0) clear_tail(payload + r * pitch, some);
    });
    return 0;
}

int commopt_bf16_reduce(const uint16_t* payloads, const float* error, float* new_error, uint16_t* own, const uint8_t* active,
                        int64_t ranks, int64_t n, int32_t threads) {
    const int64_t pitch = pitch_of(n);
    const float world = float(ranks);
    const Kernels& k = kernels();
    each_row_piece(1, n, n + n * ranks / 2, threads, [&](int64_t, int64_t i, int64_t size) {
        alignas(64) float mean[kPiece] = {};  // 0 + -0 is 0
        for (int64_t rank = 0; rank < ranks; ++rank) k.uncast(payloads + rank * pitch + i, false, mean, size);
        for (int64_t j = 0; j < size; ++j) mean[j] /= world;
        k.add_to(mean, error + i, active ? active + i / 8 : nullptr, size);
        k.cast(mean, new_error + i, own + i, size, new_error != error && n >= kStream);
        if (i == 0) clear_tail(own, n);
    });
    return 0;
}

// To tensors that lie in rows of n elements, where they are in the columns [start, stop).
int commopt_bf16_decompress_to(const uint16_t* payload, const Run* outs, int64_t count, const uint8_t* active, int64_t rows,
                               int64_t n, int64_t start, int64_t stop, int32_t threads) {
    const int64_t some = stop - start, pitch = pitch_of(some), mask_pitch = (n + 7) / 8;
    const Kernels& k = kernels();
    each_row_piece(rows, some, rows * some, threads, [&](int64_t r, int64_t i, int64_t size) {
        alignas(64) float values[kPiece];
        const int64_t place = r * n + start + i;
        k.uncast(payload + r * pitch + i, true, values, size);
        if (active) k.zero_inactive(values, active + r * mask_pitch + (start + i) / 8, size);
        write_runs(outs, count, place, place + size, values);
    });
    return 0;
}
}
