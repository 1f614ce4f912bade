// Masks, and operators on lists of tensors.

struct Mask {
    Layout at;
    float* x;
    u8* bits;
};

extern "C" __global__ void pack_nonzero(const __grid_constant__ Mask of) {
    const Tile tile(of.at);
    float x[kItems];
    load(of.x + tile.start, tile.count, x);
    u32 mine = 0;
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
        if (!is_zero(x[j])) mine |= 1u << j;
    }
    store_bits(mine, of.bits + tile.start / 8, tile.count);
}

extern "C" __global__ void zero_inactive(const __grid_constant__ Mask of) {
    const Tile tile(of.at);
    const u32 mask = present(of.bits + tile.start / 8, tile.count);
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
        if (item(j) < tile.count && !(mask >> j & 1)) of.x[tile.start + item(j)] = 0.0f;
    }
}

struct Entry {
    i64 first;  // tile of the launch
    i64 n;
    void* data;
    const float *m, *v;  // of a parameter
    float step, eps;
    int kind;
    int unused;
};

constexpr int kMaxEntries = 70;  // arguments may have 4096 bytes

struct Entries {
    Partial* partials;  // for sums, one a tile
    i64 tile;           // elements
    float decay;        // for parameters
    i64 count;
    Entry entry[kMaxEntries];

    // The entry that this block of threads works on.
    __device__ const Entry& mine() const {
        int low = 0, high = int(count);
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (entry[middle].first <= i64(blockIdx.x)) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return entry[low];
    }
};

static_assert(sizeof(Entries) <= 4096, "arguments may have 4096 bytes");

template <int KIND>
__device__ inline double square_sum_of(const Entry& x, i64 start, i64 end) {
    const typename Number<KIND>::type* data = static_cast<const typename Number<KIND>::type*>(x.data);
    double sum = 0.0;
    for (; start < end; start += kTile) {
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
            const double wide = start + item(j) < end ? widen(Number<KIND>::get(data[start + item(j)])) : 0.0;
            sum = __fma_rn(wide, wide, sum);
        }
    }
    return sum;
}

extern "C" __global__ void square_sum(const __grid_constant__ Entries of) {
    const Entry& x = of.mine();
    const i64 start = (i64(blockIdx.x) - x.first) * of.tile, end = start + of.tile < x.n ? start + of.tile : x.n;
    const double sum = x.kind == kFloat      ? square_sum_of<kFloat>(x, start, end)
                       : x.kind == kBfloat16 ? square_sum_of<kBfloat16>(x, start, end)
                                             : square_sum_of<kHalf>(x, start, end);
    const Partial total = team_sum({sum, 0});
    if (threadIdx.x == 0) of.partials[blockIdx.x] = total;
}

struct Total {
    const Partial* partials;
    double* out;
    i64 count;
};

extern "C" __global__ void __launch_bounds__(kMaxThreads) total(const __grid_constant__ Total of) {
    const Partial sum = sum_of(of.partials, u32(of.count));
    if (threadIdx.x == 0) *of.out = sum.sum;
}

extern "C" __global__ void frozen_adam(const __grid_constant__ Entries of) {
    const Entry& x = of.mine();
    const i64 start = (i64(blockIdx.x) - x.first) * of.tile, left = x.n - start;
    const int count = int(left < of.tile ? left : of.tile);
    float m[kItems], v[kItems];
    load(x.m + start, count, m);
    load(x.v + start, count, v);
    const Run run = {start, start + count, x.data, x.step, x.eps, x.kind, 0};
    u32 mine = present(nullptr, count);
    MoveParameters use = {m, v, of.decay};
    const i64 i = start + item(0);
    if (x.kind == kFloat) {
        use.some<kFloat>(run, i, mine);
    } else if (x.kind == kBfloat16) {
        use.some<kBfloat16>(run, i, mine);
    } else {
        use.some<kHalf>(run, i, mine);
    }
}
