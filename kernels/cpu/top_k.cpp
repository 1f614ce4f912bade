// Top-k of chunks: what is sent, what stays, and what rows of a payload stand for. The format is stated in
// commopt/ops/top_k.py.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "floats.hpp"
#include "kernels.hpp"
#include "parallel.hpp"

namespace commopt {
namespace {

constexpr int kLanes = 32;  // of a sum over a group

int64_t gcd(int64_t a, int64_t b) { return b == 0 ? a : gcd(b, a % b); }

// s or -s, as the lowest bit says.
float signed_by(int bit, float s) {
    uint32_t bits;
    std::memcpy(&bits, &s, 4);
    bits ^= ~uint32_t(bit) << 31;
    std::memcpy(&s, &bits, 4);
    return s;
}

// As TopKRow in top_k_row.py.
struct TopKRow {
    int64_t n, k, chunk, bits;
    int64_t whole = n / chunk;
    int64_t chunks = ceil_div(n, chunk);
    int64_t entries = whole * k + std::min(k, n % chunk);
    int64_t unit = 8 / gcd(k, 8);
    int64_t group = std::max(256 / k / unit * unit, unit);
    int64_t groups = ceil_div(chunks, group);
    int64_t scales = bits == 2 ? 2 : bits == 1 || bits == 8 ? 1 : 0;
    int64_t values_at = 4 * scales * groups;
    int64_t values_nbytes = ceil_div(entries * bits, 8);
    int64_t wide = chunk <= 256 ? 1 : 2;
    int64_t indices_at = values_at + values_nbytes + values_nbytes % 2;
    int64_t used = indices_at + entries * wide;
    int64_t nbytes = ceil_div(used, 16) * 16;

    TopKRow(int64_t n, int64_t k, int64_t chunk, int64_t bits) : n(n), k(k), chunk(chunk), bits(bits) {}

    int64_t length(int64_t c) const { return std::min(chunk, n - c * chunk); }
    int64_t count(int64_t c) const { return std::min(k, length(c)); }

    void put_index(uint8_t* row, int64_t entry, int64_t index) const {
        const uint16_t narrow = uint16_t(index);
        if (wide == 1) {
            row[indices_at + entry] = uint8_t(narrow);
        } else {
            std::memcpy(row + indices_at + 2 * entry, &narrow, 2);
        }
    }
    int64_t get_index(const uint8_t* row, int64_t entry) const {
        if (wide == 1) return row[indices_at + entry];
        uint16_t index;
        std::memcpy(&index, row + indices_at + 2 * entry, 2);
        return index;
    }
    float get_scale(const uint8_t* row, int64_t i) const {
        float s;
        std::memcpy(&s, row + 4 * i, 4);
        return s;
    }

    // What entry e, of group g, decodes to.
    float value(const uint8_t* row, int64_t g, int64_t e) const {
        const uint8_t* values = row + values_at;
        if (bits == 2) {
            const int code = values[e >> 2] >> (2 * (e & 3)) & 3;
            return signed_by(code, get_scale(row, 2 * g + (code >> 1)));
        }
        if (bits == 1) {
            return signed_by(values[e >> 3] >> (e & 7), get_scale(row, g));
        }
        if (bits == 8) return float(int8_t(values[e])) * get_scale(row, g);
        uint32_t word = 0;
        std::memcpy(reinterpret_cast<uint8_t*>(&word) + (4 - bits / 8), values + e * bits / 8, size_t(bits / 8));
        float x;
        std::memcpy(&x, &word, 4);
        return x;
    }
};

float one_nan(float x) { return x == x ? x : as_float(0x7FC00000); }

// Memory of one task.
struct Space {
    float* values;     // of the entries of a group; 0: carries nothing
    uint32_t* places;  // their elements in the row, from the start of the group
    float* z;          // of a chunk
    uint32_t* keys;
    uint16_t* found;
    void* memory;

