"""Device functions with which kernels of several ranks meet: counters, signals, and words that carry their own flag.

Inline PTX is here and nowhere else; every wait is bounded and reports whom it waited for.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

_COMPLAIN: Final = """
    add.u32 polls, polls, 1;
    and.b32 seen, polls, 1023;
    setp.ne.u32 p, seen, 0;
    @p bra POLL;
    ld.volatile.global.u32 seen, [$ERRORS];
    setp.ne.u32 p, seen, 0;
    @p bra GIVE_UP;
    mov.u64 now, %globaltimer;
    setp.eq.u64 p, end, 0;
    @p add.u64 end, now, $TIMEOUT;
    setp.lt.u64 p, now, end;
    @p bra POLL;
    st.volatile.global.u32 [$PEER_ERROR], 1;
    st.volatile.global.u32 [$ERRORS], 1;
    GIVE_UP:
"""
"""What a thread does that has waited in vain: now and then it looks whether somebody has complained already, since
then there is nothing to wait for, and at the time; in the end it complains of its peer."""

_REGISTERS: Final = """
    .reg .u32 polls, seen, low, high, low_flag, high_flag;
    .reg .u64 now, end, word;
    .reg .pred p;
    mov.u32 polls, 0;
    mov.u64 end, 0;
"""


def _asm(body: str, **operands: str) -> tl.constexpr:
    """A scope of its own, so that labels and registers may come twice; ``$NAME`` becomes an operand's number."""
    text = "{" + _REGISTERS + body.replace("COMPLAIN", _COMPLAIN) + "}"
    for name, number in operands.items():
        text = text.replace(f"${name}", f"${number}")
    return tl.constexpr(text)


# One thread a peer: the one whose number is its element's. The value may be ahead by the peer's next operation, whose
# number is larger by one, or by three where the counter starts over.
_MEET: Final = _asm(
    """
    mov.u32 seen, %tid.x;
    setp.ne.u32 p, seen, $PEER;
    @p bra DONE;
    st.release.sys.global.u32 [$SEND], $NUMBER;
    POLL:
    ld.acquire.sys.global.u32 seen, [$WAIT];
    sub.u32 seen, seen, $NUMBER;
    setp.le.u32 p, seen, 3;
    @p bra DONE;
    COMPLAIN
    DONE:
    mov.u32 $RESULT, polls;
    """,
    RESULT="0",
    SEND="1",
    WAIT="2",
    NUMBER="3",
    PEER_ERROR="6",
    PEER="4",
    ERRORS="5",
    TIMEOUT="7",
)
_SEND: Final = _asm(
    """
    setp.eq.u32 p, $INSIDE, 0;
    @p bra DONE;
    mov.b64 {low, high}, $WORD;
    st.volatile.global.v4.u32 [$ADDRESS], {low, $NUMBER, high, $NUMBER};
    DONE:
    mov.u32 $RESULT, 0;
    """,
    RESULT="0",
    ADDRESS="1",
    WORD="2",
    INSIDE="3",
    NUMBER="4",
)
# All bits set is no number in any floating-point format: what did not arrive is not taken for data.
_RECEIVE: Final = _asm(
    """
    mov.u64 word, 0;
    setp.eq.u32 p, $INSIDE, 0;
    @p bra DONE;
    POLL:
    ld.volatile.global.v4.u32 {low, low_flag, high, high_flag}, [$ADDRESS];
    setp.eq.u32 p, low_flag, $NUMBER;
    setp.eq.and.u32 p, high_flag, $NUMBER, p;
    @p bra ARRIVED;
    COMPLAIN
    mov.u32 low, 0xffffffff;
    mov.u32 high, 0xffffffff;
    ARRIVED:
    mov.b64 word, {low, high};
    DONE:
    mov.u64 $RESULT, word;
    """,
    RESULT="0",
    ADDRESS="1",
    INSIDE="2",
    NUMBER="3",
    ERRORS="4",
    PEER_ERROR="5",
    TIMEOUT="6",
)


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


@triton.jit
def send_words(address: tl.tensor, word: tl.tensor, inside: tl.tensor, number: tl.tensor) -> None:
    """Store 64-bit words at ``address`` (16 bytes each), each half with ``number`` as its flag."""
    tl.inline_asm_elementwise(
        _SEND, "=r,l,l,r,r", [address, word, inside.to(tl.int32), number], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def receive_words(
    address: tl.tensor,
    inside: tl.tensor,
    number: tl.tensor,
    table: tl.tensor,
    peer: tl.constexpr,
    world: tl.constexpr,
) -> tl.tensor:
    """The 64-bit words at ``address``, once both halves of each carry ``number``."""
    errors = tl.load(table + world)
    return tl.inline_asm_elementwise(
        _RECEIVE,
        "=l,l,r,r,l,l,l",
        [address, inside.to(tl.int32), number, errors, errors + 4 + peer * 4, tl.load(table + world + 1)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )
