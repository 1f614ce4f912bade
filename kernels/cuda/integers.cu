// Integers of 8, 4 and 2 bits, and floats of 8. commopt/ops/integers.py states the format and the arithmetic.
//
// A block is one tile: its elements stay in the registers of a team. Places in a block are items in the order of
// payload.cuh, so that bits 0 to 4 of a place are the lane, 5 to 7 the item and the others the warp. blockDim.x is a power
// of two. Comparisons of floats are those of their bits: the compiler would flush denormals.
//
// Each kernel is there three times: for blocks of up to 128 elements and of up to 256, of which a warp has one, with as
// many ITEMS as that takes and without a barrier or shared memory, and for larger ones. All do the same arithmetic.

constexpr int kLargestIntegerBlock = kMaxThreads * kItems;
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: added and taken away again, it rounds to an integer
constexpr u32 kRoundBits = 0x4B400000u;
constexpr u32 kInfinity = 0x7F800000u, kNotANumber = 0x7FC00000u, kSmallestNormal = 0x00800000u;

struct Coding {
    i64 kind, stochastic, rotated, seed;
};

// Kinds of codes: 8, 4 and 2, integers of so many bits; floats of 8, by their bits of exponent and of mantissa.
constexpr int kE4M3 = 43, kE5M2 = 52;
constexpr bool is_float(int kind) { return kind > 8; }
constexpr int bits_of(int kind) { return is_float(kind) ? 8 : kind; }
constexpr float largest_of(int kind) {
    return kind == kE4M3 ? 448.0f : kind == kE5M2 ? 57344.0f : kind == 8 ? 127.0f : kind == 4 ? 7.0f : 1.5f;
}

struct Larger {
    __device__ u32 operator()(u32 a, u32 b) const { return a > b ? a : b; }
};

struct Sum {
    template <class T>
    __device__ T operator()(T a, T b) const {
        return a + b;
    }
};

// What op makes of the values of a team, to all of its threads: of warps that are neighbours, of pairs of them and so on;
// then of the halves of a warp. Every thread of the grid's block must come here.
template <bool WARP, class T, class Op>
__device__ inline T over_team(T mine, Op op) {
    if constexpr (!WARP) {
        __shared__ T given[kMaxThreads];
        const u32 own = threadIdx.y * blockDim.x + threadIdx.x;
        for (u32 step = 32; step < blockDim.x; step *= 2) {
            given[own] = mine;
            __syncthreads();
            mine = op(mine, given[own ^ step]);
            __syncthreads();
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) mine = op(mine, __shfl_xor_sync(0xFFFFFFFFu, mine, step));
    return mine;
}

// rotation -------------------------------------------------------------------------------------------------------------

// Whether place i of count has a butterfly of distance h: in its piece, whose size is the highest bit of i ^ count.
__device__ inline bool joined(int i, int count, int h) { return i < count && (i ^ count) >= 2 * h; }

__device__ inline float factor_of(int size_bits) {  // 1 / sqrt(size)
    const int doublings = 31 - __clz(size_bits);
    return __uint_as_float((doublings & 1 ? 0x3F3504F3u : 0x3F800000u) - (u32(doublings / 2) << 23));
}

// The normalised Walsh-Hadamard transform of a whole block of 32 ITEMS elements, by a warp.
template <int ITEMS>
__device__ inline void rotate_whole(float (&x)[ITEMS]) {
#pragma unroll
    for (int h = 1; h < 32; h *= 2) {
        const u32 sign = lane() & h ? 0x80000000u : 0;
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            const float other = __shfl_xor_sync(0xFFFFFFFFu, x[j], h);
            x[j] = add(other, __uint_as_float(__float_as_uint(x[j]) ^ sign));
        }
    }
#pragma unroll
    for (int b = 1; b < ITEMS; b *= 2) {
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            if (j & b) continue;
            const float low = x[j], high = x[j | b];
            x[j] = add(low, high);
            x[j | b] = sub(low, high);
        }
    }
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) x[j] = mul(x[j], factor_of(32 * ITEMS));
}

// That of a block of count elements, or of the pieces of a shorter one. Every thread of the grid's block must come here.
template <bool WARP, int ITEMS>
__device__ inline void rotate(float (&x)[ITEMS], int count, int block) {
    if (WARP && count == 32 * ITEMS) return rotate_whole(x);
    for (int h = 1; h < 32 && h < block; h *= 2) {
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            const float other = __shfl_xor_sync(0xFFFFFFFFu, x[j], h);
            if (joined(item(j), count, h)) x[j] = lane() & h ? sub(other, x[j]) : add(x[j], other);
        }
    }
