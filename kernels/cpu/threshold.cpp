// Top-k by threshold: what is sent, what stays, and what rows of a payload stand for. The format is stated in
// commopt/ops/threshold.py.
//
// Of the largest elements of many short runs, the (k+1)-th is a bound that more than k elements reach. Below it there is
// nothing to count, as it is known to be too many; from there on there are hardly more elements than are sent. Only
// where the lower threshold ends up below it are the elements looked through once more.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "floats.hpp"
#include "kernels.hpp"
#include "parallel.hpp"

namespace commopt {
namespace {

constexpr int64_t kSegment = 65536;  // what indices count from the start of
constexpr int64_t kSummed = 4096;    // elements of a partial sum
constexpr int kLanes = 16;
constexpr uint32_t kInfinity = 0x7F800000;  // from here on: not finite

// As ThresholdRow in threshold_row.py.
struct ThresholdRow {
    int64_t n, k;
    int64_t segments = ceil_div(n, kSegment);
    int64_t values_at = 4 * std::max<int64_t>(segments - 1, 0);
    int64_t indices_at = values_at + 2 * k;
    int64_t used = indices_at + 2 * k;
    int64_t nbytes = ceil_div(used, 16) * 16;

    ThresholdRow(int64_t n, int64_t k) : n(n), k(k) {}

    int64_t length(int64_t segment) const { return std::min(kSegment, n - segment * kSegment); }

    // Where the entries of a segment start, whatever a row says.
    int64_t start(const uint8_t* row, int64_t segment) const {
        if (segment >= segments) return k;
        int64_t out = 0;
        for (int64_t s = 0; s < segment; ++s) {
            int32_t given;
            std::memcpy(&given, row + 4 * s, 4);
            out = std::max(out, std::min<int64_t>(given, k));
        }
        return out;
    }
};

// The bits of the smallest float that is not below t, which is not negative.
uint32_t reaching(double t) {
    if (t < 0x1p-126) return uint32_t(std::ceil(t * 0x1p149));  // so that no denormal is made, which may become 0
    const float near = float(t);
    return magnitude(near) + (double(near) < t);
}

// The sum in lanes, in place, of chunks, and of what comes of these.
double sum_of(double* values, int64_t n) {
    while (n > 1) {
        int64_t sums = 0;
        for (int64_t start = 0; start < n; start += kSummed) {
            const int64_t end = std::min(start + kSummed, n);
            double lanes[kLanes] = {};
            for (int64_t i = start; i < end; ++i) lanes[(i - start) % kLanes] += values[i];
            for (int half = kLanes / 2; half > 0; half /= 2) {
                for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
            }
            values[sums++] = lanes[0];
        }
        n = sums;
    }
    return values[0];
}

// Memory that is given back.
template <class T>
struct Memory {
    T* data;
    explicit Memory(int64_t count) : data(static_cast<T*>(std::malloc(size_t(count > 0 ? count : 1) * sizeof(T)))) {}
    ~Memory() { std::free(data); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
};

// All that reach high are sent, and of those that reach only low as many as are lacking.
struct Bracket {
    uint32_t low, high;
};

struct ThresholdCompression {
    ThresholdRow at;
    const float* x;
    const float* error;  // null without feedback
    float* new_error;
    uint8_t* payload;
    const uint8_t* active;  // null: all
    int64_t rows, x_pitch, error_pitch, new_error_pitch, active_pitch, rounds;
    int threads;
    int64_t chunks = ceil_div(at.n, kSummed);
    int64_t run = run_length();
    int64_t lanes_of_chunk = kSummed / run * kLanes;
    const Kernels& k = kernels();

    // Elements of which the largest of 16 lanes are noted: so few that there are several times as many lanes as entries.
    int64_t run_length() const {
        int64_t length = kSummed;
        while (length > 32 && ceil_div(at.n, length) * kLanes < 4 * (at.k + 1)) length /= 2;
        return length;
    }

    int64_t length(int64_t chunk) const { return std::min(kSummed, at.n - chunk * kSummed); }

