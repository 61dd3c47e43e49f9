// Into and out of the packed weight layout: rows of a dense matrix in, embedding rows out.
#include "abi.h"
#include "simd.h"

namespace {

using ff::bf16;

enum Source : int64_t { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

// 32 elements as 16 bf16 pairs; elements at and beyond `left` are zero.
inline __m512i pairs_of(const char* p, int64_t source, int64_t left) {
    const __mmask16 low = ff::tail_mask(left), high = ff::tail_mask(left - 16);
    if (source == kBf16)
        return _mm512_maskz_loadu_epi16(__mmask32(low) | (__mmask32(high) << 16), p);
    __m512 a, b;
    if (source == kFp32) {
        a = _mm512_maskz_loadu_ps(low, p);
        b = _mm512_maskz_loadu_ps(high, p + 64);
    } else {
        a = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(low, p));
        b = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(high, p + 32));
    }
    return (__m512i)_mm512_cvtne2ps_pbh(b, a);
}

inline void transpose16(__m512i* v) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        v[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        v[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        v[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        v[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    // v[4g + c] now holds, in lane l, column 4l + c of rows 4g..4g+3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const __m512i ab = _mm512_shuffle_i32x4(v[c], v[4 + c], 0x88), cd = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0x88);
        const __m512i AB = _mm512_shuffle_i32x4(v[c], v[4 + c], 0xdd), CD = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0xdd);
        t[c] = _mm512_shuffle_i32x4(ab, cd, 0x88);
        t[8 + c] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
        t[4 + c] = _mm512_shuffle_i32x4(AB, CD, 0x88);
        t[12 + c] = _mm512_shuffle_i32x4(AB, CD, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) v[i] = t[i];
}

}  // namespace

// packed, first row, source, source row stride in bytes, rows, K, source kind
FF_KERNEL(pack, (a[4].integer + 15) / 16) {
    uint32_t* packed = ff::ptr<uint32_t>(a[0]);
    const char* source = ff::ptr<char>(a[2]);
    const int64_t first = a[1].integer, stride = a[3].integer, rows = a[4].integer, depth = a[5].integer;
    const int64_t kind = a[6].integer, pairs = (depth + 1) / 2, width = kind == kFp32 ? 4 : 2;
    // Groups of 16 packed rows; the first and the last may be covered in part.
    const int64_t group0 = first / 16, groups = (first + rows + 15) / 16 - group0;
    for (int64_t g = member.take(); g < groups; g = member.take()) {
        const int64_t base = (group0 + g) * 16;
        __mmask16 present = 0;
        for (int i = 0; i < 16; ++i)
            if (base + i >= first && base + i < first + rows) present |= __mmask16(1u << i);
        uint32_t* out = packed + (base / 32) * pairs * 32 + base % 32;
        for (int64_t k = 0; k < pairs; k += 16) {
            __m512i v[16];
            for (int i = 0; i < 16; ++i) {
                v[i] = _mm512_setzero_si512();
                if (present >> i & 1)
                    v[i] = pairs_of(source + (base + i - first) * stride + 2 * k * width, kind, depth - 2 * k);
            }
            transpose16(v);
            const int64_t count = pairs - k < 16 ? pairs - k : 16;
            if (present == 0xffff)
                for (int64_t i = 0; i < count; ++i) _mm512_storeu_si512(out + (k + i) * 32, v[i]);
            else
                for (int64_t i = 0; i < count; ++i) _mm512_mask_storeu_epi32(out + (k + i) * 32, present, v[i]);
        }
    }
}

// out, out row stride, ids int64, T, packed, rows of the table, K, id of its first row, scale
// Ids outside the table give zero rows.
FF_KERNEL(embedding, a[3].integer / 8 + 1) {
    bf16* out = ff::ptr<bf16>(a[0]);
    const int64_t stride = a[1].integer, tokens = a[3].integer, table = a[5].integer, depth = a[6].integer;
    const int64_t* ids = ff::ptr<int64_t>(a[2]);
    const int32_t* packed = ff::ptr<int32_t>(a[4]);
    const int64_t pairs = (depth + 1) / 2;
    const __m512 scale = ff::set1(float(a[8].real));
    const bool scaled = a[8].real != 1.0;
    const __m512i lanes = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(32));
    for (int64_t t = member.take(); t < tokens; t = member.take()) {
        const int64_t id = ids[t] - a[7].integer;
        const bool inside = id >= 0 && id < table;
        const int32_t* row = packed + (inside ? (id / 32) * pairs * 32 + id % 32 : 0);
        for (int64_t k = 0; k < pairs; k += 16) {
            const int64_t left = depth - 2 * k;
            const __mmask16 live = inside ? ff::tail_mask(pairs - k) : __mmask16(0);
            __m512i v = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), live, lanes, row + k * 32, 4);
            if (scaled) {
                const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
                const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(int(0xffff0000))));
                const __m512i e = _mm512_cvtepu16_epi32(ff::to_bf16(_mm512_mul_ps(even, scale)));
                const __m512i o = _mm512_cvtepu16_epi32(ff::to_bf16(_mm512_mul_ps(odd, scale)));
                v = _mm512_or_si512(e, _mm512_slli_epi32(o, 16));
            }
            bf16* to = out + t * stride + 2 * k;
            if (left >= 32) _mm512_storeu_si512(to, v);
            else _mm512_mask_storeu_epi16(to, __mmask32((uint32_t(1) << left) - 1), v);
        }
    }
}