#pragma unroll
    for (int b = 1; b < ITEMS; b *= 2) {
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            if ((j & b) || !joined(item(j), count, 32 * b)) continue;
            const float low = x[j], high = x[j | b];
            x[j] = add(low, high);
            x[j | b] = sub(low, high);
        }
    }
    if constexpr (!WARP) {
        __shared__ float given[kLargestIntegerBlock];
        float* mine = given + threadIdx.y * blockDim.x * kItems;
        for (int h = kSegment; h < block; h *= 2) {
#pragma unroll
            for (int j = 0; j < ITEMS; ++j) mine[item(j)] = x[j];
            __syncthreads();
#pragma unroll
            for (int j = 0; j < ITEMS; ++j) {
                const float other = mine[item(j) ^ h];
                if (joined(item(j), count, h)) x[j] = item(j) & h ? sub(other, x[j]) : add(x[j], other);
            }
            __syncthreads();
        }
    }
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        if (item(j) < count) x[j] = mul(x[j], factor_of(item(j) ^ count));
    }
}

// encoding -------------------------------------------------------------------------------------------------------------

// reach: how many scales decoding may come to.
__device__ inline float usable(float scale, float reach) {
    const u32 bits = __float_as_uint(scale);
    const u32 most = __float_as_uint(mul(scale, reach));
    return bits < kSmallestNormal ? 0.0f : __uint_as_float(most < kInfinity ? bits : kNotANumber);
}

// y: 0 where there is nothing. members: of the items that count in a mean. spread: over how many elements decoding adds
// codes up. Every thread of the grid's block must come here.
template <int KIND, bool WARP, int ITEMS>
__device__ inline float scale_of(const float (&y)[ITEMS], u32 members, bool stochastic, float spread) {
    const float most = largest_of(KIND);
    if (KIND == 2 && !stochastic) {
        double t[kItems] = {};
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            const double wide = widen(y[j]);
            t[j] = wide * wide;
        }
        const double mine = ((t[0] + t[1]) + (t[2] + t[3])) + ((t[4] + t[5]) + (t[6] + t[7]));
        const double sum = over_team<WARP>(mine, Sum());
        const int all = over_team<WARP>(__popc(members), Sum());
        return all == 0 ? 0.0f : usable(narrow(sqrt(sum / double(all))), mul(most, spread));
    }
    u32 top = 0;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) top = Larger()(top, __float_as_uint(y[j]) & 0x7FFFFFFFu);
    return usable(div(__uint_as_float(over_team<WARP>(top, Larger())), most), mul(most, spread));
}

// The finaliser of MurmurHash3.
__device__ inline u32 mix(u32 h) {
    h = (h ^ h >> 16) * 0x85EBCA6Bu;
    h = (h ^ h >> 13) * 0xC2B2AE35u;
    return h ^ h >> 16;
}

// To nearest, ties to even, or to the floor.
__device__ inline int rounded(float t, bool down) {
    const float nearest = add(t, kRound);
    const int code = int(__float_as_uint(nearest) - kRoundBits);
    return down && __float_as_uint(sub(t, sub(nearest, kRound))) > 0x80000000u ? code - 1 : code;
}

// 1.0f times 2 to the power of exponent, as bits.
constexpr u32 power(int exponent) { return u32(127 + exponent) << 23; }

template <int KIND>
struct Float8 {
    static constexpr int kMantissa = KIND % 10, kBias = KIND == kE4M3 ? 7 : 15, kDropped = 23 - kMantissa;
    static constexpr u32 kTop = power(KIND == kE4M3 ? 8 : 15) | 3u << 21;  // the largest number
    static constexpr u32 kLeastNormal = power(1 - kBias);
    static constexpr int kUnitExponent = 1 - kBias - kMantissa;  // of the numbers below that
    static constexpr u32 kRebias = u32(127 - kBias);

    // The code of t, of which more than the largest is that; h: random, or nothing.
    static __device__ inline int encode(float t, bool stochastic, u32 h) {
        u32 u = __float_as_uint(t) & 0x7FFFFFFFu, code;
        u = u > kTop ? kTop : u;
        if (u >= kLeastNormal) {
            const u32 up = stochastic ? h >> (32 - kDropped) : (1u << (kDropped - 1)) - 1 + (u >> kDropped & 1);
            code = ((u + up) >> kDropped) - (kRebias << kMantissa);
        } else if (stochastic) {
            const float units = mul(__uint_as_float(u), __uint_as_float(power(-kUnitExponent)));
            code = u32(rounded(add(units, mul(float(int(h >> 8)), 1.0f / 16777216.0f)), true));
        } else {
            const u32 magic = power(23 + kUnitExponent);  // of a number whose last digit is the unit
            code = __float_as_uint(add(__uint_as_float(u), __uint_as_float(magic))) - magic;
        }
        return int(code) - int(__float_as_uint(t) >> 31 << 7);
    }

