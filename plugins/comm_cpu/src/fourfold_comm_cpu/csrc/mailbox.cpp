// Byte streams between two ranks: a ring in shared memory with one writer and one reader, and bells to wait at.
#include <algorithm>
#include "channel.h"

#define FF_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Both only grow; each has one writer.
struct Ring {
    alignas(64) std::atomic<uint64_t> written;
    alignas(64) std::atomic<uint64_t> read;
};

}  // namespace

// Writes what fits of `bytes`, and rings the reader's bell; returns how many went.
FF_EXPORT int64_t ff_push(Ring* ring, char* memory, int64_t capacity, const char* data, int64_t bytes, ff::Bell* bell) {
    const uint64_t written = ring->written.load(std::memory_order_relaxed);
    const int64_t used = static_cast<int64_t>(written - ring->read.load(std::memory_order_acquire));
    const int64_t n = std::min(bytes, capacity - used);
    if (n <= 0) return 0;
    const int64_t at = static_cast<int64_t>(written % static_cast<uint64_t>(capacity)), head = std::min(n, capacity - at);
    std::memcpy(memory + at, data, head);
    std::memcpy(memory, data + head, n - head);
    ring->written.store(written + static_cast<uint64_t>(n), std::memory_order_seq_cst);
    bell->ring_if_slept_on();
    return n;
}

// Reads what is there of `bytes`, and rings the writer's bell; returns how many came.
FF_EXPORT int64_t ff_pull(Ring* ring, const char* memory, int64_t capacity, char* data, int64_t bytes, ff::Bell* bell) {
    const uint64_t read = ring->read.load(std::memory_order_relaxed);
    const int64_t used = static_cast<int64_t>(ring->written.load(std::memory_order_acquire) - read);
    const int64_t n = std::min(bytes, used);
    if (n <= 0) return 0;
    const int64_t at = static_cast<int64_t>(read % static_cast<uint64_t>(capacity)), head = std::min(n, capacity - at);
    std::memcpy(data, memory + at, head);
    std::memcpy(data + head, memory, n - head);
    ring->read.store(read + static_cast<uint64_t>(n), std::memory_order_seq_cst);
    bell->ring_if_slept_on();
    return n;
}

// Whether one of `count` counters has left its value, within `nanoseconds`: spins, then sleeps at the bell.
FF_EXPORT int64_t ff_wait_for_change(std::atomic<uint64_t>* const* counters, const uint64_t* values, int64_t count,
                                     ff::Bell* bell, int64_t spins, int64_t nanoseconds) {
    const auto changed = [&](std::memory_order order) {
        for (int64_t i = 0; i < count; ++i)
            if (counters[i]->load(order) != values[i]) return true;
        return false;
    };
    for (int64_t spin = 0; spin < spins; ++spin) {
        if (changed(std::memory_order_acquire)) return 1;
        ff::relax();
    }
    const uint32_t rings = bell->rings.load(std::memory_order_seq_cst);
    bell->sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (!changed(std::memory_order_seq_cst)) ff::futex_wait(&bell->rings, rings, nanoseconds);
    bell->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return changed(std::memory_order_acquire);
}
