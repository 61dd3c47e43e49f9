// Paged attention over the cache of cache.h, decode and chunked prefill in one call.
// A row (a query of one head) is computed per chunk of 128 absolute key positions, and the chunks are merged
// in order. Nothing else enters the arithmetic, so a row's result depends neither on the batch, nor on how the
// prompt was cut, nor on threads; few long sequences are spread by chunk without changing a bit.
#include "abi.h"
#include "cache.h"

namespace {

using ff::bf16;
using ff::set1;

constexpr int64_t kChunk = 128;
constexpr int64_t kSubs = kChunk / ff::kSubBlock;
constexpr int64_t kRows = 48;  // rows of a tile: queries x heads of the group
constexpr int64_t kMaxRows = 64, kMaxDim = 256;
const float kMinusInfinity = -__builtin_inff();

struct Job {
    const bf16* q;
    int64_t ldq;
    ff::Cache cache;
    bf16* out;
    int64_t ldo;
    const int32_t* starts;
    const int32_t* lengths;
    const int32_t* table;
    int64_t ld_table, sequences;
    const int32_t* first_head;  // [kv heads + 1]: the query heads of each kv head, which need not be equally many
    int64_t widest;             // the most of them
    float scale;
    int64_t window;
    float cap;

    int64_t group(int64_t head) const { return first_head[head + 1] - first_head[head]; }
    int64_t queries_per_tile() const { return widest >= kRows ? 1 : kRows / widest; }
};

// Some queries of one sequence and one kv head, and the chunks of keys they can see.
struct Tile {
    int64_t sequence, head, first_query, queries, first_position;
    int64_t first_key, end_key;  // keys visible to any query of the tile
    int64_t first_chunk, chunks;
};

struct Buffers {
    alignas(64) bf16 q[kMaxRows * kMaxDim];
    alignas(64) float scores[kMaxRows * kChunk];
    alignas(64) bf16 weights[kMaxRows * kChunk];
    alignas(64) float part[kMaxRows * kMaxDim];
    alignas(64) float total[kMaxRows * kMaxDim];
    alignas(64) bf16 last_values[ff::kSubBlock * kMaxDim];
    float part_max[kMaxRows], part_sum[kMaxRows], max[kMaxRows], sum[kMaxRows];
};

int64_t tiles_of(const Job& job, int64_t s) {
    const int64_t queries = job.starts[s + 1] - job.starts[s], step = job.queries_per_tile();
    return (queries + step - 1) / step;
}

Tile make_tile(const Job& job, int64_t s, int64_t index, int64_t head) {
    const int64_t queries = job.starts[s + 1] - job.starts[s], step = job.queries_per_tile();
    const int64_t context = job.lengths[s] - queries;
    Tile t{};
    t.sequence = s;
    t.head = head;
    const int64_t local = index * step;
    t.first_query = job.starts[s] + local;
    t.queries = queries - local < step ? queries - local : step;
    t.first_position = context + local;
    t.end_key = t.first_position + t.queries;
    if (t.end_key < 0) t.end_key = 0;
    t.first_key = job.window > 0 && t.first_position >= job.window ? t.first_position - job.window + 1 : 0;
    t.first_chunk = t.first_key / kChunk;
    t.chunks = t.end_key > 0 ? (t.end_key + kChunk - 1) / kChunk - t.first_chunk : 0;
    return t;
}

inline void fetch(const bf16* p, int64_t elements) {
    for (int64_t i = 0; i < elements; i += 32) _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T1);
}

// MR rows of q against four sub-blocks of keys. `ahead`, if not null: four sub-blocks that are fetched on the way,
// a line a step, since a burst of fetches would stall the arithmetic behind it.
template <int MR>
void score_rows(const bf16* q, int64_t dim, const bf16* const* keys, const bf16* const* ahead, float* out) {
    __m512 acc[MR][4];
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) acc[r][n] = _mm512_setzero_ps();
    const bf16 *k0 = keys[0], *k1 = keys[1], *k2 = keys[2], *k3 = keys[3];
    for (int64_t d = 0; d < dim; d += 2) {
        const int64_t at = d * ff::kSubBlock;
        const __m512i k[4] = {ff::load(k0 + at), ff::load(k1 + at), ff::load(k2 + at), ff::load(k3 + at)};
        if (ahead)
            for (int n = 0; n < 4; ++n) fetch(ahead[n] + at, 32);
#pragma GCC unroll 6
        for (int r = 0; r < MR; ++r) {
            const __m512i a = ff::pair(q + r * dim + d);
#pragma GCC unroll 4
            for (int n = 0; n < 4; ++n) acc[r][n] = ff::dot(acc[r][n], k[n], a);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) _mm512_store_ps(out + r * kChunk + n * 16, acc[r][n]);
}

