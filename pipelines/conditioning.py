"""What the denoiser is told of a request's texts, and of the pictures that it looks at.

Legend: P prompts, C latent channels, h w latent cells.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..denoisers.base import Conditioning, Prompt
from ..encoders.base import TextEncoder, resident_encoders
from .checks import check_encoders
from .edit import References, with_references
from .family import Family, NegativeFamily
from .finite import NonFiniteError, is_finite
from .plan import Plan
from .request import Request
from .run_manifest import prompt_tensors
from .texts import OtherTexts

if TYPE_CHECKING:
    from .image import ImagePipeline


def prompt_of_run(pipe: "ImagePipeline", request: Request, plan: Plan, references: References | None) -> Prompt:
    """One row per prompt; a negative side where the run's guidance needs one.

    Raises:
        ValueError: a text encoder is missing, or refuses a text. NonFiniteError: a result is not finite.
    """
    sized = dataclasses.replace(request, height=plan.height, width=plan.width)
    positive, negative = _sides(pipe, sized, references, needs_negative=plan.guidance.needs_negative)
    prompt = with_references(Prompt(positive=positive, negative=negative), _reference_latents(pipe, references))
    if not all(is_finite(tensor) for tensor in prompt_tensors(prompt)):
        raise NonFiniteError("encode")
    return prompt


def _sides(
    pipe: "ImagePipeline", request: Request, references: References | None, *, needs_negative: bool
) -> tuple[Conditioning, Conditioning | None]:
    """Both sides, as they are given or read. Encoders whose weights stay in their files are filled once for both, and
    let go of when this returns."""
    given = request.given_conditioning
    positive = None if given is None else given.positive.to(pipe.device, pipe.dtype)
    negative = None if given is None or given.negative is None else given.negative.to(pipe.device, pipe.dtype)
    if pipe.origin is not None and (positive is None or (needs_negative and negative is None)):
        check_encoders(pipe.encoders, pipe.origin.layout.needed_encoders)
    reads_both = positive is None and needs_negative
    encoders = resident_encoders(pipe.encoders) if reads_both else pipe.encoders
    texts = _Texts(family=pipe.family, encoders=encoders, references=references, request=request)
    positive = texts.positive() if positive is None else positive
    if not needs_negative:
        return positive, None
    return positive, texts.negative(positive) if negative is None else negative


@dataclass(frozen=True, kw_only=True, eq=False)
class _Texts:
    """The texts of a request and the pictures that belong to them, read by a family's encoders."""

    family: Family
    encoders: Mapping[str, TextEncoder]
    references: References | None
    request: Request

    def positive(self) -> Conditioning:
        """The prompts, one row each."""
        return self._read(self.request.prompts, self.request.other_prompts, self.request)

    def negative(self, positive: Conditioning) -> Conditioning:
        """What to stay away from, a row for each of `positive`; as diffusers does it, no layer of CLIP is left out."""
        request = dataclasses.replace(self.request, clip_skip=None)

        def read() -> Conditioning:
            return self._read(request.negative_prompts, request.other_negatives, request)

        return self.family.negative(positive, read, self.request) if isinstance(self.family, NegativeFamily) else read()

    def _read(self, prompts: tuple[str, ...], others: OtherTexts, request: Request) -> Conditioning:
        """One row per prompt; texts that come twice together, with the same pictures, are read once."""
        lists = (0,) * len(prompts) if self.references is None else self.references.rows
        told = tuple(zip(prompts, others.second, others.third, lists, strict=True))
        distinct = tuple(dict.fromkeys(told))
        first, second, third, lists = zip(*distinct, strict=True)
        texts = OtherTexts(second=second, third=third)
        if self.references is None:
            conditioning = self.family.condition(self.encoders, first, texts, request)
        else:
            conditioning = self.references.condition(self.encoders, first, texts, lists, request)
        return conditioning if distinct == told else conditioning.rows([distinct.index(each) for each in told])


def _reference_latents(pipe: "ImagePipeline", references: References | None) -> list[Tensor]:
    """A batch [P, C, 1, h, w] for each picture that is looked at."""
    if references is None:
        return []
    return [pipe.vae.encode(each.to(pipe.device)).float()[list(references.rows)] for each in references.pixels]
