// As much of CUDA as kernels/cuda uses, on one thread of a CPU: each thread of a block is a fiber that runs until it has
// to wait for others. A block whose threads do not all come to where the others wait is reported, not waited for.
//
// A fiber begins with setcontext, and is left and entered again by _longjmp: ucontext's own way calls the system each
// time. It serves one block after another.
#pragma once

#include <setjmp.h>
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
constexpr size_t kStack = (1 << 15) + 448;  // no power of two: all stacks would share a few lines of the cache

struct Barrier {
    unsigned arrived = 0, generation = 0;
};

struct Fiber {
    jmp_buf at;
    Index thread;
    unsigned number;
    bool begun, done;
};

inline Fiber fibers[kMaxThreads];
inline std::vector<char> stacks(kMaxThreads* kStack);
inline jmp_buf scheduler;
inline Fiber* self;
inline Index block, block_dim;
inline Barrier all, warps[kMaxThreads / 32];
inline uint64_t slots[2][kMaxThreads];
inline unsigned events;  // barriers passed and fibers done
inline std::function<void()> kernel;

[[gnu::noinline, noreturn]] inline void go_on(jmp_buf at) { _longjmp(at, 1); }

// Out of the fiber. Not inlined, nor is resume: what a caller has in registers is as it was when they return.
[[gnu::noinline]] inline void leave() {
    if (_setjmp(self->at) == 0) go_on(scheduler);
}

inline void wait(Barrier& barrier, unsigned members) {
    const unsigned before = barrier.generation;
    if (++barrier.arrived == members) {
        barrier.arrived = 0;
        ++barrier.generation;
        ++events;
    }
    while (barrier.generation == before) leave();
}

inline void run_fiber() {
    while (true) {
        kernel();
        self->done = true;
        ++events;
        leave();
    }
}

// Runs a fiber up to where it waits, or has done.
[[gnu::noinline]] inline void resume(Fiber& fiber) {
    if (_setjmp(scheduler) != 0) return;
    self = &fiber;
    if (fiber.begun) go_on(fiber.at);
    fiber.begun = true;
    static ucontext_t context;
    getcontext(&context);
    context.uc_stack = {&stacks[(&fiber - fibers) * kStack], 0, kStack};
    makecontext(&context, run_fiber, 0);
    setcontext(&context);
}

// Runs the threads of a warp, from the first-th on, until all of them wait for other warps or have done; returns how many
// have not. What one warp needs of its stacks fits into the cache nearest to the CPU, what all need does not.
inline unsigned run_warp(unsigned first, bool backwards) {
    unsigned left, before;
    do {
        before = events;
        left = 0;
        for (unsigned i = 0; i < 32; ++i) {
            Fiber& fiber = fibers[first + (backwards ? 31 - i : i)];
            if (!fiber.done) resume(fiber);
            left += !fiber.done;
        }
    } while (left > 0 && events != before);
    return left;
}

// Runs one block of threads; false if it gets stuck. backwards: the last thread first.
inline bool run_block(bool backwards) {
    const unsigned threads = block_dim.x * block_dim.y;
    all = {};
    for (Barrier& warp : warps) warp = {};
    for (unsigned i = 0; i < threads; ++i) {
        fibers[i].thread = {i % block_dim.x, i / block_dim.x, 0};
        fibers[i].number = i;
        fibers[i].done = false;
    }
    for (unsigned left = threads; left > 0;) {
        const unsigned before = events;
        left = 0;
        for (unsigned i = 0; i < threads; i += 32) left += run_warp(backwards ? threads - 32 - i : i, backwards);
        if (events == before) {
            for (Fiber& fiber : fibers) fiber.begun = false;  // what is stuck is given up
            return false;
        }
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

template <class T>
T __shfl_sync(unsigned, T value, int from) {
    const uint64_t* given = grid::gather(&value, sizeof(T));
    std::memcpy(&value, &given[from & 31], sizeof(T));
    return value;
}

inline unsigned __ballot_sync(unsigned, bool vote) {
    const uint64_t mine = vote;
    const uint64_t* given = grid::gather(&mine, sizeof(mine));
    unsigned out = 0;
    for (int lane = 0; lane < 32; ++lane) out |= unsigned(given[lane]) << lane;
    return out;
}

inline int atomicAdd(int* to, int x) {  // fibers leave nothing half done
    const int before = *to;
    *to += x;
    return before;
}

inline void __syncwarp() { __ballot_sync(0xFFFFFFFFu, false); }

inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
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
