// Threads: independent tasks, or none of it where the work is small.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

// What GCC makes of OpenMP's pragmas. Every OpenMP library has these (GCC's, LLVM's, Intel's). None is linked: they are
// looked up in the one that torch has loaded, so that a process has one pool of threads, whoever built this library and
// whatever torch calls its own. Null where there is none; the kernels then run on the caller's thread.
extern "C" {
__attribute__((weak)) void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned flags);
__attribute__((weak)) int omp_get_num_threads();
__attribute__((weak)) int omp_get_thread_num();
}

namespace commopt {

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

// Whether there are threads to share the work.
inline bool has_threads() { return GOMP_parallel && omp_get_num_threads && omp_get_thread_num; }

// What the threads of a team are given: each takes one run of the tasks.
template <class Run>
struct Team {
    const Run& run;
    int64_t tasks;

    static void work(void* data) {
        const Team& team = *static_cast<const Team*>(data);
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
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
    GOMP_parallel(Team<Run>::work, &team, unsigned(size), 0);
}

}  // namespace commopt
