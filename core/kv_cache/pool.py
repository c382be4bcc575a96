"""A pool of blocks of keys and values, and the sequences that hold some of them (Kwon et al. 2023, PagedAttention).

Legend: N layers, Hkv key/value heads, S tokens in a block, Dh width of a head.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeAlias

import torch

from .base import check_sizes

Key: TypeAlias = bytes  # stands for the tokens of a full block and all before it


class PagedPool:
    """`num_blocks` blocks of `block_size` tokens, each for all `layers` that use the pool.

    A block belongs to the sequences that hold it, and is free again when none does. Full blocks never change, so
    sequences that begin with the same tokens can hold the same ones. With a `window`, a token sees itself and the
    `window` - 1 before it, and sequences give back the blocks that no coming token sees.
    """

    def __init__(
        self,
        *,
        layers: int,
        num_blocks: int,
        kv_heads: int,
        head_width: int,
        block_size: int = 16,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        sizes = {"layers": layers, "num_blocks": num_blocks, "kv_heads": kv_heads, "head_width": head_width}
        check_sizes(**sizes, block_size=block_size, window=1 if window is None else window)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window = window
        # two blocks more: `zero_block` fills up short block tables, `spare_block` takes the padding that is written
        self.buffers = torch.zeros(
            layers, 2, num_blocks + 2, block_size, kv_heads, head_width, dtype=dtype, device=device
        )
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_holders = [0] * num_blocks
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    @property
    def num_free(self) -> int:
        """The number of blocks that no sequence holds."""
        return len(self._free)

    @property
    def bytes(self) -> int:
        """The size of the pool."""
        return self.buffers.nbytes

    @property
    def zero_block(self) -> int:
        """A block of zeros that is no one's."""
        return self.num_blocks

    @property
    def spare_block(self) -> int:
        """A block that anyone may write to and no one reads."""
        return self.num_blocks + 1

    def take(self, count: int) -> list[int]:
        """`count` free blocks, now of one holder each; zeros, so that nothing of their past can show.

        Raises:
            ValueError: fewer are free.
        """
        if count > len(self._free):
            raise ValueError(
                f"{count} more blocks of {self.block_size} tokens are needed; "
                f"{self.num_free} of the pool's {self.num_blocks} are free"
            )
        taken = [self._free.pop() for _ in range(count)]
        if taken:
            self.buffers[:, :, taken] = 0
        for block in taken:
            self._num_holders[block] = 1
        return taken

    def hold(self, key: Key) -> int | None:
        """The full block registered under `key`, with one holder more; None if there is none."""
        block = self._block_of.get(key)
        if block is not None:
            self._num_holders[block] += 1
        return block

    def holds(self, key: Key) -> bool:
        """Whether a full block is registered under `key`."""
        return key in self._block_of

    def register(self, key: Key, block: int) -> None:
        """Let others find the full `block`, unless another is registered under `key` already."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def drop(self, block: int) -> None:
        """One holder less; a block without any is free at once."""
        self._num_holders[block] -= 1
        if self._num_holders[block] == 0:
            if block in self._key_of:
                del self._block_of[self._key_of.pop(block)]
            self._free.append(block)


class TokenChain:
    """The tokens of a sequence, and for each of its full blocks a key that stands for them all, from the first on."""

    def __init__(self, tokens: Sequence[int], block_size: int) -> None:
        self.tokens = list(tokens)
        self.block_size = block_size
        self._keys: list[Key] = []

    @property
    def num_full(self) -> int:
        """The number of full blocks."""
        return len(self.tokens) // self.block_size

    def key(self, block: int) -> Key:
        """The key of full block `block`; equal for equal tokens from the first to this block's last only."""
        while len(self._keys) <= block:
            start = len(self._keys) * self.block_size
            tokens = array("q", self.tokens[start : start + self.block_size])
            before = self._keys[-1] if self._keys else b""
            self._keys.append(blake2b(before + tokens.tobytes(), digest_size=32).digest())
        return self._keys[block]