    static __device__ inline float decode(int code) {
        const u32 m = u32(code) & 0x7Fu;
        const float small = mul(float(int(m)), __uint_as_float(power(kUnitExponent)));
        const u32 size = m < 1u << kMantissa ? __float_as_uint(small) : (m << kDropped) + (kRebias << 23);
        return __uint_as_float(size | (u32(code) << 24 & 0x80000000u));
    }
};

// s: positive. i: the place in the block.
template <int KIND>
__device__ inline int code_of(float y, float inverse, u32 key, int i, bool stochastic) {
    float t = mul(y, inverse);
    const u32 h = stochastic ? mix((__float_as_uint(y) ^ key) + 0x9E3779B9u * u32(i)) : 0;
    if constexpr (is_float(KIND)) return Float8<KIND>::encode(t, stochastic, h);
    if (stochastic) {
        if (KIND == 2) t = add(t, 1.5f);
        t = add(t, mul(float(int(h >> 8)), 1.0f / 16777216.0f));
    }
    int code = rounded(t, stochastic || KIND == 2);
    if (KIND == 2 && !stochastic) code += 2;
    const int high = KIND == 2 ? 3 : KIND == 4 ? 7 : 127, low = KIND == 2 ? 0 : -high;
    return code < low ? low : code > high ? high : code;
}

// code * s; for 2 bits (code - 1.5) * s.
template <int KIND>
__device__ inline float value_of(int code, float s) {
    if constexpr (is_float(KIND)) return mul(Float8<KIND>::decode(code), s);
    return mul(KIND == 2 ? mul(float(2 * code - 3), 0.5f) : float(code), s);
}

// Writes the codes of a tile; there: of which items. Every lane of a warp must come here.
template <int BITS, int ITEMS>
__device__ inline void store_codes(const int (&code)[ITEMS], u32 there, u8* to) {
    constexpr int kPer = 8 / BITS;
    to += item(0) / kPer;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        u32 byte = there >> j & 1 ? u32(code[j]) & ((1u << BITS) - 1) : 0;
        if (BITS <= 4) byte |= __shfl_xor_sync(0xFFFFFFFFu, byte, 1) << BITS;
        if (BITS == 2) byte |= __shfl_xor_sync(0xFFFFFFFFu, byte, 2) << 4;
        if (there >> j & 1 && lane() % kPer == 0) to[32 / kPer * j] = u8(byte);
    }
}

struct IntCompression {
    Layout at;
    Coding how;
    const float* error;  // null without feedback
    float* new_error;
    u8* payload;
    const u8* active;            // null: all
    i64 stride, active_stride;  // of the rows of error and new_error, and of active
};

// Compresses z, the items of this thread.
template <int KIND, bool WARP, int ITEMS>
__device__ inline void int_encode(const IntCompression& to, const Tile& tile, float (&z)[ITEMS]) {
    constexpr int BITS = bits_of(KIND);
    const i64 place = tile.row * to.stride + tile.start;
    const int block = int(to.at.block), count = tile.count;
    const bool stochastic = to.how.stochastic != 0;
    if (to.error != nullptr) {
        float e[ITEMS];
        load(to.error + place, count, e);
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) z[j] = add(z[j], e[j]);
    }
    const u32 mask = present<ITEMS>(to.active ? to.active + tile.row * to.active_stride + tile.start / 8 : nullptr, count);
    float y[ITEMS];
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        if (!(mask >> j & 1)) z[j] = 0.0f;
        y[j] = z[j];
    }
    if (to.how.rotated) rotate<WARP>(y, count, block);
    const u32 there = present<ITEMS>(nullptr, count);
    const float s = scale_of<KIND, WARP>(y, to.how.rotated ? there : mask, stochastic, to.how.rotated ? float(block) : 1.0f);
    const bool good = __float_as_uint(s) - 1 < kInfinity - 1;
    const float inverse = good ? div(1.0f, s) : 0.0f;
    const u32 key = mix(__float_as_uint(s) ^ u32(to.how.seed));
    int code[ITEMS];
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        code[j] = good ? code_of<KIND>(y[j], inverse, key, item(j), stochastic) : KIND == 2 ? 2 : 0;
    }
    u8* row = to.payload + tile.row * to.at.nbytes;
    const i64 codes = 4 * i64(to.at.nblocks);
    store_codes<BITS>(code, there, row + codes + tile.start * BITS / 8);
    if (threadIdx.x == 0 && count > 0) reinterpret_cast<float*>(row)[tile.block] = s;
    if (count > 0 && tile.start + count == to.at.n && threadIdx.x < 16) {  // the zeros at the end
        const i64 byte = codes + (to.at.n * BITS + 7) / 8 + threadIdx.x;
        if (byte < to.at.nbytes) row[byte] = 0;
    }
    if (to.error == nullptr) return;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) y[j] = value_of<KIND>(code[j], s);
    if (to.how.rotated) rotate<WARP>(y, count, block);
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) z[j] = mask >> j & 1 ? sub(z[j], y[j]) : 0.0f;
    store(to.new_error + place, count, z);
}