    // z, partial sums, and the largest of lanes; returns how many these are.
    int64_t measure(int64_t r, float* z, double* sums, uint32_t* lanes) const {
        const float* from = x + r * x_pitch;
        const float* owed = error ? error + r * error_pitch : nullptr;
        const uint8_t* mask = active ? active + r * active_pitch : nullptr;
        parallel_for(chunks, at.n, threads, [&](int64_t c) {
            const int64_t start = c * kSummed, end = start + length(c);
            uint32_t* noted = lanes + c * lanes_of_chunk;
            for (int64_t i = start; i < end; i += run, noted += kLanes) {
                k.largest(from + i, owed ? owed + i : nullptr, mask ? mask + i / 8 : nullptr, z ? z + i : nullptr,
                          std::min(run, end - i), noted);
            }
            const KeepDenormals kept;  // z is what the mode makes of it; what is chosen of z does not depend on that
            uint8_t unused[kSummed / 8];
            sums[c] = k.encode((z ? z : from) + start, nullptr, nullptr, nullptr, unused, end - start, 1).sum;
        });
        return (chunks - 1) * lanes_of_chunk + ceil_div(length(chunks - 1), run) * kLanes;
    }

    // A magnitude that more than k elements reach, if it is not 0. Changes the order of the lanes.
    uint32_t bound_of(uint32_t* lanes, int64_t count) const {
        return count <= at.k ? 0 : kth_largest(lanes, count, at.k + 1);
    }

    // keys: all magnitudes that reach `bound`, and maybe others.
    Bracket search(const uint32_t* keys, int64_t count, uint32_t bound, double mean) const {
        const auto reach = [&](uint32_t least) {
            int64_t out = 0;
            for (int64_t i = 0; i < count; ++i) out += keys[i] >= least;
            return out;
        };
        const auto fits = [&](double t) {
            const uint32_t least = reaching(t);
            return least >= bound && reach(least) <= at.k;
        };
        const int64_t wild = reach(kInfinity);
        if (wild > at.k) return {kInfinity, 0x80000000};
        if (wild > 0) return {0, kInfinity};
        uint32_t largest = 0;
        for (int64_t i = 0; i < count; ++i) largest = std::max(largest, keys[i]);
        const bool below = fits(mean);
        const double base = below ? 0.0 : mean, top = below ? mean : wide_magnitude(as_float(largest));
        double low = base, high = mean, left = 0.0, right = 1.0;
        bool none = !below;  // no threshold yet that no more than k elements reach
        for (int64_t i = 0; i < rounds; ++i) {
            const double middle = (left + right) / 2, t = base + middle * (top - base);
            if (fits(t)) {
                right = middle;
                high = t;
                none = false;
            } else {
                left = middle;
                low = t;
            }
        }
        return {reaching(low), none ? kInfinity : reaching(high)};
    }

    // Notes the places of all elements of each chunk that reach `bound`, and how many these are; returns that of all.
    int64_t note(const float* z, uint32_t bound, int64_t* counts, uint16_t* places) const {
        parallel_for(chunks, at.n, threads, [&](int64_t c) {
            counts[c] = k.at_least(z + c * kSummed, length(c), bound, places + c * kSummed);
        });
        int64_t all = 0;
        for (int64_t c = 0; c < chunks; ++c) all += counts[c];
        return all;
    }

    // The entries, of places that were noted; among these are all that reach between.low.
    void write(int64_t r, Bracket between, const float* z, const int64_t* counts, const uint16_t* places) const {
        uint8_t* row = payload + r * at.nbytes;
        float* rest = error ? new_error + r * new_error_pitch : nullptr;
        int64_t lacking = at.k, entry = 0;
        for (int64_t c = 0; c < chunks; ++c) {
            const float* from = z + c * kSummed;
            for (int64_t j = 0; j < counts[c]; ++j) {
                lacking -= magnitude(from[places[c * kSummed + j]]) >= between.high;
            }
        }
        for (int64_t c = 0; c < chunks; ++c) {
            const int64_t start = c * kSummed;
            if (start % kSegment == 0 && start > 0) {
                const uint32_t before = uint32_t(entry);
                std::memcpy(row + 4 * (start / kSegment - 1), &before, 4);
            }
            for (int64_t j = 0; j < counts[c]; ++j) {
                const int64_t i = start + places[start + j];
                const float value = z[i];
                const uint32_t key = magnitude(value);
                if (key < between.high && (key < between.low || lacking-- <= 0)) continue;
                const uint16_t code = to_bfloat16(value), index = uint16_t(i % kSegment);
                std::memcpy(row + at.values_at + 2 * entry, &code, 2);
                std::memcpy(row + at.indices_at + 2 * entry, &index, 2);
                if (rest) rest[i] = value - as_float(uint32_t(code) << 16);
                ++entry;
            }
        }
        std::memset(row + at.used, 0, size_t(at.nbytes - at.used));
    }

