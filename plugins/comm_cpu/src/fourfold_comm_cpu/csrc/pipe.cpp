// Messages from one process to one other: slots in shared memory, which one fills in order and the other empties.
#include <algorithm>
#include "channel.h"

#define FF_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using ff::Bell;

// At the start of the memory; counters only grow, and each has one writer.
struct Head {
    alignas(64) std::atomic<uint64_t> sent;
    alignas(64) std::atomic<uint64_t> taken;
    Bell for_receiver;
    Bell for_sender;
};

constexpr int64_t kLengthBytes = 64;  // before each slot's message: its length

// Mirrored by ctypes; private to its process.
struct Pipe {
    Head* head;   // shared
    char* slots;  // [depth][kLengthBytes + slot_bytes], shared
    int64_t slot_bytes, depth;
    int64_t timeout_ns, spins, yield_ns;

    char* slot(uint64_t message) const {
        return slots + static_cast<int64_t>(message % static_cast<uint64_t>(depth)) * (kLengthBytes + slot_bytes);
    }
};

// Whether `ready` comes true in time: looks, gives the core away, then sleeps at the bell.
template <class Ready>
bool wait_until(const Pipe& pipe, Bell& bell, const Ready& ready) {
    for (int64_t spin = 0; spin < pipe.spins; ++spin) {
        if (ready(std::memory_order_acquire)) return true;
        ff::relax();
    }
    const int64_t start = ff::now_ns();
    for (;;) {
        if (ready(std::memory_order_acquire)) return true;
        const int64_t waited = ff::now_ns() - start;
        if (waited > pipe.timeout_ns) return false;
        if (waited < pipe.yield_ns) {
            sched_yield();
            continue;
        }
        const uint32_t rings = bell.rings.load(std::memory_order_seq_cst);
        bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
        if (!ready(std::memory_order_seq_cst)) ff::futex_wait(&bell.rings, rings, ff::kSleepNs);
        bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
}

}  // namespace

// Sends the `count` parts as one message, which fits a slot; 0, or -1 where no slot became free in time.
FF_EXPORT int64_t ff_pipe_send(const Pipe* pipe, const char* const* parts, const int64_t* sizes, int64_t count) {
    Head& head = *pipe->head;
    const uint64_t sent = head.sent.load(std::memory_order_relaxed);
    const auto has_room = [&](std::memory_order order) {
        return sent - head.taken.load(order) < static_cast<uint64_t>(pipe->depth);
    };
    if (!wait_until(*pipe, head.for_sender, has_room)) return -1;
    char* slot = pipe->slot(sent);
    int64_t length = 0;
    for (int64_t i = 0; i < count; ++i) {
        std::memcpy(slot + kLengthBytes + length, parts[i], static_cast<size_t>(sizes[i]));
        length += sizes[i];
    }
    std::memcpy(slot, &length, sizeof length);
    head.sent.store(sent + 1, std::memory_order_seq_cst);
    head.for_receiver.ring_if_slept_on();
    return 0;
}

// Fills the `count` parts with the next message as far as it goes; its length, or -1 where none came in time.
FF_EXPORT int64_t ff_pipe_receive(const Pipe* pipe, char* const* parts, const int64_t* sizes, int64_t count) {
    Head& head = *pipe->head;
    const uint64_t taken = head.taken.load(std::memory_order_relaxed);
    const auto has_come = [&](std::memory_order order) { return head.sent.load(order) != taken; };
    if (!wait_until(*pipe, head.for_receiver, has_come)) return -1;
    const char* slot = pipe->slot(taken);
    int64_t length;
    std::memcpy(&length, slot, sizeof length);
    length = std::min(length, pipe->slot_bytes);
    int64_t at = 0;
    for (int64_t i = 0; i < count && at < length; ++i) {
        const int64_t size = std::min(sizes[i], length - at);
        std::memcpy(parts[i], slot + kLengthBytes + at, static_cast<size_t>(size));
        at += size;
    }
    head.taken.store(taken + 1, std::memory_order_seq_cst);
    head.for_sender.ring_if_slept_on();
    return length;
}
