// Over rows of fp32 logits: argmax (first index on ties), Gumbel-max sampling with Philox4x32-10, log-sum-exp.
// Rows are cut in chunks of fixed width, reduced in order, so results do not depend on threads.
#include "abi.h"
#include "simd.h"

namespace {

using ff::set1;

constexpr int64_t kWidth = 8192;
const float kMinusInfinity = -__builtin_inff();

struct Best {
    float value;
    int32_t index;
};

struct Running {
    __m512 value = set1(kMinusInfinity);
    __m512i index = _mm512_set1_epi32(INT32_MAX);
    void offer(__m512 v, __m512i at) {
        const __mmask16 better = _mm512_cmp_ps_mask(v, value, _CMP_GT_OQ);
        value = _mm512_mask_mov_ps(value, better, v);
        index = _mm512_mask_mov_epi32(index, better, at);
    }
    Best best() const {
        const float top = _mm512_reduce_max_ps(value);
        const __mmask16 ties = _mm512_cmp_ps_mask(value, set1(top), _CMP_EQ_OQ);
        return {top, _mm512_mask_reduce_min_epi32(ties, index)};
    }
};

inline __m512i iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline __m512 load_logits(const float* p, int64_t left) {
    return _mm512_mask_loadu_ps(set1(kMinusInfinity), ff::tail_mask(left), p);
}

Best argmax_range(const float* logits, int64_t from, int64_t to) {
    Running running;
    for (int64_t i = from; i < to; i += 16)
        running.offer(load_logits(logits + i, to - i), _mm512_add_epi32(iota(), _mm512_set1_epi32(int(i))));
    return running.best();
}

struct Words {
    __m512i w[4];
};

inline void multiply(__m512i x, uint32_t by, __m512i& high, __m512i& low) {
    const __m512i m = _mm512_set1_epi64(by);
    const __m512i even = _mm512_mul_epu32(x, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), m);
    high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
    low = _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
}

// 64 words of 16 consecutive counters, in order: w[i] holds words 16i..16i+15.
inline Words philox(uint32_t counter, uint32_t position, uint64_t seed) {
    // The 4x4 transpose below works within 128-bit lanes, so lane l, place j takes counter 4j + l.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i c0 = _mm512_add_epi32(_mm512_set1_epi32(int(counter)), order);
    __m512i c1 = _mm512_set1_epi32(int(position)), c2 = _mm512_setzero_si512(), c3 = c2;
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        __m512i high0, low0, high1, low1;
        multiply(c0, 0xD2511F53u, high0, low0);
        multiply(c2, 0xCD9E8D57u, high1, low1);
        c0 = _mm512_ternarylogic_epi32(high1, c1, _mm512_set1_epi32(int(k0)), 0x96);
        c2 = _mm512_ternarylogic_epi32(high0, c3, _mm512_set1_epi32(int(k1)), 0x96);
        c1 = low1;
        c3 = low0;
    }
    const __m512i a = _mm512_unpacklo_epi32(c0, c1), b = _mm512_unpacklo_epi32(c2, c3);
    const __m512i c = _mm512_unpackhi_epi32(c0, c1), d = _mm512_unpackhi_epi32(c2, c3);
    return {{_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b), _mm512_unpacklo_epi64(c, d),
             _mm512_unpackhi_epi64(c, d)}};
}

// -log(-log(u)), u = (word + 0.5) / 2^32. Above one half it works with 1 - u, which is exact in fp32's range.
inline __m512 gumbel(__m512i word) {
    const __mmask16 upper = _mm512_movepi32_mask(word);
    const __m512i folded = _mm512_mask_xor_epi32(word, upper, word, _mm512_set1_epi32(-1));
    const __m512 f = _mm512_mul_ps(_mm512_add_ps(_mm512_cvtepu32_ps(folded), set1(0.5f)), set1(0x1p-32f));
    const __m512 w = _mm512_sub_ps(set1(1.0f), f);
    // log1p(-f) = log(w) + (rounding of w) / w
    const __m512 lost = _mm512_sub_ps(_mm512_sub_ps(set1(1.0f), w), f);
    const __m512 argument = _mm512_mask_mov_ps(f, upper, w);
    __m512 log_u = ff::log_ps(argument);
    log_u = _mm512_mask_add_ps(log_u, upper, log_u, _mm512_mul_ps(lost, ff::reciprocal(w)));
    return _mm512_sub_ps(_mm512_setzero_ps(), ff::log_ps(_mm512_sub_ps(_mm512_setzero_ps(), log_u)));
}

