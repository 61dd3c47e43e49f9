"""Device functions with which kernels of several ranks meet: a counter, and signals in each other's memory.

Inline PTX is here and nowhere else; every wait is bounded and reports whom it waited for.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

# One thread a peer: the one whose number is its element's. The value may be ahead by the peer's next operation, whose
# number is larger by one, or by three where the counter starts over. A thread that has waited in vain looks now and
# then whether somebody has complained already, since then there is nothing to wait for, and at the time; in the end it
# complains of its peer. The scope lets labels and registers come twice in a kernel.
_MEET: Final = tl.constexpr(
    """{
    .reg .u32 polls, seen;
    .reg .u64 now, end;
    .reg .pred p;
    mov.u32 polls, 0;
    mov.u64 end, 0;
    mov.u32 seen, %tid.x;
    setp.ne.u32 p, seen, $4;
    @p bra DONE;
    st.release.sys.global.u32 [$1], $3;
    POLL:
    ld.acquire.sys.global.u32 seen, [$2];
    sub.u32 seen, seen, $3;
    setp.le.u32 p, seen, 3;
    @p bra DONE;
    add.u32 polls, polls, 1;
    and.b32 seen, polls, 1023;
    setp.ne.u32 p, seen, 0;
    @p bra POLL;
    ld.volatile.global.u32 seen, [$5];
    setp.ne.u32 p, seen, 0;
    @p bra DONE;
    mov.u64 now, %globaltimer;
    setp.eq.u64 p, end, 0;
    @p add.u64 end, now, $7;
    setp.lt.u64 p, now, end;
    @p bra POLL;
    st.volatile.global.u32 [$6], 1;
    st.volatile.global.u32 [$5], 1;
    DONE:
    mov.u32 $0, polls;
    }"""
)
"""Operands: result, where to signal, where to wait, number, peer, the errors, the peer's error, time limit."""


@triton.jit
def next_number(sequence: tl.tensor, program: tl.tensor) -> tl.tensor:
    """The number of this operation: one more than the last one's, never 0, which is what unused memory holds.

    It is read from the device, so that a recorded launch counts on at each replay. Skipping 0 keeps odd and even apart.
    """
    number = tl.load(sequence + program) + 1
    return tl.where(number == 0, 2, number)


@triton.jit
def finish(sequence: tl.tensor, program: tl.tensor, number: tl.tensor, max_programs: tl.constexpr) -> None:
    """Note the number for all programs together, those that had no part in this operation too."""
    # Other threads of this program may have yet to read the number.
    tl.debug_barrier()
    entries = tl.arange(0, max_programs)
    mine = entries % tl.num_programs(0) == program
    tl.store(sequence + entries, tl.zeros([max_programs], tl.int32) + number, mask=mine)


@triton.jit
def signal_and_wait(
    send: tl.tensor, wait: tl.tensor, number: tl.tensor, peer: tl.tensor, table: tl.tensor, world: tl.constexpr
) -> None:
    """[world] addresses: tell every peer ``number``, then wait until every peer has told it."""
    errors = tl.load(table + world)
    peer_error = errors + 4 + peer.to(tl.int64) * 4
    tl.inline_asm_elementwise(
        _MEET,
        "=r,l,l,r,r,l,l,l",
        [send, wait, number, peer, errors, peer_error, tl.load(table + world + 1)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def meet(
    table: tl.tensor,
    rank: tl.tensor,
    number: tl.tensor,
    program: tl.tensor,
    phase: tl.constexpr,
    world: tl.constexpr,
    max_programs: tl.constexpr,
) -> None:
    """Return when this program of every rank is here; what they wrote before is visible then.

    ``table`` holds the addresses of all ranks' regions, that of the errors, and the time limit in nanoseconds;
    ``phase`` tells meetings of one operation apart.
    """
    peer = tl.arange(0, world)
    row = (phase * max_programs + program) * world
    send = tl.load(table + peer) + (row + rank) * 4
    wait = tl.load(table + rank) + (row + peer) * 4
    # One thread speaks for all: the barrier puts their stores before its release, and its acquire before their loads.
    tl.debug_barrier()
    signal_and_wait(send, wait, number, peer, table, world)
    tl.debug_barrier()
