// Top-k by threshold: what is sent, what stays, and what rows of a payload stand for. The format is stated in
// commopt/ops/threshold.py. A warp works on a chunk, of which it has element 32 j + lane in lane `lane`.
//
// Five rounds of the search are one pass over the elements: it counts those that reach any of the 31 thresholds that the
// five may ask for. What chunks come to is added up by one block for a row, of as many warps as a block can have.

constexpr int kIndexed = 65536;  // elements that indices count from the start of
constexpr int kSummed = 4096;    // of a chunk
constexpr int kSampled = 31;     // thresholds of a pass

// As cuda_threshold.py lays it out: ThresholdRow of threshold_row.py.
struct ThresholdLayout {
    i64 n, k, segments, values_at, indices_at, used, nbytes;

    __device__ i64 chunks() const { return (n + kSummed - 1) / kSummed; }
    __device__ int length(i64 chunk) const {
        return (chunk + 1) * kSummed <= n ? kSummed : int(n - chunk * kSummed);
    }
    // Where a row says that the entries of segment s + 1 start, 0 ... k. They do where it is the largest so far.
    __device__ u32 start_after(const u8* row, i64 s) const {
        const i64 given = reinterpret_cast<const int*>(row)[s];
        return u32(given < 0 ? 0 : given > k ? k : given);
    }
};

// Of a row. Thresholds in [low, high): more than k elements reach low, no more than k reach high.
struct ThresholdSearch {
    double base, top, left, right, low, high;
    double sampled[kSampled + 1];
    u32 least[kSampled + 1];  // of these, the bits of the smallest float that reaches it
    i64 above;                // elements that reach high
    i64 wild;                 // that are not finite
    u32 largest, none;        // none: there is no such high yet
    u32 low_bits, high_bits;
    i64 lacking;              // entries below high
};

struct ThresholdCompression {
    ThresholdLayout at;
    const float* x;
    const float* error;  // null without feedback
    float* new_error;
    u8* payload;
    const u8* active;            // null: all
    ThresholdSearch* search;   // of each row
    double* sums;              // of each chunk of each row: of magnitudes
    u32* extremes;             // its largest magnitude; how many of it are not finite
    int* counts;               // 32: how many reach each of the thresholds; then [0]: that are sent for sure, [1]: maybe
    i64* before;               // [0]: entries before the chunk; [1]: elements before it that are sent maybe
    i64 rows, x_stride, error_stride, new_error_stride, active_stride;
    i64 levels, next;  // rounds of the pass that was (0: the mean), and of the one that is to come (0: none)
};

__device__ inline u32 threshold_reaching(double t) {
    const float near = narrow(t);
    return magnitude_bits(near) + (widen(near) < t ? 1u : 0u);
}

// The elements of a chunk: as given, or as the first pass has left them in the place of the residual.
struct ThresholdItems {
    const float* from;
    const u8* active;
    int length;

    __device__ ThresholdItems(const ThresholdCompression& of, i64 row, i64 chunk) {
        const i64 start = chunk * kSummed;
        from = of.error == nullptr ? of.x + row * of.x_stride + start : of.new_error + row * of.new_error_stride + start;
        active = of.active == nullptr || of.error != nullptr ? nullptr : of.active + row * of.active_stride + start / 8;
        length = of.at.length(chunk);
    }
    __device__ float get(int i) const {
        return i < length && (active == nullptr || active[i >> 3] >> (i & 7) & 1) ? from[i] : 0.0f;
    }
};

__device__ inline i64 threshold_team() { return i64(blockIdx.x) * blockDim.y + threadIdx.y; }