    int run_all() const {
        if (rows == 0 || at.n == 0) return 0;
        Memory<float> formed(error == nullptr && active != nullptr ? at.n : 0);
        Memory<uint32_t> lanes(chunks * lanes_of_chunk);
        Memory<double> sums(chunks);
        Memory<int64_t> counts(chunks);
        Memory<uint16_t> places(chunks * kSummed);
        if (!formed.data || !lanes.data || !sums.data || !counts.data || !places.data) return 1;
        for (int64_t r = 0; r < rows; ++r) {
            float* to = error ? new_error + r * new_error_pitch : active ? formed.data : nullptr;
            const int64_t of_lanes = measure(r, to, sums.data, lanes.data);
            const float* z = to ? to : x + r * x_pitch;
            const double mean = sum_of(sums.data, chunks) / double(at.n);
            const uint32_t bound = bound_of(lanes.data, of_lanes);
            const int64_t noted = note(z, bound, counts.data, places.data);
            Memory<uint32_t> keys(noted);
            if (!keys.data) return 1;
            uint32_t* next = keys.data;
            for (int64_t c = 0; c < chunks; ++c) {
                const float* from = z + c * kSummed;
                for (int64_t j = 0; j < counts.data[c]; ++j) *next++ = magnitude(from[places.data[c * kSummed + j]]);
            }
            const Bracket between = search(keys.data, noted, bound, mean);
            if (between.low < bound) note(z, between.low, counts.data, places.data);
            write(r, between, z, counts.data, places.data);
        }
        return 0;
    }
};

// Calls use(index, value) for the entries of a segment that count.
template <class Use>
void each_entry(const ThresholdRow& at, const uint8_t* row, int64_t segment, const Use& use) {
    const int64_t length = at.length(segment), end = at.start(row, segment + 1);
    int64_t before = -1;
    for (int64_t entry = at.start(row, segment); entry < end; ++entry) {
        uint16_t index, code;
        std::memcpy(&index, row + at.indices_at + 2 * entry, 2);
        std::memcpy(&code, row + at.values_at + 2 * entry, 2);
        if (index < length && index > before) use(int64_t(index), as_float(uint32_t(code) << 16));
        before = index;
    }
}

}  // namespace
}  // namespace commopt

using namespace commopt;

extern "C" {

// Pitches: elements (of active: bytes) from a row to the next.
int commopt_threshold_compress(const float* x, const float* error, float* new_error, uint8_t* payload,
                               const uint8_t* active, int64_t rows, int64_t n, int64_t x_pitch, int64_t error_pitch,
                               int64_t new_error_pitch, int64_t active_pitch, int64_t k, int64_t rounds,
                               int32_t threads) {
    return ThresholdCompression{ThresholdRow(n, k), x,           error,           new_error,  payload,   active,   rows,
                                x_pitch,            error_pitch, new_error_pitch, active_pitch, rounds, threads}
        .run_all();
}

int commopt_threshold_decompress(const uint8_t* payload, float* out, const uint8_t* active, int64_t rows, int64_t n,
                                 int64_t out_pitch, int64_t active_pitch, int64_t k, int32_t threads) {
    const ThresholdRow at(n, k);
    parallel_for(rows * at.segments, rows * n, threads, [&](int64_t task) {
        const int64_t r = task / at.segments, segment = task % at.segments, start = segment * kSegment;
        const uint8_t* mask = active ? active + r * active_pitch + start / 8 : nullptr;
        float* to = out + r * out_pitch + start;
        std::memset(to, 0, size_t(at.length(segment)) * sizeof(float));
        each_entry(at, payload + r * at.nbytes, segment, [&](int64_t i, float value) {
            if (mask == nullptr || (mask[i >> 3] >> (i & 7) & 1)) to[i] += value;
        });
    });
    return 0;
}

int commopt_threshold_decompress_mean(const uint8_t* payload, float* out, int64_t ranks, int64_t n, int64_t k,
                                      int32_t threads) {
    const ThresholdRow at(n, k);
    parallel_for(at.segments, n, threads, [&](int64_t segment) {
        float* to = out + segment * kSegment;
        std::memset(to, 0, size_t(at.length(segment)) * sizeof(float));
        for (int64_t rank = 0; rank < ranks; ++rank) {
            each_entry(at, payload + rank * at.nbytes, segment,
                       [&](int64_t i, float value) { to[i] += value / float(ranks); });
        }
    });
    return 0;
}
}