Best gumbel_range(const float* logits, int64_t from, int64_t to, float scale, uint64_t seed, uint32_t position) {
    Running running;
    const __m512 factor = set1(scale);
    for (int64_t i = from; i < to; i += 64) {
        const Words words = philox(uint32_t(i / 4), position, seed);
        for (int part = 0; part < 4; ++part) {
            const int64_t at = i + part * 16;
            if (at >= to) break;
            // Two roundings, as in the torch twin.
            const __m512 scaled = _mm512_mul_ps(load_logits(logits + at, to - at), factor);
            const __m512 v = _mm512_add_ps(scaled, gumbel(words.w[part]));
            running.offer(v, _mm512_add_epi32(iota(), _mm512_set1_epi32(int(at))));
        }
    }
    return running.best();
}

template <class Range>
void choose(ff::Member& member, int64_t* out, int64_t rows, int64_t width, Range range) {
    int64_t step = kWidth;
    while (size_t(rows * ((width + step - 1) / step)) * sizeof(Best) > ff::kSharedScratchBytes) step *= 2;
    const int64_t chunks = (width + step - 1) / step;
    Best* found = member.shared<Best>();
    for (int64_t unit = member.take(); unit < rows * chunks; unit = member.take()) {
        const int64_t from = unit % chunks * step;
        found[unit] = range(unit / chunks, from, from + step < width ? from + step : width);
    }
    member.barrier();
    for (int64_t row = member.take(64); row < rows; row = member.take(64))
        for (int64_t i = row; i < rows && i < row + 64; ++i) {
            Best best = found[i * chunks];
            for (int64_t c = 1; c < chunks; ++c)
                if (found[i * chunks + c].value > best.value) best = found[i * chunks + c];
            out[i] = best.index == INT32_MAX ? 0 : best.index;
        }
}

}  // namespace

// out int64[rows], logits, row stride, rows, width
FF_KERNEL(argmax, a[3].integer * ((a[4].integer + kWidth - 1) / kWidth)) {
    const float* logits = ff::ptr<float>(a[1]);
    const int64_t ld = a[2].integer;
    choose(member, ff::ptr<int64_t>(a[0]), a[3].integer, a[4].integer,
           [=](int64_t row, int64_t from, int64_t to) { return argmax_range(logits + row * ld, from, to); });
}

// out int64[rows], logits, row stride, rows, width, inverse temperatures fp32 (0: greedy), seeds int64, positions int64
FF_KERNEL(gumbel_argmax, a[3].integer * ((a[4].integer + kWidth - 1) / kWidth)) {
    const float* logits = ff::ptr<float>(a[1]);
    const float* scales = ff::ptr<float>(a[5]);
    const int64_t ld = a[2].integer;
    const int64_t *seeds = ff::ptr<int64_t>(a[6]), *positions = ff::ptr<int64_t>(a[7]);
    choose(member, ff::ptr<int64_t>(a[0]), a[3].integer, a[4].integer, [=](int64_t row, int64_t from, int64_t to) {
        if (scales[row] <= 0) return argmax_range(logits + row * ld, from, to);
        return gumbel_range(logits + row * ld, from, to, scales[row], uint64_t(seeds[row]), uint32_t(positions[row]));
    });
}

// out fp32[rows] = log(sum(exp(row))), logits, row stride, rows, width
FF_KERNEL(logsumexp, a[3].integer) {
    float* out = ff::ptr<float>(a[0]);
    const int64_t ld = a[2].integer, width = a[4].integer;
    for (int64_t row = member.take(); row < a[3].integer; row = member.take()) {
        const float* x = ff::ptr<float>(a[1]) + row * ld;
        __m512 top = set1(kMinusInfinity);
        for (int64_t i = 0; i < width; i += 16) top = _mm512_max_ps(top, load_logits(x + i, width - i));
        const float max = _mm512_reduce_max_ps(top);
        double total = 0;
        for (int64_t from = 0; from < width; from += kWidth) {
            const int64_t to = from + kWidth < width ? from + kWidth : width;
            __m512 sum = _mm512_setzero_ps();
            for (int64_t i = from; i < to; i += 16)
                sum = _mm512_add_ps(sum, ff::exp_ps(_mm512_sub_ps(load_logits(x + i, to - i), set1(max))));
            total += ff::sum_lanes(sum);
        }
        out[row] = max == kMinusInfinity ? max : max + float(__builtin_log(total));
    }
}