// Forms z; the sum of magnitudes in 16 lanes, the largest of them, and how many are not finite.
extern "C" __global__ void threshold_measure(const __grid_constant__ ThresholdCompression of) {
    const i64 index = threshold_team(), chunks = of.at.chunks();
    if (index >= of.rows * chunks) return;
    const i64 row = index / chunks, start = index % chunks * kSummed;
    const int length = of.at.length(index % chunks);
    const float* x = of.x + row * of.x_stride + start;
    const float* error = of.error == nullptr ? nullptr : of.error + row * of.error_stride + start;
    float* rest = of.error == nullptr ? nullptr : of.new_error + row * of.new_error_stride + start;
    const u8* active = of.active == nullptr ? nullptr : of.active + row * of.active_stride + start / 8;
    double sum = 0.0;
    u32 largest = 0, wild = 0;
    for (int first = 0; first < length; first += 32 * kItems) {
        float z[kItems];
#pragma unroll
        for (int j = 0; j < kItems; ++j) {  // all loads before the first store, which may be to the same places
            const int i = first + 32 * j + lane();
            const bool is_active = i < length && (active == nullptr || active[i >> 3] >> (i & 7) & 1);
            z[j] = !is_active ? 0.0f : error == nullptr ? x[i] : add(x[i], error[i]);
        }
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
            const int i = first + 32 * j + lane();
            if (rest != nullptr && i < length) rest[i] = z[j];
            const u32 size = magnitude_bits(z[j]);
            const double mine = widen(__uint_as_float(size)), after = __shfl_xor_sync(0xFFFFFFFFu, mine, 16);
            sum += mine;  // the upper half of the warp has the elements that come after those of the lower
            sum += after;
            if (size > largest) largest = size;
            wild += size >= kInfinity;
        }
    }
#pragma unroll
    for (int step = 8; step > 0; step >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    largest = warp_max(largest);
    wild = warp_sum(wild);
    if (lane() != 0) return;
    of.sums[index] = sum;
    of.extremes[2 * index] = largest;
    of.extremes[2 * index + 1] = wild;
}

// What of the chunks comes to: the mean, the first threshold.
extern "C" __global__ void __launch_bounds__(kMaxThreads)
    threshold_begin(const __grid_constant__ ThresholdCompression of) {
    __shared__ u32 tops[kMaxWarps];
    __shared__ i64 wilds[kMaxWarps];
    const i64 row = blockIdx.x, chunks = of.at.chunks();
    double* sums = of.sums + row * chunks;
    for (i64 n = chunks; n > 1;) {
        const i64 groups = (n + kSummed - 1) / kSummed;
        for (i64 base = 0; base < groups; base += blockDim.y) {
            const i64 group = base + threadIdx.y, start = group * kSummed;
            const i64 end = start + kSummed < n ? start + kSummed : n;
            double sum = 0.0;
#pragma unroll 8
            for (i64 i = start + (lane() & 15); i < end; i += 16) sum += sums[i];
#pragma unroll
            for (int step = 8; step > 0; step >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
            __syncthreads();  // sums come where others have been read
            if (lane() == 0 && group < groups) sums[group] = sum;
        }
        __syncthreads();
        n = groups;
    }
    u32 largest = 0;
    i64 wild = 0;
#pragma unroll 4
    for (i64 i = 32 * threadIdx.y + lane(); i < chunks; i += 32 * blockDim.y) {
        const u32* mine = of.extremes + 2 * (row * chunks + i);
        if (mine[0] > largest) largest = mine[0];
        wild += mine[1];
    }
    largest = warp_max(largest);
    wild = warp_sum(wild);
    if (lane() == 0) {
        tops[threadIdx.y] = largest;
        wilds[threadIdx.y] = wild;
    }
    __syncthreads();
    if (threadIdx.y != 0) return;
    const bool there = u32(lane()) < blockDim.y;
    largest = warp_max(there ? tops[lane()] : 0);
    wild = warp_sum(there ? wilds[lane()] : 0);
    if (lane() != 0) return;
    ThresholdSearch& search = of.search[row];
    search.largest = largest;
    search.wild = wild;
    search.sampled[0] = sums[0] / double(of.at.n);
    search.least[0] = threshold_reaching(search.sampled[0]);
}

// Of a chunk, by a warp: how many elements reach each of the thresholds, which ascend.
extern "C" __global__ void threshold_count(const __grid_constant__ ThresholdCompression of) {
    __shared__ u32 bounds[kMaxWarps][32];
    __shared__ int reached[kMaxWarps][32];  // [j]: elements that reach j thresholds
    const i64 index = threshold_team(), chunks = of.at.chunks();
    if (index >= of.rows * chunks) return;
    const ThresholdItems items(of, index / chunks, index % chunks);
    const int thresholds = of.levels == 0 ? 1 : (1 << of.levels) - 1;
    u32* bound = bounds[threadIdx.y];
    int* count = reached[threadIdx.y];
    bound[lane()] = lane() < thresholds ? of.search[index / chunks].least[lane()] : 0xFFFFFFFFu;
    count[lane()] = 0;
    __syncwarp();
    for (int first = 0; first < items.length; first += 32 * kItems) {
        u32 size[kItems];
#pragma unroll
        for (int i = 0; i < kItems; ++i) size[i] = magnitude_bits(items.get(first + 32 * i + lane()));
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            int reach = 0;
#pragma unroll
            for (int step = 16; step > 0; step >>= 1) {
                if (size[i] >= bound[reach + step - 1]) reach += step;
            }
            if (reach > 0 && first + 32 * i + lane() < items.length) atomicAdd(&count[reach], 1);
        }
    }
    __syncwarp();
    int mine = count[lane()];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int after = __shfl_sync(0xFFFFFFFFu, mine, lane() + step);
        if (lane() + step < 32) mine += after;
    }
    mine = __shfl_sync(0xFFFFFFFFu, mine, lane() + 1);
    of.counts[32 * index + lane()] = lane() < thresholds ? mine : 0;
}