    explicit Space(const TopKRow& at) {
        const size_t entries = size_t(ceil_div(at.group * at.k, kLanes) * kLanes), chunk = size_t(at.chunk);
        // aligned, so that what was stored of 16 lanes at once is read from the store
        memory = std::aligned_alloc(64, (8 * entries + 10 * chunk + 63) / 64 * 64);
        values = static_cast<float*>(memory);
        places = reinterpret_cast<uint32_t*>(values + entries);
        z = reinterpret_cast<float*>(places + entries);
        keys = reinterpret_cast<uint32_t*>(z + chunk);
        found = reinterpret_cast<uint16_t*>(keys + chunk);
    }
    ~Space() { std::free(memory); }
    Space(const Space&) = delete;
    Space& operator=(const Space&) = delete;
};

// The mean of magnitudes, in the order that top_k.py states. use(|v|): whether v counts. There is room for whole lanes.
template <class Use>
double mean_of(const float* values, int64_t count, const Use& use) {
    double lanes[kLanes] = {};
    int64_t used = 0;
    for (int64_t first = 0; first < count; first += kLanes) {
        for (int i = 0; i < kLanes; ++i) {  // without a branch: whether an entry counts cannot be guessed
            double size = wide_magnitude(values[first + i]);
            uint64_t bits;
            std::memcpy(&bits, &size, 8);
            bits &= -uint64_t(use(size));
            std::memcpy(&size, &bits, 8);
            lanes[i] += size;
            used += bits != 0;
        }
    }
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0] / double(used > 0 ? used : 1);
}

struct TopKCompression {
    TopKRow at;
    const float* x;
    const float* error;  // null without feedback
    float* new_error;
    uint8_t* payload;
    const uint8_t* active;  // null: all
    int64_t rows, x_pitch, error_pitch, new_error_pitch, active_pitch;
    const Kernels& k = kernels();

    // Elements of which the largest of 16 lanes are noted, so that there are enough of those for a good bound.
    int64_t run_length() const {
        int64_t runs = 1;
        while (16 * runs < 4 * at.k && at.chunk / (2 * runs) >= 32) runs *= 2;
        return at.chunk / runs;
    }

    // The k-th largest of 16.
    uint32_t kth_of_16(const uint32_t* keys) const {
        int32_t ranks[16];
        k.ranks(reinterpret_cast<const int32_t*>(keys), ranks);
        uint32_t out = 0;
        for (int i = 0; i < 16; ++i) out |= ranks[i] == at.k - 1 ? keys[i] : 0;
        return out;
    }

    // Leaves the places of the k largest of up to 16, in order; returns k.
    int64_t best_of_16(uint32_t* keys, int64_t count, uint16_t* found) const {
        int32_t ranks[16];
        for (int64_t i = count; i < 16; ++i) keys[i] = 0;
        k.ranks(reinterpret_cast<const int32_t*>(keys), ranks);
        int64_t kept = 0;
        for (int64_t i = 0; i < count; ++i) {
            found[kept] = found[i];
            kept += ranks[i] < at.k;
        }
        return kept;
    }

    // Writes z of a chunk, and the places in it of its entries to space.found; returns how many these are.
    int64_t select(int64_t r, int64_t c, Space& space, const float*& z) const {
        const int64_t start = c * at.chunk, n = at.length(c), run = run_length();
        const float* from = x + r * x_pitch + start;
        const float* owed = error ? error + r * error_pitch + start : nullptr;
        const uint8_t* mask = active ? active + r * active_pitch + start / 8 : nullptr;
        float* to = error ? new_error + r * new_error_pitch + start : active ? space.z : nullptr;
        int64_t lanes = 0;
        for (int64_t i = 0; i < n; i += run, lanes += 16) {
            k.largest(from + i, owed ? owed + i : nullptr, mask ? mask + i / 8 : nullptr, to ? to + i : nullptr,
                      std::min(run, n - i), space.keys + lanes);
        }
        z = to ? to : from;
        uint32_t bound = lanes < at.k ? 1 : lanes == 16 ? kth_of_16(space.keys) : kth_largest(space.keys, lanes, at.k);
        if (bound == 0) bound = 1;  // zeros are never sent
        const int64_t count = k.at_least(z, n, bound, space.found);
        if (count <= at.k) return count;
        for (int64_t i = 0; i < count; ++i) space.keys[i] = magnitude(z[space.found[i]]);
        if (count <= 16) return best_of_16(space.keys, count, space.found);
        const uint32_t least = kth_largest(space.keys, count, at.k);
        int64_t ties = at.k;
        for (int64_t i = 0; i < count; ++i) ties -= space.keys[i] > least;
        int64_t kept = 0;
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t key = magnitude(z[space.found[i]]);
            if (key > least || (key == least && ties-- > 0)) space.found[kept++] = space.found[i];
        }
        return kept;
    }

    void write_indices(uint8_t* row, int64_t entry, int64_t count, int64_t length, const uint16_t* found,
                       int64_t carrying) const {
        for (int64_t j = 0; j < count; ++j) {
            const int64_t nothing = j > 0 ? 0 : count > 1 ? 1 : length;
            at.put_index(row, entry + j, j < carrying ? found[j] : carrying > 0 ? found[carrying - 1] : nothing);
        }
    }

