"""What flows through a stack of blocks, and the contracts of its parts.

Legend: B rows, L tokens, Lc context tokens, H heads, D width, Dh width of a head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

from torch import Tensor

from .attention.base import FULL, AttentionMask, AttentionSelector
from .modulation import Modulation
from .moe import Routing
from .ops.row_product import working_dtype
from .rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The tokens that blocks change: `x` [B, L, D] and, in two-stream models, `context` [B, Lc, D]."""

    x: Tensor
    context: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Where tokens stand (None: the tokens themselves hold it), and what each may see."""

    rotary: Rotary | None
    mask: AttentionMask


@dataclass(frozen=True, kw_only=True, eq=False)
class KeysValues:
    """What tokens attend to besides each other, the same in every evaluation: keys and values [B, H, Lc, Dh], and which
    of them are seen."""

    keys: Tensor
    values: Tensor
    mask: AttentionMask = FULL


def all_tokens(x: Tensor) -> Tensor:
    """`x`."""
    return x


@dataclass(frozen=True, kw_only=True)
class BlockInputs:
    """What the blocks of one evaluation read and never change (a denoiser's `Prepared` gives one per evaluation).

    `modulation[i]` holds block i's modulations, one per sublayer, or the whole is empty for unmodulated models.
    `crossed[i]` holds what block i's cross-attentions read (empty for models without any). `special[i]` replaces
    `rotary` and `mask` in block i (sliding windows). `routing`, where given, is told which experts each block used.
    `kept` picks, of [B, L, D], the tokens that a `DecoderBlock` gives back (keys and values are made of all).
    """

    rotary: Rotary | None
    mask: AttentionMask
    attention: AttentionSelector
    modulation: Sequence[Sequence[Modulation]] = ()
    crossed: Sequence[Sequence[KeysValues]] = ()
    special: Mapping[int, AttentionInputs] = field(default_factory=dict[int, AttentionInputs])
    routing: Routing | None = None
    kept: Callable[[Tensor], Tensor] = all_tokens

    def of(self, i: int) -> AttentionInputs:
        """The rotary tables and the mask of block `i`."""
        return self.special.get(i, self._common)

    @cached_property
    def _common(self) -> AttentionInputs:
        return AttentionInputs(rotary=self.rotary, mask=self.mask)


class Cache(Protocol):
    """Keys and values that a run keeps between calls."""

    def update(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take block `block`'s new keys and values [B, H, L, Dh]; give all that the queries may attend to."""
        ...


class NoCache:
    """The neutral cache: the keys and values of this call alone."""

    def update(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The arguments, unchanged."""
        return keys, values


class Block(Protocol):
    """One layer: `block(stream, prepared, cache, i) -> stream`."""

    def __call__(self, stream: Stream, prepared: BlockInputs, cache: Cache, i: int) -> Stream:
        """The stream after block `i`."""
        ...


class Runner(Protocol):
    """Walks a list of blocks. Step caching, offload and the like are runners around runners."""

    def __call__(self, blocks: Sequence[Block], stream: Stream, prepared: BlockInputs, cache: Cache) -> Stream:
        """The stream after all blocks."""
        ...


@runtime_checkable
class Watching(Protocol):
    """A runner that only looks on, so that denoisers without a list of blocks can do with it as well."""

    def look(self, x: Tensor, place: str) -> None:
        """Shown what leaves the part that `place` names in words, a tensor of any shape."""
        ...


def run_blocks(blocks: Sequence[Block], stream: Stream, prepared: BlockInputs, cache: Cache) -> Stream:
    """The plain runner: every block, in order."""
    for index, block in enumerate(blocks):
        stream = block(stream, prepared, cache, index)
    return stream


def walk(runner: Runner, blocks: Sequence[Block], stream: Stream, prepared: BlockInputs, cache: Cache) -> Stream:
    """The stream after all blocks, as `runner` walks them, in its own dtype. What is bfloat16 goes through them in
    float32 where the processor has no products in bfloat16, which is faster and more exact; what a cache keeps stays as
    it is."""
    x, context = stream.x, stream.context
    wide = working_dtype(x)
    if wide is x.dtype or not isinstance(cache, NoCache):
        return runner(blocks, stream, prepared, cache)
    widened = Stream(x=x.to(wide), context=None if context is None else context.to(wide))
    stream = runner(blocks, widened, prepared, cache)
    return Stream(x=stream.x.to(x.dtype), context=None if stream.context is None else stream.context.to(x.dtype))
