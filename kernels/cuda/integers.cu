// Integers of 8, 4 and 2 bits. commopt/ops/integers.py states the format and the arithmetic.
//
// A block is one tile: its elements stay in the registers of a team. Places in a block are items in the order of
// wire.cuh, so that bits 0 to 4 of a place are the lane, 5 to 7 the item and the others the warp. blockDim.x is a power
// of two. Comparisons of floats are those of their bits: the compiler would flush denormals.
//
// Each kernel is there three times: for blocks of up to 128 elements and of up to 256, of which a warp has one, with as
// many ITEMS as that takes and without a barrier or shared memory, and for larger ones. All do the same arithmetic.

constexpr int kLargestIntegerBlock = kMaxThreads * kItems;
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: added and taken away again, it rounds to an integer
constexpr u32 kRoundBits = 0x4B400000u;
constexpr u32 kInfinity = 0x7F800000u, kNotANumber = 0x7FC00000u, kSmallestNormal = 0x00800000u;

struct Coding {
    i64 bits, stochastic, rotated, seed;
};

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

// The normalised Walsh-Hadamard transform of a block of count elements, or of the pieces of a shorter one. Every thread
// of the grid's block must come here.
template <bool WARP, int ITEMS>
__device__ inline void rotate(float (&x)[ITEMS], int count, int block) {
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

__device__ inline float usable(float scale) {
    const u32 bits = __float_as_uint(scale);
    return bits < kSmallestNormal ? 0.0f : __uint_as_float(bits < kInfinity ? bits : kNotANumber);
}

// members: of the items that count in a mean. Every thread of the grid's block must come here.
template <bool WARP, int ITEMS>
__device__ inline float scale_of(const float (&y)[ITEMS], int count, u32 members, const Coding& how) {
    if (how.bits == 2 && !how.stochastic) {
        double t[kItems] = {};
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            const double wide = item(j) < count ? widen(y[j]) : 0.0;
            t[j] = wide * wide;
        }
        const double mine = ((t[0] + t[1]) + (t[2] + t[3])) + ((t[4] + t[5]) + (t[6] + t[7]));
        const double sum = over_team<WARP>(mine, Sum());
        const int all = over_team<WARP>(__popc(members), Sum());
        return all == 0 ? 0.0f : usable(narrow(sqrt(sum / double(all))));
    }
    u32 top = 0;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        if (item(j) < count) top = Larger()(top, __float_as_uint(y[j]) & 0x7FFFFFFFu);
    }
    const float most = how.bits == 8 ? 127.0f : how.bits == 4 ? 7.0f : 1.5f;
    return usable(div(__uint_as_float(over_team<WARP>(top, Larger())), most));
}

// The finaliser of MurmurHash3.
__device__ inline u32 mix(u32 h) {
    h = (h ^ h >> 16) * 0x85EBCA6Bu;
    h = (h ^ h >> 13) * 0xC2B2AE35u;
    return h ^ h >> 16;
}

// s: positive. i: the place in the block.
__device__ inline int code_of(float y, float inverse, u32 key, int i, const Coding& how) {
    float t = mul(y, inverse);
    if (how.stochastic) {
        const u32 h = mix((__float_as_uint(y) ^ key) + 0x9E3779B9u * u32(i));
        if (how.bits == 2) t = add(t, 1.5f);
        t = add(t, mul(float(int(h >> 8)), 1.0f / 16777216.0f));
    }
    const float rounded = add(t, kRound);
    int code = int(__float_as_uint(rounded) - kRoundBits);
    if (how.stochastic || how.bits == 2) {  // to the floor
        if (__float_as_uint(sub(t, sub(rounded, kRound))) > 0x80000000u) --code;
    }
    if (how.bits == 2 && !how.stochastic) code += 2;
    const int high = how.bits == 2 ? 3 : how.bits == 4 ? 7 : 127, low = how.bits == 2 ? 0 : -high;
    return code < low ? low : code > high ? high : code;
}

// code * s; for 2 bits (code - 1.5) * s.
__device__ inline float value_of(int code, float s, i64 bits) {
    return mul(bits == 2 ? mul(float(2 * code - 3), 0.5f) : float(code), s);
}

