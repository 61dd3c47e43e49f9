// Row-wise kernels: RMS norms, gated activations, soft-cap. Arithmetic in fp32, one rounding at the end;
// a row is always reduced in the same order by one thread.
#include "abi.h"
#include "simd.h"

namespace {

using ff::bf16;
using ff::set1;

inline float inverse_rms(const bf16* x, int64_t width, float eps) {
    __m512 s0 = _mm512_setzero_ps(), s1 = s0;
    int64_t i = 0;
    for (; i + 32 <= width; i += 32) {
        const __m512 u = ff::load_bf16(x + i), v = ff::load_bf16(x + i + 16);
        s0 = _mm512_fmadd_ps(u, u, s0);
        s1 = _mm512_fmadd_ps(v, v, s1);
    }
    for (; i < width; i += 16) {
        const __m512 u = ff::load_bf16(x + i, ff::tail_mask(width - i));
        s0 = _mm512_fmadd_ps(u, u, s0);
    }
    const float mean = ff::sum_lanes(_mm512_add_ps(s0, s1)) / float(width);
    return 1.0f / __builtin_sqrtf(mean + eps);
}

inline void scale_row(bf16* out, const bf16* x, const bf16* weight, int64_t width, float inverse, float offset) {
    const __m512 r = set1(inverse), shift = set1(offset);
    for (int64_t i = 0; i < width; i += 16) {
        const __mmask16 mask = ff::tail_mask(width - i);
        const __m512 w = _mm512_add_ps(ff::load_bf16(weight + i, mask), shift);
        ff::store_bf16(out + i, _mm512_mul_ps(_mm512_mul_ps(ff::load_bf16(x + i, mask), r), w), mask);
    }
}

// 1 / (1 + exp(-x)); exp may be inf, where rcp's Newton step would give NaN instead of 0.
inline __m512 logistic(__m512 x) {
    const __m512 d = _mm512_add_ps(ff::exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x)), set1(1.0f));
    const __mmask16 finite = _mm512_cmp_ps_mask(d, set1(1e37f), _CMP_LT_OQ);
    return _mm512_maskz_mov_ps(finite, ff::reciprocal(d));
}

struct Silu {
    static __m512 of(__m512 x) {
        return _mm512_mul_ps(x, logistic(x));
    }
};
struct GeluTanh {
    static __m512 of(__m512 x) {
        const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
        const __m512 inner = _mm512_mul_ps(set1(0.79788456f), _mm512_fmadd_ps(cube, set1(0.044715f), x));
        // 0.5 (1 + tanh t) is logistic(2t), which does not cancel for negative t.
        return _mm512_mul_ps(x, logistic(_mm512_add_ps(inner, inner)));
    }
};
struct Gelu {
    static __m512 of(__m512 x) {
        // erfc(z) = poly(t) exp(-z^2), t = 1 / (1 + p z), z >= 0 (Abramowitz and Stegun 7.1.26, 1.5e-7).
        const __m512 z = _mm512_mul_ps(_mm512_abs_ps(x), set1(0.70710678f));
        const __m512 t = ff::reciprocal(_mm512_fmadd_ps(z, set1(0.3275911f), set1(1.0f)));
        __m512 p = set1(1.061405429f);
        p = _mm512_fmadd_ps(p, t, set1(-1.453152027f));
        p = _mm512_fmadd_ps(p, t, set1(1.421413741f));
        p = _mm512_fmadd_ps(p, t, set1(-0.284496736f));
        p = _mm512_fmadd_ps(p, t, set1(0.254829592f));
        const __m512 square = _mm512_min_ps(_mm512_mul_ps(z, z), set1(200.0f));
        const __m512 tail = _mm512_mul_ps(
            _mm512_mul_ps(p, t), ff::exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), square)));
        const __m512 half_tail = _mm512_mul_ps(set1(0.5f), tail);
        const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
        const __m512 phi = _mm512_mask_mov_ps(_mm512_sub_ps(set1(1.0f), half_tail), negative, half_tail);
        return _mm512_mul_ps(x, phi);
    }
};

constexpr int64_t kColumns = 1024;

// out, out row stride, gate_up [T, 2I], its row stride, T, I
template <class Activation>
inline void gated(ff::Member& member, const ff::Slot* a) {
    bf16* out = ff::ptr<bf16>(a[0]);
    const bf16* x = ff::ptr<bf16>(a[2]);
    const int64_t ldo = a[1].integer, ldx = a[3].integer, rows = a[4].integer, width = a[5].integer;
    const int64_t chunks = (width + kColumns - 1) / kColumns, units = rows * chunks;
    for (int64_t unit = member.take(); unit < units; unit = member.take()) {
        const int64_t row = unit / chunks, from = unit % chunks * kColumns;
        const int64_t to = from + kColumns < width ? from + kColumns : width;
        const bf16* gate = x + row * ldx;
        for (int64_t i = from; i < to; i += 16) {
            const __mmask16 mask = ff::tail_mask(to - i);
            const __m512 y = Activation::of(ff::load_bf16(gate + i, mask));
            ff::store_bf16(out + row * ldo + i, _mm512_mul_ps(y, ff::load_bf16(gate + width + i, mask)), mask);
        }
    }
}

