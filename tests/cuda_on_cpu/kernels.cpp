// kernels/cuda as a library for the CPU. scalar.cuh is made of instructions, so that its functions are written anew.
#include "grid.hpp"

using std::fabs;
using std::sqrt;

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef long long i64;
typedef unsigned long long u64;

#if defined(__aarch64__)
typedef __fp16 Half;
#else
typedef _Float16 Half;
#endif

inline float add(float a, float b) { return a + b; }
inline float sub(float a, float b) { return a - b; }
inline float mul(float a, float b) { return a * b; }
inline float div(float a, float b) { return a / b; }
inline float root(float a) { return std::sqrt(a); }
inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline double widen(float a) { return a; }
inline float narrow(double a) { return float(a); }

inline int round_even(float a) { return int(std::nearbyint(std::fmin(std::fmax(a, -1e9f), 1e9f))); }

inline float half_to_float(u16 a) {
    Half half;
    std::memcpy(&half, &a, 2);
    return float(half);
}

inline u16 float_to_half(float a) {
    const Half half = Half(a);
    u16 bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}

#include "payload.cuh"
//
#include "runs.cuh"
//
#include "compress.cu"
//
#include "decompress.cu"
//
#include "lists.cu"
//
#include "integers.cu"
#include "top_k.cu"
//
#include "threshold.cu"

namespace {

struct Kernel {
    const char* name;
    size_t size;  // of its argument
    std::function<std::function<void()>(const void*)> bind;
};

template <class Argument>
Kernel describe(const char* name, void (*kernel)(Argument)) {
    return {name, sizeof(Argument), [kernel](const void* argument) {
                return [kernel, argument] { kernel(*static_cast<const Argument*>(argument)); };
            }};
}

#define KERNEL(name) describe(#name, name)
#define INTEGER_KERNELS(name) KERNEL(name), KERNEL(name##_256), KERNEL(name##_128)
const Kernel kernels[] = {
    KERNEL(sign_compress),   KERNEL(sign_compress_momentum), KERNEL(sign_reduce),          KERNEL(sign_scales),
    KERNEL(sign_residuals),  KERNEL(sign_decompress),        KERNEL(sign_decompress_mean), KERNEL(sign_decompress_adam),
    KERNEL(momentum),        KERNEL(pack_nonzero),           KERNEL(zero_inactive),            KERNEL(square_sum),
    KERNEL(total),           KERNEL(frozen_adam),
    INTEGER_KERNELS(int_compress), INTEGER_KERNELS(int_compress_momentum), INTEGER_KERNELS(int_reduce),
    INTEGER_KERNELS(int_decompress), INTEGER_KERNELS(int_decompress_mean),
    KERNEL(topk_select),       KERNEL(topk_select_block), KERNEL(topk_select_large), KERNEL(topk_scales),
    KERNEL(topk_encode),       KERNEL(topk_decompress),   KERNEL(topk_find_unsound),
    KERNEL(threshold_measure),    KERNEL(threshold_begin), KERNEL(threshold_count),  KERNEL(threshold_step),
    KERNEL(threshold_tally),      KERNEL(threshold_places), KERNEL(threshold_encode), KERNEL(threshold_decompress),
};

const Kernel* find(const char* name) {
    for (const Kernel& kernel : kernels) {
        if (std::strcmp(kernel.name, name) == 0) return &kernel;
    }
    return nullptr;
}

}  // namespace

extern "C" {

// Bytes of the argument; 0 if there is no such kernel.
size_t argument_size(const char* name) {
    const Kernel* kernel = find(name);
    return kernel ? kernel->size : 0;
}

// 0, or 1 if threads waited for others that never came.
int launch(const char* name, unsigned blocks, unsigned x, unsigned y, const void* argument, int backwards) {
    grid::kernel = find(name)->bind(argument);
    grid::block_dim = {x, y, 1};
    for (unsigned i = 0; i < blocks; ++i) {
        grid::block = {backwards ? blocks - 1 - i : i, 0, 0};
        if (!grid::run_block(backwards)) return 1;
    }
    return 0;
}
}
