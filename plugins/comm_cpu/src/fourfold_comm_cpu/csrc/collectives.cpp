// The collectives of one channel, a plain C ABI. Sums are taken in rank order, in fp32 for the 16-bit floats, so all
// ranks get the same bits. Messages larger than a slot go in pieces.
#include <algorithm>
#include "channel.h"

#define FF_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using ff::Channel;

enum Kind : uint64_t { kAllReduce = 1, kAllGather, kReduceScatter, kBroadcast, kAllToAll, kBarrier, kGather };
constexpr int64_t kBlock = 2048;  // elements summed at a time, in the first-level cache
constexpr int64_t kTwoShotBytes = 64 << 10;  // from here on several ranks share the summing

uint64_t make_tag(Kind kind, uint64_t a, uint64_t b = 0) {
    uint64_t hash = kind * UINT64_C(0x9e3779b97f4a7c15);
    for (const uint64_t word : {a, b}) hash = (hash ^ word) * UINT64_C(0xff51afd7ed558ccd), hash ^= hash >> 32;
    return hash;
}

uint64_t hash_of(const int64_t* values, int64_t count) {
    uint64_t hash = 0;
    for (int64_t i = 0; i < count; ++i) hash = (hash ^ static_cast<uint64_t>(values[i])) * UINT64_C(0xc4ceb9fe1a85ec53);
    return hash;
}

template <class T>
struct Plain {
    using Stored = T;
    using Sum = T;
    static Sum widen(T x) { return x; }
    static T narrow(Sum x) { return x; }
};

template <class T>
struct Wrapping {  // signed overflow wraps, as it does in torch
    using Stored = T;
    using Sum = std::make_unsigned_t<T>;
    static Sum widen(T x) { return static_cast<Sum>(x); }
    static T narrow(Sum x) { return static_cast<T>(x); }
};

struct BFloat16 {
    using Stored = uint16_t;
    using Sum = float;
    static float widen(uint16_t x) {
        const uint32_t bits = static_cast<uint32_t>(x) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    static uint16_t narrow(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
    }
};

struct Float16 {
    using Stored = _Float16;
    using Sum = float;
    static float widen(_Float16 x) { return static_cast<float>(x); }
    static _Float16 narrow(float x) { return static_cast<_Float16>(x); }
};

// out[i] = sum over ranks of their slot's element `first` + i.
template <class Type>
void sum_slots(const Channel& c, int64_t first, int64_t count, void* target) {
    using T = typename Type::Stored;
    T* out = static_cast<T*>(target);
    if (c.world == 2) {
        const T* a = reinterpret_cast<const T*>(c.slot(0)) + first;
        const T* b = reinterpret_cast<const T*>(c.slot(1)) + first;
        for (int64_t i = 0; i < count; ++i) out[i] = Type::narrow(Type::widen(a[i]) + Type::widen(b[i]));
        return;
    }
    typename Type::Sum total[kBlock];
    for (int64_t start = 0; start < count; start += kBlock) {
        const int64_t n = std::min(kBlock, count - start);
        const T* a = reinterpret_cast<const T*>(c.slot(0)) + first + start;
        for (int64_t i = 0; i < n; ++i) total[i] = Type::widen(a[i]);
        for (int64_t r = 1; r < c.world; ++r) {
            const T* b = reinterpret_cast<const T*>(c.slot(r)) + first + start;
            for (int64_t i = 0; i < n; ++i) total[i] += Type::widen(b[i]);
        }
        for (int64_t i = 0; i < n; ++i) out[start + i] = Type::narrow(total[i]);
    }
}

struct Dtype {
    int64_t bytes;
    void (*sum)(const Channel&, int64_t first, int64_t count, void* out);
};

// In the order of SUMMABLE in native_channel.py.
const Dtype kDtypes[] = {
    {4, sum_slots<Plain<float>>},      {2, sum_slots<BFloat16>},          {2, sum_slots<Float16>},
    {8, sum_slots<Plain<double>>},     {4, sum_slots<Wrapping<int32_t>>}, {8, sum_slots<Wrapping<int64_t>>},
    {2, sum_slots<Wrapping<int16_t>>}, {1, sum_slots<Wrapping<int8_t>>},  {1, sum_slots<Plain<uint8_t>>},
};

// Stripe `of` of `count` elements: whole cache lines, the first ones larger.
int64_t stripe_start(const Channel& c, int64_t count, int64_t of) {
    const int64_t lines = (count + 63) / 64;
    return std::min(count, (lines * of / c.world) * 64);
}

int64_t put_piece(Channel& c, const char* data, int64_t bytes, uint64_t tag) {
    if (c.failed) return c.failed;
    std::memcpy(c.slot(c.rank), data, bytes);
    arrive(c, tag);
    return 0;
}

// `data` becomes the sum of what all ranks have put.
int64_t sum_piece(Channel& c, const Dtype& type, char* data, int64_t count, uint64_t tag) {
    if (c.failed) return c.failed;
    char* mine = c.slot(c.rank);
    const int64_t bytes = count * type.bytes;
    if (const int64_t failed = wait_for_all(c, tag)) return failed;
    if (c.world == 2 || bytes < kTwoShotBytes) {
        type.sum(c, 0, count, data);
        return 0;
    }
    // My stripe of my own slot is read by nobody else in this half: it takes the sum.
    const int64_t first = stripe_start(c, count, c.rank), last = stripe_start(c, count, c.rank + 1);
    type.sum(c, first, last - first, data + first * type.bytes);
    std::memcpy(mine + first * type.bytes, data + first * type.bytes, (last - first) * type.bytes);
    if (const int64_t failed = meet(c, tag + 1)) return failed;
    for (int64_t r = 0; r < c.world; ++r) {
        if (r == c.rank) continue;
        const int64_t from = stripe_start(c, count, r) * type.bytes, to = stripe_start(c, count, r + 1) * type.bytes;
        std::memcpy(data + from, c.slot(r) + from, to - from);
    }
    return 0;
}

struct AllReduceCall {
    Channel* channel;
    char* data;
    int64_t count, dtype;
};

}  // namespace

