// Tensors that cover runs of a flat buffer, and the momentum that is made of gradients like that.
#pragma once

#include <cstring>

#include "floats.hpp"
#include "kernels.hpp"

namespace commopt {

// As the caller lays it out: 64-bit numbers in this order. Lists of them are ascending, without overlap.
struct Run {
    int64_t start, n;  // the elements of the buffer that it covers
    int64_t bfloat16;  // 1, or 0 for float32
    void* data;

    int64_t end() const { return start + n; }
};

// The first run that ends after start; runs + count if none does.
inline const Run* run_after(const Run* runs, int64_t count, int64_t start) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (runs[middle].end() > start) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return runs + low;
}

// Calls use(run, i, n) for each piece [i, i + n) of [start, end) that one of the runs covers, and use(nullptr, i, n)
// for those that none does.
template <class Use>
void each_piece(const Run* runs, int64_t count, int64_t start, int64_t end, const Use& use) {
    const Run *run = run_after(runs, count, start), *const last = runs + count;
    for (int64_t i = start; i < end;) {
        const bool covered = run != last && run->start <= i;
        const int64_t next = covered ? run->end() : run != last ? run->start : end;
        const int64_t n = (next < end ? next : end) - i;
        use(covered ? run : nullptr, i, n);
        if (covered) ++run;
        i += n;
    }
}

// Writes values, the elements [start, end), where runs cover them, rounded to theirs.
inline void write_runs(const Run* runs, int64_t count, int64_t start, int64_t end, const float* values) {
    each_piece(runs, count, start, end, [&](const Run* out, int64_t i, int64_t n) {
        if (out == nullptr) return;
        const float* these = values + (i - start);
        if (out->bfloat16) {
            uint16_t* to = static_cast<uint16_t*>(out->data) + (i - out->start);
            for (int64_t j = 0; j < n; ++j) to[j] = to_bfloat16(these[j]);
        } else {
            std::memcpy(static_cast<float*>(out->data) + (i - out->start), these, size_t(n) * 4);
        }
    });
}

struct Momentum {
    const float* m;
    const Run* grads;
    int64_t count;
    float beta, alpha;
    const Kernels& k = kernels();

    // Where the gradient of an element lies, if it is of float32; else what is given.
    const float* gradient_at(int64_t i, const float* otherwise) const {
        const Run* g = run_after(grads, count, i);
        const bool there = g != grads + count && g->start <= i && !g->bfloat16;
        return there ? static_cast<const float*>(g->data) + (i - g->start) : otherwise;
    }

    // out = beta m + alpha g for the elements [start, end); g is 0 where no gradient lies.
    void write(int64_t start, int64_t end, float* out) const {
        each_piece(grads, count, start, end, [&](const Run* g, int64_t i, int64_t n) {
            float* to = out + (i - start);
            if (g == nullptr) {
                k.scale(m + i, to, n, beta);
            } else if (g->bfloat16) {
                k.momentum_bf16(m + i, static_cast<const uint16_t*>(g->data) + (i - g->start), to, n, beta, alpha);
            } else {
                k.momentum(m + i, static_cast<const float*>(g->data) + (i - g->start), to, n, beta, alpha);
            }
        });
    }
};

}  // namespace commopt
