// Operators on lists of tensors: the list is cut into tasks of at most kTask elements, whatever its tensors' sizes.
#include <cstdlib>

#include "kernels.hpp"
#include "parallel.hpp"
#include "runs.hpp"

namespace commopt {
namespace {

// One tensor, or tensors of one shape that go together, as the caller lays it out: 64-bit numbers in this order.
template <int POINTERS>
struct Entry {
    int64_t n;
    int64_t bfloat16;  // 1: the last of them is bfloat16; 0: all are float32
    void* data[POINTERS];
};

struct Task {
    int64_t entry, start, n;
};

template <int POINTERS>
class TaskList {
   public:
    TaskList(const Entry<POINTERS>* entries, int64_t count) : entries_(entries) {
        for (int64_t e = 0; e < count; ++e) {
            work_ += entries[e].n;
            size_ += (entries[e].n + kTask - 1) / kTask;
        }
        tasks_ = static_cast<Task*>(std::malloc(size_t(size_ + 1) * sizeof(Task)));
        if (tasks_ == nullptr) return;
        Task* next = tasks_;
        for (int64_t e = 0; e < count; ++e) {
            const int64_t n = entries[e].n;
            for (int64_t i = 0; i < n; i += kTask) *next++ = {e, i, n - i < kTask ? n - i : kTask};
        }
    }
    ~TaskList() { std::free(tasks_); }
    TaskList(const TaskList&) = delete;
    TaskList& operator=(const TaskList&) = delete;

    bool failed() const { return tasks_ == nullptr; }
    int64_t size() const { return size_; }
    int64_t entry_of(int64_t task) const { return tasks_[task].entry; }

    // Calls run(entry, task, index of the task).
    template <class Run>
    void each(int threads, const Run& run) const {
        parallel_for(size_, work_, threads, [&](int64_t i) { run(entries_[tasks_[i].entry], tasks_[i], i); });
    }

   private:
    const Entry<POINTERS>* entries_;
    Task* tasks_ = nullptr;
    int64_t size_ = 0, work_ = 0;
};

template <class T>
T* at(void* data, const Task& task) {
    return static_cast<T*>(data) + task.start;
}

// Calls add(entry, sum of the squares of a task) for each task. They have a place each and are added in order: the same
// bits for any number of threads.
template <class Add>
int add_squares(const Entry<1>* entries, int64_t count, int32_t threads, const Add& add) {
    const TaskList<1> tasks(entries, count);
    double* sums = static_cast<double*>(std::malloc(size_t(tasks.size() + 1) * sizeof(double)));
    if (tasks.failed() || sums == nullptr) {
        std::free(sums);
        return 1;
    }
    const Kernels& k = kernels();
    tasks.each(threads, [&](const Entry<1>& x, const Task& task, int64_t i) {
        sums[i] = x.bfloat16 ? k.square_sum_bf16(at<uint16_t>(x.data[0], task), task.n)
                             : k.square_sum(at<float>(x.data[0], task), task.n);
    });
    for (int64_t i = 0; i < tasks.size(); ++i) add(tasks.entry_of(i), sums[i]);
    std::free(sums);
    return 0;
}

}  // namespace
}  // namespace commopt

using namespace commopt;

extern "C" {

int commopt_square_sum(const Entry<1>* entries, int64_t count, double* total, int32_t threads) {
    *total = 0.0;
    return add_squares(entries, count, threads, [=](int64_t, double sum) { *total += sum; });
}

// totals: of each entry, 0 before.
int commopt_square_sums(const Entry<1>* entries, int64_t count, double* totals, int32_t threads) {
    return add_squares(entries, count, threads, [=](int64_t entry, double sum) { totals[entry] += sum; });
}

int commopt_momentum(const float* m, const Run* grads, int64_t count, float beta, float alpha, float* out,
                     int64_t n, int32_t threads) {
    const Momentum momentum = {m, grads, count, beta, alpha};
    parallel_for((n + kTask - 1) / kTask, n, threads, [&](int64_t task) {
        const int64_t start = task * kTask;
        momentum.write(start, n - start < kTask ? n : start + kTask, out + start);
    });
    return 0;
}

// Entries: m, v, p. factors: for each entry its step size and its eps.
int commopt_frozen_adam(const Entry<3>* entries, int64_t count, const float* factors, float decay, int32_t threads) {
    const TaskList<3> tasks(entries, count);
    if (tasks.failed()) return 1;
    const Kernels& k = kernels();
    tasks.each(threads, [&](const Entry<3>& x, const Task& task, int64_t) {
        const float* m = at<float>(x.data[0], task);
        const float* v = at<float>(x.data[1], task);
        const float step = factors[2 * task.entry], eps = factors[2 * task.entry + 1];
        if (x.bfloat16) {
            k.frozen_adam_bf16(at<uint16_t>(x.data[2], task), m, v, task.n, step, eps, decay);
        } else {
            k.frozen_adam(at<float>(x.data[2], task), m, v, task.n, step, eps, decay);
        }
    });
    return 0;
}
}