struct IntCompressRows {
    IntCompression to;
    const float* x;
    i64 stride;
};

template <int KIND, bool WARP, int ITEMS>
__device__ inline void int_compress_of(const IntCompressRows& of) {
    const Tile tile(of.to.at);
    float z[ITEMS];
    load(of.x + tile.row * of.stride + tile.start, tile.count, z);
    int_encode<KIND, WARP>(of.to, tile, z);
}

struct IntCompressMomentum {
    IntCompression to;
    Momentum of;
};

static_assert(sizeof(IntCompressMomentum) <= 4096, "arguments may have 4096 bytes");

template <int KIND, bool WARP, int ITEMS>
__device__ inline void int_compress_momentum_of(const IntCompressMomentum& of) {
    const Tile tile(of.to.at);
    float x[ITEMS];
    of.of.load_items(tile, x);
    int_encode<KIND, WARP>(of.to, tile, x);
}

// decoding -------------------------------------------------------------------------------------------------------------

// Of item j the byte that holds its code; codes: of a tile.
template <int BITS>
__device__ inline u32 int_byte(const u8* codes, int j) {
    return codes[item(0) * BITS / 8 + 32 * BITS / 8 * j];
}

// What the code of this lane's items in that byte stands for.
template <int KIND>
__device__ inline float int_decode(u32 byte, float s) {
    constexpr int BITS = bits_of(KIND);
    int code = int(byte >> (lane() * BITS & 7)) & ((1 << BITS) - 1);
    if (KIND == 8 || KIND == 4) code = (code ^ 1 << (BITS - 1)) - (1 << (BITS - 1));
    return value_of<KIND>(code, s);
}

// Adds N of the rows whose mean is taken; all that they need is asked for before any of it is used.
template <int KIND, int N, int ITEMS>
__device__ inline void add_int_ranks(const u8* row, const Layout& at, int ranks, bool first, const Tile& tile,
                                     float (&x)[ITEMS]) {
    constexpr int BITS = bits_of(KIND);
    const i64 place = 4 * i64(at.nblocks) + tile.start * BITS / 8;
    const int there = items_there<ITEMS>(tile.count);
    u32 bytes[N][ITEMS];
#pragma unroll
    for (int r = 0; r < N; ++r) {
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) bytes[r][j] = j < there ? int_byte<BITS>(row + r * at.nbytes + place, j) : 0;
    }
    const float mine = share_of<N>(row, at, ranks, tile);
#pragma unroll
    for (int r = 0; r < N; ++r) {
        const float share = __shfl_sync(0xFFFFFFFFu, mine, r);
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            const float own = int_decode<KIND>(bytes[r][j], share);
            x[j] = first && r == 0 ? own : add(x[j], own);
        }
    }
}

// The mean of rows, in their order; 0 where there is nothing. Every thread of the grid's block must come here.
template <int KIND, bool WARP, int ITEMS>
__device__ inline void int_mean(const u8* payloads, const Layout& at, const Coding& how, int ranks, const Tile& tile,
                                float (&x)[ITEMS]) {
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) x[j] = 0.0f;
    if (tile.count > 0) {
        int rank = 0;
        for (; rank + 4 <= ranks; rank += 4) {
            add_int_ranks<KIND, 4>(payloads + rank * at.nbytes, at, ranks, rank == 0, tile, x);
        }
        for (; rank < ranks; ++rank) {
            add_int_ranks<KIND, 1>(payloads + rank * at.nbytes, at, ranks, rank == 0, tile, x);
        }
    }
    const int there = items_there<ITEMS>(tile.count);
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        if (j >= there) x[j] = 0.0f;
    }
    if (how.rotated) rotate<WARP>(x, tile.count, int(at.block));
}