FF_EXPORT int64_t ff_abi_version() { return 2; }

// The first half of a sum: what this rank adds is there, and nobody is waited for.
FF_EXPORT int64_t ff_start_all_reduce(Channel* channel, const char* data, int64_t count, int64_t dtype) {
    const Dtype& type = kDtypes[dtype];
    const int64_t n = std::min(channel->slot_bytes / type.bytes, count);
    return put_piece(*channel, data, n * type.bytes, make_tag(kAllReduce, count, dtype));
}

// The second half, in place: `data` becomes the sum over the ranks.
FF_EXPORT int64_t ff_finish_all_reduce(Channel* channel, char* data, int64_t count, int64_t dtype) {
    Channel& c = *channel;
    const Dtype& type = kDtypes[dtype];
    const uint64_t tag = make_tag(kAllReduce, count, dtype);
    const int64_t most = c.slot_bytes / type.bytes;
    for (int64_t done = 0;;) {
        const int64_t n = std::min(most, count - done);
        const int64_t failed = sum_piece(c, type, data + done * type.bytes, n, tag);
        c.next_set();
        if (failed) return failed;
        done += n;
        if (done >= count) return 0;
        const int64_t next = std::min(most, count - done);
        if (const int64_t lost = put_piece(c, data + done * type.bytes, next * type.bytes, tag)) return lost;
    }
}

FF_EXPORT int64_t ff_all_reduce(Channel* channel, char* data, int64_t count, int64_t dtype) {
    if (const int64_t failed = ff_start_all_reduce(channel, data, count, dtype)) return failed;
    return ff_finish_all_reduce(channel, data, count, dtype);
}

// The same as a recorded call. A failure is not lost: it has broken the channel, so the next operation fails too.
FF_EXPORT void ff_all_reduce_call(const AllReduceCall* a) {
    ff_all_reduce(a->channel, a->data, a->count, a->dtype);
}

// On `destination`, rank r's `bytes` go to targets[r]: rows of `row` bytes, so far apart as `stride` says.
struct Rows {
    char* first;
    int64_t stride;
};

FF_EXPORT int64_t ff_gather(Channel* channel, const char* data, const Rows* targets, int64_t bytes, int64_t row,
                            int64_t destination) {
    Channel& c = *channel;
    const uint64_t tag = make_tag(kGather, bytes, destination);
    int64_t done = 0;
    do {
        const int64_t n = std::min(c.slot_bytes, bytes - done);
        if (c.rank != destination) std::memcpy(c.slot(c.rank), data + done, n);
        const int64_t failed = meet(c, tag);
        for (int64_t r = 0; !failed && c.rank == destination && r < c.world; ++r) {
            const char* from = r == c.rank ? data + done : c.slot(r);
            for (int64_t at = done; at < done + n;) {
                const int64_t column = at % row, part = std::min(row - column, done + n - at);
                std::memcpy(targets[r].first + at / row * targets[r].stride + column, from + at - done, part);
                at += part;
            }
        }
        c.next_set();
        if (failed) return failed;
        done += n;
    } while (done < bytes);
    return 0;
}