// `ahead`: for each sub-block one of the next chunk, fetched on the way; null for none.
template <int MR, int NV>
inline void weigh_rows(const bf16* p, const bf16* const* values, const bf16* const* ahead, int64_t subs, int64_t dim,
                       float* out) {
    __m512 acc[MR][NV];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < NV; ++n) acc[r][n] = _mm512_setzero_ps();
    for (int64_t j = 0; j < subs; ++j) {
        const bf16* v = values[j];
        for (int i = 0; i < 8; ++i, v += 2 * dim, p += 2) {
            if (ahead) fetch(ahead[j] + i * 2 * dim, 2 * dim);
            __m512i b[NV];
#pragma GCC unroll 4
            for (int n = 0; n < NV; ++n) b[n] = ff::load(v + n * 32);
#pragma GCC unroll 8
            for (int r = 0; r < MR; ++r) {
                const __m512i a = ff::pair(p + r * kChunk);
#pragma GCC unroll 4
                for (int n = 0; n < NV; ++n) acc[r][n] = ff::dot(acc[r][n], b[n], a);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < NV; ++n) _mm512_store_ps(out + r * dim + n * 16, acc[r][n]);
}

template <int MR>
void weigh_all_dims(const bf16* p, const bf16* const* values, const bf16* const* ahead, int64_t subs, int64_t dim,
                    float* out) {
    const bf16* at[kSubs];
    for (int64_t d = 0; d < dim; ahead = nullptr) {
        for (int64_t j = 0; j < subs; ++j) at[j] = values[j] + 2 * d;
        if (dim - d >= 64) weigh_rows<MR, 4>(p, at, ahead, subs, dim, out + d), d += 64;
        else if (dim - d >= 32) weigh_rows<MR, 2>(p, at, ahead, subs, dim, out + d), d += 32;
        else weigh_rows<MR, 1>(p, at, ahead, subs, dim, out + d), d += 16;
    }
}

// Scores of one row over the sub-blocks [from, to) of the chunk that starts at key `base`, to weights.
void softmax_row(const Job& job, Buffers& b, int64_t row, int64_t position, int64_t base, int64_t from, int64_t to) {
    float* scores = b.scores + row * kChunk;
    const int64_t low = job.window > 0 ? position - job.window + 1 - base : 0;
    const int64_t high = position + 1 - base;  // visible columns: low <= column < high
    __m512 top = set1(kMinusInfinity);
    for (int64_t j = from; j < to; ++j) {
        const int64_t column = j * ff::kSubBlock;
        __m512 v = _mm512_mul_ps(_mm512_load_ps(scores + column), set1(job.scale));
        if (job.cap > 0) v = _mm512_mul_ps(set1(job.cap), ff::tanh_ps(_mm512_mul_ps(v, set1(1.0f / job.cap))));
        __mmask16 visible = ff::tail_mask(high - column);
        if (low > column) visible &= __mmask16(~ff::tail_mask(low - column));
        v = _mm512_mask_mov_ps(set1(kMinusInfinity), visible, v);
        _mm512_store_ps(scores + column, v);
        top = _mm512_max_ps(top, v);
    }
    const float max = _mm512_reduce_max_ps(top);
    const __m512 shift = set1(max == kMinusInfinity ? 0.0f : max);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = from; j < to; ++j) {
        const __m512 p = ff::exp_ps(_mm512_sub_ps(_mm512_load_ps(scores + j * ff::kSubBlock), shift));
        sum = _mm512_add_ps(sum, p);
        ff::store_bf16(b.weights + row * kChunk + j * ff::kSubBlock, p);
    }
    b.part_max[row] = max;
    b.part_sum[row] = ff::sum_lanes(sum);
}

