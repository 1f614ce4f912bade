// Numbers: float arithmetic rounded once, to nearest, as IEEE 754 has it, and the 16-bit formats.
//
// Written as instructions because the options of the compiler are not ours: CuPy lets it flush denormals to zero, and it
// may fuse multiplications with additions. The residual has to be what the payload leaves, to the last bit.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

__device__ inline float add(float a, float b) {
    float c;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ inline float sub(float a, float b) {
    float c;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ inline float mul(float a, float b) {
    float c;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ inline float div(float a, float b) {
    float c;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ inline float root(float a) {
    float c;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(c) : "f"(a));
    return c;
}

// a b + c, rounded once.
__device__ inline float multiply_add(float a, float b, float c) {
    float d;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}

__device__ inline double widen(float a) {
    double b;
    asm("cvt.f64.f32 %0, %1;" : "=d"(b) : "f"(a));
    return b;
}

__device__ inline float narrow(double a) {
    float b;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(b) : "d"(a));
    return b;
}

// To the nearest integer, ties to even; what is beyond those of 32 bits to the last of them.
__device__ inline int round_even(float a) {
    int b;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(b) : "f"(a));
    return b;
}

__device__ inline float half_to_float(u16 a) {
    float b;
    asm("cvt.f32.f16 %0, %1;" : "=f"(b) : "h"(a));
    return b;
}

__device__ inline u16 float_to_half(float a) {
    u16 b;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(b) : "f"(a));
    return b;
}
