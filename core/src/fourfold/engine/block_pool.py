"""The blocks of one KV-cache group: reference counts, and an LRU free list that keeps content until it is reused.

Every operation is O(1) a block. Knows nothing of requests, tokens or tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from fourfold.errors import EngineError

NULL_BLOCK = 0
"""Never handed out: padding is written there, and tables name it for positions that are read no more."""


class BlockPool:
    """``num_blocks`` blocks, of which block 0 is the null block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_usable = num_blocks - 1
        self._references = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}
        # Next victim first. A plain dict would find its first key in O(n) after many deletions.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds; some still have content that can be found."""
        return len(self._free)

    def is_free(self, block: int) -> bool:
        """Whether nobody holds ``block``."""
        return block in self._free

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, forgetting their content; EngineError if fewer are free."""
        if count > len(self._free):
            raise EngineError(f"{count} cache blocks asked for, {len(self._free)} free; the scheduler must ask first")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            digest = self._digests[block]
            if digest is not None:
                self._digests[block] = None
                del self._blocks[digest]
        return blocks

    def share(self, block: int) -> None:
        """Hold ``block`` once more, keeping its content."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each block of a table in order; null blocks are passed over.

        Blocks with content join the free list at its end, the table's last block first, so that the tails of
        prompts are reused before their beginnings. Blocks without content are reused first of all.
        """
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            references = self._references[block] - 1
            if references < 0:
                raise EngineError(f"cache block {block} is released more often than it was taken")
            self._references[block] = references
            if references == 0:
                self._free[block] = None
                if self._digests[block] is None:
                    self._free.move_to_end(block, last=False)

    def find(self, digest: bytes) -> int | None:
        """The block whose content has this digest."""
        return self._blocks.get(digest)

    def remember(self, block: int, digest: bytes) -> None:
        """Make ``block`` findable by its content. Of two blocks of equal content the first is kept."""
        if digest not in self._blocks and self._digests[block] is None:
            self._blocks[digest] = block
            self._digests[block] = digest

    def forget_all(self) -> None:
        """Make no block findable; holders keep theirs."""
        self._blocks.clear()
        self._digests = [None] * len(self._digests)