void copy_queries(const Job& job, const Tile& t, Buffers& b) {
    const int64_t group = job.group(t.head), dim = job.cache.dim;
    for (int64_t i = 0; i < t.queries; ++i)
        __builtin_memcpy(b.q + i * group * dim, job.q + (t.first_query + i) * job.ldq + job.first_head[t.head] * dim,
                         size_t(group * dim) * 2);
}

// The sub-blocks [from, to) of a chunk that a tile can see, and where they lie.
struct Chunk {
    int64_t base, from, to, end;
    const bf16 *keys[kSubs], *values[kSubs];
};

Chunk locate(const Job& job, const Tile& t, int64_t chunk) {
    Chunk c;
    c.base = chunk * kChunk;
    c.from = t.first_key > c.base ? (t.first_key - c.base) / ff::kSubBlock : 0;
    c.end = t.end_key - c.base < kChunk ? t.end_key - c.base : kChunk;
    c.to = (c.end + ff::kSubBlock - 1) / ff::kSubBlock;
    for (int64_t j = c.from; j < c.to; ++j) {
        const int64_t key = c.base + j * ff::kSubBlock;
        const int64_t block = job.table[t.sequence * job.ld_table + key / job.cache.block_size];
        c.keys[j] = job.cache.sub_block(block, t.head, false, key % job.cache.block_size);
        c.values[j] = job.cache.sub_block(block, t.head, true, key % job.cache.block_size);
    }
    return c;
}

// part, part_max and part_sum of all rows of the tile over one chunk. The queries lie in b.q. The keys of the
// chunk `next`, if any, are fetched meanwhile.
void chunk_part(const Job& job, const Tile& t, const Chunk& c, const Chunk* next, Buffers& b) {
    const int64_t dim = job.cache.dim, group = job.group(t.head);
    const int64_t rows = t.queries * group, from = c.from, to = c.to;
    // Places of the four-wide groups that no sub-block fills repeat a neighbour; nobody reads their scores.
    const bf16 *keys[kSubs], *values[kSubs], *ahead[kSubs];
    for (int64_t j = 0; j < kSubs; ++j) {
        const int64_t filled = j < from ? from : j >= to ? to - 1 : j;
        keys[j] = c.keys[filled];
        values[j] = c.values[filled];
        ahead[j] = next && j >= next->from && j < next->to ? next->keys[j] : keys[j];
    }
    for (int64_t j = from / 4 * 4; j < to; j += 4) {
        const bf16* q = b.q;
        const bf16* const* fetching = values + j;
        float* out = b.scores + j * ff::kSubBlock;
        for (int64_t r = 0; r < rows;) {
            const int64_t left = rows - r;
            const auto step = [&](int64_t n) { r += n, q += n * dim, out += n * kChunk, fetching = nullptr; };
            if (left >= 6) score_rows<6>(q, dim, keys + j, fetching, out), step(6);
            else if (left >= 4) score_rows<4>(q, dim, keys + j, fetching, out), step(4);
            else if (left == 3) score_rows<3>(q, dim, keys + j, fetching, out), step(3);
            else if (left == 2) score_rows<2>(q, dim, keys + j, fetching, out), step(2);
            else score_rows<1>(q, dim, keys + j, fetching, out), step(1);
        }
    }
    if (const int64_t valid = c.end % ff::kSubBlock) {
        // Slots past the last key may hold anything, and 0 * NaN would spread: use a cleaned copy.
        const bf16* source = values[to - 1];
        for (int64_t i = 0; i < 8; ++i) {
            const __mmask32 mask = valid >= 2 * i + 2 ? 0xffffffffu : valid == 2 * i + 1 ? 0x55555555u : 0u;
            for (int64_t d = 0; d < dim * 2; d += 32)
                _mm512_store_si512(b.last_values + i * dim * 2 + d, _mm512_maskz_loadu_epi16(mask, source + i * dim * 2 + d));
        }
        values[to - 1] = b.last_values;
    }
    for (int64_t r = 0; r < rows; ++r) softmax_row(job, b, r, t.first_position + r / group, c.base, from, to);
    const bf16* p = b.weights + from * ff::kSubBlock;
    const bf16* const* fetching = next ? ahead + from : nullptr;
    float* out = b.part;
    for (int64_t r = 0; r < rows;) {
        const int64_t left = rows - r;
        const auto step = [&](int64_t n) { r += n, p += n * kChunk, out += n * dim, fetching = nullptr; };
        if (left >= 6) weigh_all_dims<6>(p, values + from, fetching, to - from, dim, out), step(6);
        else if (left >= 4) weigh_all_dims<4>(p, values + from, fetching, to - from, dim, out), step(4);
        else if (left == 3) weigh_all_dims<3>(p, values + from, fetching, to - from, dim, out), step(3);
        else if (left == 2) weigh_all_dims<2>(p, values + from, fetching, to - from, dim, out), step(2);
        else weigh_all_dims<1>(p, values + from, fetching, to - from, dim, out), step(1);
    }
}

