// The scaled sign: what is sent, and what stays.

struct Compression {
    Layout at;
    const float* error;  // null without feedback
    float* new_error;
    u8* payload;
    const u8* active;     // null: all
    Partial* partials;  // one a tile, where blocks have several; else null
    i64 error_stride, new_error_stride, active_stride;
    i64 norm;

    __device__ u8* row(const Tile& tile) const { return payload + tile.row * at.nbytes; }
    __device__ const u8* active_at(const Tile& tile) const {
        return active == nullptr ? nullptr : active + tile.row * active_stride + tile.start / 8;
    }
    __device__ float* new_error_at(const Tile& tile) const {
        return new_error + tile.row * new_error_stride + tile.start;
    }
};

// What is left of z. s: the scale; mask: bits of the items.
__device__ inline void store_residual(float* to, int count, const float (&z)[kItems], u32 mask, float s) {
    float rest[kItems];
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
        rest[j] = !(mask >> j & 1) ? 0.0f : not_negative(z[j]) ? sub(z[j], s) : add(z[j], s);
    }
    store(to, count, rest);
}

__device__ inline void zero_tail(const Compression& to, const Tile& tile) {
    if (tile.start + tile.count < to.at.n || tile.count == 0 || threadIdx.x >= 16) return;
    const i64 byte = to.at.signs() + (to.at.n + 7) / 8 + threadIdx.x;
    if (byte < to.at.nbytes) to.row(tile)[byte] = 0;
}

// Compresses x, the items of this thread.
__device__ inline void compress(const Compression& to, const Tile& tile, float (&x)[kItems]) {
    __shared__ float scales[kMaxWarps];
    if (to.error != nullptr) {
        float e[kItems];
        load(to.error + tile.row * to.error_stride + tile.start, tile.count, e);
#pragma unroll
        for (int j = 0; j < kItems; ++j) x[j] = add(x[j], e[j]);
    }
    const u32 mask = present(to.active_at(tile), tile.count);
    u32 plus = 0;
    Partial mine = {0.0, __popc(mask)};
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
        if (!(mask >> j & 1)) x[j] = 0.0f;
        if (not_negative(x[j])) plus |= 1u << j;
        const double wide = widen(x[j]);
        mine.sum = to.norm == 2 ? __fma_rn(wide, wide, mine.sum) : mine.sum + fabs(wide);
    }
    store_bits(plus & mask, to.row(tile) + to.at.signs() + tile.start / 8, tile.count);
    zero_tail(to, tile);
    const Partial total = team_sum(mine);
    if (to.partials != nullptr) {
        if (threadIdx.x == 0 && tile.index < to.at.last) to.partials[tile.index] = total;
        if (to.error != nullptr) store(to.new_error_at(tile), tile.count, x);  // residuals() goes on from there
        return;
    }
    if (threadIdx.x == 0 && tile.count > 0) {
        const float s = scale_of(total, int(to.norm));
        scales[threadIdx.y] = s;
        reinterpret_cast<float*>(to.row(tile))[tile.block] = s;
    }
    if (to.error == nullptr) return;
    __syncthreads();
    store_residual(to.new_error_at(tile), tile.count, x, mask, scales[threadIdx.y]);
}

struct CompressRows {
    Compression to;
    const float* x;
    i64 stride;
};

extern "C" __global__ void __launch_bounds__(kMaxThreads) sign_compress(const __grid_constant__ CompressRows of) {
    const Tile tile(of.to.at);
    float x[kItems];
    load(of.x + tile.row * of.stride + tile.start, tile.count, x);
    compress(of.to, tile, x);
}

// alpha g is added to the items that gradients cover, in one rounding.
template <int ITEMS>
struct AddGradients {
    float (&x)[ITEMS];
    float alpha;

    template <int KIND>
    __device__ void some(const Run& run, i64 i, u32 mine) {
        const typename Number<KIND>::type* g = static_cast<const typename Number<KIND>::type*>(run.data);
        float values[ITEMS];
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) values[j] = mine >> j & 1 ? Number<KIND>::get(g[i + 32 * j]) : 0.0f;
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            if (mine >> j & 1) x[j] = multiply_add(alpha, values[j], x[j]);
        }
    }
};

struct Momentum {
    const float* m;
    i64 stride;
    float beta, alpha;
    Runs grads;

    template <int ITEMS>
    __device__ void load_items(const Tile& tile, float (&x)[ITEMS]) const {
        const i64 place = tile.row * stride + tile.start;
        load(m + place, tile.count, x);
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) x[j] = mul(x[j], beta);
        AddGradients<ITEMS> use = {x, alpha};
        each_run(grads, place, tile.count, use);
    }
};