class PagedSequence:
    """One sequence's part of a pool: its block table `blocks` and the number of tokens read, `length`.

    `chain` names the tokens, read or to be read, by which full blocks are found by others; without, none are.
    """

    def __init__(self, pool: PagedPool, chain: TokenChain | None = None) -> None:
        """
        Raises:
            ValueError: the chain is made for blocks of another size.
        """
        if chain is not None and chain.block_size != pool.block_size:
            raise ValueError(f"the chain's blocks are of {chain.block_size} tokens; the pool's of {pool.block_size}")
        self.pool = pool
        self.chain = TokenChain((), pool.block_size) if chain is None else chain
        self.length = 0
        self.blocks: list[int] = []  # `zero_block` where nothing is held any more
        self._first = 0  # the first block that is held

    def num_missing(self, num_new: int) -> int:
        """The number of blocks to take before `num_new` more tokens can be written."""
        return max(0, -(-(self.length + num_new) // self.pool.block_size) - len(self.blocks))

    def reserve(self, num_new: int) -> None:
        """Take blocks for `num_new` more tokens.

        Raises:
            ValueError: not enough are free; nothing is taken.
        """
        self.blocks += self.pool.take(self.num_missing(num_new))

    def advance(self, count: int) -> None:
        """Count `count` more tokens, which are written, as read."""
        full, size = self.length // self.pool.block_size, self.pool.block_size
        self.length += count
        for block in range(full, min(self.length // size, self.chain.num_full)):
            self.pool.register(self.chain.key(block), self.blocks[block])
        self._forget()

    def can_adopt(self, count: int) -> bool:
        """Whether blocks of others stand for those of this sequence from its length on to block `count`."""
        size, window = self.pool.block_size, self.pool.window
        first = self.length // size
        if window is not None:
            first = max(first, (count * size + 1 - window) // size)
        return all(self.pool.holds(self.chain.key(block)) for block in range(first, count))

    def adopt(self, count: int) -> None:
        """Read the tokens up to block `count`, exclusive, by holding the blocks of others, which `can_adopt` found."""
        pool, first = self.pool, self.length // self.pool.block_size
        for block in self.blocks[first:]:
            pool.drop(block)
        held = (pool.hold(self.chain.key(block)) for block in range(first, count))
        self.blocks[first:] = [pool.zero_block if block is None else block for block in held]
        self.length = count * pool.block_size
        self._forget()

    def release(self) -> None:
        """Give all blocks back: as newly made."""
        for block in self.blocks:
            if block != self.pool.zero_block:
                self.pool.drop(block)
        self.blocks = []
        self.length = self._first = 0

    def _forget(self) -> None:
        """Give back the blocks that no coming token sees."""
        if self.pool.window is None:
            return
        unseen = max(0, (self.length + 1 - self.pool.window) // self.pool.block_size)
        for block in range(self._first, unseen):
            if self.blocks[block] != self.pool.zero_block:
                self.pool.drop(self.blocks[block])
                self.blocks[block] = self.pool.zero_block
        self._first = max(self._first, unseen)


def share_prefix(sequences: Sequence[PagedSequence]) -> int:
    """Let the sequences (of one chain, one per pool) hold the full blocks that others have read of the tokens that
    come next, all but the chain's last; gives the number of tokens gained.

    Only whole blocks are shared, so sequences that stand within a block gain nothing.
    """
    chain, start = sequences[0].chain, sequences[0].length
    if start % chain.block_size:
        return 0
    first, count = start // chain.block_size, (len(chain.tokens) - 1) // chain.block_size
    while count > first and not all(sequence.can_adopt(count) for sequence in sequences):
        count -= 1
    if count <= first:
        return 0
    for sequence in sequences:
        sequence.adopt(count)
    return count * chain.block_size - start
