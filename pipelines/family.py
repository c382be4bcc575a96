"""What a family of models decides for itself: which arguments it uses, and what it makes of them.

Legend: B rows, N picture tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ..denoisers.base import Conditioning
from ..denoisers.guidance import ClassifierFree, Guidance
from ..encoders.base import TextEncoder
from ..schedulers import Schedule, flow_schedule, flow_schedule_from_sigmas
from .distilled import check_not_told
from .recipe import Recipe
from .request import Request
from .text_options import conditioning_of
from .texts import OtherTexts

COMMON = frozenset(
    (
        *("negative_prompt", "height", "width", "num_inference_steps", "num_images_per_prompt", "guidance_scale"),
        *("image", "mask_image", "strength", "latents", "sigmas", "output_type", "generator", "seed"),
        *("conditioning", "expand", "guidance", "sampler", "schedule"),
    )
)
"""Arguments of every family, besides the prompt."""
STARTING = frozenset(("image", "mask_image", "strength"))
"""Those of them that say what a picture starts from."""
OF_CLIPS = frozenset(("num_frames", "num_videos_per_prompt"))
"""Arguments of every family that makes clips, besides these."""


@runtime_checkable
class NegativeFamily(Protocol):
    """A family whose negative side is more than another text."""

    def negative(self, positive: Conditioning, encode: Callable[[], Conditioning], request: Request) -> Conditioning:
        """What to stay away from, one row per prompt as `positive` has; `encode` reads the negative prompts, "" where
        there are none."""
        ...


class Family(Protocol):
    """The choices of one family of picture models; immutable."""

    @property
    def arguments(self) -> frozenset[str]:
        """The names of a request's arguments that it uses."""
        ...

    @property
    def draws_posterior(self) -> bool:
        """Whether input pictures become a sample of the autoencoder's posterior (drawn before the initial noise), not
        its mean."""
        ...

    def check(self, request: Request) -> None:
        """Refuse, with a ValueError, values that this family cannot use; names are checked already."""
        ...

    def guidance(self, request: Request, recipe: Recipe) -> Guidance:
        """The guidance that a request asks for."""
        ...

    def schedule(self, request: Request, recipe: Recipe, num_cells: int) -> Schedule:
        """The whole schedule of a request that brings none of its own, for results of `num_cells` latent cells."""
        ...

    def late(self, schedule: Schedule, strength: float) -> Schedule:
        """The end of a schedule that image-to-image runs at a strength over 0."""
        ...

    def condition(
        self, encoders: Mapping[str, TextEncoder], prompts: Sequence[str], others: OtherTexts, request: Request
    ) -> Conditioning:
        """What the denoiser is told for prompts, and their texts for further encoders: one row each. The request's
        `height` and `width` are those of the picture."""
        ...

    def described(self, request: Request) -> Mapping[str, Any]:
        """Numbers among its own arguments, which the manifest must keep."""
        ...

    def warnings(self, request: Request) -> tuple[str, ...]:
        """What the user should know about the arguments."""
        ...


@dataclass(frozen=True)
class PlainFamily:
    """plate: one language model reads the prompt; classifier-free guidance; one shift for all sizes; maybe `clips` as
    well as pictures."""

    clips: bool = False

    @property
    def arguments(self) -> frozenset[str]:
        """All common ones, the guidance's rescale, and those of clips."""
        return COMMON | {"guidance_rescale"} | ({*OF_CLIPS, "video"} if self.clips else set[str]())

    @property
    def draws_posterior(self) -> bool:
        """The autoencoder has a mean alone."""
        return False

    def check(self, request: Request) -> None:
        """All can be used, but for guidance that tells a value, and pictures together with clips."""
        check_not_told(request)
        if request.image is not None and request.num_frames is not None:
            raise ValueError("image: a picture starts from it; clips of this model cannot begin with one")
        if request.image is not None and request.video is not None:
            raise ValueError("image and video: a picture starts from one, a clip from the other; give one of the two")

    def guidance(self, request: Request, recipe: Recipe) -> Guidance:
        """u + scale (c - u)."""
        if request.guidance is not None:
            return request.guidance
        return ClassifierFree(guidance_scale(request, recipe), rescale=guidance_rescale(request, recipe))

    def schedule(self, request: Request, recipe: Recipe, num_cells: int) -> Schedule:
        """Equal steps, shifted by the recipe's shift; or the given sigmas as they are."""
        if request.sigmas is not None:
            return flow_schedule_from_sigmas(request.sigmas)
        return flow_schedule(num_steps(request, recipe), recipe.shift)

    def late(self, schedule: Schedule, strength: float) -> Schedule:
        """The last `int(n strength)` steps."""
        return schedule.starting_at(strength)

    def condition(
        self, encoders: Mapping[str, TextEncoder], prompts: Sequence[str], others: OtherTexts, request: Request
    ) -> Conditioning:
        """The language model's states."""
        text = encoders["llm"](prompts)
        return conditioning_of(text)

    def described(self, request: Request) -> Mapping[str, Any]:
        """Nothing."""
        return {}

    def warnings(self, request: Request) -> tuple[str, ...]:
        """None."""
        return ()


def num_steps(request: Request, recipe: Recipe) -> int:
    """Steps that a request asks for, else the recipe's."""
    return recipe.num_inference_steps if request.num_inference_steps is None else request.num_inference_steps


def guidance_scale(request: Request, recipe: Recipe) -> float:
    """The scale that a request asks for, else the recipe's."""
    return float(recipe.guidance_scale if request.guidance_scale is None else request.guidance_scale)


def guidance_rescale(request: Request, recipe: Recipe) -> float:
    """The rescale that a request asks for, else the recipe's."""
    return float(recipe.guidance_rescale if request.guidance_rescale is None else request.guidance_rescale)
