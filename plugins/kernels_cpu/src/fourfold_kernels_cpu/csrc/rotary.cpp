// Rotary embedding of q and k in place (rotate-half), fused with writing k and v into the paged cache.
#include "abi.h"
#include "cache.h"

namespace {

using ff::bf16;

inline void rotate(bf16* x, const float* cosine, const float* sine, int64_t half) {
    for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 mask = ff::tail_mask(half - i);
        const __m512 a = ff::load_bf16(x + i, mask), b = ff::load_bf16(x + half + i, mask);
        const __m512 c = _mm512_maskz_loadu_ps(mask, cosine + i), s = _mm512_maskz_loadu_ps(mask, sine + i);
        ff::store_bf16(x + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)), mask);
        ff::store_bf16(x + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)), mask);
    }
}

inline void write_key(const ff::Cache& cache, int64_t slot, int64_t head, const bf16* k) {
    const int64_t offset = slot % cache.block_size;
    bf16* out = cache.sub_block(slot / cache.block_size, head, false, offset) + offset % ff::kSubBlock * 2;
    const __m512i lanes = _mm512_slli_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 4);
    for (int64_t d = 0; d < cache.dim; d += 32) {
        const int64_t left = (cache.dim - d) / 2;
        const __mmask16 mask = ff::tail_mask(left);
        const __m512i v = _mm512_maskz_loadu_epi32(mask, k + d);
        _mm512_mask_i32scatter_epi32(out + d * ff::kSubBlock, mask, lanes, v, 4);
    }
}

inline void write_value(const ff::Cache& cache, int64_t slot, int64_t head, const bf16* v) {
    const int64_t offset = slot % cache.block_size, token = offset % ff::kSubBlock;
    bf16* out = cache.sub_block(slot / cache.block_size, head, true, offset) + token / 2 * cache.dim * 2;
    // Only this token's half of each pair is stored: another thread may own its neighbour.
    const __mmask32 mask = token & 1 ? 0xaaaaaaaau : 0x55555555u;
    const unsigned shift = token & 1 ? 16 : 0;
    for (int64_t d = 0; d < cache.dim; d += 16) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + d)));
        _mm512_mask_storeu_epi16(out + d * 2, mask, _mm512_slli_epi32(wide, shift));
    }
}

}  // namespace

// qkv row [(Hq + 2 Hkv) D], row stride, T, Hq, Hkv, D, rotary dim (0: none), cos, sin (fp32 rows),
// their row stride, positions int64[T], cache, block size, slots int64[T] (-1: do not write)
FF_KERNEL(rope_and_cache, a[2].integer * (a[3].integer + 2 * a[4].integer) * a[5].integer / 8192 + 1) {
    bf16* qkv = ff::ptr<bf16>(a[0]);
    const int64_t ld = a[1].integer, tokens = a[2].integer, query_heads = a[3].integer, half = a[6].integer / 2;
    const ff::Cache cache{ff::ptr<bf16>(a[11]), a[4].integer, a[5].integer, a[12].integer};
    const int64_t* positions = ff::ptr<int64_t>(a[10]);
    const int64_t* slots = ff::ptr<int64_t>(a[13]);
    for (int64_t t = member.take(); t < tokens; t = member.take()) {
        bf16* row = qkv + t * ld;
        bf16* keys = row + query_heads * cache.dim;
        const bf16* values = keys + cache.heads * cache.dim;
        if (half) {
            const float* cosine = ff::ptr<float>(a[7]) + positions[t] * a[9].integer;
            const float* sine = ff::ptr<float>(a[8]) + positions[t] * a[9].integer;
            for (int64_t h = 0; h < query_heads + cache.heads; ++h) rotate(row + h * cache.dim, cosine, sine, half);
        }
        if (slots && slots[t] >= 0)
            for (int64_t h = 0; h < cache.heads; ++h) {
                write_key(cache, slots[t], h, keys + h * cache.dim);
                write_value(cache, slots[t], h, values + h * cache.dim);
            }
    }
}
