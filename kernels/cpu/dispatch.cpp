// Chooses the instruction set, once, when the library is loaded.
#include <cstring>

#include "kernels.hpp"
#include "parallel.hpp"

// Changes with every signature of an exported function; commopt/ops/native.py states the same number.
#define COMMOPT_ABI_VERSION 13

namespace commopt {
namespace {

struct Choice {
    const char* name;
    const Kernels* kernels;
    bool supported;
};

#if COMMOPT_X86
bool has_avx2() {
    __builtin_cpu_init();  // this runs among the constructors, perhaps before the one that does it
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("popcnt");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Best first.
const Choice choices[] = {
#if COMMOPT_X86
    {"avx512", &kernels_avx512, has_avx512()},
    {"avx2", &kernels_avx2, has_avx2()},
#endif
#if COMMOPT_NEON
    {"neon", &kernels_neon, true},
#endif
    {"plain", &kernels_plain, true},
};

// name "" is the best that is supported; null where there is none of that name.
const Choice* find(const char* name) {
    for (const Choice& choice : choices) {
        if (choice.supported && (*name == '\0' || std::strcmp(name, choice.name) == 0)) return &choice;
    }
    return nullptr;
}

const Choice* chosen = find("");

}  // namespace

const Kernels& kernels() { return *chosen->kernels; }

OpenMP openmp = {};

}  // namespace commopt

extern "C" {

int commopt_abi_version() { return COMMOPT_ABI_VERSION; }

// Gives the kernels threads. Not for use while another thread is in a kernel.
void commopt_use_openmp(const commopt::OpenMP* functions) { commopt::openmp = *functions; }

// Whether the kernels have threads: torch has loaded an OpenMP library.
int commopt_threaded() { return commopt::has_threads(); }

const char* commopt_isa() { return commopt::chosen->name; }

// Returns 1, or 0 and changes nothing where this machine has no instruction set of that name. Not for use while another
// thread is in a kernel.
int commopt_use_isa(const char* name) {
    const commopt::Choice* choice = commopt::find(name);
    if (choice == nullptr) return 0;
    commopt::chosen = choice;
    return 1;
}
}
