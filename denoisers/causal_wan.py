"""Wan 2.1 as a causal model of few steps (Self-Forcing): the same network and weights, a chunk of latent frames at a
time.

Within a chunk all tokens see each other, and those of the chunks before; no mask is needed. Frames stand where they are
in the whole clip. A finished chunk goes through the network once more, at time 0, so that what is kept are the keys and
values of clean latents. Those of the text are made once for the run.

Source: Self-Forcing (Huang et al. 2025, https://arxiv.org/abs/2506.08009), FastVideo's CausalWanTransformer3DModel.

Legend: B rows, C latent channels, F latent frames of a clip, f of a chunk, h w latent cells.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..core.attention.base import FULL, AttentionSelector
from ..core.saving import Component
from ..core.stream import Runner, run_blocks
from ..schedulers.base import Point
from .base import Conditioning
from .causal import CacheSizes, Chunks, ClipMemory
from .wan import WanDenoiser, WanPrepared
from .wan_config import PATCH, WanConfig

CLASS_NAME = "CausalWanTransformer3DModel"
"""What FastVideo's folders call it."""
CLEAN = -1
"""The evaluation at time 0, see `TimedPrepared`."""


@dataclass(kw_only=True, eq=False)
class CausalWanPrepared:
    """Of one run: `told` is the same for every chunk, `memory` what was remembered so far. `chunk` is read by the next
    one, whose place is its first frame's number and how many it has."""

    told: WanPrepared
    memory: ClipMemory
    chunk: WanPrepared
    place: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class CausalWan:
    """See the module's first lines; implements `CausalDenoiser`. The network's conditioning holds text alone.

    Raises:
        ValueError: a network that reads pictures.
    """

    network: WanDenoiser
    chunks: Chunks = Chunks()  # noqa: RUF009 (immutable)

    def __post_init__(self) -> None:
        check_reads_text(self.network.config)

    @property
    def config(self) -> tuple[WanConfig, Chunks]:
        """See `Saveable`."""
        return self.network.config, self.chunks

    def prepare(
        self,
        conditioning: Conditioning,
        shape: tuple[int, ...],
        evaluations: Sequence[Point],
        *,
        attention: AttentionSelector,
        runner: Runner = run_blocks,
    ) -> CausalWanPrepared:
        """Everything for a new clip of latents of `shape` [B, C, F, h, w], every chunk of which is asked for these
        points.

        Raises:
            ValueError: latents or conditioning of a shape or kind that the model does not take.
        """
        rows, channels, frames, *sides = shape
        own = self.network.runner(runner)
        frame = (rows, channels, 1, *sides)
        told = self.network.prepare(conditioning, frame, evaluations, attention=attention, runner=own)
        config, weight = self.network.config, self.network.image_in.weight
        sizes = CacheSizes(
            layers=config.layers,
            batch=rows,
            heads=config.heads,
            head_width=config.head_width,
            dtype=weight.dtype,
            device=weight.device,
        )
        memory = ClipMemory(self.chunks, sizes, num_frames=frames, frame_tokens=_tokens(frame))
        return CausalWanPrepared(told=told, memory=memory, chunk=told)

    def slope(self, x: Tensor, prepared: CausalWanPrepared, point: Point) -> Tensor:
        """noise - data, float32 [B, C, f, h, w], of the clip's next chunk at one of the points that were prepared."""
        chunk = self._next(x, prepared)
        return self.network.predicted(x, chunk, chunk.places[point.index], prepared.memory)

    def remember(self, x0: Tensor, prepared: CausalWanPrepared) -> None:
        """See `CausalDenoiser`."""
        self.network.read(x0, self._next(x0, prepared), CLEAN, prepared.memory)
        prepared.memory.advance(x0.shape[2])

    def component(self) -> Component:
        """See `Saveable`."""
        base = self.network.component()
        entries = {**base.entries, "_class_name": CLASS_NAME, **self.chunks.entries()}
        return Component(entries=entries, weights=base.weights)

    def _next(self, x: Tensor, prepared: CausalWanPrepared) -> WanPrepared:
        """What latents of the next chunk read, made once for all of its evaluations."""
        place = (prepared.memory.num_frames, x.shape[2])
        if prepared.place != place:
            rotary = self.network.rotary(x.shape, start=place[0])
            prepared.chunk = dataclasses.replace(prepared.told, rotary=rotary, mask=FULL, lengths=(0, _tokens(x.shape)))
            prepared.place = place
        return prepared.chunk


def check_reads_text(config: WanConfig) -> None:
    """Makes sure that clips can be made chunk by chunk. ValueError for a denoiser that reads pictures."""
    if config.beside_channels or config.picture_width is not None:
        raise ValueError("this denoiser reads pictures beside its latents; only text-to-video makes clips by chunks")


def _tokens(shape: Sequence[int]) -> int:
    """Those of a row of latents."""
    return shape[2] * shape[3] * shape[4] // PATCH**2
