// Operators on lists of tensors: the list is cut into tasks of at most kTask elements, whatever its tensors' sizes.
#include <cstdlib>

#include "kernels.hpp"
#include "parallel.hpp"

namespace commopt {
namespace {

constexpr int64_t kTask = 1 << 16;
enum Kind : uint8_t { kFloat32 = 0, kBFloat16 = 1 };

struct Task {
    int64_t tensor, start, n;
};

class TaskList {
   public:
    TaskList(int64_t tensors, const int64_t* sizes) {
        for (int64_t t = 0; t < tensors; ++t) count_ += (sizes[t] + kTask - 1) / kTask;
        tasks_ = static_cast<Task*>(std::malloc(size_t(count_ ? count_ : 1) * sizeof(Task)));
        if (tasks_ == nullptr) return;
        Task* next = tasks_;
        for (int64_t t = 0; t < tensors; ++t) {
            for (int64_t i = 0; i < sizes[t]; i += kTask) {
                *next++ = {t, i, sizes[t] - i < kTask ? sizes[t] - i : kTask};
            }
            work_ += sizes[t];
        }
    }
    ~TaskList() { std::free(tasks_); }
    TaskList(const TaskList&) = delete;
    TaskList& operator=(const TaskList&) = delete;

    bool failed() const { return tasks_ == nullptr; }
    int64_t size() const { return count_; }

    template <class Run>
    void run(int threads, const Run& run) const {
        parallel_for(count_, work_, threads, [&](int64_t i) { run(tasks_[i], i); });
    }

   private:
    Task* tasks_ = nullptr;
    int64_t count_ = 0, work_ = 0;
};

template <class T>
T* at(void* const* pointers, const Task& task) {
    return static_cast<T*>(pointers[task.tensor]) + task.start;
}

}  // namespace
}  // namespace commopt

using namespace commopt;

extern "C" {

// Each task's sum has its own place and the places are added in order: the same bits for any number of threads.
int commopt_square_sum(int64_t tensors, void* const* xs, const int64_t* sizes, const uint8_t* kinds, double* total,
                       int32_t threads) {
    const TaskList tasks(tensors, sizes);
    double* sums = static_cast<double*>(std::malloc(size_t(tasks.size() + 1) * sizeof(double)));
    if (tasks.failed() || sums == nullptr) {
        std::free(sums);
        return 1;
    }
    const Kernels& k = kernels();
    tasks.run(threads, [&](const Task& task, int64_t i) {
        sums[i] = kinds[task.tensor] == kBFloat16 ? k.square_sum_bf16(at<uint16_t>(xs, task), task.n)
                                                  : k.square_sum(at<float>(xs, task), task.n);
    });
    *total = 0.0;
    for (int64_t i = 0; i < tasks.size(); ++i) *total += sums[i];
    std::free(sums);
    return 0;
}

// kinds: of gs.
int commopt_momentum(int64_t tensors, void* const* ms, void* const* gs, const int64_t* sizes, const uint8_t* kinds,
                     float beta, float alpha, int32_t threads) {
    const TaskList tasks(tensors, sizes);
    if (tasks.failed()) return 1;
    const Kernels& k = kernels();
    tasks.run(threads, [&](const Task& task, int64_t) {
        if (kinds[task.tensor] == kBFloat16) {
            k.momentum_bf16(at<float>(ms, task), at<uint16_t>(gs, task), task.n, beta, alpha);
        } else {
            k.momentum(at<float>(ms, task), at<float>(gs, task), task.n, beta, alpha);
        }
    });
    return 0;
}

// kinds: of ps.
int commopt_frozen_adam(int64_t tensors, void* const* ps, void* const* ms, void* const* vs, const int64_t* sizes,
                        const uint8_t* kinds, const float* steps, const float* corrections, float eps, float decay,
                        int32_t threads) {
    const TaskList tasks(tensors, sizes);
    if (tasks.failed()) return 1;
    const Kernels& k = kernels();
    tasks.run(threads, [&](const Task& task, int64_t) {
        const float* m = at<float>(ms, task);
        const float* v = at<float>(vs, task);
        const float step = steps[task.tensor], correction = corrections[task.tensor];
        if (kinds[task.tensor] == kBFloat16) {
            k.frozen_adam_bf16(at<uint16_t>(ps, task), m, v, task.n, step, correction, eps, decay);
        } else {
            k.frozen_adam(at<float>(ps, task), m, v, task.n, step, correction, eps, decay);
        }
    });
    return 0;
}
}
