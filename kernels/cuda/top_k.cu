// Top-k of chunks: what is sent, what stays, and what rows on the wire stand for. The format is stated in
// commopt/ops/top_k.py. A warp works on a chunk, of which it has element 32 j + lane in lane `lane`.

// As cuda_top_k.py lays it out: TopKRow of top_k_row.py.
struct TopKLayout {
    i64 n, k, chunk, bits;
    i64 chunks, entries, group, groups, scales;
    i64 values_at, values_nbytes, wide, indices_at, used, nbytes;

    __device__ i64 length(i64 c) const { return (c + 1) * chunk <= n ? chunk : n - c * chunk; }
    __device__ i64 count(i64 c) const { return k < length(c) ? k : length(c); }

    __device__ void put_index(u8* row, i64 entry, i64 index) const {
        u8* to = row + indices_at + entry * wide;
        to[0] = u8(index);
        if (wide == 2) to[1] = u8(index >> 8);
    }
    __device__ i64 get_index(const u8* row, i64 entry) const {
        const u8* from = row + indices_at + entry * wide;
        return wide == 2 ? from[0] | from[1] << 8 : from[0];
    }
    // What entry e, of group g, decodes to.
    __device__ float value(const u8* row, i64 g, i64 e) const {
        const u8* values = row + values_at;
        if (bits == 32) return reinterpret_cast<const float*>(values)[e];
        if (bits == 16) return __uint_as_float(u32(reinterpret_cast<const u16*>(values)[e]) << 16);
        if (bits == 8) return mul(float(int(static_cast<signed char>(values[e]))), get_scale(row, u32(g)));
        const u32 code = bits == 2 ? values[e >> 2] >> (2 * (e & 3)) & 3 : values[e >> 3] >> (e & 7) & 1;
        const float s = get_scale(row, u32(scales * g + (code >> 1)));
        return __uint_as_float(__float_as_uint(s) ^ (code & 1 ? 0 : 0x80000000u));
    }
};

struct TopKCompression {
    TopKLayout at;
    const float* x;
    const float* error;  // null without feedback
    float* new_error;
    u8* wire;
    const u8* live;  // null: all
    float* kept;     // of each entry its value; 0: it carries nothing
    double* means;   // of each group its mean magnitude, before it is rounded
    i64 rows, x_stride, error_stride, new_error_stride, live_stride;
};

__device__ inline u32 magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

__device__ inline float one_nan(float x) { return magnitude_bits(x) > 0x7F800000u ? __uint_as_float(0x7FC00000u) : x; }

template <class T>
__device__ inline T warp_sum(T x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}

__device__ inline u32 warp_max(u32 x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        const u32 other = __shfl_xor_sync(0xFFFFFFFFu, x, step);
        if (other > x) x = other;
    }
    return x;
}

// The elements of a chunk as a warp has them: SMALL, of up to 32 kItems, in registers.
template <bool SMALL>
struct ChunkItems {
    const float* from;
    const u8* live;
    int length;
    float z[kItems];

    __device__ int items() const { return SMALL ? kItems : (length + 31) >> 5; }

    __device__ float given(int i) const {
        return i < length && (live == nullptr || live[i >> 3] >> (i & 7) & 1) ? from[i] : 0.0f;
    }
    __device__ float get(int j) const { return SMALL ? z[j] : given(32 * j + lane()); }

    __device__ int at_least(u32 least) const {
        int count = 0;
#pragma unroll 8
        for (int j = 0; j < items(); ++j) count += magnitude_bits(get(j)) >= least;
        return warp_sum(count);
    }
};

// z of a chunk. Where there is a residual, it is written in its place, and what is not in registers is read from there.
template <bool SMALL>
__device__ inline ChunkItems<SMALL> chunk_items(const TopKCompression& of, i64 row, i64 start, int length) {
    const u8* live = of.live == nullptr ? nullptr : of.live + row * of.live_stride + start / 8;
    ChunkItems<SMALL> out = {of.x + row * of.x_stride + start, live, length, {}};
    const float* error = of.error == nullptr ? nullptr : of.error + row * of.error_stride + start;
    float* rest = of.error == nullptr ? nullptr : of.new_error + row * of.new_error_stride + start;
    if (!SMALL && error == nullptr) return out;
#pragma unroll 8
    for (int j = 0; j < out.items(); ++j) {
        const int i = 32 * j + lane();
        float z = 0.0f;
        if (i < length) {
            const bool alive = live == nullptr || live[i >> 3] >> (i & 7) & 1;
            if (alive) z = error == nullptr ? out.from[i] : add(out.from[i], error[i]);
            if (error != nullptr) rest[i] = z;
        }
        if (SMALL) out.z[j] = z;
    }
    if (error != nullptr) out.from = rest;
    return out;
}

