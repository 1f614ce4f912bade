// Top-k of chunks: what is sent, what stays, and what rows of a payload stand for. The format is stated in
// commopt/ops/top_k.py. A team works on a chunk: a warp on a small one, all warps of a block on a larger one, each on a
// run of its elements, of which it has element 32 j + lane in lane `lane`.

// Both not negative. Numbers are small mostly, and a division of 64 bits takes as long as a hundred other instructions.
__device__ inline i64 divided(i64 a, i64 b) {
    return u64(a | b) >> 32 == 0 ? i64(u32(a) / u32(b)) : a / b;
}

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
    u8* payload;
    const u8* active;  // null: all
    float* kept;     // of each entry its value; 0: it carries nothing
    double* means;   // of each group its mean magnitude, before it is rounded
    i64 rows, x_stride, error_stride, new_error_stride, active_stride;
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

__device__ inline int warp_count(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(0xFFFFFFFFu, x);
#else
    return warp_sum(x);
#endif
}

// The sum over a team: a warp or, if not WARP, the block, every thread of which must come here.
template <bool WARP>
__device__ inline int team_count(int mine) {
    mine = warp_count(mine);
    if constexpr (!WARP) {
        __shared__ int of_warps[kMaxWarps];
        __syncthreads();  // before it, others may still read those of the last time
        if (lane() == 0) of_warps[threadIdx.x >> 5] = mine;
        __syncthreads();
        mine = warp_count(lane() < int(blockDim.x >> 5) ? of_warps[lane()] : 0);
    }
    return mine;
}

// The elements of a chunk as a team has them, in registers or, of a very large one, where they lie.
template <bool WARP, bool REGISTERS>
struct ChunkItems {
    const float* from;
    const u8* active;
    int length;
    float z[kItems];

    __device__ int items() const {  // of a thread
        return REGISTERS ? kItems : (length + int(blockDim.x) - 1) / int(blockDim.x);
    }
    __device__ int place(int j) const { return (WARP ? 0 : int(threadIdx.x >> 5) * 32 * items()) + 32 * j + lane(); }

    __device__ float given(int i) const {
        return i < length && (active == nullptr || active[i >> 3] >> (i & 7) & 1) ? from[i] : 0.0f;
    }
    __device__ float get(int j) const { return REGISTERS ? z[j] : given(place(j)); }

    __device__ int at_least(u32 least) const {
        int count = 0;
#pragma unroll 8
        for (int j = 0; j < items(); ++j) count += magnitude_bits(get(j)) >= least;
        return team_count<WARP>(count);
    }
};

// z of a chunk. Where there is a residual, it is written in its place, and what is not in registers is read from there.
template <bool WARP, bool REGISTERS>
__device__ inline ChunkItems<WARP, REGISTERS> chunk_items(const TopKCompression& of, i64 row, i64 start, int length) {
    const u8* active = of.active == nullptr ? nullptr : of.active + row * of.active_stride + start / 8;
    ChunkItems<WARP, REGISTERS> out = {of.x + row * of.x_stride + start, active, length, {}};
    const float* error = of.error == nullptr ? nullptr : of.error + row * of.error_stride + start;
    float* rest = of.error == nullptr ? nullptr : of.new_error + row * of.new_error_stride + start;
    if (!REGISTERS && error == nullptr) return out;
    float loaded[kItems];
#pragma unroll 8
    for (int j = 0; j < out.items(); ++j) {
        const int i = out.place(j);
        float z = 0.0f;
        if (i < length) {
            const bool is_active = active == nullptr || active[i >> 3] >> (i & 7) & 1;
            if (is_active) z = error == nullptr ? out.from[i] : add(out.from[i], error[i]);
            if (!REGISTERS) rest[i] = z;
        }
        if (REGISTERS) loaded[j] = z;
    }
    if (REGISTERS) {  // stores after all loads, which would wait for them: either may lie in the other's place
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
            if (error != nullptr && out.place(j) < length) rest[out.place(j)] = loaded[j];
            out.z[j] = loaded[j];
        }
    } else {
        out.from = rest;  // each thread reads again what it has written itself
    }
    return out;
}

