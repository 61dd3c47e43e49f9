// The calling convention of every kernel: one array of 8-byte slots, read by all threads of a team.
// A kernel is written once as a body that each thread runs; `ff_<name>` opens a team for one body,
// a recorded program runs many bodies in one team.
#pragma once
#include <cstdint>
#include "team.h"

namespace ff {

union Slot {
    void* pointer;
    int64_t integer;
    double real;
};

using Body = void (*)(Member&, const Slot*);

// Runs `body` on min(width, the caller's OpenMP thread count) threads.
void run(Body body, const Slot* slots, int64_t width);

template <class T>
inline T* ptr(const Slot& slot) { return static_cast<T*>(slot.pointer); }

}  // namespace ff

// `width` may read the slots as `a`: the number of threads that can share the work at all.
#define FF_KERNEL(name, width)                                                              \
    extern "C" __attribute__((visibility("default"))) void ff_##name##_body(ff::Member&, const ff::Slot*); \
    extern "C" __attribute__((visibility("default"))) void ff_##name(const ff::Slot* a) {   \
        ff::run(ff_##name##_body, a, (width));                                              \
    }                                                                                       \
    extern "C" void ff_##name##_body(ff::Member& member, const ff::Slot* a)
