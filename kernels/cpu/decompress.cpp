// What rows of a payload stand for, and what is done with it at once.
#include "runs.hpp"
#include "payload.hpp"

namespace commopt {
namespace {

// Elements that are decoded at a time for the update of parameters. Fewer let stores that bypass the caches go on while
// the update computes.
constexpr int64_t kNear = 1 << 10;

struct Decompression {
    Layout at;
    const uint8_t* payload;
    const uint8_t* active;  // null: all
    const Kernels& k = kernels();

    // Writes the elements [start, end) of row r to out.
    void write(int64_t r, int64_t start, int64_t end, float* out, bool stream) const {
        const uint8_t* row = payload + r * at.nbytes;
        each_block(at, start, end, [&](int64_t b, int64_t i, int64_t n) {
            const uint8_t* mask = active ? active + r * at.mask_pitch() + i / 8 : nullptr;
            k.decode(row + at.signs() + i / 8, mask, get_scale(row, b), out + (i - start), n, stream);
        });
    }
};

}  // namespace
}  // namespace commopt

using namespace commopt;

extern "C" {

int commopt_sign_decompress(const uint8_t* payload, float* out, const uint8_t* active, int64_t rows, int64_t n,
                            int64_t block, int32_t threads) {
    const Decompression source = {Layout(rows, n, block), payload, active};
    const bool stream = rows * n >= kStream;
    each_chunk(rows, n, rows * n, threads, [&](int64_t r, int64_t start, int64_t end) {
        source.write(r, start, end, out + r * n + start, stream);
    });
    return 0;
}

// factors: for each parameter its step size and its eps. Where m bypasses the caches, it is decoded twice: to
// where the update can read it, too. Of the rows of n elements, only the columns [first, last).
int commopt_sign_decompress_adam(const uint8_t* payload, const uint8_t* active, float* m, const float* v, const Run* params,
                                 int64_t count, const float* factors, float decay, int64_t rows, int64_t n,
                                 int64_t first, int64_t last, int64_t block, int32_t threads) {
    const Layout layout(rows, last - first, block, n);
    const Decompression source = {layout, payload, active ? active + first / 8 : nullptr};
    const Kernels& k = kernels();
    const bool stream = rows * n >= kStream;
    const auto update = [&](int64_t start, int64_t end, const float* near) {
        each_piece(params, count, start, end, [&](const Run* p, int64_t i, int64_t size) {
            if (p == nullptr) return;
            const float step = factors[2 * (p - params)], eps = factors[2 * (p - params) + 1];
            if (p->bfloat16) {
                uint16_t* x = static_cast<uint16_t*>(p->data) + (i - p->start);
                k.frozen_adam_bf16(x, near + (i - start), v + i, size, step, eps, decay);
            } else {
                float* x = static_cast<float*>(p->data) + (i - p->start);
                k.frozen_adam(x, near + (i - start), v + i, size, step, eps, decay);
            }
        });
    };
    each_chunk(rows, layout.n, rows * layout.n, threads, [&](int64_t r, int64_t from, int64_t to) {
        alignas(64) float scratch[kNear];
        for (int64_t start = from; start < to; start += kNear) {
            const int64_t end = to - start < kNear ? to : start + kNear, at = r * n + first + start;
            if (stream) source.write(r, start, end, scratch, false);  // first: it need not wait for those stores
            source.write(r, start, end, m + at, stream);
            update(at, at + (end - start), stream ? scratch : m + at);
        }
    });
    return 0;
}

int commopt_sign_decompress_mean(const uint8_t* payload, float* out, int64_t ranks, int64_t n, int64_t block,
                                 int32_t threads) {
    const Mean mean = {Layout(ranks, n, block), payload};
    const bool stream = n >= kStream && ranks <= kMaxRanks;
    const int64_t work = n + n * ranks / 4;  // adding a rank costs less than writing the result
    each_chunk(1, n, work, threads, [&](int64_t, int64_t start, int64_t end) {
        each_block(mean.at, start, end, [&](int64_t, int64_t i, int64_t count) {
            mean.write(i, count, out + i, stream);
        });
    });
    return 0;
}
}
