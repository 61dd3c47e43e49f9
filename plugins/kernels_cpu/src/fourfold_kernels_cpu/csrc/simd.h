// AVX-512 pieces: bf16 conversion, exp, log, tanh, horizontal sums with a fixed order.
// Polynomials are own least-squares fits on the reduced interval, relative error below 2e-7.
#pragma once
#include <immintrin.h>
#include <cstdint>

namespace ff {

using bf16 = uint16_t;

inline __m512 load_bf16(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
inline __m512 load_bf16(const bf16* p, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
}
inline __m256i to_bf16(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }
inline __m512 from_bf16(__m256i v) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}
inline void store_bf16(bf16* p, __m512 v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(v)); }
// Masked stores are many times slower than plain ones on Zen 4, so only a true tail takes one.
inline void store_bf16(bf16* p, __m512 v, __mmask16 mask) {
    if (mask == 0xffff) store_bf16(p, v);
    else _mm256_mask_storeu_epi16(p, mask, to_bf16(v));
}
inline void store_fp32(float* p, __m512 v, __mmask16 mask) {
    if (mask == 0xffff) _mm512_storeu_ps(p, v);
    else _mm512_mask_storeu_ps(p, mask, v);
}
inline __mmask16 tail_mask(int64_t left) {
    return left >= 16 ? __mmask16(0xffff) : left <= 0 ? __mmask16(0) : __mmask16((1u << left) - 1);
}
inline __m512 set1(float v) { return _mm512_set1_ps(v); }

inline __m512 exp_ps(__m512 x) {
    // Below -87.3 the result is flushed to zero, -inf included; above 88.7 it is inf.
    const __mmask16 alive = _mm512_cmp_ps_mask(x, set1(-87.3f), _CMP_GE_OQ);
    x = _mm512_min_ps(x, set1(89.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, set1(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, set1(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, set1(-2.12194440e-4f), r);
    __m512 q = set1(0.00139505f);
    q = _mm512_fmadd_ps(q, r, set1(0.00836889f));
    q = _mm512_fmadd_ps(q, r, set1(0.04166621f));
    q = _mm512_fmadd_ps(q, r, set1(0.16666519f));
    q = _mm512_fmadd_ps(q, r, set1(0.50000001f));
    const __m512 y = _mm512_add_ps(_mm512_fmadd_ps(q, _mm512_mul_ps(r, r), r), set1(1.0f));
    return _mm512_maskz_scalef_ps(alive, y, n);
}

// log of finite positive x.
inline __m512 log_ps(__m512 x) {
    __m512 m = _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
    __m512 e = _mm512_getexp_ps(x);
    const __mmask16 high = _mm512_cmp_ps_mask(m, set1(1.41421356f), _CMP_GT_OQ);
    m = _mm512_mask_mul_ps(m, high, m, set1(0.5f));
    e = _mm512_mask_add_ps(e, high, e, set1(1.0f));
    const __m512 r = _mm512_sub_ps(m, set1(1.0f));
    __m512 q = set1(0.06916226f);
    q = _mm512_fmadd_ps(q, r, set1(-0.11791525f));
    q = _mm512_fmadd_ps(q, r, set1(0.11873511f));
    q = _mm512_fmadd_ps(q, r, set1(-0.12384113f));
    q = _mm512_fmadd_ps(q, r, set1(0.14218561f));
    q = _mm512_fmadd_ps(q, r, set1(-0.1666926f));
    q = _mm512_fmadd_ps(q, r, set1(0.20002231f));
    q = _mm512_fmadd_ps(q, r, set1(-0.24999986f));
    q = _mm512_fmadd_ps(q, r, set1(0.3333331f));
    const __m512 r2 = _mm512_mul_ps(r, r);
    __m512 y = _mm512_mul_ps(_mm512_mul_ps(q, r), r2);
    y = _mm512_fmadd_ps(e, set1(-2.12194440e-4f), y);
    y = _mm512_fnmadd_ps(set1(0.5f), r2, y);
    return _mm512_fmadd_ps(e, set1(0.693359375f), _mm512_add_ps(r, y));
}

// 1 / x, one Newton step: for results that are rounded to bf16 or need about 1e-7.
inline __m512 reciprocal(__m512 x) {
    const __m512 y = _mm512_rcp14_ps(x);
    return _mm512_mul_ps(y, _mm512_fnmadd_ps(x, y, set1(2.0f)));
}

inline __m512 tanh_ps(__m512 x) {
    // Saturated beyond 20, so that exp stays finite and the reciprocal exact.
    const __m512 c = _mm512_max_ps(_mm512_min_ps(x, set1(20.0f)), set1(-20.0f));
    const __m512 large = _mm512_fnmadd_ps(
        set1(2.0f), reciprocal(_mm512_add_ps(exp_ps(_mm512_add_ps(c, c)), set1(1.0f))), set1(1.0f));
    // Near zero the form above cancels: use x - x^3/3 + 2x^5/15.
    const __m512 s = _mm512_mul_ps(c, c);
    const __m512 p = _mm512_fmadd_ps(_mm512_fmadd_ps(s, set1(0.13333333f), set1(-0.33333333f)), s, set1(1.0f));
    const __mmask16 small = _mm512_cmp_ps_mask(_mm512_abs_ps(c), set1(0.06f), _CMP_LT_OQ);
    return _mm512_mask_mul_ps(large, small, c, p);
}

inline float sum_lanes(__m512 v) {
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

inline __m512 dot(__m512 acc, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
inline __m512i load(const void* p) { return _mm512_loadu_si512(p); }
inline __m512i pair(const bf16* p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}

}  // namespace ff