template <bool WARP, bool REGISTERS>
__device__ inline void select_entries(const TopKCompression& of, i64 row, i64 c) {
    const TopKLayout& at = of.at;
    const ChunkItems<WARP, REGISTERS> chunk = chunk_items<WARP, REGISTERS>(of, row, c * at.chunk, int(at.length(c)));
    u8* to = of.payload + row * at.nbytes;
    float* kept = of.kept + row * at.entries + c * at.k;
    const i64 entry = c * at.k;
    const int k = int(at.k), count = int(at.count(c));
    u32 least = 0;  // the magnitude of the k-th largest; 0 where fewer than k are not 0
    for (u32 bit = 0x40000000u; bit != 0; bit >>= 1) {
        const int reach = chunk.at_least(least | bit);
        if (reach >= k) least |= bit;
        if (reach == k) {  // these are they: the k largest are all above the next smaller magnitude
            --least;
            break;
        }
    }
    const int ties = least == 0 ? 0 : k - chunk.at_least(least + 1);
    const u32 before = (1u << lane()) - 1;
    int done = 0, seen = 0, last = 0;
    if constexpr (!WARP) {  // what the warps before this one have
        __shared__ int above[kMaxWarps], equal[kMaxWarps];
        int more = 0, same = 0;
#pragma unroll 8
        for (int j = 0; j < chunk.items(); ++j) {
            const u32 size = magnitude_bits(chunk.get(j));
            more += size > least;
            same += size == least && least != 0;
        }
        more = warp_count(more);
        same = warp_count(same);
        const int warp = int(threadIdx.x >> 5);
        __syncthreads();
        if (lane() == 0) {
            above[warp] = more;
            equal[warp] = same;
        }
        __syncthreads();
        seen = warp_count(lane() < warp ? equal[lane()] : 0);
        done = warp_count(lane() < warp ? above[lane()] : 0) + (seen < ties ? seen : ties);
    }
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
            at.put_index(to, entry + place, chunk.place(j));
            kept[place] = z;
        }
        done += __popc(all);
        seen += __popc(all_ties);
        if (all != 0) last = chunk.place(j) - lane() + 31 - __clz(int(all));
    }
    if constexpr (!WARP) {  // of the last warp all; the others' last ones are smaller
        __shared__ int lasts[kMaxWarps], all_done;
        const int warp = int(threadIdx.x >> 5), warps = int(blockDim.x >> 5);
        if (lane() == 0) {
            lasts[warp] = last;
            if (warp == warps - 1) all_done = done;
        }
        __syncthreads();
        done = all_done;
        last = int(warp_max(lane() < warps ? u32(lasts[lane()]) : 0u));
    }
    for (int place = done + int(WARP ? u32(lane()) : threadIdx.x); place < count; place += WARP ? 32 : int(blockDim.x)) {
        const i64 nothing = place > 0 ? 0 : count > 1 ? 1 : at.length(c);
        at.put_index(to, entry + place, done > 0 ? last : nothing);
        kept[place] = 0.0f;
    }
}

template <bool WARP, bool REGISTERS>
__device__ inline void of_chunk(const TopKCompression& of, i64 index) {
    const i64 row = divided(index, of.at.chunks);
    select_entries<WARP, REGISTERS>(of, row, index - row * of.at.chunks);
}

// Chunks of up to 32 kItems elements, each by a warp ...
extern "C" __global__ void topk_select(const __grid_constant__ TopKCompression of) {
    const i64 index = i64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (index < of.rows * of.at.chunks) of_chunk<true, true>(of, index);
}

// ... of up to kMaxThreads * kItems, by a block ...
extern "C" __global__ void __launch_bounds__(kMaxThreads)
    topk_select_block(const __grid_constant__ TopKCompression of) {
    of_chunk<false, true>(of, blockIdx.x);
}

// ... and of more.
extern "C" __global__ void __launch_bounds__(kMaxThreads)
    topk_select_large(const __grid_constant__ TopKCompression of) {
    of_chunk<false, false>(of, blockIdx.x);
}

// The scales of a group, by a warp, from the values that are kept.
extern "C" __global__ void topk_scales(const __grid_constant__ TopKCompression of) {
    const TopKLayout& at = of.at;
    const i64 index = i64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (index >= of.rows * at.groups) return;
    const i64 row = divided(index, at.groups), g = index - row * at.groups, size = at.group * at.k;
    const float* kept = of.kept + row * at.entries;
    const i64 first = g * size, end = first + size < at.entries ? first + size : at.entries;
    float* scales = reinterpret_cast<float*>(of.payload + row * at.nbytes) + at.scales * g;
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
    const i64 row = divided(index, octets), first = (index - row * octets) * 8, left = at.entries - first;
    const int count = int(left < 8 ? left : 8);
    u8* to = of.payload + row * at.nbytes;
    u8* values = to + at.values_at;
    const float* kept = of.kept + row * at.entries;
    if (first == 0) {
        if (at.values_nbytes & 1) to[at.indices_at - 1] = 0;
        for (i64 byte = at.used; byte < at.nbytes; ++byte) to[byte] = 0;
    }
    u32 codes = 0;
    for (int j = 0; j < count; ++j) {
        const i64 e = first + j, g = divided(divided(e, at.k), at.group);
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
        const i64 e = first + j, c = divided(e, at.k);
        if (is_zero(kept[e])) continue;
        float* rest = of.new_error + row * of.new_error_stride + c * at.chunk + at.get_index(to, e);
        *rest = sub(kept[e], at.value(to, divided(c, at.group), e));
    }
}

// Rows of `ranks` payloads each, of which the mean is taken.
struct TopKDecompression {
    TopKLayout at;
    const u8* payload;
    float* out;
    const u8* active;  // null: all
    i64 rows, ranks, out_stride, active_stride;
};

