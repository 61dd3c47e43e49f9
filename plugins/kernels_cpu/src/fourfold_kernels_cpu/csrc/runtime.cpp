// Opens teams on the OpenMP pool that torch already runs (its libgomp is loaded before this library),
// for one kernel or for a recorded program.
#include "abi.h"

extern "C" {
void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
int omp_get_max_threads();
int omp_get_num_threads();
int omp_get_thread_num();
}

namespace {

struct Record {
    ff::Body body;
    const ff::Slot* slots;
};

struct Region {
    ff::Team* team;
    const Record* records;
    int64_t count;
};

void region_main(void* data) {
    const Region& region = *static_cast<const Region*>(data);
    ff::Member member(*region.team, omp_get_thread_num(), omp_get_num_threads());
    for (int64_t i = 0; i < region.count; ++i) {
        if (i) member.barrier();
        region.records[i].body(member, region.records[i].slots);
    }
}

struct OwnTeam {
    ff::Team team;
    OwnTeam() { team.scratch = static_cast<char*>(_mm_malloc(ff::kSharedScratchBytes, 64)); }
    ~OwnTeam() { _mm_free(team.scratch); }
};

void open_region(const Record* records, int64_t count, int64_t width) {
    static thread_local OwnTeam own;
    if (!own.team.scratch) __builtin_trap();
    own.team.next.store(0, std::memory_order_relaxed);
    Region region{&own.team, records, count};
    int64_t threads = omp_get_max_threads();
    if (threads > width) threads = width;
    if (threads <= 1) {
        ff::Member member(own.team, 0, 1);
        for (int64_t i = 0; i < count; ++i) {
            records[i].body(member, records[i].slots);
            member.barrier();
        }
        return;
    }
    GOMP_parallel(region_main, &region, static_cast<unsigned>(threads), 0);
}

}  // namespace

void ff::run(Body body, const Slot* slots, int64_t width) {
    const Record record{body, slots};
    open_region(&record, 1, width);
}

// A C function of somebody else, as one of a program's calls: one thread calls it, the others wait at the barrier.
FF_KERNEL(call, 1) {
    if (member.rank == 0) reinterpret_cast<void (*)(const void*)>(a[0].integer)(a[1].pointer);
}

extern "C" __attribute__((visibility("default"))) void ff_replay(const Record* records, int64_t count) {
    open_region(records, count, INT64_MAX);
}

extern "C" __attribute__((visibility("default"))) int64_t ff_abi_version() { return 1; }
