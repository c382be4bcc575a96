"""FLUX.2 klein KV: the tokens of reference pictures see each other alone, and are modulated as at time 0.

So their keys and values are the same in every evaluation: they are made once by `prepare`, block by block, and a step
reads them beside its own tokens.

Source: diffusers' Flux2KleinKVPipeline.

Legend: B rows, H heads, L tokens, R reference tokens, Dh width of a head.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.attention.base import FULL, AttentionSelector
from ..core.modulation import Modulation
from ..core.rotary import rotary_table
from ..core.stream import BlockInputs, Runner, Stream, run_blocks
from ..schedulers.base import Point
from .base import Conditioning
from .flux2 import Flux2Denoiser, reference_places
from .stages import StagesPrepared

STILL = Point(index=-1, sigma=0.0, alpha=1.0, time=0.0)
"""Where references are modulated."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Beside:
    """A cache of the keys and values [B, H, R, Dh] that each block's tokens see after their own."""

    pairs: Mapping[int, tuple[Tensor, Tensor]]

    def update(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Both, with those of the references."""
        more_keys, more_values = self.pairs[block]
        return torch.cat((keys, more_keys), dim=2), torch.cat((values, more_values), dim=2)


class Recorder:
    """A cache that keeps a copy of each block's keys and values, and changes nothing."""

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The arguments, unchanged."""
        self.pairs[block] = keys.clone(), values.clone()
        return keys, values


class Flux2KVDenoiser(Flux2Denoiser):
    """See the module's first lines; all else is `Flux2Denoiser`'s."""

    def prepare(
        self,
        conditioning: Conditioning,
        shape: tuple[int, ...],
        evaluations: Sequence[Point],
        *,
        attention: AttentionSelector,
        runner: Runner = run_blocks,
    ) -> StagesPrepared:
        """As there."""
        alone, points = dataclasses.replace(conditioning, references=()), (*evaluations, STILL)
        prepared = super().prepare(alone, shape, points, attention=attention, runner=runner)
        return self._looking(prepared, conditioning, shape)

    def prepare_beside(
        self, prepared: StagesPrepared, conditioning: Conditioning, shape: tuple[int, ...]
    ) -> StagesPrepared:
        """See `SharingDenoiser`."""
        alone = dataclasses.replace(conditioning, references=())
        return self._looking(super().prepare_beside(prepared, alone, shape), conditioning, shape)

    def _looking(self, prepared: StagesPrepared, conditioning: Conditioning, shape: tuple[int, ...]) -> StagesPrepared:
        """What is prepared without references, and what they leave in each block."""
        self._check_fits(conditioning, shape)
        tokens, still = self._reference_tokens(conditioning.references), prepared.places[STILL.index]
        if tokens is None:
            return prepared
        places = torch.cat(reference_places(conditioning.references)).to(tokens.device)

        def inputs(modulation: Sequence[Sequence[Modulation]]) -> BlockInputs:
            rotary = rotary_table(self.config.rotary(), places)
            return BlockInputs(rotary=rotary, mask=FULL, attention=prepared.attention, modulation=modulation)

        joint, single = Recorder(), Recorder()
        stream = prepared.runner([*self.blocks], Stream(x=tokens), inputs(prepared.modulation[still]), joint)
        prepared.runner([*self.single_blocks], stream, inputs(prepared.single_modulation[still]), single)
        caches = {"joint_cache": Beside(pairs=joint.pairs), "single_cache": Beside(pairs=single.pairs)}
        return dataclasses.replace(prepared, told=dataclasses.replace(prepared.told, **caches))
