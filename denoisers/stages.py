"""Joint blocks over pictures and text, then parallel ones over all tokens: what FLUX.1 and FLUX.2 share.

Legend: B rows, E evaluations, C latent channels, h w latent cells, N picture tokens, R reference tokens, Lt text
tokens, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.attention.base import AttentionMask, AttentionSelector
from ..core.modulation import Modulation, ShiftScale
from ..core.rotary import Rotary
from ..core.stream import Block, BlockInputs, Cache, NoCache, Runner, Stream, walk


@dataclass(frozen=True, kw_only=True, eq=False)
class StagesTold:
    """What is prepared of the text, and of pictures to look at. Tokens are in the order picture, references, text, and
    so are the rotary tables. `joint_cache` and `single_cache` hold what tokens see besides each other."""

    context: Tensor  # [B, Lt, D]
    references: Tensor | None = None  # [B, R, D]
    rotary: Rotary
    joint_cache: Cache = NoCache()  # noqa: RUF009 (immutable)
    single_cache: Cache = NoCache()  # noqa: RUF009 (immutable)


@dataclass(frozen=True, kw_only=True, eq=False)
class StagesPrepared:
    """All that one run needs and that does not depend on the latents. `modulation[e]` are evaluation e's
    modulations of the joint blocks, `single_modulation[e]` those of the parallel ones, `final[e]` that of the output
    layer; `places[index]` finds e by a point's index.
    """

    told: StagesTold
    mask: AttentionMask
    attention: AttentionSelector
    runner: Runner
    modulation: Sequence[Sequence[Sequence[Modulation]]]
    single_modulation: Sequence[Sequence[Sequence[Modulation]]]
    final: Sequence[ShiftScale]
    places: Mapping[int, int]

    def inputs(self, modulation: Sequence[Sequence[Modulation]]) -> BlockInputs:
        """What blocks with these modulations read."""
        return BlockInputs(rotary=self.told.rotary, mask=self.mask, attention=self.attention, modulation=modulation)


def run_stages(
    tokens: Tensor, prepared: StagesPrepared, e: int, joint: Sequence[Block], single: Sequence[Block]
) -> Tensor:
    """Picture tokens [B, N, D] through all blocks at evaluation e, [B, N, D]."""
    told, references = prepared.told, prepared.told.references
    x = tokens if references is None else torch.cat((tokens, references), dim=1)
    stream = Stream(x=x, context=told.context)
    stream = walk(prepared.runner, joint, stream, prepared.inputs(prepared.modulation[e]), told.joint_cache)
    assert stream.context is not None
    stream = Stream(x=torch.cat((stream.x, stream.context), dim=1))
    stream = walk(prepared.runner, single, stream, prepared.inputs(prepared.single_modulation[e]), told.single_cache)
    return stream.x[:, : tokens.shape[1]]
