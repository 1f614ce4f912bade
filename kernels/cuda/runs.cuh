// Tensors that cover runs of a flat buffer. Their table is an argument by value: nothing has to be copied to the device
// before the launch, and a captured graph keeps it.

enum Kind { kFloat = 0, kBfloat16 = 1, kHalf = 2 };

struct Run {
    i64 start, end;  // the elements of the buffer that it covers; they may lie outside of the rows at hand
    void* data;
    float step, eps;  // of a parameter: the factors of its update
    int kind;
    int unused;
};

constexpr int kMaxRuns = 95;  // arguments may have 4096 bytes

struct Runs {  // ascending, without overlap
    i64 count;
    Run run[kMaxRuns];

    // The first run that ends after a place.
    __device__ int after(i64 place) const {
        int low = 0, high = int(count);
        while (low < high) {
            const int middle = (low + high) / 2;
            if (run[middle].end > place) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        return low;
    }
};

template <int KIND>
struct Number;

template <>
struct Number<kFloat> {
    typedef float type;
    __device__ static float get(float x) { return x; }
    __device__ static float put(float x) { return x; }
};

template <>
struct Number<kBfloat16> {
    typedef u16 type;
    __device__ static float get(u16 x) { return __uint_as_float(u32(x) << 16); }
    __device__ static u16 put(float x) {  // to nearest, ties to even
        const u32 bits = __float_as_uint(x);
        return (bits << 1) > 0xFF000000u ? u16(0x7FC0) : u16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
};

template <>
struct Number<kHalf> {
    typedef u16 type;
    __device__ static float get(u16 x) { return half_to_float(x); }
    __device__ static u16 put(float x) { return float_to_half(x); }
};

// Calls use.template some<KIND>(run, i, present) for each run that meets the items of this thread: item j is the i + 32 j
// -th element of the run where bit j of present is set. first: the place of the tile in the buffer.
template <class Use>
__device__ inline void each_run(const Runs& runs, i64 first, int count, Use& use) {
    const int from = int(threadIdx.x >> 5) * kSegment;
    const i64 start = first + from, end = first + (count < from + kSegment ? count : from + kSegment);
    for (int k = runs.after(start); k < runs.count && runs.run[k].start < end; ++k) {
        const Run& run = runs.run[k];
        const i64 i = start + lane() - run.start;
        u32 mine = 0;
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
            const i64 at = i + 32 * j;
            if (item(j) < count && at >= 0 && at < run.end - run.start) mine |= 1u << j;
        }
        if (run.kind == kFloat) {
            use.template some<kFloat>(run, i, mine);
        } else if (run.kind == kBfloat16) {
            use.template some<kBfloat16>(run, i, mine);
        } else {
            use.template some<kHalf>(run, i, mine);
        }
    }
}
