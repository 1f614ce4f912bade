// Integers with the build's baseline: any machine.
namespace commopt {
constexpr int kLanes = 4;
}

#include "integers.inc"

namespace commopt {
extern const IntegerKernels integers_plain = integer_table;
}
