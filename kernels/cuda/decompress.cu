// What rows of a payload stand for, and what is done with it at once.

struct Decompression {
    Layout at;
    const u8* payload;
    float* out;
    const u8* active;  // null: all
    i64 out_stride, active_stride;

    __device__ void write(const Tile& tile, float (&x)[kItems]) const {
        const u8* row = payload + tile.row * at.nbytes;
        const u8* bits = row + at.signs() + tile.start / 8;
        const u32 mask = present(active == nullptr ? nullptr : active + tile.row * active_stride + tile.start / 8, tile.count);
        const float s = tile.count > 0 ? get_scale(row, tile.block) : 0.0f;
#pragma unroll
        for (int j = 0; j < kItems; ++j) x[j] = mask >> j & 1 ? signed_by(bits[item(j) >> 3], s) : 0.0f;
        store(out + tile.row * out_stride + tile.start, tile.count, x);
    }
};

extern "C" __global__ void __launch_bounds__(kMaxThreads) sign_decompress(const __grid_constant__ Decompression of) {
    const Tile tile(of.at);
    float x[kItems];
    of.write(tile, x);
}

struct DecompressMean {
    Layout at;
    const u8* payloads;
    float* out;
    i64 ranks;
};

extern "C" __global__ void __launch_bounds__(kMaxThreads)
    sign_decompress_mean(const __grid_constant__ DecompressMean of) {
    const Tile tile(of.at);
    float x[kItems];
    mean_of(of.payloads, of.at, int(of.ranks), tile, x);
    store(of.out + tile.start, tile.count, x);
}

__device__ inline float moved(float p, float m, float v, float step, float eps, float decay) {
    const float update = div(mul(m, step), add(root(v), eps));
    return sub(mul(p, decay), is_zero(v) ? 0.0f : update);
}

struct MoveParameters {
    const float (&m)[kItems];
    const float (&v)[kItems];
    float decay;

    template <int KIND>
    __device__ void some(const Run& run, i64 i, u32 mine) {
        typename Number<KIND>::type* p = static_cast<typename Number<KIND>::type*>(run.data) + i;
        float values[kItems];
#pragma unroll
        for (int j = 0; j < kItems; ++j) values[j] = mine >> j & 1 ? Number<KIND>::get(p[32 * j]) : 0.0f;
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
            if (!(mine >> j & 1)) continue;
            p[32 * j] = Number<KIND>::put(moved(values[j], m[j], v[j], run.step, run.eps, decay));
        }
    }
};

struct DecompressAdam {
    Decompression of;
    const float* v;
    i64 stride;  // of v
    float decay;
    Runs params;
};

static_assert(sizeof(DecompressAdam) <= 4096, "arguments may have 4096 bytes");

extern "C" __global__ void __launch_bounds__(kMaxThreads)
    sign_decompress_adam(const __grid_constant__ DecompressAdam of) {
    const Tile tile(of.of.at);
    float m[kItems], v[kItems];
    load(of.v + tile.row * of.stride + tile.start, tile.count, v);
    of.of.write(tile, m);
    MoveParameters use = {m, v, of.decay};
    each_run(of.params, tile.row * of.of.out_stride + tile.start, tile.count, use);
}
