"""Clips made chunk by chunk: the tokens of a chunk attend to each other and to what came before, by keys and values
that are kept of it.

Legend: B rows, C latent channels, F latent frames of a clip, f of a chunk, h w latent cells, H heads, L new tokens of a
row, Lk keys given back, Dh width of a head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from ..core.kv_cache import ContiguousKVCache, RingKVCache
from ..core.kv_cache.base import check_sizes
from .base import Denoiser, P
from .entries import size, switch


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """How a clip is made, in latent frames: `frames` are a chunk, but the first one is a single frame with
    `independent_first_frame`.

    A chunk sees itself and all that came before. With a `window` it sees so many latent frames, itself among them: the
    `sink` first ones of the clip, and of the others the last.

    Raises:
        ValueError: sizes that are none, or a window in which a chunk and the sink have no room.
    """

    frames: int = 3
    independent_first_frame: bool = False
    window: int | None = None
    sink: int = 0

    def __post_init__(self) -> None:
        check_sizes(frames=self.frames, window=1 if self.window is None else self.window)
        if not isinstance(cast(object, self.independent_first_frame), bool):
            raise ValueError(f"independent_first_frame is {self.independent_first_frame!r}; it must be true or false")
        if not isinstance(cast(object, self.sink), int) or self.sink < 0:
            raise ValueError(f"sink is {self.sink!r}; it must be a whole number from 0")
        if self.window is None and self.sink:
            raise ValueError(f"sink is {self.sink}, but there is no window: all frames are seen; leave it out")
        if self.window is not None and self.window < self.frames + self.sink:
            least = f"{self.frames + self.sink}, for a chunk of {self.frames} and a sink of {self.sink}"
            raise ValueError(f"window is {self.window} latent frames; it must be at least {least}")

    @property
    def first(self) -> int:
        """Frames of the first chunk."""
        return 1 if self.independent_first_frame else self.frames

    def whole(self, least: int, given: int = 0) -> int:
        """The frames of so many chunks, at least one, that there are `least` frames: whole ones after the `given`
        frames that a clip begins with."""
        begun = given or self.first
        return begun + -(-max(least - begun, 0) // self.frames) * self.frames

    def lengths(self, count: int, given: int = 0) -> tuple[int, ...]:
        """The frames of each chunk of a clip of `count` frames, which begins with those of `begun(given)`.

        Raises:
            ValueError: the others are no whole chunks.
        """
        above = self.whole(count, given)
        if above != count:
            near = " or ".join(str(each) for each in (above - self.frames, above) if each > given)
            after = f" after the first {given}" if given else ""
            raise ValueError(f"{count} latent frames are no whole chunks of {self.frames}{after}; {near} are")
        begun = self.begun(given) or (self.first,)
        return (*begun, *(self.frames,) * ((count - sum(begun)) // self.frames))

    def begun(self, given: int) -> tuple[int, ...]:
        """The frames of each chunk of those that a clip begins with, which may be none: where they are no whole chunks,
        the first is a shorter one (but for a frame that is alone), so that the last ones are as the model knows
        them."""
        alone = int(self.independent_first_frame and given > 0)
        whole, short = divmod(given - alone, self.frames)
        return (*(1,) * alone, *(short,) * (short > 0), *(self.frames,) * whole)

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "Chunks":
        """From the entries of a denoiser's config.json, by the names that Self-Forcing and FastVideo give them; what is
        missing has its default.

        Raises:
            ValueError: an entry of the wrong type, or as above.
        """
        windowed = entries.get("local_attn_size") not in (None, -1)
        return cls(
            frames=size(entries, "num_frames_per_block", cls.frames),
            independent_first_frame=switch(entries, "independent_first_frame"),
            window=size(entries, "local_attn_size", 0) if windowed else None,
            sink=size(entries, "sink_size", 0) if windowed and entries.get("sink_size") else 0,
        )

    def entries(self) -> dict[str, Any]:
        """Those of a config.json."""
        return {
            "num_frames_per_block": self.frames,
            "independent_first_frame": self.independent_first_frame,
            "local_attn_size": -1 if self.window is None else self.window,
            "sink_size": self.sink,
        }


@runtime_checkable
class CausalDenoiser(Denoiser[P], Protocol[P]):
    """A denoiser of clips that are made chunk by chunk. What it prepares belongs to one run, and holds what the run has
    remembered so far: `slope` takes latents of the chunk that follows it, [B, C, f, h, w]."""

    @property
    def chunks(self) -> Chunks:
        """How its clips are made."""
        ...

    def remember(self, x0: Tensor, prepared: P) -> None:
        """Lets the chunks to come see the next one, [B, C, f, h, w], which is finished or was given."""
        ...


@dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """What the caches of one run have in common."""

    layers: int
    batch: int
    heads: int
    head_width: int
    dtype: torch.dtype
    device: torch.device

    def contiguous(self, capacity: int) -> ContiguousKVCache:
        """One for the first `capacity` tokens."""
        return ContiguousKVCache(
            layers=self.layers,
            batch=self.batch,
            kv_heads=self.heads,
            head_width=self.head_width,
            capacity=capacity,
            dtype=self.dtype,
            device=self.device,
        )

    def ring(self, window: int, chunk: int) -> RingKVCache:
        """One for the last tokens."""
        return RingKVCache(
            layers=self.layers,
            batch=self.batch,
            kv_heads=self.heads,
            head_width=self.head_width,
            window=window,
            chunk=chunk,
            dtype=self.dtype,
            device=self.device,
        )


class ClipMemory:
    """Keys and values of the clip so far, for every block; a `Cache` for the tokens of its next chunk.

    What one call writes is kept once `advance` counts it; until then the next call writes over it. With a window the
    memory that this takes does not grow with the clip.
    """

    def __init__(self, chunks: Chunks, sizes: CacheSizes, *, num_frames: int, frame_tokens: int) -> None:
        """For a clip of `num_frames` latent frames of `frame_tokens` each."""
        self.num_frames = 0
        self._batch, self._frame_tokens, self._num_sunk = sizes.batch, frame_tokens, chunks.sink * frame_tokens
        self._sink = sizes.contiguous(self._num_sunk) if chunks.sink else None
        self._recent: ContiguousKVCache | RingKVCache
        if chunks.window is None:
            self._recent = sizes.contiguous(num_frames * frame_tokens)
        else:
            before = chunks.window - chunks.sink - chunks.frames
            self._recent = sizes.ring(before * frame_tokens + 1, chunks.frames * frame_tokens)

    @property
    def bytes(self) -> int:
        """The size of all buffers as they are now."""
        return self._recent.bytes + (0 if self._sink is None else self._sink.bytes)

    def update(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Block `block`'s new keys and values [B, H, L, Dh] after all that the chunk sees of what came before them,
        [B, H, Lk, Dh]."""
        if self._sink is None:
            return self._recent.update(block, keys, values)
        count = self._sinking(keys.shape[2])
        first = self._sink.update(block, keys[:, :, :count], values[:, :, :count])
        last = self._recent.update(block, keys[:, :, count:], values[:, :, count:])
        return torch.cat((first[0], last[0]), dim=2), torch.cat((first[1], last[1]), dim=2)

    def advance(self, frames: int) -> None:
        """Keep the `frames` latent frames that were written last."""
        new = frames * self._frame_tokens
        count = self._sinking(new)
        if self._sink is not None:
            self._sink.advance([count] * self._batch)
        self._recent.advance([new - count] * self._batch)
        self.num_frames += frames

    def _sinking(self, num_new: int) -> int:
        """How many of the next tokens are of the frames that stay."""
        return min(max(self._num_sunk - self.num_frames * self._frame_tokens, 0), num_new)
