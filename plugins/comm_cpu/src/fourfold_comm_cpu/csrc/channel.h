// One channel of one rank: arrival counters and two sets of slots in shared memory, and how ranks meet.
// A round: write my slot of the current set, arrive, wait for all, read anybody's slot. A set is rewritten two
// operations later; to get there I met every peer once more, and a peer only comes to that meeting when it has
// finished reading. So one meeting an operation is enough.
#pragma once
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ff {

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

// A futex is 32 bits; the word may lie in memory that several processes map, so it is not a private one.
inline void futex_wait(std::atomic<uint32_t>* word, uint32_t expected, int64_t nanoseconds) {
    timespec t{nanoseconds / 1000000000, nanoseconds % 1000000000};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, expected, &t, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>* word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// A place where somebody may sleep until it is rung.
struct alignas(64) Bell {
    std::atomic<uint32_t> rings;
    std::atomic<uint32_t> sleepers;

    void ring_if_slept_on() {
        if (sleepers.load(std::memory_order_seq_cst) == 0) return;
        rings.fetch_add(1, std::memory_order_seq_cst);
        futex_wake(&rings);
    }
};

// What one rank tells about its arrivals; two tags, since a peer may look while I am one round ahead.
struct alignas(64) Arrival {
    std::atomic<uint32_t> sequence;
    uint32_t unused;
    std::atomic<uint64_t> tag[2];
};

// Mirrored by ctypes; private to its process.
struct Channel {
    Arrival* arrivals;  // [world], shared
    Bell* bell;         // shared
    Bell* broken;       // shared; `rings` is not 0 once a rank has given up
    char* slots;        // [2][world][slot_bytes], shared
    int64_t rank, world, slot_bytes;
    int64_t timeout_ns;
    int64_t spins;   // looks at a counter before giving the core away
    int64_t yield_ns;  // then it is given away for so long, before sleeping
    int64_t set;     // of slots, 0 or 1
    int64_t sequence;
    int64_t failed;  // the first failure; nothing runs after it, or late peers would take stale data for a sum

    char* slot(int64_t of) const { return slots + (set * world + of) * slot_bytes; }
    void next_set() { set ^= 1; }
};

// Results of every operation: 0, or one of these with the ranks at fault in the lower bits.
constexpr int64_t kMissing = INT64_C(1) << 62, kDiffers = INT64_C(1) << 61;
constexpr int64_t kSleepNs = 50 * 1000 * 1000;  // a sleeper looks again this often

inline int64_t not_there(const Channel& c, uint32_t sequence, std::memory_order order) {
    int64_t missing = 0;
    for (int64_t r = 0; r < c.world; ++r)
        if (static_cast<int32_t>(c.arrivals[r].sequence.load(order) - sequence) < 0) missing |= INT64_C(1) << r;
    return missing;
}

inline int64_t sleep_until_there(Channel& c, uint32_t sequence) {
    const int64_t start = now_ns();
    for (;;) {
        // In this order: who broke the channel because of what I do has arrived before, and is not missing.
        const bool broken = c.broken->rings.load(std::memory_order_acquire);
        const int64_t missing = not_there(c, sequence, std::memory_order_acquire);
        if (!missing) return 0;
        const int64_t waited = now_ns() - start;
        if (waited > c.timeout_ns || broken) return kMissing | missing;
        if (waited < c.yield_ns) {
            sched_yield();
            continue;
        }
        const uint32_t rings = c.bell->rings.load(std::memory_order_seq_cst);
        c.bell->sleepers.fetch_add(1, std::memory_order_seq_cst);
        if (not_there(c, sequence, std::memory_order_seq_cst)) futex_wait(&c.bell->rings, rings, kSleepNs);
        c.bell->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
}

inline int64_t give_up(Channel& c, int64_t failure) {
    c.failed = failure;
    c.broken->rings.store(1, std::memory_order_release);
    c.bell->rings.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(&c.bell->rings);
    return failure;
}

// Arrive at the next meeting; `tag` tells what is going on.
inline void arrive(Channel& c, uint64_t tag) {
    const uint32_t sequence = static_cast<uint32_t>(++c.sequence);
    Arrival& mine = c.arrivals[c.rank];
    mine.tag[sequence & 1].store(tag, std::memory_order_relaxed);
    mine.sequence.store(sequence, std::memory_order_seq_cst);
    // The one that completes the meeting wakes the sleepers; of two that arrive at once, at least one sees both.
    if (!not_there(c, sequence, std::memory_order_seq_cst)) c.bell->ring_if_slept_on();
}

// Wait for all at the meeting where I have arrived; ranks whose tag differs are reported.
inline int64_t wait_for_all(Channel& c, uint64_t tag) {
    const uint32_t sequence = static_cast<uint32_t>(c.sequence);
    int64_t missing = not_there(c, sequence, std::memory_order_acquire);
    for (int64_t spin = 0; missing && spin < c.spins; ++spin) {
        relax();
        missing = not_there(c, sequence, std::memory_order_acquire);
    }
    if (missing) {
        missing = sleep_until_there(c, sequence);
        if (missing) return give_up(c, missing);
    }
    int64_t different = 0;
    for (int64_t r = 0; r < c.world; ++r)
        if (c.arrivals[r].tag[sequence & 1].load(std::memory_order_relaxed) != tag) different |= INT64_C(1) << r;
    return different ? give_up(c, kDiffers | different) : 0;
}

inline int64_t meet(Channel& c, uint64_t tag) {
    if (c.failed) return c.failed;
    arrive(c, tag);
    return wait_for_all(c, tag);
}

}  // namespace ff