// The only place where chunks meet: total <- total and part, both scaled to the larger maximum.
void merge_row(float* total, float& max, float& sum, const float* part, float part_max, float part_sum, int64_t dim) {
    if (part_max == kMinusInfinity) return;
    const float top = max > part_max ? max : part_max;
    alignas(64) float factors[16];
    const __m512 from = _mm512_mask_mov_ps(set1(part_max), 1, set1(max));
    _mm512_store_ps(factors, ff::exp_ps(_mm512_sub_ps(from, set1(top))));
    const __m512 a = set1(factors[0]), c = set1(factors[1]);
    for (int64_t d = 0; d < dim; d += 16)
        _mm512_storeu_ps(total + d, _mm512_fmadd_ps(_mm512_loadu_ps(total + d), a,
                                                    _mm512_mul_ps(_mm512_loadu_ps(part + d), c)));
    sum = sum * factors[0] + part_sum * factors[1];
    max = top;
}

void write_row(const Job& job, const Tile& t, int64_t row, const float* total, float sum) {
    const int64_t group = job.group(t.head), dim = job.cache.dim;
    const __m512 factor = set1(sum > 0 ? 1.0f / sum : 0.0f);
    bf16* out = job.out + (t.first_query + row / group) * job.ldo + (job.first_head[t.head] + row % group) * dim;
    for (int64_t d = 0; d < dim; d += 16) ff::store_bf16(out + d, _mm512_mul_ps(_mm512_loadu_ps(total + d), factor));
}

void clear_totals(Buffers& b, int64_t rows, int64_t dim) {
    __builtin_memset(b.total, 0, size_t(rows * dim) * sizeof(float));
    for (int64_t r = 0; r < rows; ++r) b.max[r] = kMinusInfinity, b.sum[r] = 0;
}

// One piece of work: a tile with all its chunks, or with one of them.
struct Unit {
    Tile tile;
    int64_t number, chunk, chunks;
};

// Finds units by rising number. A unit is a tile of one kv head, or each of its chunks where `split`.
class Cursor {
public:
    Cursor(const Job& job, bool split) : job_(job), split_(split) {}

    bool seek(int64_t number, Unit& unit) {
        for (; sequence_ < job_.sequences; ++sequence_, index_ = 0)
            for (const int64_t count = tiles_of(job_, sequence_); index_ < count; ++index_) {
                Tile tile = make_tile(job_, sequence_, index_, 0);
                const int64_t each = split_ ? tile.chunks : 1, all = each * job_.cache.heads;
                if (number < before_ + all) {
                    tile.head = (number - before_) / each;
                    const int64_t part = (number - before_) % each;
                    unit = {tile, number, tile.first_chunk + (split_ ? part : 0), split_ ? 1 : tile.chunks};
                    return true;
                }
                before_ += all;
            }
        return false;
    }

private:
    const Job& job_;
    const bool split_;
    int64_t sequence_ = 0, index_ = 0, before_ = 0;
};

// Visits this thread's share of the units, telling each visit the one after it (null for the last).
template <class Visit>
void walk(ff::Member& member, const Job& job, bool split, Visit visit) {
    Cursor cursor(job, split);
    Unit now, next;
    for (bool some = cursor.seek(member.take(), now); some;) {
        some = cursor.seek(member.take(), next);
        visit(now, some ? &next : nullptr);
        now = next;
    }
}

// Runs the chunks of a unit; done(c) is called with the parts of each in place.
template <class Done>
void each_chunk(const Job& job, const Unit& unit, const Unit* after, Buffers& b, Done done) {
    copy_queries(job, unit.tile, b);
    Chunk now{}, next{};
    if (unit.chunks) now = locate(job, unit.tile, unit.chunk);
    for (int64_t c = 0; c < unit.chunks; ++c) {
        const bool inside = c + 1 < unit.chunks, outside = !inside && after && after->chunks;
        if (inside) next = locate(job, unit.tile, unit.chunk + c + 1);
        else if (outside) next = locate(job, after->tile, after->chunk);
        chunk_part(job, unit.tile, now, inside || outside ? &next : nullptr, b);
        done(c);
        now = next;
    }
}

}  // namespace

