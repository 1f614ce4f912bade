// Rows of a payload (the format is stated in commopt/ops/sign.py), and who works on what of them.
//
// A tile is a run of elements of a row that lies in one block. A team of threads works on one tile: a warp has
// 32 * kItems elements in a row, of which item j of a lane is the 32 j + lane-th. So all loads and stores of a warp are
// of neighbours, at any alignment of the data, and the ballot over item j is the word j of the signs.
//
// A block of up to kLargest elements is one tile: its elements stay in registers between the sum and the residual.
// Larger ones are cut into tiles of kTile. The sum of a tile is that of each thread in the order of its items, of the
// lanes of a warp in a butterfly, and of the warps in order. Nothing of that depends on the grid or on the device.

constexpr int kItems = 8;
constexpr int kSegment = 32 * kItems;
constexpr int kTile = 2048;
constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / 32;

// Rows of n elements in blocks, and blocks in tiles. Structs are as cuda.py and tiles.py lay them out.
struct Layout {
    i64 n;       // elements of a row
    i64 block;   // elements that share a scale
    i64 nbytes;  // of a row in the payload
    u32 nblocks, tiles_per_block;
    u32 tile;         // elements, at most
    u32 first, last;  // the launch does the tiles [first, last), counted over all rows
    u32 unused;

    __device__ i64 signs() const { return 4 * i64(nblocks); }
};

struct Partial {
    double sum;
    i64 count;
};

__device__ inline int lane() { return threadIdx.x & 31; }

// Where item j of this thread is in its tile.
__device__ inline int item(int j) { return int(threadIdx.x >> 5) * kSegment + 32 * j + lane(); }

struct Tile {
    u32 index;  // over all rows
    i64 row, start;
    u32 block;
    int count;  // of its elements; 0 for a team without work

    __device__ explicit Tile(const Layout& at) {
        index = at.first + blockIdx.x * blockDim.y + threadIdx.y;
        const u32 per_row = at.nblocks * at.tiles_per_block;
        const u32 which = index < per_row ? 0 : index / per_row;  // the same for all threads mostly: few divide
        const u32 in_row = index - which * per_row;
        row = which;
        block = at.tiles_per_block == 1 ? in_row : in_row / at.tiles_per_block;
        start = i64(block) * at.block + i64(in_row - block * at.tiles_per_block) * at.tile;
        i64 end = i64(block + 1) * at.block;
        if (end > at.n) end = at.n;
        const i64 left = index < at.last && start < end ? end - start : 0;
        count = int(left < at.tile ? left : at.tile);
    }
};

__device__ inline bool not_negative(float x) {  // x >= 0: true for both zeros, false for NaN
    const u32 bits = __float_as_uint(x);
    return bits <= 0x7F800000u || bits == 0x80000000u;
}

__device__ inline bool is_zero(float x) { return __float_as_uint(x) << 1 == 0; }

// a or -a, as the bit of this lane's items in a byte of signs says.
__device__ inline float signed_by(u32 byte, float a) {
    return __uint_as_float(__float_as_uint(a) ^ (~(byte << (31 - (threadIdx.x & 7))) & 0x80000000u));
}

// How many items of this thread there are: the first ones. ITEMS: fewer than kItems where a team is one warp, and no tile
// has more elements.
template <int ITEMS>
__device__ inline int items_there(int count) {
    const int left = (count - item(0) + 31) >> 5;
    return left < 0 ? 0 : left < ITEMS ? left : ITEMS;
}

// Whether all elements of this warp are there.
template <int ITEMS>
__device__ inline bool is_whole(int count) {
    return int(threadIdx.x >> 5) * kSegment + 32 * ITEMS <= count;
}

template <int ITEMS>
__device__ inline void load(const float* x, int count, float (&out)[ITEMS]) {
    if (is_whole<ITEMS>(count)) {
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) out[j] = x[item(j)];
        return;
    }
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) out[j] = item(j) < count ? x[item(j)] : 0.0f;
}

template <int ITEMS>
__device__ inline void store(float* x, int count, const float (&from)[ITEMS]) {
    if (is_whole<ITEMS>(count)) {
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) x[item(j)] = from[j];
        return;
    }
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        if (item(j) < count) x[item(j)] = from[j];
    }
}

// Bit j: whether item j is there and active. active (null: all are) is that of the tile.
template <int ITEMS = kItems>
__device__ inline u32 present(const u8* active, int count) {
    const u32 there = (1u << items_there<ITEMS>(count)) - 1;
    if (active == nullptr) return there;
    u32 out = 0;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        if (there >> j & 1 && active[item(j) >> 3] >> (item(j) & 7) & 1) out |= 1u << j;
    }
    return out;
}

// Writes the bits of a tile, of which this thread has those of its items. Every lane of a warp must come here.
__device__ inline void store_bits(u32 mine, u8* bits, int count) {
    u32 word = 0;  // the one that holds byte `lane` of the warp
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
        const u32 ballot = __ballot_sync(0xFFFFFFFFu, mine >> j & 1);
        if (lane() >> 2 == j) word = ballot;
    }
    const int byte = int(threadIdx.x >> 5) * (kSegment / 8) + lane();
    if (8 * byte < count) bits[byte] = u8(word >> 8 * (lane() & 3));
}

__device__ inline float get_scale(const u8* row, u32 block) { return reinterpret_cast<const float*>(row)[block]; }

__device__ inline float scale_of(Partial total, int norm) {
    if (total.count == 0) return 0.0f;
    const double mean = total.sum / double(total.count);
    return narrow(norm == 2 ? sqrt(mean) : mean);
}

// The sum over a team, to its first thread only. Every thread of the grid's block must come here.
__device__ inline Partial team_sum(Partial mine) {
    __shared__ double sums[kMaxWarps];
    __shared__ i64 counts[kMaxWarps];
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        mine.sum += __shfl_xor_sync(0xFFFFFFFFu, mine.sum, step);
        mine.count += __shfl_xor_sync(0xFFFFFFFFu, mine.count, step);
    }
    const u32 warps = blockDim.x >> 5, own = threadIdx.y * warps;
    if (lane() == 0) {
        sums[own + (threadIdx.x >> 5)] = mine.sum;
        counts[own + (threadIdx.x >> 5)] = mine.count;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 warp = 1; warp < warps; ++warp) {
            mine.sum += sums[own + warp];
            mine.count += counts[own + warp];
        }
    }
    return mine;
}

// The sum of many, by one block of threads, to its first one.
__device__ inline Partial sum_of(const Partial* partials, u32 count) {
    Partial mine = {0.0, 0};
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        mine.sum += partials[i].sum;
        mine.count += partials[i].count;
    }
    return team_sum(mine);
}