// What the counts say of where the threshold lies and, at the end, of which elements are sent. By one thread.
__device__ inline void narrow_down(ThresholdSearch& search, const ThresholdCompression& of, const i64* counts) {
    const i64 k = of.at.k;
    if (of.levels == 0) {
        const double mean = search.sampled[0];
        const bool below = counts[0] <= k;
        search.base = below ? 0.0 : mean;
        search.top = below ? mean : widen(__uint_as_float(search.largest));
        search.low = search.base;
        search.high = mean;
        search.above = below ? counts[0] : 0;
        search.none = !below;
        search.left = 0.0;
        search.right = 1.0;
    } else {
        int low = 0, high = 1 << of.levels;
        const double left = search.left, unit = (search.right - left) / double(high);
        for (i64 round = 0; round < of.levels; ++round) {
            const int middle = (low + high) / 2;
            if (counts[middle - 1] <= k) {
                high = middle;
                search.high = search.sampled[middle - 1];
                search.above = counts[middle - 1];
                search.none = 0;
            } else {
                low = middle;
                search.low = search.sampled[middle - 1];
            }
        }
        search.left = __dadd_rn(left, __dmul_rn(unit, double(low)));  // exact, as are all halves of halves
        search.right = __dadd_rn(left, __dmul_rn(unit, double(high)));
    }
    if (of.next != 0) return;
    search.low_bits = threshold_reaching(search.low);
    search.high_bits = search.none ? kInfinity : threshold_reaching(search.high);
    search.lacking = k - search.above;
    if (search.wild > k) {
        search.low_bits = kInfinity;
        search.high_bits = 0x80000000u;
        search.lacking = k;
    } else if (search.wild > 0) {
        search.low_bits = 0;
        search.high_bits = kInfinity;
        search.lacking = k - search.wild;
    }
}

// The rounds that have been counted, and the thresholds of the next ones, one by each lane.
extern "C" __global__ void __launch_bounds__(kMaxThreads)
    threshold_step(const __grid_constant__ ThresholdCompression of) {
    __shared__ i64 partial[kMaxWarps][32];
    const i64 row = blockIdx.x, chunks = of.at.chunks();
    i64 sum = 0;
#pragma unroll 16
    for (i64 chunk = threadIdx.y; chunk < chunks; chunk += blockDim.y) {
        sum += of.counts[32 * (row * chunks + chunk) + lane()];
    }
    partial[threadIdx.y][lane()] = sum;
    __syncthreads();
    if (threadIdx.y != 0) return;
    for (u32 team = 1; team < blockDim.y; ++team) sum += partial[team][lane()];
    partial[0][lane()] = sum;
    __syncwarp();
    ThresholdSearch& search = of.search[row];
    if (lane() == 0) narrow_down(search, of, partial[0]);
    __syncwarp();
    if (lane() >= (1 << of.next) - 1) return;
    const double left = search.left, base = search.base, unit = (search.right - left) / double(1 << of.next);
    const double q = __dadd_rn(left, __dmul_rn(unit, double(lane() + 1)));
    const double sampled = __dadd_rn(base, __dmul_rn(q, __dadd_rn(search.top, -base)));
    search.sampled[lane()] = sampled;
    search.least[lane()] = threshold_reaching(sampled);
}