template <bool SMALL>
__device__ inline void select_entries(const TopKCompression& of, i64 row, i64 c) {
    const TopKLayout& at = of.at;
    const ChunkItems<SMALL> chunk = chunk_items<SMALL>(of, row, c * at.chunk, int(at.length(c)));
    u8* to = of.wire + row * at.nbytes;
    float* kept = of.kept + row * at.entries + c * at.k;
    const i64 entry = c * at.k;
    const int k = int(at.k), count = int(at.count(c));
    u32 least = 0;  // the magnitude of the k-th largest; 0 where fewer than k are not 0
    for (u32 bit = 0x40000000u; bit != 0; bit >>= 1) {
        if (chunk.at_least(least | bit) >= k) least |= bit;
    }
    const int ties = least == 0 ? 0 : k - chunk.at_least(least + 1);
    const u32 before = (1u << lane()) - 1;
    int done = 0, seen = 0, last = 0;
#pragma unroll 8
    for (int j = 0; j < chunk.items(); ++j) {
        const float z = chunk.get(j);
        const u32 size = magnitude_bits(z);
        const bool tie = size == least && least != 0;
        const u32 all_ties = __ballot_sync(0xFFFFFFFFu, tie);
        const bool mine = size > least || (tie && seen + __popc(all_ties & before) < ties);
        const u32 all = __ballot_sync(0xFFFFFFFFu, mine);
        if (mine) {
            const int place = done + __popc(all & before);
            at.put_index(to, entry + place, 32 * j + lane());
            kept[place] = z;
        }
        done += __popc(all);
        seen += __popc(all_ties);
        if (all != 0) last = 32 * j + 31 - __clz(int(all));
    }
    for (int place = done + lane(); place < count; place += 32) {
        const i64 nothing = place > 0 ? 0 : count > 1 ? 1 : at.length(c);
        at.put_index(to, entry + place, done > 0 ? last : nothing);
        kept[place] = 0.0f;
    }
}

extern "C" __global__ void topk_select(const __grid_constant__ TopKCompression of) {
    const i64 index = i64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (index >= of.rows * of.at.chunks) return;
    const i64 row = index / of.at.chunks, c = index % of.at.chunks;
    if (of.at.chunk <= 32 * kItems) {
        select_entries<true>(of, row, c);
    } else {
        select_entries<false>(of, row, c);
    }
}

// The scales of a group, by a warp, from the values that are kept.
extern "C" __global__ void topk_scales(const __grid_constant__ TopKCompression of) {
    const TopKLayout& at = of.at;
    const i64 index = i64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (index >= of.rows * at.groups) return;
    const i64 row = index / at.groups, g = index % at.groups, size = at.group * at.k;
    const float* kept = of.kept + row * at.entries;
    const i64 first = g * size, end = first + size < at.entries ? first + size : at.entries;
    float* scales = reinterpret_cast<float*>(of.wire + row * at.nbytes) + at.scales * g;
    if (at.bits == 8) {
        u32 largest = 0;
        for (i64 i = first + lane(); i < end; i += 32) {
            const u32 mine = magnitude_bits(kept[i]);
            if (mine > largest) largest = mine;
        }
        largest = warp_max(largest);
        if (lane() == 0) scales[0] = one_nan(narrow(widen(__uint_as_float(largest)) / 127.0));
        return;
    }
    double sum = 0.0;
    int count = 0;
    for (i64 i = first + lane(); i < end; i += 32) {
        sum += fabs(widen(kept[i]));
        count += !is_zero(kept[i]);
    }
    sum = warp_sum(sum);
    count = warp_sum(count);
    const double mean = sum / double(count > 0 ? count : 1);
    if (lane() == 0 && at.bits == 1) scales[0] = one_nan(narrow(mean));
    if (at.bits == 1) return;
    double low = 0.0, high = 0.0;
    int above = 0;
    for (i64 i = first + lane(); i < end; i += 32) {
        const double v = fabs(widen(kept[i]));
        if (is_zero(kept[i])) continue;
        if (v >= mean) {
            high += v;
            ++above;
        } else {
            low += v;
        }
    }
    low = warp_sum(low);
    high = warp_sum(high);
    above = warp_sum(above);
    if (lane() != 0) return;
    of.means[index] = mean;
    scales[0] = one_nan(narrow(low / double(count > above ? count - above : 1)));
    scales[1] = one_nan(narrow(high / double(above > 0 ? above : 1)));
}