struct CompressMomentum {
    Compression to;
    Momentum of;
};

static_assert(sizeof(CompressMomentum) <= 4096, "arguments may have 4096 bytes");

extern "C" __global__ void __launch_bounds__(kMaxThreads)
    sign_compress_momentum(const __grid_constant__ CompressMomentum of) {
    const Tile tile(of.to.at);
    float x[kItems];
    of.of.load_items(tile, x);
    compress(of.to, tile, x);
}

struct MomentumTo {
    Layout at;
    float* out;
    i64 stride;
    Momentum of;
};

extern "C" __global__ void momentum(const __grid_constant__ MomentumTo of) {
    const Tile tile(of.at);
    float x[kItems];
    of.of.load_items(tile, x);
    store(of.out + tile.row * of.stride + tile.start, tile.count, x);
}

// Lane r, less than N: the scale of row r over the number of ranks.
template <int N>
__device__ inline float share_of(const u8* row, const Layout& at, int ranks, const Tile& tile) {
    return lane() < N ? div(get_scale(row + lane() * at.nbytes, tile.block), float(ranks)) : 0.0f;
}

// Adds N of the rows whose mean is taken; all that they need is asked for before any of it is used. Each lane of a warp
// has one byte of a row's signs, and gets those of its items from other lanes.
template <int N>
__device__ inline void add_ranks(const u8* row, const Layout& at, int ranks, bool first, const Tile& tile,
                                 float (&sums)[kItems]) {
    const int byte = int(threadIdx.x >> 5) * (kSegment / 8) + lane();
    const i64 place = at.signs() + tile.start / 8 + byte;
    u32 bytes[N];
#pragma unroll
    for (int r = 0; r < N; ++r) bytes[r] = 8 * byte < tile.count ? row[r * at.nbytes + place] : 0;
    const float mine = share_of<N>(row, at, ranks, tile);
#pragma unroll
    for (int r = 0; r < N; ++r) {
        const float share = __shfl_sync(0xFFFFFFFFu, mine, r);
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
            const float own = signed_by(__shfl_sync(0xFFFFFFFFu, bytes[r], 4 * j + (lane() >> 3)), share);
            sums[j] = first && r == 0 ? own : add(sums[j], own);
        }
    }
}

// The mean of rows, in their order.
__device__ inline void mean_of(const u8* payloads, const Layout& at, int ranks, const Tile& tile, float (&x)[kItems]) {
#pragma unroll
    for (int j = 0; j < kItems; ++j) x[j] = 0.0f;
    if (tile.count == 0) return;
    int rank = 0;
    for (; rank + 4 <= ranks; rank += 4) add_ranks<4>(payloads + rank * at.nbytes, at, ranks, rank == 0, tile, x);
    if (rank + 2 <= ranks) {
        add_ranks<2>(payloads + rank * at.nbytes, at, ranks, rank == 0, tile, x);
        rank += 2;
    }
    if (rank < ranks) add_ranks<1>(payloads + rank * at.nbytes, at, ranks, rank == 0, tile, x);
}

struct Reduce {
    Compression to;
    const u8* payloads;
    i64 ranks;
};

extern "C" __global__ void __launch_bounds__(kMaxThreads) sign_reduce(const __grid_constant__ Reduce of) {
    const Tile tile(of.to.at);
    float x[kItems];
    mean_of(of.payloads, of.to.at, int(of.ranks), tile, x);
    compress(of.to, tile, x);
}

// Blocks of several tiles: their scales from the sums of the tiles, by one block of threads each ...
extern "C" __global__ void __launch_bounds__(kMaxThreads) sign_scales(const __grid_constant__ Compression to) {
    const u32 first = blockIdx.x * to.at.tiles_per_block;
    const Partial total = sum_of(to.partials + first, to.at.tiles_per_block);
    if (threadIdx.x != 0) return;
    float* scales = reinterpret_cast<float*>(to.payload + i64(blockIdx.x / to.at.nblocks) * to.at.nbytes);
    scales[blockIdx.x % to.at.nblocks] = scale_of(total, int(to.norm));
}

// ... and what is left of z, which lies in the place of the new residual.
extern "C" __global__ void sign_residuals(const __grid_constant__ Compression to) {
    const Tile tile(to.at);
    if (tile.count == 0) return;
    float z[kItems];
    load(to.new_error_at(tile), tile.count, z);
    const u32 mask = present(to.active_at(tile), tile.count);
    store_residual(to.new_error_at(tile), tile.count, z, mask, get_scale(to.row(tile), tile.block));
}