    // Writes scales and values; returns nothing: what they decode to is read from the row.
    void write_values(uint8_t* row, int64_t g, int64_t entry, int64_t count, float* values) const {
        for (int64_t i = count; i % kLanes != 0; ++i) values[i] = 0.0f;
        uint8_t* out = row + at.values_at;
        float scales[2] = {0.0f, 0.0f};
        double mean = 0.0;
        if (at.bits <= 2) {
            mean = mean_of(values, count, [](double) { return true; });
            scales[0] = float(mean);
        }
        if (at.bits == 2) {
            scales[0] = float(mean_of(values, count, [=](double size) { return !(size >= mean); }));
            scales[1] = float(mean_of(values, count, [=](double size) { return size >= mean; }));
        }
        if (at.bits == 8) {
            uint32_t largest = 0;
            for (int64_t i = 0; i < count; ++i) largest = std::max(largest, magnitude(values[i]));
            scales[0] = float(double(as_float(largest)) / 127.0);
        }
        for (int64_t i = 0; i < at.scales; ++i) {
            const float s = one_nan(scales[i]);
            std::memcpy(row + 4 * (at.scales * g + i), &s, 4);
        }
        if (at.bits <= 2) std::memset(out + entry * at.bits / 8, 0, size_t(ceil_div(count * at.bits, 8)));
        const bool usable = scales[0] > 0.0f && scales[0] <= 3.4028234663852886e38f;
        for (int64_t i = 0; i < count; ++i) {
            const float v = values[i];
            const int64_t e = entry + i;
            if (at.bits <= 2) {
                if (magnitude(v) == 0) continue;
                int code = !std::signbit(v);
                if (at.bits == 2) code |= int(wide_magnitude(v) >= mean) << 1;
                out[e * at.bits >> 3] |= uint8_t(code << (e * at.bits & 7));
            } else if (at.bits == 8) {
                const float steps = usable ? std::nearbyintf(v / scales[0]) : 0.0f;
                out[e] = uint8_t(int8_t(std::min(std::max(steps, -127.0f), 127.0f)));
            } else if (at.bits == 16) {
                const uint16_t half = to_bfloat16(v);
                std::memcpy(out + 2 * e, &half, 2);
            } else {
                std::memcpy(out + 4 * e, &v, 4);
            }
        }
    }

    void compress_group(int64_t r, int64_t g, Space& space) const {
        uint8_t* row = payload + r * at.nbytes;
        const int64_t first = g * at.group, last = std::min(first + at.group, at.chunks), entry = first * at.k;
        int64_t done = 0;
        for (int64_t c = first; c < last; ++c) {
            const float* z;
            const int64_t carrying = select(r, c, space, z), count = at.count(c);
            write_indices(row, entry + done, count, at.length(c), space.found, carrying);
            for (int64_t j = 0; j < count; ++j) {
                space.values[done + j] = j < carrying ? z[space.found[j]] : 0.0f;
                space.places[done + j] = uint32_t((c - first) * at.chunk) + space.found[j];
            }
            done += count;
        }
        write_values(row, g, entry, done, space.values);
        if (error == nullptr) return;
        float* rest = new_error + r * new_error_pitch + first * at.chunk;
        for (int64_t i = 0; i < done; ++i) {
            const float v = space.values[i];
            if (magnitude(v) != 0) rest[space.places[i]] = v - at.value(row, g, entry + i);
        }
    }

    int run(int threads) const {
        if (rows == 0 || at.n == 0) return 0;
        for (int64_t r = 0; r < rows; ++r) {
            uint8_t* row = payload + r * at.nbytes;
            if (at.values_nbytes % 2) row[at.indices_at - 1] = 0;
            std::memset(row + at.used, 0, size_t(at.nbytes - at.used));
        }
        const int64_t groups = rows * at.groups, together = std::max<int64_t>(1, kTask / (at.group * at.chunk));
        std::atomic<int> failed{0};
        parallel_for(ceil_div(groups, together), rows * at.n, threads, [&](int64_t task) {
            Space space(at);
            if (space.memory == nullptr) {
                failed = 1;
                return;
            }
            const int64_t end = std::min(groups, (task + 1) * together);
            for (int64_t g = task * together; g < end; ++g) compress_group(g / at.groups, g % at.groups, space);
        });
        return failed;
    }
};

// Calls use(c) for the chunks of a row, several to a task.
template <class Use>
void each_chunk_of_rows(const TopKRow& at, int64_t rows, int64_t work, int threads, const Use& use) {
    const int64_t together = std::max<int64_t>(1, kTask / at.chunk), chunks = rows * at.chunks;
    parallel_for(ceil_div(chunks, together), work, threads, [&](int64_t task) {
        const int64_t end = std::min(chunks, (task + 1) * together);
        for (int64_t i = task * together; i < end; ++i) use(i / at.chunks, i % at.chunks);
    });
}

