// Threads: independent tasks, or none of it where the work is small.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

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

// Calls run(task) for each task in [0, tasks). work: how many elements all of them touch. What a task computes may not
// depend on the thread that runs it, so that results do not depend on the number of threads.
template <class Run>
void parallel_for(int64_t tasks, int64_t work, int threads, const Run& run) {
    int64_t team = threads;
    if (team > tasks) team = tasks;
    if (team > work / kWorkPerThread) team = work / kWorkPerThread;
    if (team <= 1) {
        for (int64_t task = 0; task < tasks; ++task) run(task);
        flush_streams();
        return;
    }
#pragma omp parallel num_threads(int(team))
    {
#pragma omp for schedule(static) nowait
        for (int64_t task = 0; task < tasks; ++task) run(task);
        flush_streams();
    }
}

}  // namespace commopt
