"""Rotary position embedding over any number of axes (Su et al. 2021).

Legend: B rows, L tokens, H heads, A axes, Dh width of one head (the sum of the axes' widths).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from .ops import kernels

Pairing = Literal["interleaved", "half"]


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How frequencies are lowered, so that a model reaches further than the `original_context` it was trained for.

    "linear": all by `factor`. "llama3": only wavelengths over original_context / low_frequency, none under
    original_context / high_frequency, smoothly between (Llama 3.1). "yarn": by pairs that turn less than `beta_slow`
    times in the original context, not those that turn more than `beta_fast` times, and all tables times
    `attention_factor` (None: 0.1 ln factor + 1; Peng et al. 2023). "divisors": each pair by its own of `divisors`.
    """

    kind: Literal["linear", "llama3", "yarn", "divisors"]
    factor: float = 1.0
    original_context: int = 0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise ValueError(f"rotary scaling factor is {self.factor}; it must be more than 0")
        if self.kind in ("llama3", "yarn") and self.original_context < 1:
            raise ValueError(f"{self.kind} rotary scaling needs the original context's length, over 0")
        if self.kind == "llama3" and not 0 < self.low_frequency < self.high_frequency:
            raise ValueError(f"frequencies {self.low_frequency} and {self.high_frequency} must ascend from over 0")

    @property
    def gain(self) -> float:
        """The factor on cosines and sines."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """The lowered frequencies, for those [Dh / 2] of base `theta`."""
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "divisors":
            if len(self.divisors) != len(frequencies):
                raise ValueError(f"{len(self.divisors)} rotary divisors for {len(frequencies)} pairs of channels")
            return frequencies / torch.tensor(self.divisors, dtype=frequencies.dtype, device="cpu")
        return self._llama3(frequencies) if self.kind == "llama3" else self._yarn(frequencies, theta)

    def _llama3(self, frequencies: Tensor) -> Tensor:
        turns = self.original_context / (2 * math.pi / frequencies)
        smooth = ((turns - self.low_frequency) / (self.high_frequency - self.low_frequency)).clamp(0, 1)
        return (1 - smooth) * frequencies / self.factor + smooth * frequencies

    def _yarn(self, frequencies: Tensor, theta: float) -> Tensor:
        num_pairs = len(frequencies)
        low, high = (self._pair_that_turns(times, num_pairs, theta) for times in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * num_pairs - 1)
        ramp = (torch.arange(num_pairs, device="cpu") - low) / (high - low if high != low else 0.001)
        keep = 1 - ramp.clamp(0, 1).to(frequencies.dtype)
        return frequencies / self.factor * (1 - keep) + frequencies * keep

    def _pair_that_turns(self, times: float, num_pairs: int, theta: float) -> float:
        """The pair (a fraction) that turns so many times in the original context."""
        return num_pairs * math.log(self.original_context / (times * 2 * math.pi)) / math.log(theta)


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Widths per axis, base, how channels pair up, and the dtype that the tables are built in.

    Pair n of an axis of width w turns by position * theta^(-2n / w), lowered by `scaling`. "interleaved" pairs
    neighbours, "half" the first half of the head with the second. `sections` shares the pairs of a single axis out
    among several axes of positions: so many pairs turn by the first one's position, the next ones by the second's, and
    so on (Qwen2-VL's M-RoPE).
    """

    axes: tuple[int, ...]
    theta: float = 10000.0
    pairing: Pairing = "interleaved"
    dtype: Literal["float32", "float64"] = "float32"
    scaling: RotaryScaling | None = None
    sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.axes or any(width < 2 or width % 2 for width in self.axes):
            raise ValueError(f"rotary axes are {self.axes}; there must be one at least, each of an even width")
        if self.sections and (len(self.axes) != 1 or 2 * sum(self.sections) != sum(self.axes)):
            raise ValueError(f"rotary sections {self.sections} do not make up the pairs of one axis, {self.axes}")
        if self.theta <= 0:
            raise ValueError(f"rotary theta is {self.theta}; it must be more than 0")

    @cached_property
    def frequencies(self) -> tuple[Tensor, ...]:
        """What each pair of an axis turns by per step, on the CPU in the tables' dtype: [width / 2] for each axis."""
        dtype = torch.float64 if self.dtype == "float64" else torch.float32
        return tuple(self._frequencies(width, dtype) for width in self.axes)

    def _frequencies(self, width: int, dtype: torch.dtype) -> Tensor:
        exponents = torch.arange(0, width, 2, dtype=dtype, device="cpu") / width
        frequencies = 1.0 / self.theta**exponents
        return frequencies if self.scaling is None else self.scaling.scale(frequencies, self.theta)


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Cosines and sines for each token: float32 [B or 1, L, Dh / 2]."""

    cos: Tensor
    sin: Tensor
    pairing: Pairing

    def fits(self, x: Tensor) -> bool:
        """Whether heads [B, H, L, Dh] have as many tokens and rows, with channels that lie side by side."""
        rows, length, _ = self.cos.shape
        return x.dim() == 4 and x.shape[2] == length and rows in (1, len(x)) and x.stride(-1) == 1

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """`cos` and `sin`, each in one piece."""
        return self.cos.contiguous(), self.sin.contiguous()

    @cached_property
    def by_halves(self) -> tuple[Tensor, Tensor]:
        """The factors of a head's channels and of its halves swapped, [B or 1, 1, L, Dh] each; kept for every block."""
        cos, sin = self.cos[:, None], self.sin[:, None]
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    @cached_property
    def as_complex(self) -> Tensor:
        """The factors of a head's pairs as complex numbers, [B or 1, 1, L, Dh / 2]."""
        return torch.complex(self.cos, self.sin)[:, None]

    @cached_property
    def matrix(self) -> Tensor:
        """For one token of each row: what turns a head, as a matrix to multiply it with, [B or 1, Dh, Dh]."""
        (cos, sin), width = self.by_halves, 2 * self.cos.shape[-1]
        here = torch.eye(width, device=cos.device) * cos[:, 0]
        return here + torch.eye(width, device=cos.device).roll(width // 2, 0) * sin[:, 0]


def rotary_table(config: RotaryConfig, positions: Tensor) -> Rotary:
    """Tables for `positions` [B, L, A] or [L, A] (any real dtype); one axis stands for all `sections`.

    They are built on the CPU in the config's dtype, so that every device gets the same numbers, then go to the
    positions' device.

    Raises:
        ValueError: the positions have another number of axes.
    """
    if positions.dim() == 2:
        positions = positions[None]
    if config.sections and positions.shape[-1] != 1:
        positions = _by_pair(positions, config.sections)
    elif positions.shape[-1] != len(config.axes):
        raise ValueError(f"positions have {positions.shape[-1]} axes; the rotary embedding has {len(config.axes)}")
    frequencies = config.frequencies
    on_host = positions.to("cpu", frequencies[0].dtype)
    if len(frequencies) == 1:
        angles = on_host * frequencies[0]
    else:
        angles = torch.cat([on_host[..., n, None] * each for n, each in enumerate(frequencies)], dim=-1)
    tables = (angles.cos(), angles.sin())
    if config.scaling is not None and config.scaling.gain != 1:
        tables = (tables[0] * config.scaling.gain, tables[1] * config.scaling.gain)
    cos, sin = (table.to(positions.device, torch.float32) for table in tables)
    return Rotary(cos=cos, sin=sin, pairing=config.pairing)


def _by_pair(positions: Tensor, sections: tuple[int, ...]) -> Tensor:
    """Each pair's own position, [B, L, A] to [B, L, Dh / 2]."""
    if positions.shape[-1] != len(sections):
        raise ValueError(f"positions have {positions.shape[-1]} axes; the rotary embedding has sections {sections}")
    return positions.repeat_interleave(torch.tensor(sections, device=positions.device), dim=-1)


def apply_rotary(x: Tensor, rotary: Rotary | None) -> Tensor:
    """Rotate queries or keys [B, H, L, Dh]; computed in float32, returned in `x`'s dtype. Without tables: `x`.

    Raises:
        ValueError: the tables are made for heads of another width.
    """
    if rotary is None:
        return x
    width = x.shape[-1]
    if width != 2 * rotary.cos.shape[-1]:
        raise ValueError(f"the heads are {width} wide; the rotary tables are made for {2 * rotary.cos.shape[-1]}")
    if rotary.fits(x) and kernels.runs(x, rotary.cos, rotary.sin):
        return kernels.rotate(x, *rotary.tables, by_halves=rotary.pairing == "half")
    if rotary.pairing == "half":
        if x.shape[2] == 1 and x.dtype is torch.float32 and x.device.type == "cpu" and len(x) == len(rotary.cos):
            return torch.bmm(x.squeeze(2), rotary.matrix).unsqueeze(2)  # decoding: one operation instead of five
        cos, sin = rotary.by_halves
        return torch.addcmul(x * cos, x.roll(width // 2, -1), sin).to(x.dtype)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotary.as_complex).flatten(-2).to(x.dtype)


def turned(x: Tensor, rotary: Rotary | None) -> Tensor:
    """`apply_rotary`, which may take the memory of `x`: for an `x` that is read by nobody else."""
    fits = rotary is not None and rotary.pairing == "interleaved" and x.shape[-1] == 2 * rotary.cos.shape[-1]
    if rotary is None or not fits or x.dtype is not torch.float32 or torch.is_grad_enabled():
        return apply_rotary(x, rotary)
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(rotary.as_complex)
    return x


def grid_positions(sizes: Sequence[int], *, start: Sequence[int] | None = None) -> Tensor:
    """Positions of a dense grid, row-major, [product of sizes, A] int64; `start` shifts each axis."""
    offsets = start if start is not None else (0,) * len(sizes)
    axes = [torch.arange(size) + offset for size, offset in zip(sizes, offsets, strict=True)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)