// Writes the codes of a tile. Every lane of a warp must come here.
template <int ITEMS>
__device__ inline void store_codes(const int (&code)[ITEMS], int count, int bits, u8* to) {
    const int per = 8 / bits;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        u32 byte = item(j) < count ? u32(code[j]) & ((1u << bits) - 1) : 0;
        if (bits <= 4) byte |= __shfl_xor_sync(0xFFFFFFFFu, byte, 1) << bits;
        if (bits == 2) byte |= __shfl_xor_sync(0xFFFFFFFFu, byte, 2) << 4;
        if (item(j) < count && lane() % per == 0) to[item(j) / per] = u8(byte);
    }
}

struct IntCompression {
    Layout at;
    Coding how;
    const float* error;  // null without feedback
    float* new_error;
    u8* wire;
    const u8* live;  // null: all
};

// Compresses z, the items of this thread.
template <bool WARP, int ITEMS>
__device__ inline void int_encode(const IntCompression& to, const Tile& tile, float (&z)[ITEMS]) {
    const i64 place = tile.row * to.at.n + tile.start;
    const int bits = int(to.how.bits), block = int(to.at.block), count = tile.count;
    if (to.error != nullptr) {
        float e[ITEMS];
        load(to.error + place, count, e);
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) z[j] = add(z[j], e[j]);
    }
    const i64 mask_bytes = (to.at.n + 7) / 8;
    const u32 alive = present<ITEMS>(to.live ? to.live + tile.row * mask_bytes + tile.start / 8 : nullptr, count);
    float y[ITEMS];
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        if (!(alive >> j & 1)) z[j] = 0.0f;
        y[j] = z[j];
    }
    if (to.how.rotated) rotate<WARP>(y, count, block);
    const float s = scale_of<WARP>(y, count, to.how.rotated ? present<ITEMS>(nullptr, count) : alive, to.how);
    const bool good = __float_as_uint(s) - 1 < kInfinity - 1;
    const float inverse = good ? div(1.0f, s) : 0.0f;
    const u32 key = mix(__float_as_uint(s) ^ u32(to.how.seed));
    int code[ITEMS];
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        code[j] = good ? code_of(y[j], inverse, key, item(j), to.how) : bits == 2 ? 2 : 0;
    }
    u8* row = to.wire + tile.row * to.at.nbytes;
    const i64 codes = 4 * i64(to.at.nblocks);
    store_codes(code, count, bits, row + codes + tile.start * bits / 8);
    if (threadIdx.x == 0 && count > 0) reinterpret_cast<float*>(row)[tile.block] = s;
    if (count > 0 && tile.start + count == to.at.n && threadIdx.x < 16) {  // the zeros at the end
        const i64 byte = codes + (to.at.n * bits + 7) / 8 + threadIdx.x;
        if (byte < to.at.nbytes) row[byte] = 0;
    }
    if (to.error == nullptr) return;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) y[j] = value_of(code[j], s, bits);
    if (to.how.rotated) rotate<WARP>(y, count, block);
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) z[j] = alive >> j & 1 ? sub(z[j], y[j]) : 0.0f;
    store(to.new_error + place, count, z);
}

struct IntCompressRows {
    IntCompression to;
    const float* x;
};

template <bool WARP, int ITEMS>
__device__ inline void int_compress_of(const IntCompressRows& of) {
    const Tile tile(of.to.at);
    float z[ITEMS];
    load(of.x + tile.row * of.to.at.n + tile.start, tile.count, z);
    int_encode<WARP>(of.to, tile, z);
}

// decoding -------------------------------------------------------------------------------------------------------------

// Of item j the byte that holds its code; codes: of a tile.
__device__ inline u32 int_byte(const u8* codes, int j, i64 bits) { return codes[item(j) * int(bits) >> 3]; }

// What the code of item j in that byte stands for.
__device__ inline float int_decode(u32 byte, int j, float s, i64 bits) {
    int code = int(byte >> (item(j) * int(bits) & 7)) & ((1 << bits) - 1);
    if (bits > 2) code = (code ^ 1 << (bits - 1)) - (1 << (bits - 1));
    return value_of(code, s, bits);
}

// Adds N of the rows whose mean is taken; all that they need is asked for before any of it is used.
template <int N, int ITEMS>
__device__ inline void add_int_ranks(const u8* row, const Layout& at, i64 bits, int ranks, bool first,
                                     const Tile& tile, float (&x)[ITEMS]) {
    const i64 place = 4 * i64(at.nblocks) + tile.start * bits / 8;
    u32 bytes[N][ITEMS];
    float scales[N];
#pragma unroll
    for (int r = 0; r < N; ++r) {
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            bytes[r][j] = item(j) < tile.count ? int_byte(row + r * at.nbytes + place, j, bits) : 0;
        }
        scales[r] = get_scale(row + r * at.nbytes, tile.block);
    }