// q, row stride, cache, block size, Hkv, D, out, row stride, query starts int32[S+1], sequence lengths int32[S],
// block table int32, its row stride, S, first query head of each kv head int32[Hkv+1], most query heads of one, scale, window (0: none), soft-cap (0: none)
FF_KERNEL(attention, INT64_MAX) {
    const Job job{ff::ptr<bf16>(a[0]), a[1].integer,
                  {ff::ptr<bf16>(a[2]), a[4].integer, a[5].integer, a[3].integer},
                  ff::ptr<bf16>(a[6]), a[7].integer, ff::ptr<int32_t>(a[8]), ff::ptr<int32_t>(a[9]),
                  ff::ptr<int32_t>(a[10]), a[11].integer, a[12].integer, ff::ptr<int32_t>(a[13]), a[14].integer,
                  float(a[15].real), a[16].integer, float(a[17].real)};
    Buffers& b = *reinterpret_cast<Buffers*>(ff::thread_buffer<Buffers>(sizeof(Buffers)));
    const int64_t dim = job.cache.dim, heads = job.cache.heads, most = job.queries_per_tile() * job.widest;
    const int64_t enough = 4 * member.size, record = most * (dim + 2);
    int64_t tiles = 0, parts = 0;
    for (int64_t s = 0; s < job.sequences && tiles * heads < enough; ++s)
        for (int64_t index = 0, count = tiles_of(job, s); index < count; ++index, ++tiles)
            parts += make_tile(job, s, index, 0).chunks;
    // Few tiles: spread their chunks over the threads and merge afterwards.
    const bool split = member.size > 1 && tiles * heads < enough && parts > tiles &&
                       size_t(parts * heads * record) * sizeof(float) <= ff::kSharedScratchBytes;
    float* records = member.shared<float>();
    walk(member, job, split, [&](const Unit& unit, const Unit* after) {
        const Tile& t = unit.tile;
        const int64_t rows = t.queries * job.group(t.head);
        if (split) {
            each_chunk(job, unit, after, b, [&](int64_t) {
                float* to = records + unit.number * record;
                __builtin_memcpy(to, b.part_max, size_t(rows) * sizeof(float));
                __builtin_memcpy(to + most, b.part_sum, size_t(rows) * sizeof(float));
                __builtin_memcpy(to + 2 * most, b.part, size_t(rows * dim) * sizeof(float));
            });
            return;
        }
        clear_totals(b, rows, dim);
        each_chunk(job, unit, after, b, [&](int64_t) {
            for (int64_t r = 0; r < rows; ++r)
                merge_row(b.total + r * dim, b.max[r], b.sum[r], b.part + r * dim, b.part_max[r], b.part_sum[r], dim);
        });
        for (int64_t r = 0; r < rows; ++r) write_row(job, t, r, b.total + r * dim, b.sum[r]);
    });
    if (!split) return;
    member.barrier();
    walk(member, job, false, [&](const Unit& unit, const Unit*) {
        const Tile& t = unit.tile;
        const int64_t rows = t.queries * job.group(t.head);
        int64_t first = t.head * t.chunks;  // records of the tiles ahead of this one, then of its earlier heads
        for (int64_t s = 0; s <= t.sequence; ++s)
            for (int64_t index = 0, count = tiles_of(job, s); index < count; ++index) {
                const Tile other = make_tile(job, s, index, 0);
                if (other.first_query >= t.first_query) break;
                first += other.chunks * heads;
            }
        clear_totals(b, rows, dim);
        for (int64_t c = 0; c < t.chunks; ++c) {
            const float* from = records + (first + c) * record;
            for (int64_t r = 0; r < rows; ++r)
                merge_row(b.total + r * dim, b.max[r], b.sum[r], from + 2 * most + r * dim, from[r], from[most + r], dim);
        }
        for (int64_t r = 0; r < rows; ++r) write_row(job, t, r, b.total + r * dim, b.sum[r]);
    });
}
