"""Decoders that are told a time, and take away noise that is mixed in before (LTX-Video from 0.9.1 on).

Legend: N clips, C latent channels, F latent frames, h w latent cells.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from torch import Tensor

from ..schedulers import RowNoise
from ..schedulers.base import State
from ..vae.base import Autoencoder
from .request import Request

if TYPE_CHECKING:
    from .base import Encoded


@runtime_checkable
class TimedAutoencoder(Autoencoder, Protocol):
    """An autoencoder whose decoder can be told a time."""

    def at(self, time: float) -> Self:
        """The same, whose decoder is told another time, in 0..1."""
        ...

    def noised(self, latents: Tensor, noise: Tensor, share: float) -> Tensor:
        """Latents [N, C, F, h, w] of which `share` is noise, by what the decoder sees."""
        ...


@dataclass(frozen=True, kw_only=True)
class TimedDecoding:
    """The `time` that a run's decoder is told, and the share of noise that is mixed in before."""

    time: float
    noise_scale: float


@runtime_checkable
class TimedFamily(Protocol):
    """A family whose decoders may be told a time."""

    def decoding(self, request: Request) -> TimedDecoding | None:
        """How a request's clips are decoded, None where the decoder is told none."""
        ...


def decoding_of(family: object, request: Request) -> TimedDecoding | None:
    """How a request's results are decoded, where that can be chosen."""
    return family.decoding(request) if isinstance(family, TimedFamily) else None


def ready_to_decode(
    vae: Autoencoder, latents: Tensor, run: "Encoded | None", state: State | None = None
) -> tuple[Autoencoder, Tensor]:
    """What decodes the latents of a run, and these with the noise that it takes away: that of each clip's generator
    after those of the run's steps (where `state` is not known, after the initial noise).

    Raises:
        ValueError: the run was made for a decoder that is told a time, and this one cannot be.
    """
    decoding = None if run is None else run.plan.decoding
    if run is None or decoding is None:
        return vae, latents
    if not isinstance(vae, TimedAutoencoder):
        raise ValueError(f"vae is a {type(vae).__name__}; decode_timestep needs one that is told a time")
    noise = _noise_before_decoding(run) if state is None else RowNoise.resumed(state.noise, run.shape)
    return vae.at(decoding.time), vae.noised(latents, noise.draw().to(latents.device), decoding.noise_scale)


def _noise_before_decoding(run: "Encoded") -> RowNoise:
    """What is left when the initial noise is drawn, and that of frames that are held."""
    if run.held is not None and run.plan.schedule is not None:
        return run.held.noise_after(run.plan.schedule.num_steps, run.shape)
    noise = RowNoise.resumed(run.noise, run.shape)
    if run.initial is None:
        noise.draw()
    return noise
