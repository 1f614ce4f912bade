// The momentum of a flat buffer, of which gradients cover some runs.
#pragma once

#include "kernels.hpp"

namespace commopt {

// As the caller lays it out: 64-bit numbers in this order.
struct Gradient {
    int64_t start, n;  // the elements of the buffer that it covers
    int64_t bfloat16;  // 1, or 0 for float32
    const void* data;
};

struct Momentum {
    const float* m;
    const Gradient* grads;  // ascending, without overlap
    int64_t count;
    float beta, alpha;
    const Kernels& k = kernels();

    // out = beta m + alpha g for the elements [start, end); g is 0 where no gradient lies.
    void operator()(int64_t start, int64_t end, float* out) const {
        const Gradient* g = first_after(start);
        for (int64_t i = start; i < end;) {
            const bool left = g != grads + count, covered = left && g->start <= i;
            const int64_t next = covered ? g->start + g->n : left ? g->start : end;
            const int64_t n = (next < end ? next : end) - i;
            if (!covered) {
                k.scale(m + i, out, n, beta);
            } else if (g->bfloat16) {
                k.momentum_bf16(m + i, static_cast<const uint16_t*>(g->data) + (i - g->start), out, n, beta, alpha);
            } else {
                k.momentum(m + i, static_cast<const float*>(g->data) + (i - g->start), out, n, beta, alpha);
            }
            if (covered) ++g;
            i += n;
            out += n;
        }
    }

   private:
    // The first gradient that ends after element i.
    const Gradient* first_after(int64_t i) const {
        int64_t low = 0, high = count;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (grads[middle].start + grads[middle].n > i) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        return grads + low;
    }
};

}  // namespace commopt