// Of a chunk, entry j of one rank: where it goes, and what it adds.
struct TopKEntry {
    i64 to;  // -1: nowhere
    float value;

    __device__ TopKEntry(const TopKDecompression& of, const u8* from, const u8* active, i64 c, i64 group, i64 j) {
        const TopKLayout& at = of.at;
        const i64 length = at.length(c), count = at.count(c), entry = c * at.k + j;
        to = -1;
        value = 0.0f;
        if (j >= count) return;
        const i64 i = at.get_index(from, entry), beside = at.get_index(from, j > 0 ? entry - 1 : count > 1 ? entry + 1 : entry);
        bool counts = i < length && (active == nullptr || active[i >> 3] >> (i & 7) & 1);
        if (j > 0) counts = counts && i > beside;
        if (j == 0 && count > 1) counts = counts && i <= beside;
        if (!counts) return;
        to = i;
        value = at.value(from, group, entry);
        if (of.ranks > 1) value = div(value, float(int(of.ranks)));
    }
};

// A warp has a chunk, a lane one entry of one rank, of as many ranks as there are lanes for; or all lanes have one rank's.
extern "C" __global__ void topk_decompress(const __grid_constant__ TopKDecompression of) {
    const TopKLayout& at = of.at;
    const i64 index = i64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (index >= of.rows * at.chunks) return;
    const i64 row = divided(index, at.chunks), c = index - row * at.chunks, group = divided(c, at.group);
    const int length = int(at.length(c)), count = int(at.count(c)), ranks = int(of.ranks);
    float* out = of.out + row * of.out_stride + c * at.chunk;
    const u8* active = of.active == nullptr ? nullptr : of.active + row * of.active_stride + c * at.chunk / 8;
    const u8* from = of.payload + row * of.ranks * at.nbytes;
#pragma unroll 8
    for (int i = lane(); i < length; i += 32) out[i] = 0.0f;
    if (count > 32) {
        for (int rank = 0; rank < ranks; ++rank) {
            __syncwarp();  // before it, other lanes have written these elements
            for (int j = lane(); j < count; j += 32) {
                const TopKEntry entry(of, from + rank * at.nbytes, active, c, group, j);
                if (entry.to >= 0) out[entry.to] = add(out[entry.to], entry.value);
            }
        }
        return;
    }
    const int at_once = 32 / count, mine = lane() / count;
    for (int first = 0; first < ranks; first += at_once) {
        const bool has = mine < at_once && first + mine < ranks;
        const TopKEntry entry(of, from + (first + mine) * at.nbytes, active, c, group, has ? lane() - mine * count : count);
        for (int rank = 0; rank < at_once && first + rank < ranks; ++rank) {
            __syncwarp();
            if (rank == mine && entry.to >= 0) out[entry.to] = add(out[entry.to], entry.value);
        }
    }
}

struct TopKSoundness {
    TopKLayout at;
    const u8* payload;
    u8* sound;  // 1; 0 is written if rows are not such as compression makes of finite numbers
    i64 rows;
};

__device__ inline bool is_scale(float s) { return not_negative(s) && magnitude_bits(s) < 0x7F800000u; }

// A warp looks at a chunk, and at the scales of the group that begins with it.
extern "C" __global__ void topk_find_unsound(const __grid_constant__ TopKSoundness of) {
    const TopKLayout& at = of.at;
    const i64 index = i64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (index >= of.rows * at.chunks) return;
    const i64 which = divided(index, at.chunks), c = index - which * at.chunks, group = divided(c, at.group);
    const i64 length = at.length(c), count = at.count(c), entry = c * at.k;
    const u8* row = of.payload + which * at.nbytes;
    const i64 first = count > 1 ? 1 : at.wide == 2 ? length & 0xFFFF : length & 0xFF;  // where there are no entries
    bool ascends = true, nothing = true, finite = true;
    for (i64 j = lane(); j < count; j += 32) {
        const i64 i = at.get_index(row, entry + j);
        const i64 step = j > 0 ? i - at.get_index(row, entry + j - 1) : 0;
        const i64 before = j > 1 ? at.get_index(row, entry + j - 1) - at.get_index(row, entry + j - 2) : 1;
        ascends = ascends && i < length && step >= 0 && !(step > 0 && before == 0);
        nothing = nothing && i == (j == 0 ? first : 0);
        if (at.bits >= 16) finite = finite && magnitude_bits(at.value(row, group, entry + j)) < 0x7F800000u;
    }
    if (c == group * at.group && lane() < at.scales) {
        finite = finite && is_scale(get_scale(row, u32(at.scales * group + lane())));
    }
    const u32 all = 0xFFFFFFFFu;
    const bool good = __ballot_sync(all, ascends) == all || __ballot_sync(all, nothing) == all;
    if (__ballot_sync(all, finite && good) != all && lane() == 0) *of.sound = 0;
}