// Of a chunk, by a warp: how many of its elements are sent for sure, and how many may be.
extern "C" __global__ void threshold_tally(const __grid_constant__ ThresholdCompression of) {
    const i64 index = threshold_team(), chunks = of.at.chunks();
    if (index >= of.rows * chunks) return;
    const ThresholdSearch& search = of.search[index / chunks];
    const ThresholdItems items(of, index / chunks, index % chunks);
    int sure = 0, maybe = 0;
#pragma unroll 8
    for (int i = lane(); i < items.length; i += 32) {
        const u32 size = magnitude_bits(items.get(i));
        sure += size >= search.high_bits;
        maybe += size < search.high_bits && size >= search.low_bits;
    }
    sure = warp_sum(sure);
    maybe = warp_sum(maybe);
    if (lane() < 2) of.counts[32 * index + lane()] = lane() == 0 ? sure : maybe;
}

// The sum of what the threads before this one have. Every thread of the grid's block must come here.
__device__ inline i64 block_before(i64 mine) {
    __shared__ i64 of_warps[kMaxWarps];
    i64 sum = mine;  // of this lane and those before it
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const i64 other = __shfl_sync(0xFFFFFFFFu, sum, lane() - step);
        if (lane() >= step) sum += other;
    }
    __syncthreads();
    if (lane() == 31) of_warps[threadIdx.y] = sum;
    __syncthreads();
    return warp_sum(u32(lane()) < threadIdx.y ? of_warps[lane()] : 0) + sum - mine;
}

// Where the entries of each chunk start, by a block for a row, of which each thread has a run of chunks.
extern "C" __global__ void __launch_bounds__(kMaxThreads)
    threshold_places(const __grid_constant__ ThresholdCompression of) {
    const i64 row = blockIdx.x, chunks = of.at.chunks(), threads = 32 * blockDim.y, each = (chunks + threads - 1) / threads;
    const i64 first = (32 * threadIdx.y + lane()) * each, end = first + each < chunks ? first + each : chunks;
    i64 sure = 0, maybe = 0;
    for (i64 chunk = first; chunk < end; ++chunk) {
        sure += of.counts[32 * (row * chunks + chunk)];
        maybe += of.counts[32 * (row * chunks + chunk) + 1];
    }
    sure = block_before(sure);
    maybe = block_before(maybe);
    u8* to = of.payload + row * of.at.nbytes;
    const i64 lacking = of.search[row].lacking;
    for (i64 chunk = first; chunk < end; ++chunk) {
        const i64 index = row * chunks + chunk, entry = sure + (maybe < lacking ? maybe : lacking);
        of.before[2 * index] = entry;
        of.before[2 * index + 1] = maybe;
        if (chunk > 0 && chunk % (kIndexed / kSummed) == 0) {
            reinterpret_cast<u32*>(to)[chunk / (kIndexed / kSummed) - 1] = u32(entry);
        }
        sure += of.counts[32 * index];
        maybe += of.counts[32 * index + 1];
    }
    for (i64 byte = of.at.used + 32 * threadIdx.y + lane(); byte < of.at.nbytes; byte += threads) to[byte] = 0;
}

