"""One cache for models whose blocks need different ones: full layers and sliding-window layers, say.

Legend: B rows, Hkv key/value heads, L new tokens, Dh width of a head.
"""

from collections.abc import Sequence

from torch import Tensor

from ..attention.base import AttentionMask
from ..ops.kernels import TokenPlaces
from .base import KVCache
from .contiguous import ContiguousKVCache
from .paged import PagedKVCache


class LayeredKVCache:
    """Block i uses `caches[layout[i]]`, in which it is the n-th block if n blocks before it use the same."""

    def __init__(self, caches: Sequence[KVCache], layout: Sequence[int]) -> None:
        """
        Raises:
            ValueError: a cache that is not there or that no block uses, or caches that differ in rows or lengths.
        """
        if sorted(set(layout)) != list(range(len(caches))):
            raise ValueError(f"layout is {list(layout)}; it must use each of the {len(caches)} caches, 0 onwards")
        states = [cache.lengths.tolist() for cache in caches]
        if any(state != states[0] for state in states):
            raise ValueError(f"the caches' rows have read {states} tokens; they must agree")
        self._caches = tuple(caches)
        self._places = [(cache, list(layout[:i]).count(cache)) for i, cache in enumerate(layout)]

    @property
    def batch(self) -> int:
        """The number of rows, B."""
        return self._caches[0].batch

    @property
    def lengths(self) -> Tensor:
        """The number of tokens that each row has read, [B] int64; a later `advance` makes a new tensor."""
        return self._caches[0].lengths

    @property
    def bytes(self) -> int:
        """The size of all caches' buffers as they are now."""
        return sum(cache.bytes for cache in self._caches)

    def positions(self, num_new: int) -> Tensor:
        """The places of the next `num_new` tokens of each row, [B, num_new, 1] int64, for `rotary_table`."""
        return self._caches[0].positions(num_new)

    def mask(self, block: int, num_new: int) -> AttentionMask:
        """What the next `num_new` tokens of each row see among the keys that `update(block, ...)` will give back."""
        cache, local = self._places[block]
        return self._caches[cache].mask(local, num_new)

    def update(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """`update` of the block's cache: [B, Hkv, L, Dh] new to all visible ones."""
        cache, local = self._places[block]
        return self._caches[cache].update(local, keys, values)

    def place_token(self) -> TokenPlaces | None:
        """That of the one cache that all blocks use; None where there are several."""
        first = self._caches[0]
        if len(self._caches) > 1 or not isinstance(first, ContiguousKVCache | PagedKVCache):
            return None
        return first.place_token()

    def advance(self, counts: Tensor | Sequence[int]) -> None:
        """Count the first `counts[b]` of row b's new tokens as read, in every cache."""
        new = counts.tolist() if isinstance(counts, Tensor) else list(counts)
        for cache in self._caches:
            cache.advance(new)
