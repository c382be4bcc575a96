"""What a denoiser is told, and the two calls it answers: prepare once, then a slope per evaluation.

Legend: B rows, C latent channels, F frames, h w latent cells, Lt text tokens, Dt text width.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from ..core.attention.base import AttentionSelector
from ..core.stream import Runner, run_blocks
from ..schedulers.base import Point


@dataclass(frozen=True, kw_only=True, eq=False)
class Conditioning:
    """What a denoiser is told, row by row.

    `states` [B, Lt, Dt] are text encoder states, padded at the end; `lengths` [B] int64 says how many of each row are
    valid. `pooled` [B, Dp] is one vector for each prompt, for models that read one. `guidance` is the value that
    guidance-distilled models are told (set by the run's guidance). `references` are latents [B, C, F, h, w] of pictures
    to look at, of any sizes, for edit models, or what a model reads beside its latents; float32. `picture_states`
    [B, Lp, Dv] are a picture encoder's states, all of them read, for models that look at pictures so. `time_ids` [B, T]
    are numbers that describe the picture (its size, where it was cropped), for models that are told such; float32.
    `other_states` [B, Lo, Do] are those of another text encoder, for models that keep them apart, padded and counted by
    `other_lengths` [B] as `states` are; a row may have none. `warnings` are remarks of the encoder for the user
    (dropped tokens and the like).
    """

    states: Tensor
    lengths: Tensor
    pooled: Tensor | None = None
    guidance: float | None = None
    references: tuple[Tensor, ...] = ()
    picture_states: Tensor | None = None
    time_ids: Tensor | None = None
    other_states: Tensor | None = None
    other_lengths: Tensor | None = None
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.states.ndim != 3 or tuple(self.lengths.shape) != (self.states.shape[0],):
            raise ValueError(
                f"states of shape {tuple(self.states.shape)} with lengths of shape {tuple(self.lengths.shape)}; "
                "conditioning takes states [B, Lt, Dt] and lengths [B]"
            )
        if self.pooled is not None and (self.pooled.ndim != 2 or len(self.pooled) != len(self.states)):
            raise ValueError(
                f"pooled of shape {tuple(self.pooled.shape)} with states of shape {tuple(self.states.shape)}; "
                "conditioning takes pooled [B, Dp] and states [B, Lt, Dt]"
            )
        if self.time_ids is not None and (self.time_ids.ndim != 2 or len(self.time_ids) != len(self.states)):
            raise ValueError(
                f"time_ids of shape {tuple(self.time_ids.shape)} with states of shape {tuple(self.states.shape)}; "
                "conditioning takes time_ids [B, T] and states [B, Lt, Dt]"
            )
        if self.picture_states is not None and (
            self.picture_states.ndim != 3 or len(self.picture_states) != len(self.states)
        ):
            raise ValueError(
                f"picture_states of shape {tuple(self.picture_states.shape)} with states of shape "
                f"{tuple(self.states.shape)}; conditioning takes picture_states [B, Lp, Dv] and states [B, Lt, Dt]"
            )
        self._check_others()
        for latents in self.references:
            if latents.ndim != 5 or len(latents) != len(self.states):
                raise ValueError(
                    f"references of shape {tuple(latents.shape)} with states of shape {tuple(self.states.shape)}; "
                    "conditioning takes references [B, C, F, h, w] and states [B, Lt, Dt]"
                )

    def _check_others(self) -> None:
        states, lengths = self.other_states, self.other_lengths
        found = [None if each is None else tuple(each.shape) for each in (states, lengths)]
        if found == [None, None]:
            return
        if states is None or states.ndim != 3 or found[1] != (len(states),) or len(states) != len(self.states):
            raise ValueError(
                f"other_states of shape {found[0]} and other_lengths of shape {found[1]} with states of shape "
                f"{tuple(self.states.shape)}; conditioning takes other_states [B, Lo, Do], other_lengths [B] and "
                "states [B, Lt, Dt]"
            )

    @property
    def num_rows(self) -> int:
        """B."""
        return self.states.shape[0]

    @property
    def _kind(self) -> tuple[object, ...]:
        """What must be alike in rows of one batch."""
        pictures = () if self.picture_states is None else (self.picture_states,)
        shapes = _shapes(self.references), _shapes(pictures)
        tensors = (self.states, self.pooled, self.time_ids, self.other_states)
        widths = tuple(None if each is None else each.shape[-1] for each in tensors)
        return widths, self.guidance, *shapes

    def rows(self, indices: Sequence[int]) -> "Conditioning":
        """The rows `indices`, in that order; an index may come several times."""
        index = torch.tensor(list(indices), dtype=torch.int64, device=self.states.device)
        lengths = self.lengths.to(index.device)[index]
        pooled = None if self.pooled is None else self.pooled[index]
        references = tuple(latents[index.to(latents.device)] for latents in self.references)
        picture_states = None if self.picture_states is None else self.picture_states[index]
        time_ids, others, lengths_of_others = (
            None if each is None else each[index.to(each.device)]
            for each in (self.time_ids, self.other_states, self.other_lengths)
        )
        return dataclasses.replace(
            self,
            states=self.states[index],
            lengths=lengths,
            pooled=pooled,
            references=references,
            picture_states=picture_states,
            time_ids=time_ids,
            other_states=others,
            other_lengths=lengths_of_others,
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> "Conditioning":
        """The same on `device`, all states and pooled in `dtype`."""
        states = self.states.to(device=device, dtype=dtype)
        pooled = None if self.pooled is None else self.pooled.to(device=device, dtype=dtype)
        pictures = None if self.picture_states is None else self.picture_states.to(device=device, dtype=dtype)
        others = None if self.other_states is None else self.other_states.to(device=device, dtype=dtype)
        return dataclasses.replace(
            self,
            states=states,
            lengths=self.lengths.to(device),
            pooled=pooled,
            references=tuple(latents.to(device) for latents in self.references),
            picture_states=pictures,
            time_ids=None if self.time_ids is None else self.time_ids.to(device),
            other_states=others,
            other_lengths=None if self.other_lengths is None else self.other_lengths.to(device),
        )

    @staticmethod
    def concatenate(parts: Sequence["Conditioning"]) -> "Conditioning":
        """The rows of all parts, one after the other, padded with zeros to the longest part.

        Raises:
            ValueError: parts of different kinds: only some are pooled or have time_ids, or they have different
            widths, guidance, references or shapes of picture_states.
        """
        if len({part._kind for part in parts}) > 1:
            raise ValueError(
                "conditioning of different kinds cannot be joined: widths of states, pooled and time_ids, guidance, "
                "references and picture_states must agree"
            )
        others = [part.other_states for part in parts if part.other_states is not None]
        return Conditioning(
            states=_joined_texts([part.states for part in parts]),
            lengths=torch.cat([part.lengths for part in parts]),
            pooled=_joined([part.pooled for part in parts]),
            picture_states=_joined([part.picture_states for part in parts]),
            time_ids=_joined([part.time_ids for part in parts]),
            other_states=_joined_texts(others) if others else None,
            other_lengths=_joined([part.other_lengths for part in parts]),
            guidance=parts[0].guidance,
            references=tuple(torch.cat(each) for each in zip(*(part.references for part in parts), strict=True)),
            warnings=tuple(dict.fromkeys(line for part in parts for line in part.warnings)),
        )


def _joined_texts(states: Sequence[Tensor]) -> Tensor:
    """The rows of all, padded with zeros to the longest."""
    longest = max(each.shape[1] for each in states)
    return torch.cat([functional.pad(each, (0, 0, 0, longest - each.shape[1])) for each in states])


def _joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The rows of all, which are there or not alike."""
    found = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(found) if found else None


def _shapes(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """Of one row."""
    return tuple(tuple(each.shape[1:]) for each in tensors)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """What a run is told, one row per prompt: the prompts themselves, and what to stay away from (None: nothing
    said)."""

    positive: Conditioning
    negative: Conditioning | None = None

    def __post_init__(self) -> None:
        if self.negative is not None and self.negative.num_rows != self.positive.num_rows:
            raise ValueError(
                f"conditioning has {self.positive.num_rows} positive and {self.negative.num_rows} negative rows; "
                "it takes one of each per prompt"
            )

    def rows(self, indices: Sequence[int]) -> "Prompt":
        """The rows `indices` of both."""
        negative = None if self.negative is None else self.negative.rows(indices)
        return Prompt(positive=self.positive.rows(indices), negative=negative)


class Prepared(Protocol):
    """All that does not depend on the latents, computed once per run. Opaque to everyone but its denoiser."""


P = TypeVar("P", bound=Prepared)
_Made = TypeVar("_Made", bound=Prepared, covariant=True)


class Denoiser(Protocol[P]):
    """A trained model of the slope dx/dsigma, where x = alpha x0 + sigma noise."""

    def prepare(
        self,
        conditioning: Conditioning,
        shape: tuple[int, ...],
        evaluations: Sequence[Point],
        *,
        attention: AttentionSelector,
        runner: Runner = run_blocks,
    ) -> P:
        """Everything a run needs besides the latents [B, C, F, h, w] of `shape`.

        `evaluations` are the points that `slope` will be asked for; `runner` walks the blocks.

        Raises:
            ValueError: the shape or the conditioning does not fit the model, or it has no blocks for `runner` to walk.
        """
        ...

    def slope(self, x: Tensor, prepared: P, point: Point) -> Tensor:
        """dx/dsigma at `point`, float32 [B, C, F, h, w], for x of the same shape."""
        ...


@runtime_checkable
class SharingDenoiser(Protocol[P]):
    """A denoiser that prepares a second conditioning of a run from what it prepared for the first."""

    def prepare_beside(self, prepared: P, conditioning: Conditioning, shape: tuple[int, ...]) -> P:
        """What `prepare` gives for `conditioning`, at the points, and computed as `prepared` is, bit by bit; tables
        that do not depend on the conditioning are shared with it, not made again. Errors as there."""
        ...


@runtime_checkable
class PairingDenoiser(Protocol[_Made]):
    """A denoiser that prepares two conditionings of a run at once: weights that only this uses are read once for
    both."""

    def prepare_both(
        self,
        first: Conditioning,
        second: Conditioning,
        shape: tuple[int, ...],
        evaluations: Sequence[Point],
        *,
        attention: AttentionSelector,
        runner: Runner = run_blocks,
    ) -> tuple[_Made, _Made]:
        """What `prepare` gives for each of them, bit by bit. Errors as there."""
        ...


@runtime_checkable
class UnmaskedDenoiser(Protocol):
    """A denoiser that attends to every text token that it is given, padding as well."""

    def takes_together(self, first: Conditioning, second: Conditioning) -> bool:
        """Whether both can be rows of one batch: their texts have one length."""
        ...
