"""Latent frames that a run is given and keeps, each as far as it is sure of it (LTX-Video from 0.9.5 on).

A frame of strength s begins as s of what it shows and 1 - s of noise. That is latents at noise level 1 - s, which is
what the model is told of it until the run's own level is below: then it goes on with all others. Frames whose places
lie between those of the clip's own latent frames go ahead of these, and are left out of the result.

Legend: N clips, C latent channels, E frames ahead, f latent frames of the clip, h w latent cells.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..denoisers.base import Conditioning, Prompt
from ..schedulers import RowNoise

NEAR = 1e-6
"""Noise levels that lie closer are the same."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenFrames:
    """Latents [N, C, n, h, w] of strength `strength`, from `place` on: a latent frame, or a frame of what is shown."""

    latents: Tensor
    place: int
    strength: float

    @property
    def num_frames(self) -> int:
        """n."""
        return self.latents.shape[2]


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """What a run is given. `inside` are at latent frames of its clips, mixed with these one after the other; `ahead`,
    as they begin, go before them.

    `num_frames` is f; after the first, a latent frame stands for `group` frames. `noise` is each row's generator state
    when all this is drawn. `noise_scale`: what is fully known is shown to the model, at noise level sigma, with so many
    times sigma^2 of noise.
    """

    inside: tuple[GivenFrames, ...]
    ahead: tuple[GivenFrames, ...]
    num_frames: int
    group: int
    noise: tuple[Tensor, ...]
    noise_scale: float

    @property
    def num_ahead(self) -> int:
        """E."""
        return sum(part.num_frames for part in self.ahead)

    def begun(self, x: Tensor) -> Tensor:
        """Latents [N, C, E + f, h, w] at a run's first point, of the clips' own [N, C, f, h, w] there."""
        own = x.clone()
        for part in self.inside:
            place = slice(part.place, part.place + part.num_frames)
            own[:, :, place] = torch.lerp(own[:, :, place], part.latents, part.strength)
        return torch.cat((*(part.latents for part in self.ahead), own), dim=2)

    def own(self, x: Tensor) -> Tensor:
        """The clips' latents [N, C, f, h, w] of all."""
        return x[:, :, self.num_ahead :]

    def keeps(self, sigma: float, x: Tensor) -> Tensor:
        """Whether a step from noise level sigma leaves a frame as it is, [E + f, 1, 1] on the device of x."""
        return self._levels.to(x.device) <= sigma - NEAR

    def shares(self, sigma: float, x: Tensor) -> Tensor:
        """The noise level of each frame at a run's level sigma > 0, as a share of that, [E + f, 1, 1]."""
        levels = self._levels.to(x.device)
        return torch.where(levels < sigma, levels / sigma, torch.ones_like(levels))

    def noised(self, x: Tensor, begun: Tensor, noise: RowNoise, sigma: float) -> Tensor:
        """Latents that the model is shown: x, but what is fully known with noise of its own. `noise` is that of
        [N, C, E + f, h, w], and goes on by a draw where any is added."""
        if self.noise_scale == 0:
            return x
        drawn = _by_token(noise.draw()).to(x.device)
        is_known = self._levels.to(x.device) < NEAR
        return torch.where(is_known, begun + self.noise_scale * drawn * sigma**2, x)

    def noise_after(self, num_steps: int, shape: Sequence[int]) -> RowNoise:
        """The noise of clips of latents of `shape` [N, C, f, h, w] when so many steps have drawn theirs."""
        rows, channels, frames, *sides = shape
        steps = RowNoise.resumed(self.noise, (rows, channels, self.num_ahead + frames, *sides))
        for _ in range(num_steps if self.noise_scale else 0):
            steps.draw()
        return RowNoise.resumed(steps.state(), shape)

    def told(self, prompt: Prompt) -> Prompt:
        """The prompt whose `time_ids` also say of each frame when it is shown, then of each its strength."""
        negative = None if prompt.negative is None else self._told(prompt.negative)
        return Prompt(positive=self._told(prompt.positive), negative=negative)

    def _told(self, part: Conditioning) -> Conditioning:
        assert part.time_ids is not None
        own = part.time_ids.new_tensor([*self.ticks, *self.strengths]).expand(part.num_rows, -1)
        return dataclasses.replace(part, time_ids=torch.cat((part.time_ids, own), dim=1))

    @cached_property
    def ticks(self) -> tuple[int, ...]:
        """The frame at which each of E + f begins to be shown."""
        ahead = (part.place + tick for part in self.ahead for tick in self._ticks(part.num_frames))
        return (*ahead, *self._ticks(self.num_frames))

    @cached_property
    def strengths(self) -> tuple[float, ...]:
        """Of each of E + f frames; the last one that is given where there are several."""
        own = [0.0] * self.num_frames
        for part in self.inside:
            own[part.place : part.place + part.num_frames] = [part.strength] * part.num_frames
        return (*(part.strength for part in self.ahead for _ in range(part.num_frames)), *own)

    @cached_property
    def _levels(self) -> Tensor:
        """The noise level of each frame at which it goes on, [E + f, 1, 1]."""
        return (1 - torch.tensor(self.strengths))[:, None, None]

    def _ticks(self, count: int) -> Iterator[int]:
        """Those of the first latent frames of a clip."""
        return (max(0, (frame - 1) * self.group + 1) for frame in range(count))


def _by_token(drawn: Tensor) -> Tensor:
    """Draws [N, C, f, h, w] as the reference has them, token by token with all channels of each."""
    rows, channels, *cells = drawn.shape
    return drawn.reshape(rows, *cells, channels).movedim(-1, 1)
