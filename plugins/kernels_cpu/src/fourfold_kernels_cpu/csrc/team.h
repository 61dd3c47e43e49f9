// Threads that run one kernel body together: a shared work counter, a barrier, a scratch buffer.
#pragma once
#include <immintrin.h>
#include <sched.h>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ff {

constexpr size_t kSharedScratchBytes = size_t(8) << 20;

struct Team {
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<uint32_t> generation{0};
    alignas(64) char* scratch = nullptr;
};

struct Member {
    Team& team;
    int rank;
    int size;

    // The next `count` items of the current phase; the caller stops when the answer passes its total.
    int64_t take(int64_t count = 1) {
        if (size == 1) {
            const int64_t first = solo;
            solo += count;
            return first;
        }
        return team.next.fetch_add(count, std::memory_order_relaxed);
    }

    // Ends a phase: all writes before it are visible after it, and the work counter is zero again.
    void barrier() {
        solo = 0;
        if (size == 1) return;
        const uint32_t now = team.generation.load(std::memory_order_relaxed);
        if (team.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            team.arrived.store(0, std::memory_order_relaxed);
            team.next.store(0, std::memory_order_relaxed);
            team.generation.store(now + 1, std::memory_order_release);
            return;
        }
        // Some 50 us of spinning, then give the core away: a foreign process may hold our peer's.
        for (int spins = 0; team.generation.load(std::memory_order_acquire) == now; ++spins) {
            if (spins < 2000) _mm_pause();
            else sched_yield();
        }
    }

    template <class T>
    T* shared() const { return reinterpret_cast<T*>(team.scratch); }

private:
    int64_t solo = 0;
public:
    Member(Team& t, int r, int s) : team(t), rank(r), size(s) {}
};

// A buffer of the calling thread that only grows and is 64-byte aligned.
template <class Tag>
inline char* thread_buffer(size_t bytes) {
    struct Holder {
        char* data = nullptr;
        size_t size = 0;
        ~Holder() { _mm_free(data); }
    };
    static thread_local Holder holder;
    if (holder.size < bytes) {
        _mm_free(holder.data);
        holder.data = static_cast<char*>(_mm_malloc(bytes, 64));
        holder.size = holder.data ? bytes : 0;
        if (!holder.data) __builtin_trap();
    }
    return holder.data;
}

}  // namespace ff
