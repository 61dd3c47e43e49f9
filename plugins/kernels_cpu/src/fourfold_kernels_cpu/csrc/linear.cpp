// out[M, N] = x[M, K] @ weight[N, K]^T + bias, with the weight packed as [ceil(N/32)][ceil(K/2)][32][2] bf16.
// Every output is one fp32 chain over K in steps of a pair, whatever M and the threads are: a row does
// not depend on the other rows of its batch.
#include "abi.h"
#include "simd.h"

namespace {

using ff::bf16;

constexpr int kPanel = 32;
// A block of rows of x that should stay in the L2 cache beside one panel of the weight.
constexpr int64_t kRowBlockBytes = int64_t(384) << 10;

struct Job {
    const bf16* x;
    int64_t ldx;
    const bf16* weight;
    const float* bias;
    void* out;
    int64_t ldo;
    int64_t rows, columns, depth;
    bool out_fp32;
    int64_t panels, pairs, panel_elements;
};

// Adds the bias, rounds and stores. Out of line and from memory: it would otherwise be the larger part of every tile.
__attribute__((noinline)) void finish(const Job& job, int64_t first, int64_t column, const float* sums, int rows,
                                      int vectors) {
    for (int r = 0; r < rows; ++r)
        for (int n = 0; n < vectors; ++n, sums += 16) {
            const int64_t at = column + n * 16;
            if (at >= job.columns) continue;
            const __mmask16 mask = ff::tail_mask(job.columns - at);
            __m512 value = _mm512_load_ps(sums);
            if (job.bias) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, job.bias + at));
            const int64_t offset = (first + r) * job.ldo + at;
            if (job.out_fp32) ff::store_fp32(static_cast<float*>(job.out) + offset, value, mask);
            else ff::store_bf16(static_cast<bf16*>(job.out) + offset, value, mask);
        }
}

// MR rows x NP panels. `ahead` is fetched into L2 on the way: `step` bytes for each pair of K.
template <int MR, int NP>
__attribute__((noinline)) void tile(const Job& job, int64_t row, int64_t panel, const char* ahead, int64_t step) {
    constexpr int NV = 2 * NP;
    __m512 acc[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < NV; ++n) acc[r][n] = _mm512_setzero_ps();

    // Three rows share a pointer, so that all addresses fit the general registers.
    constexpr int NP3 = (MR + 2) / 3;
    const int64_t ld = job.ldx;
    const bf16* base[NP3];
#pragma GCC unroll 8
    for (int i = 0; i < NP3; ++i) base[i] = job.x + (row + 3 * i) * ld;
    const bf16* w = job.weight + panel * job.panel_elements;
    const int64_t second = job.panel_elements;
    const int64_t whole = job.depth / 2;
    for (int64_t k = 0; k < whole; ++k) {
        __m512i b[NV];
#pragma GCC unroll 4
        for (int n = 0; n < NV; ++n) b[n] = ff::load(w + (n / 2) * second + (n % 2) * 32);
        _mm_prefetch(ahead, _MM_HINT_T1);
        if (NP == 2) _mm_prefetch(ahead + second * 2, _MM_HINT_T1);
        ahead += step;
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
            const __m512i a = ff::pair(base[r / 3] + (r % 3) * ld + 2 * k);
#pragma GCC unroll 4
            for (int n = 0; n < NV; ++n) acc[r][n] = ff::dot(acc[r][n], b[n], a);
        }
        w += 2 * kPanel;
    }
    if (job.depth & 1) {
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
            const __m512i a = _mm512_set1_epi32(base[r / 3][(r % 3) * ld + job.depth - 1]);
#pragma GCC unroll 4
            for (int n = 0; n < NV; ++n)
                acc[r][n] = ff::dot(acc[r][n], ff::load(w + (n / 2) * second + (n % 2) * 32), a);
        }
    }
    alignas(64) float sums[MR * NV * 16];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < NV; ++n) _mm512_store_ps(sums + (r * NV + n) * 16, acc[r][n]);
    finish(job, row, panel * kPanel, sums, MR, NV);
}

using Tile = void (*)(const Job&, int64_t, int64_t, const char*, int64_t);

constexpr Tile kWide[] = {nullptr, tile<1, 2>, tile<2, 2>, tile<3, 2>, tile<4, 2>, tile<5, 2>, tile<6, 2>};
constexpr Tile kNarrow[] = {nullptr,     tile<1, 1>, tile<2, 1>,  tile<3, 1>,  tile<4, 1>,
                            tile<5, 1>,  tile<6, 1>, tile<7, 1>,  tile<8, 1>,  tile<9, 1>,
                            tile<10, 1>, tile<11, 1>, tile<12, 1>, tile<13, 1>, tile<14, 1>};
constexpr int kWideRows = 6, kNarrowRows = 14;

// Few rows: bound by reading the weight once. Two panels at a time, all rows in one tile.
void few_rows(ff::Member& member, const Job& job) {
    const int64_t units = (job.panels + 1) / 2;
    const Tile wide = kWide[job.rows], narrow = kNarrow[job.rows];
    for (int64_t unit = member.take(); unit < units;) {
        const int64_t next = member.take();
        const int64_t panel = unit * 2;
        if (panel + 1 < job.panels) {
            const char* ahead = reinterpret_cast<const char*>(job.weight + panel * job.panel_elements) + 2048;
            wide(job, 0, panel, ahead, 128);
        } else {
            narrow(job, 0, panel, reinterpret_cast<const char*>(job.weight + panel * job.panel_elements), 0);
        }
        unit = next;
    }
}

void many_rows(ff::Member& member, const Job& job) {
    const int64_t row_bytes = job.depth * 2;
    int64_t block = kRowBlockBytes / row_bytes;
    if (block < 2 * kNarrowRows) block = 2 * kNarrowRows;
    const int64_t blocks = (job.rows + block - 1) / block;
    const int64_t units = blocks * job.panels;
    for (int64_t unit = member.take(); unit < units;) {
        const int64_t next = member.take();
        const int64_t index = unit / job.panels, panel = unit % job.panels;
        const int64_t first = job.rows * index / blocks, last = job.rows * (index + 1) / blocks;
        const int64_t tiles = (last - first + kNarrowRows - 1) / kNarrowRows;
        const char* here = reinterpret_cast<const char*>(job.weight + panel * job.panel_elements);
        const char* there = here;
        if (next < units) there = reinterpret_cast<const char*>(job.weight + next % job.panels * job.panel_elements);
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t from = first + (last - first) * t / tiles, to = first + (last - first) * (t + 1) / tiles;
            const bool fetch = t < 2 && there != here;
            kNarrow[to - from](job, from, panel, fetch ? there + 64 * t : here, fetch ? 128 : 0);
        }
        unit = next;
    }
}

}  // namespace

// x, ldx, packed, bias (fp32 or null), out, ldo, M, N, K, out is fp32
FF_KERNEL(linear, (a[7].integer + kPanel - 1) / kPanel) {
    Job job{ff::ptr<bf16>(a[0]), a[1].integer, ff::ptr<bf16>(a[2]), ff::ptr<float>(a[3]), ff::ptr<void>(a[4]),
            a[5].integer, a[6].integer, a[7].integer, a[8].integer, a[9].integer != 0, 0, 0, 0};
    if (job.rows <= 0) return;
    job.panels = (job.columns + kPanel - 1) / kPanel;
    job.pairs = (job.depth + 1) / 2;
    job.panel_elements = job.pairs * 2 * kPanel;
    if (job.rows <= kWideRows) few_rows(member, job);
    else many_rows(member, job);
}