// The entries of a chunk, by a warp, and what is left of their elements.
extern "C" __global__ void threshold_encode(const __grid_constant__ ThresholdCompression of) {
    const i64 index = threshold_team(), chunks = of.at.chunks();
    if (index >= of.rows * chunks) return;
    const i64 row = index / chunks, start = index % chunks * kSummed;
    const ThresholdSearch& search = of.search[row];
    const ThresholdItems items(of, row, index % chunks);
    u8* to = of.payload + row * of.at.nbytes;
    u16* codes = reinterpret_cast<u16*>(to + of.at.values_at);
    u16* indices = reinterpret_cast<u16*>(to + of.at.indices_at);
    float* rest = of.error == nullptr ? nullptr : of.new_error + row * of.new_error_stride + start;
    const u32 ahead = (1u << lane()) - 1;
    i64 entry = of.before[2 * index], seen = of.before[2 * index + 1];
    const u32 high = search.high_bits, low = search.low_bits;
    const i64 lacking = search.lacking;
    for (int first = 0; first < items.length; first += 32 * kItems) {
        float given[kItems];
#pragma unroll
        for (int j = 0; j < kItems; ++j) given[j] = items.get(first + 32 * j + lane());
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
            const int i = first + 32 * j + lane();
            const float z = given[j];
            const u32 size = magnitude_bits(z);
            const bool sure = i < items.length && size >= high;
            const bool maybe = i < items.length && !sure && size >= low;
            const u32 all_maybe = __ballot_sync(0xFFFFFFFFu, maybe);
            const bool mine = sure || (maybe && seen + __popc(all_maybe & ahead) < lacking);
            const u32 all = __ballot_sync(0xFFFFFFFFu, mine);
            if (mine) {
                const i64 place = entry + __popc(all & ahead);
                const u16 code = Number<kBfloat16>::put(z);
                codes[place] = code;
                indices[place] = u16((start + i) % kIndexed);
                if (rest != nullptr) rest[i] = sub(z, Number<kBfloat16>::get(code));
            }
            entry += __popc(all);
            seen += __popc(all_maybe);
        }
    }
}

// Rows of `ranks` payloads each, of which the mean is taken.
struct ThresholdDecompression {
    ThresholdLayout at;
    const u8* payload;
    float* out;
    const u8* active;  // null: all
    i64 rows, ranks, out_stride, active_stride;
};

// A segment, by a block.
extern "C" __global__ void threshold_decompress(const __grid_constant__ ThresholdDecompression of) {
    __shared__ u32 tops[kMaxWarps];
    const ThresholdLayout& at = of.at;
    const i64 row = blockIdx.x / at.segments, segment = blockIdx.x % at.segments, start = segment * kIndexed;
    const i64 length = at.n - start < kIndexed ? at.n - start : kIndexed;
    float* out = of.out + row * of.out_stride + start;
    const u8* active = of.active == nullptr ? nullptr : of.active + row * of.active_stride + start / 8;
    for (i64 i = threadIdx.x; i < length; i += blockDim.x) out[i] = 0.0f;
    for (i64 rank = 0; rank < of.ranks; ++rank) {
        const u8* from = of.payload + (row * of.ranks + rank) * at.nbytes;
        const u16* codes = reinterpret_cast<const u16*>(from + at.values_at);
        const u16* indices = reinterpret_cast<const u16*>(from + at.indices_at);
        u32 start_here = 0;
#pragma unroll 4
        for (i64 s = threadIdx.x; s < segment; s += blockDim.x) {
            const u32 given = at.start_after(from, s);
            if (given > start_here) start_here = given;
        }
        start_here = warp_max(start_here);
        __syncthreads();  // before it, other threads have written these elements, and read of tops
        if (lane() == 0) tops[threadIdx.x >> 5] = start_here;
        __syncthreads();
        start_here = warp_max(u32(lane()) < blockDim.x >> 5 ? tops[lane()] : 0);
        const i64 first = start_here;
        i64 end = at.k;
        if (segment + 1 < at.segments) {
            const u32 given = at.start_after(from, segment);
            end = given > start_here ? given : start_here;
        }
        for (i64 entry = first + threadIdx.x; entry < end; entry += blockDim.x) {
            const i64 i = indices[entry];
            if (i >= length || (active != nullptr && !(active[i >> 3] >> (i & 7) & 1))) continue;
            if (entry > first && i <= i64(indices[entry - 1])) continue;
            const float v = Number<kBfloat16>::get(codes[entry]);
            out[i] = add(out[i], of.ranks > 1 ? div(v, float(int(of.ranks))) : v);
        }
    }
}
