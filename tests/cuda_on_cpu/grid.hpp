// As much of CUDA as kernels/cuda uses, on one thread of a CPU: each thread of a block is a fiber that runs until it has
// to wait for others. A block whose threads do not all come to where the others wait is reported, not waited for.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(threads)

struct Index {
    unsigned x, y, z;
};

namespace grid {

constexpr int kMaxThreads = 1024;
constexpr size_t kStack = 1 << 15;

struct Barrier {
    unsigned arrived = 0, generation = 0;
};

struct Fiber {
    ucontext_t context;
    Index thread;
    unsigned number;
    bool done;
};

inline Fiber fibers[kMaxThreads];
inline std::vector<char> stacks(kMaxThreads* kStack);
inline ucontext_t scheduler;
inline Fiber* self;
inline Index block, block_dim;
inline Barrier all, warps[kMaxThreads / 32];
inline uint64_t slots[2][kMaxThreads];
inline unsigned events;  // barriers passed and fibers done
inline std::function<void()> kernel;

inline void wait(Barrier& barrier, unsigned members) {
    const unsigned before = barrier.generation;
    if (++barrier.arrived == members) {
        barrier.arrived = 0;
        ++barrier.generation;
        ++events;
    }
    while (barrier.generation == before) swapcontext(&self->context, &scheduler);
}

inline void run_fiber() {
    kernel();
    self->done = true;
    ++events;
}

// Runs one block of threads; false if it gets stuck. backwards: the last thread first.
inline bool run_block(bool backwards) {
    const unsigned threads = block_dim.x * block_dim.y;
    all = {};
    for (Barrier& warp : warps) warp = {};
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        getcontext(&fiber.context);
        fiber.context.uc_stack = {&stacks[i * kStack], 0, kStack};
        fiber.context.uc_link = &scheduler;
        fiber.thread = {i % block_dim.x, i / block_dim.x, 0};
        fiber.number = i;
        fiber.done = false;
        makecontext(&fiber.context, run_fiber, 0);
    }
    for (unsigned left = threads; left > 0;) {
        const unsigned before = events;
        left = 0;
        for (unsigned i = 0; i < threads; ++i) {
            self = &fibers[backwards ? threads - 1 - i : i];
            if (!self->done) swapcontext(&scheduler, &self->context);
            left += !self->done;
        }
        if (events == before) return false;
    }
    return true;
}

// What each lane of the warp has given.
inline const uint64_t* gather(const void* value, size_t size) {
    Barrier& warp = warps[self->number / 32];
    uint64_t(&all_slots)[kMaxThreads] = slots[warp.generation & 1];  // the others may still read those of before
    std::memcpy(&all_slots[self->number], value, size);
    wait(warp, 32);
    return &all_slots[self->number / 32 * 32];
}

}  // namespace grid

#define threadIdx (grid::self->thread)
#define blockIdx (grid::block)
#define blockDim (grid::block_dim)

inline void __syncthreads() { grid::wait(grid::all, blockDim.x * blockDim.y); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int step) {
    const uint64_t* given = grid::gather(&value, sizeof(T));
    std::memcpy(&value, &given[(grid::self->number & 31) ^ unsigned(step)], sizeof(T));
    return value;
}

inline unsigned __ballot_sync(unsigned, bool vote) {
    const uint64_t mine = vote;
    const uint64_t* given = grid::gather(&mine, sizeof(mine));
    unsigned out = 0;
    for (int lane = 0; lane < 32; ++lane) out |= unsigned(given[lane]) << lane;
    return out;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
