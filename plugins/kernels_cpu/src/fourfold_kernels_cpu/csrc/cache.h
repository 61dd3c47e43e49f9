// The paged KV cache: [blocks][kv heads][K, V][block_size * head_dim] bf16, in sub-blocks of 16 tokens.
// K sub-block: [D/2][16 tokens][2], so that one vector holds a pair of dims of 16 tokens.
// V sub-block: [8 token pairs][D][2], so that one vector holds a pair of tokens of 16 dims.
#pragma once
#include "simd.h"

namespace ff {

constexpr int64_t kSubBlock = 16;

struct Cache {
    bf16* data;
    int64_t heads, dim, block_size;

    bf16* sub_block(int64_t block, int64_t head, bool value, int64_t offset) const {
        return data + ((block * heads + head) * 2 + (value ? 1 : 0)) * block_size * dim + offset / kSubBlock * kSubBlock * dim;
    }
};

}  // namespace ff