inline int64_t gated_width(const ff::Slot* a) { return a[4].integer * a[5].integer / 4096 + 1; }

}  // namespace

// out, its token and head strides, x, its token and head strides, weight, tokens, heads, width, eps, weight offset
FF_KERNEL(rms_norm, a[7].integer * a[8].integer * a[9].integer / 8192 + 1) {
    const int64_t heads = a[8].integer, rows = a[7].integer * heads, width = a[9].integer;
    const int64_t chunk = width < 1024 ? 8 : 1;
    for (int64_t first = member.take(chunk); first < rows; first = member.take(chunk))
        for (int64_t i = first; i < rows && i < first + chunk; ++i) {
            const int64_t token = i / heads, head = i % heads;
            const bf16* x = ff::ptr<bf16>(a[3]) + token * a[4].integer + head * a[5].integer;
            bf16* out = ff::ptr<bf16>(a[0]) + token * a[1].integer + head * a[2].integer;
            scale_row(out, x, ff::ptr<bf16>(a[6]), width, inverse_rms(x, width, float(a[10].real)), float(a[11].real));
        }
}

// out, its row stride, x, its row stride, residual (in and out), its row stride, weight, rows, width, eps, offset
FF_KERNEL(add_rms_norm, a[7].integer * a[8].integer / 8192 + 1) {
    const int64_t rows = a[7].integer, width = a[8].integer;
    for (int64_t row = member.take(); row < rows; row = member.take()) {
        const bf16* x = ff::ptr<bf16>(a[2]) + row * a[3].integer;
        bf16* residual = ff::ptr<bf16>(a[4]) + row * a[5].integer;
        for (int64_t i = 0; i < width; i += 16) {
            const __mmask16 mask = ff::tail_mask(width - i);
            const __m512 sum = _mm512_add_ps(ff::load_bf16(x + i, mask), ff::load_bf16(residual + i, mask));
            ff::store_bf16(residual + i, sum, mask);
        }
        scale_row(ff::ptr<bf16>(a[0]) + row * a[1].integer, residual, ff::ptr<bf16>(a[6]), width,
                  inverse_rms(residual, width, float(a[9].real)), float(a[10].real));
    }
}

FF_KERNEL(silu_mul, gated_width(a)) { gated<Silu>(member, a); }
FF_KERNEL(gelu_tanh_mul, gated_width(a)) { gated<GeluTanh>(member, a); }
FF_KERNEL(gelu_mul, gated_width(a)) { gated<Gelu>(member, a); }

// logits fp32 (in place), row stride, rows, width, cap
FF_KERNEL(softcap, a[2].integer * a[3].integer / 4096 + 1) {
    float* x = ff::ptr<float>(a[0]);
    const int64_t ld = a[1].integer, rows = a[2].integer, width = a[3].integer;
    const __m512 cap = set1(float(a[4].real)), inverse = set1(float(1.0 / a[4].real));
    const int64_t chunks = (width + 4095) / 4096, units = rows * chunks;
    for (int64_t unit = member.take(); unit < units; unit = member.take()) {
        float* row = x + unit / chunks * ld;
        const int64_t from = unit % chunks * 4096, to = from + 4096 < width ? from + 4096 : width;
        for (int64_t i = from; i < to; i += 16) {
            const __mmask16 mask = ff::tail_mask(to - i);
            const __m512 v = _mm512_maskz_loadu_ps(mask, row + i);
            ff::store_fp32(row + i, _mm512_mul_ps(cap, ff::tanh_ps(_mm512_mul_ps(v, inverse))), mask);
        }
    }
}

// out, its row stride, x, its row stride, rows, width, factor
FF_KERNEL(scale, a[4].integer * a[5].integer / 8192 + 1) {
    const __m512 factor = set1(float(a[6].real));
    const int64_t width = a[5].integer;
    for (int64_t row = member.take(); row < a[4].integer; row = member.take())
        for (int64_t i = 0; i < width; i += 16) {
            const __mmask16 mask = ff::tail_mask(width - i);
            const __m512 v = ff::load_bf16(ff::ptr<bf16>(a[2]) + row * a[3].integer + i, mask);
            ff::store_bf16(ff::ptr<bf16>(a[0]) + row * a[1].integer + i, _mm512_mul_ps(v, factor), mask);
        }
}