// `out` gets `bytes[0]` bytes of rank 0, `bytes[1]` of rank 1 and so on.
FF_EXPORT int64_t ff_all_gather(Channel* channel, const char* data, char* out, const int64_t* bytes) {
    Channel& c = *channel;
    const uint64_t tag = make_tag(kAllGather, hash_of(bytes, c.world));
    const int64_t longest = *std::max_element(bytes, bytes + c.world);
    int64_t done = 0;
    do {
        const auto piece = [&](int64_t of) {
            return std::max<int64_t>(0, std::min(c.slot_bytes, bytes[of] - done));
        };
        if (piece(c.rank)) std::memcpy(c.slot(c.rank), data + done, piece(c.rank));
        const int64_t failed = meet(c, tag);
        if (!failed) {
            char* to = out + done;
            for (int64_t r = 0; r < c.world; to += bytes[r++])
                if (piece(r)) std::memcpy(to, c.slot(r), piece(r));
        }
        c.next_set();
        if (failed) return failed;
        done += c.slot_bytes;
    } while (done < longest);
    return 0;
}

// `out` gets the sum of the elements of this rank, which come after those of the ranks before it.
FF_EXPORT int64_t ff_reduce_scatter(Channel* channel, const char* data, char* out, const int64_t* counts, int64_t dtype) {
    Channel& c = *channel;
    const Dtype& type = kDtypes[dtype];
    const uint64_t tag = make_tag(kReduceScatter, hash_of(counts, c.world), dtype);
    int64_t first = 0, total = 0;
    for (int64_t r = 0; r < c.world; ++r) {
        if (r == c.rank) first = total;
        total += counts[r];
    }
    const int64_t last = first + counts[c.rank], most = c.slot_bytes / type.bytes;
    int64_t done = 0;
    do {
        const int64_t n = std::min(most, total - done);
        std::memcpy(c.slot(c.rank), data + done * type.bytes, n * type.bytes);
        const int64_t failed = meet(c, tag);
        const int64_t from = std::max(first, done), to = std::min(last, done + n);
        if (!failed && from < to) type.sum(c, from - done, to - from, out + (from - first) * type.bytes);
        c.next_set();
        if (failed) return failed;
        done += n;
    } while (done < total);
    return 0;
}

FF_EXPORT int64_t ff_broadcast(Channel* channel, char* data, int64_t bytes, int64_t source) {
    Channel& c = *channel;
    const uint64_t tag = make_tag(kBroadcast, bytes, source);
    int64_t done = 0;
    do {
        const int64_t n = std::min(c.slot_bytes, bytes - done);
        if (c.rank == source) std::memcpy(c.slot(source), data + done, n);
        const int64_t failed = meet(c, tag);
        if (!failed && c.rank != source) std::memcpy(data + done, c.slot(source), n);
        c.next_set();
        if (failed) return failed;
        done += n;
    } while (done < bytes);
    return 0;
}

// `send[r]` bytes for rank r, in rank order in `data`; `receive[r]` bytes of rank r, in rank order into `out`.
FF_EXPORT int64_t ff_all_to_all(Channel* channel, const char* data, char* out, const int64_t* send,
                                const int64_t* receive) {
    Channel& c = *channel;
    const uint64_t tag = make_tag(kAllToAll, 0);
    // First everybody tells what it sends, so that all know how many rounds there are.
    std::memcpy(c.slot(c.rank), send, c.world * 8);
    const int64_t failed = meet(c, tag);
    if (failed) return c.next_set(), failed;
    int64_t mine = 0, longest = 0, wrong = 0, offsets[64];
    for (int64_t r = 0; r < c.world; ++r) {
        const int64_t* sizes = reinterpret_cast<const int64_t*>(c.slot(r));
        int64_t total = 0;
        offsets[r] = 0;
        for (int64_t to = 0; to < c.world; ++to) {
            if (to < c.rank) offsets[r] += sizes[to];
            total += sizes[to];
        }
        longest = std::max(longest, total);
        if (r == c.rank) mine = total;
        if (sizes[c.rank] != receive[r]) wrong |= INT64_C(1) << r;
    }
    c.next_set();
    if (wrong) return ff::give_up(c, ff::kDiffers | wrong);
    for (int64_t done = 0; done < longest; done += c.slot_bytes) {
        if (done < mine) std::memcpy(c.slot(c.rank), data + done, std::min(c.slot_bytes, mine - done));
        const int64_t lost = meet(c, tag);
        char* to = out;
        for (int64_t r = 0; !lost && r < c.world; to += receive[r++]) {
            const int64_t from = std::max(offsets[r], done);
            const int64_t end = std::min(offsets[r] + receive[r], done + c.slot_bytes);
            if (from < end) std::memcpy(to + from - offsets[r], c.slot(r) + from - done, end - from);
        }
        c.next_set();
        if (lost) return lost;
    }
    return 0;
}

FF_EXPORT int64_t ff_barrier(Channel* channel) {
    return meet(*channel, make_tag(kBarrier, 0));
}
