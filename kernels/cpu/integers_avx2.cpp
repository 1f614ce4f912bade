// Integers with AVX2.
#include <cmath>
#include <cstring>

#include "integers.hpp"

#if defined(__x86_64__)
#if defined(__clang__)  // after what others may share
#pragma clang attribute push(__attribute__((target("avx2,fma,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,popcnt")
#endif

namespace commopt {
constexpr int kLanes = 8;
}

#include "integers.inc"

namespace commopt {
extern const IntegerKernels integers_avx2 = integer_table;
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
