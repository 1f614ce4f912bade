// Threads: independent tasks, or none of it where the work is small.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace commopt {

// What GCC makes of OpenMP's pragmas. Every OpenMP library has these (GCC's, LLVM's, Intel's). None is linked: native.py
// hands over those that torch calls, so that a process has one pool of threads, whoever built this library and whatever
// torch calls its own. Null where there is none; the kernels then run on the caller's thread.
struct OpenMP {
    void (*parallel)(void (*run)(void*), void* data, unsigned threads, unsigned flags);  // GOMP_parallel
    int (*num_threads)();
    int (*thread_num)();
};
extern OpenMP openmp;

// Elements below which a second thread does not pay. Entering an OpenMP region costs microseconds at best, and
// hundreds where its threads have gone to sleep or the cores are busy.
constexpr int64_t kWorkPerThread = 1 << 16;

// Elements of a task where nothing else says how to cut the work.
constexpr int64_t kTask = 1 << 16;

// Orders stores that bypassed the caches before whatever this thread does next.
inline void flush_streams() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// How this thread rounds, and whether it takes denormals for 0.
#if defined(__x86_64__)
using FloatMode = unsigned;
constexpr FloatMode kFlush = 0x8040;  // results, and operands
inline FloatMode float_mode() { return _mm_getcsr(); }
inline void set_float_mode(FloatMode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
using FloatMode = uint64_t;
constexpr FloatMode kFlush = 1 << 24 | 1;
inline FloatMode float_mode() {
    FloatMode mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
    return mode;
}
inline void set_float_mode(FloatMode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
using FloatMode = unsigned;
constexpr FloatMode kFlush = 0;
inline FloatMode float_mode() { return 0; }
inline void set_float_mode(FloatMode) {}
#endif

// While one is there, this thread is in that mode.
class InFloatMode {
    const FloatMode before = float_mode();

  public:
    explicit InFloatMode(FloatMode mode) { set_float_mode(mode); }
    ~InFloatMode() { set_float_mode(before); }
    InFloatMode(const InFloatMode&) = delete;
    InFloatMode& operator=(const InFloatMode&) = delete;
};

// While one is there, denormals are what they are to functions that are called through a pointer.
struct KeepDenormals : InFloatMode {
    KeepDenormals() : InFloatMode(float_mode() & ~kFlush) {}
};

// Whether there are threads to share the work.
inline bool has_threads() { return openmp.parallel && openmp.num_threads && openmp.thread_num; }

// What the threads of a team are given: each takes one run of the tasks, in the caller's mode, as theirs is their own.
template <class Run>
struct Team {
    const Run& run;
    int64_t tasks;
    FloatMode mode = float_mode();

    static void work(void* data) {
        const Team& team = *static_cast<const Team*>(data);
        const InFloatMode alike(team.mode);
        const int64_t threads = openmp.num_threads(), thread = openmp.thread_num();
        const int64_t stop = team.tasks * (thread + 1) / threads;
        for (int64_t task = team.tasks * thread / threads; task < stop; ++task) team.run(task);
        flush_streams();
    }
};

// Calls run(task) for each task in [0, tasks). work: how many elements all of them touch. What a task computes may not
// depend on the thread that runs it, so that results do not depend on the number of threads.
template <class Run>
void parallel_for(int64_t tasks, int64_t work, int threads, const Run& run) {
    int64_t size = threads;
    if (size > tasks) size = tasks;
    if (size > work / kWorkPerThread) size = work / kWorkPerThread;
    if (size <= 1 || !has_threads()) {
        for (int64_t task = 0; task < tasks; ++task) run(task);
        flush_streams();
        return;
    }
    Team<Run> team{run, tasks};
    openmp.parallel(Team<Run>::work, &team, unsigned(size), 0);
}

}  // namespace commopt
