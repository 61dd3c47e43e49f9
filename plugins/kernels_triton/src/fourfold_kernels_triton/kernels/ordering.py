"""Device functions about who runs when: after the launch before, and last among the programs of one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_predecessor(EARLY: tl.constexpr):
    """Before this, a kernel that was launched early reads what no other kernel writes; after it, the next may start."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def last_to_arrive(counter_ptr, count):
    """Whether this program is the last of ``count`` to call this; then what the others stored before is visible.

    The counter is zero before a launch and after it, so that a recorded launch can be replayed.
    """
    # The barrier puts every thread's stores before the one thread's release.
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter_ptr, 0)
    return last