// Calls use(index, entry) for the entries of a chunk that carry something.
template <class Use>
void each_entry(const TopKRow& at, const uint8_t* row, int64_t c, const Use& use) {
    const int64_t entry = c * at.k, count = at.count(c), length = at.length(c);
    int64_t before = -1;
    for (int64_t j = 0; j < count; ++j) {
        const int64_t index = at.get_index(row, entry + j);
        const bool first_of_none = j == 0 && count > 1 && at.get_index(row, entry + 1) < index;
        if (index < length && index > before && !first_of_none) use(index, entry + j);
        before = index;
    }
}

// Whether a chunk, and the scales of the group that begins with it, are such as compression makes of finite numbers: its
// indices ascend, and then repeat the last; or there is nothing.
bool is_sound(const TopKRow& at, const uint8_t* row, int64_t c) {
    const int64_t length = at.length(c), count = at.count(c), entry = c * at.k, group = c / at.group;
    const int64_t first_of_none = count > 1 ? 1 : length & (at.wide == 2 ? 0xFFFF : 0xFF);
    bool ascends = true, nothing = true, finite = true;
    int64_t before = 0, step_before = 1;
    for (int64_t j = 0; j < count; ++j) {
        const int64_t index = at.get_index(row, entry + j), step = j > 0 ? index - before : 1;
        ascends &= index < length && step >= 0 && !(step > 0 && step_before == 0);
        nothing &= index == (j == 0 ? first_of_none : 0);
        if (at.bits >= 16) finite &= std::isfinite(at.value(row, group, entry + j));
        before = index;
        step_before = step;
    }
    for (int64_t i = 0; c == group * at.group && i < at.scales; ++i) {
        const float scale = at.get_scale(row, at.scales * group + i);
        finite &= std::isfinite(scale) && scale >= 0.0f;
    }
    return finite && (ascends || nothing);
}

}  // namespace
}  // namespace commopt

using namespace commopt;

extern "C" {

// Pitches: elements (of active: bytes) from a row to the next.
int commopt_topk_compress(const float* x, const float* error, float* new_error, uint8_t* payload, const uint8_t* active,
                          int64_t rows, int64_t n, int64_t x_pitch, int64_t error_pitch, int64_t new_error_pitch,
                          int64_t active_pitch, int64_t k, int64_t chunk, int64_t bits, int32_t threads) {
    return TopKCompression{TopKRow(n, k, chunk, bits), x,       error,       new_error,       payload,
                           active,                       rows,    x_pitch,     error_pitch,     new_error_pitch,
                           active_pitch}
        .run(threads);
}

int commopt_topk_decompress(const uint8_t* payload, float* out, const uint8_t* active, int64_t rows, int64_t n,
                            int64_t out_pitch, int64_t active_pitch, int64_t k, int64_t chunk, int64_t bits,
                            int32_t threads) {
    const TopKRow at(n, k, chunk, bits);
    each_chunk_of_rows(at, rows, rows * n, threads, [&](int64_t r, int64_t c) {
        const uint8_t* row = payload + r * at.nbytes;
        const uint8_t* mask = active ? active + r * active_pitch + c * chunk / 8 : nullptr;
        float* to = out + r * out_pitch + c * chunk;
        std::memset(to, 0, size_t(at.length(c)) * sizeof(float));
        each_entry(at, row, c, [&](int64_t i, int64_t entry) {
            if (mask == nullptr || (mask[i >> 3] >> (i & 7) & 1)) to[i] += at.value(row, c / at.group, entry);
        });
    });
    return 0;
}

int commopt_topk_decompress_mean(const uint8_t* payload, float* out, int64_t ranks, int64_t n, int64_t k, int64_t chunk,
                                 int64_t bits, int32_t threads) {
    const TopKRow at(n, k, chunk, bits);
    each_chunk_of_rows(at, 1, n, threads, [&](int64_t, int64_t c) {
        float* to = out + c * chunk;
        std::memset(to, 0, size_t(at.length(c)) * sizeof(float));
        for (int64_t rank = 0; rank < ranks; ++rank) {
            const uint8_t* row = payload + rank * at.nbytes;
            each_entry(at, row, c, [&](int64_t i, int64_t entry) {
                to[i] += at.value(row, c / at.group, entry) / float(ranks);
            });
        }
    });
    return 0;
}

// Writes 0 to sound if rows are not such as compression makes of finite numbers.
int commopt_topk_find_unsound(const uint8_t* payload, uint8_t* sound, int64_t rows, int64_t n, int64_t k, int64_t chunk,
                              int64_t bits, int32_t threads) {
    const TopKRow at(n, k, chunk, bits);
    std::atomic<bool> all{true};
    each_chunk_of_rows(at, rows, rows * at.chunks * k, threads, [&](int64_t r, int64_t c) {
        if (!is_sound(at, payload + r * at.nbytes, c)) all = false;
    });
    if (!all) *sound = 0;
    return 0;
}
}