struct IntReduce {
    IntCompression to;
    const u8* payloads;
    i64 ranks;
};

template <int KIND, bool WARP, int ITEMS>
__device__ inline void int_reduce_of(const IntReduce& of) {
    const Tile tile(of.to.at);
    float x[ITEMS];
    int_mean<KIND, WARP>(of.payloads, of.to.at, of.to.how, int(of.ranks), tile, x);
    int_encode<KIND, WARP>(of.to, tile, x);
}

struct IntDecompression {
    Layout at;
    Coding how;
    const u8* payload;
    float* out;
    const u8* active;  // null: all
};

template <int KIND, bool WARP, int ITEMS>
__device__ inline void int_decompress_of(const IntDecompression& of) {
    constexpr int BITS = bits_of(KIND);
    const Tile tile(of.at);
    const u8* row = of.payload + tile.row * of.at.nbytes;
    const u8* codes = row + 4 * i64(of.at.nblocks) + tile.start * BITS / 8;
    const float s = tile.count > 0 ? get_scale(row, tile.block) : 0.0f;
    float x[ITEMS];
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) x[j] = item(j) < tile.count ? int_decode<KIND>(int_byte<BITS>(codes, j), s) : 0.0f;
    if (of.how.rotated) rotate<WARP>(x, tile.count, int(of.at.block));
    const i64 mask_bytes = (of.at.n + 7) / 8;
    const u32 mask = present<ITEMS>(of.active ? of.active + tile.row * mask_bytes + tile.start / 8 : nullptr, tile.count);
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        if (!(mask >> j & 1)) x[j] = 0.0f;
    }
    store(of.out + tile.row * of.at.n + tile.start, tile.count, x);
}

struct IntMean {
    Layout at;
    Coding how;
    const u8* payloads;
    float* out;
    i64 ranks;
};

template <int KIND, bool WARP, int ITEMS>
__device__ inline void int_decompress_mean_of(const IntMean& of) {
    const Tile tile(of.at);
    float x[ITEMS];
    int_mean<KIND, WARP>(of.payloads, of.at, of.how, int(of.ranks), tile, x);
    store(of.out + tile.start, tile.count, x);
}

// kernels --------------------------------------------------------------------------------------------------------------

__device__ inline const Coding& coding(const IntCompressRows& of) { return of.to.how; }
__device__ inline const Coding& coding(const IntCompressMomentum& of) { return of.to.how; }
__device__ inline const Coding& coding(const IntReduce& of) { return of.to.how; }
__device__ inline const Coding& coding(const IntDecompression& of) { return of.how; }
__device__ inline const Coding& coding(const IntMean& of) { return of.how; }

#define COMMOPT_OF_KIND(NAME, WARP, ITEMS)                             \
    switch (int(coding(of).kind)) {                                    \
        case 8: return NAME##_of<8, WARP, ITEMS>(of);                  \
        case 4: return NAME##_of<4, WARP, ITEMS>(of);                  \
        case 2: return NAME##_of<2, WARP, ITEMS>(of);                  \
        case kE4M3: return NAME##_of<kE4M3, WARP, ITEMS>(of);          \
        default: return NAME##_of<kE5M2, WARP, ITEMS>(of);             \
    }

#define COMMOPT_INTEGER_KERNELS(NAME, ARGUMENT)                                                              \
    extern "C" __global__ void __launch_bounds__(kMaxThreads) NAME(const __grid_constant__ ARGUMENT of) {    \
        COMMOPT_OF_KIND(NAME, false, kItems)                                                                 \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(kSegment) NAME##_256(const __grid_constant__ ARGUMENT of) { \
        COMMOPT_OF_KIND(NAME, true, kItems)                                                                  \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(kSegment) NAME##_128(const __grid_constant__ ARGUMENT of) { \
        COMMOPT_OF_KIND(NAME, true, kItems / 2)                                                              \
    }

COMMOPT_INTEGER_KERNELS(int_compress, IntCompressRows)
COMMOPT_INTEGER_KERNELS(int_compress_momentum, IntCompressMomentum)
COMMOPT_INTEGER_KERNELS(int_reduce, IntReduce)
COMMOPT_INTEGER_KERNELS(int_decompress, IntDecompression)
COMMOPT_INTEGER_KERNELS(int_decompress_mean, IntMean)