// The values of 8 entries, by a thread, and what is left of their elements.
extern "C" __global__ void topk_encode(const __grid_constant__ TopKCompression of) {
    const TopKLayout& at = of.at;
    const i64 octets = (at.entries + 7) / 8, index = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= of.rows * octets) return;
    const i64 row = index / octets, first = index % octets * 8, left = at.entries - first;
    const int count = int(left < 8 ? left : 8);
    u8* to = of.wire + row * at.nbytes;
    u8* values = to + at.values_at;
    const float* kept = of.kept + row * at.entries;
    if (first == 0) {
        if (at.values_nbytes & 1) to[at.indices_at - 1] = 0;
        for (i64 byte = at.used; byte < at.nbytes; ++byte) to[byte] = 0;
    }
    u32 codes = 0;
    for (int j = 0; j < count; ++j) {
        const i64 e = first + j, g = e / at.k / at.group;
        const float v = kept[e];
        if (at.bits <= 2 && !is_zero(v)) {
            u32 code = __float_as_uint(v) >> 31 ^ 1;
            if (at.bits == 2 && fabs(widen(v)) >= of.means[row * at.groups + g]) code |= 2;
            codes |= code << (j * int(at.bits));
        } else if (at.bits == 8) {
            const float s = get_scale(to, u32(g));
            const u32 size = __float_as_uint(s);
            int steps = size != 0 && size < 0x7F800000u ? round_even(div(v, s)) : 0;
            if (steps > 127) steps = 127;
            if (steps < -127) steps = -127;
            values[e] = u8(steps);
        } else if (at.bits == 16) {
            reinterpret_cast<u16*>(values)[e] = Number<kBfloat16>::put(v);
        } else if (at.bits == 32) {
            reinterpret_cast<float*>(values)[e] = v;
        }
    }
    if (at.bits <= 2) {
        u8* bytes = values + first * at.bits / 8;
        for (int byte = 0; 8 * byte < count * int(at.bits); ++byte) bytes[byte] = u8(codes >> 8 * byte);
    }
    if (of.error == nullptr) return;
    for (int j = 0; j < count; ++j) {
        const i64 e = first + j, c = e / at.k;
        if (is_zero(kept[e])) continue;
        float* rest = of.new_error + row * of.new_error_stride + c * at.chunk + at.get_index(to, e);
        *rest = sub(kept[e], at.value(to, c / at.group, e));
    }
}

// Rows of `ranks` wires each, of which the mean is taken.
struct TopKDecompression {
    TopKLayout at;
    const u8* wire;
    float* out;
    const u8* live;  // null: all
    i64 rows, ranks, out_stride, live_stride;
};

extern "C" __global__ void topk_decompress(const __grid_constant__ TopKDecompression of) {
    const TopKLayout& at = of.at;
    const i64 index = i64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (index >= of.rows * at.chunks) return;
    const i64 row = index / at.chunks, c = index % at.chunks, length = at.length(c), count = at.count(c);
    const i64 entry = c * at.k;
    float* out = of.out + row * of.out_stride + c * at.chunk;
    const u8* live = of.live == nullptr ? nullptr : of.live + row * of.live_stride + c * at.chunk / 8;
    for (i64 i = lane(); i < length; i += 32) out[i] = 0.0f;
    for (i64 rank = 0; rank < of.ranks; ++rank) {
        const u8* from = of.wire + (row * of.ranks + rank) * at.nbytes;
        __syncwarp();  // before it, other lanes have written these elements
        for (i64 j = lane(); j < count; j += 32) {
            const i64 i = at.get_index(from, entry + j);
            bool counts = i < length && (live == nullptr || live[i >> 3] >> (i & 7) & 1);
            if (j > 0) counts = counts && i > at.get_index(from, entry + j - 1);
            if (j == 0 && count > 1) counts = counts && i <= at.get_index(from, entry + 1);
            if (!counts) continue;
            const float v = at.value(from, c / at.group, entry + j);
            out[i] = add(out[i], of.ranks > 1 ? div(v, float(int(of.ranks))) : v);
        }
    }
}
