// Bit masks of elements.
#include "kernels.hpp"
#include "parallel.hpp"

using namespace commopt;

extern "C" {

int commopt_pack_nonzero(const float* x, uint8_t* bits, int64_t n, int32_t threads) {
    const Kernels& k = kernels();
    parallel_for((n + kTask - 1) / kTask, n, threads, [&](int64_t c) {
        k.pack_nonzero(x + c * kTask, bits + c * kTask / 8, n - c * kTask < kTask ? n - c * kTask : kTask);
    });
    return 0;
}

int commopt_zero_inactive(float* x, const uint8_t* bits, int64_t n, int32_t threads) {
    const Kernels& k = kernels();
    parallel_for((n + kTask - 1) / kTask, n, threads, [&](int64_t c) {
        k.zero_inactive(x + c * kTask, bits + c * kTask / 8, n - c * kTask < kTask ? n - c * kTask : kTask);
    });
    return 0;
}
}