#pragma unroll
    for (int r = 0; r < N; ++r) {
        const float share = div(scales[r], float(ranks));
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            if (item(j) >= tile.count) continue;
            const float own = int_decode(bytes[r][j], j, share, bits);
            x[j] = first && r == 0 ? own : add(x[j], own);
        }
    }
}

// The mean of rows, in their order. Every thread of the grid's block must come here.
template <bool WARP, int ITEMS>
__device__ inline void int_mean(const u8* wires, const Layout& at, const Coding& how, int ranks, const Tile& tile,
                                float (&x)[ITEMS]) {
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) x[j] = 0.0f;
    if (tile.count > 0) {
        int rank = 0;
        for (; rank + 4 <= ranks; rank += 4) {
            add_int_ranks<4>(wires + rank * at.nbytes, at, how.bits, ranks, rank == 0, tile, x);
        }
        for (; rank < ranks; ++rank) {
            add_int_ranks<1>(wires + rank * at.nbytes, at, how.bits, ranks, rank == 0, tile, x);
        }
    }
    if (how.rotated) rotate<WARP>(x, tile.count, int(at.block));
}

struct IntReduce {
    IntCompression to;
    const u8* wires;
    i64 ranks;
};

template <bool WARP, int ITEMS>
__device__ inline void int_reduce_of(const IntReduce& of) {
    const Tile tile(of.to.at);
    float x[ITEMS];
    int_mean<WARP>(of.wires, of.to.at, of.to.how, int(of.ranks), tile, x);
    int_encode<WARP>(of.to, tile, x);
}

struct IntDecompression {
    Layout at;
    Coding how;
    const u8* wire;
    float* out;
    const u8* live;  // null: all
};

template <bool WARP, int ITEMS>
__device__ inline void int_decompress_of(const IntDecompression& of) {
    const Tile tile(of.at);
    const u8* row = of.wire + tile.row * of.at.nbytes;
    const u8* codes = row + 4 * i64(of.at.nblocks) + tile.start * of.how.bits / 8;
    const float s = tile.count > 0 ? get_scale(row, tile.block) : 0.0f;
    float x[ITEMS];
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) x[j] = item(j) < tile.count ? int_decode(int_byte(codes, j, of.how.bits), j, s, of.how.bits) : 0.0f;
    if (of.how.rotated) rotate<WARP>(x, tile.count, int(of.at.block));
    const i64 mask_bytes = (of.at.n + 7) / 8;
    const u32 alive = present<ITEMS>(of.live ? of.live + tile.row * mask_bytes + tile.start / 8 : nullptr, tile.count);
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        if (!(alive >> j & 1)) x[j] = 0.0f;
    }
    store(of.out + tile.row * of.at.n + tile.start, tile.count, x);
}

struct IntMean {
    Layout at;
    Coding how;
    const u8* wires;
    float* out;
    i64 ranks;
};

template <bool WARP, int ITEMS>
__device__ inline void int_decompress_mean_of(const IntMean& of) {
    const Tile tile(of.at);
    float x[ITEMS];
    int_mean<WARP>(of.wires, of.at, of.how, int(of.ranks), tile, x);
    store(of.out + tile.start, tile.count, x);
}

// kernels --------------------------------------------------------------------------------------------------------------

#define COMMOPT_INTEGER_KERNELS(NAME, ARGUMENT)                                                           \
    extern "C" __global__ void __launch_bounds__(kMaxThreads) NAME(const __grid_constant__ ARGUMENT of) { \
        NAME##_of<false, kItems>(of);                                                                     \
    }                                                                                                     \
    extern "C" __global__ void __launch_bounds__(kSegment) NAME##_256(const __grid_constant__ ARGUMENT of) { \
        NAME##_of<true, kItems>(of);                                                                      \
    }                                                                                                     \
    extern "C" __global__ void __launch_bounds__(kSegment) NAME##_128(const __grid_constant__ ARGUMENT of) { \
        NAME##_of<true, kItems / 2>(of);                                                                  \
    }

COMMOPT_INTEGER_KERNELS(int_compress, IntCompressRows)
COMMOPT_INTEGER_KERNELS(int_reduce, IntReduce)
COMMOPT_INTEGER_KERNELS(int_decompress, IntDecompression)
COMMOPT_INTEGER_KERNELS(int_decompress_mean, IntMean)
