"""FLUX.1 (dev, schnell) from a folder in diffusers' layout.

Source: diffusers' FluxPipeline and FluxImg2ImgPipeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.loading import build_on_meta
from ..core.weight_source import WeightSource
from ..denoisers.base import Conditioning
from ..denoisers.flux import HOISTED, FluxConfig, FluxDenoiser, flux_key_map
from ..denoisers.guidance import ClassifierFree, Distilled, Guidance
from ..denoisers.hoisting import fill_denoiser
from ..encoders.base import LimitedEncoder, TextEncoder
from ..encoders.clip import load_clip
from ..encoders.t5 import load_t5
from ..schedulers import Schedule
from ..schedulers.flow_match import FlowMatchConfig
from ..vae.kl import load_kl
from .base import Source
from .family import COMMON
from .flow import late_steps, size_shifted_schedule
from .folders import entries_of, weights_digests
from .image import ImagePipeline
from .parts import Layout, Parts
from .recipe import Recipe
from .request import Request

FAMILY = "flux"
PATCH = 2
MAX_TOKENS = {True: 512, False: 256}  # that T5 reads, by whether the model is guided (dev) or not (schnell)
LONGEST = 512
LAYOUT = Layout(
    classes=("FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline"),
    encoders={"clip": "text_encoder", "t5": "text_encoder_2"},
    tokenizers={"clip": "tokenizer", "t5": "tokenizer_2"},
)
DEFAULT_CELLS = 128  # latent cells a side of a picture whose size is not given


@dataclass(frozen=True, kw_only=True)
class FluxFamily:
    """FLUX.1's choices. `guided`: dev, which is told a guidance value; schnell is not.

    `guidance_scale` is that value. `true_cfg_scale` over 1 with a negative prompt adds classifier-free guidance, one
    pass after the other.
    """

    scheduler: FlowMatchConfig
    guided: bool

    @property
    def arguments(self) -> frozenset[str]:
        """All common ones, and these."""
        return COMMON | {"prompt_2", "true_cfg_scale", "max_sequence_length"}

    @property
    def draws_posterior(self) -> bool:
        """As the reference does."""
        return True

    def check(self, request: Request) -> None:
        """The length is within what the model was made for."""
        length = request.max_sequence_length
        if length is not None and not 2 <= length <= LONGEST:
            raise ValueError(f"max_sequence_length is {length}; it must be from 2 to {LONGEST}")
        if length is not None and request.prompt is None:
            raise ValueError("max_sequence_length: conditioning is given, so that there is no prompt to read")
        told, given = request.guidance, request.given_conditioning
        if isinstance(told, Distilled) and (told.scale is not None) != self.guided:
            wanted = "a value" if self.guided else "no value (None)"
            raise ValueError(f"guidance is {told}; this model is told {wanted}")
        for part in () if given is None else (given.positive, given.negative):
            if part is not None and (part.pooled is None or bool((part.lengths != part.states.shape[1]).any())):
                raise ValueError("conditioning: this model reads states without padding, and a pooled vector")

    def guidance(self, request: Request, recipe: Recipe) -> Guidance:
        """The distilled value, and classifier-free guidance where it is asked for."""
        scale = recipe.guidance_scale if request.guidance_scale is None else request.guidance_scale
        told = float(scale) if self.guided else None
        if request.guidance is not None:
            given = request.guidance
            return given if isinstance(given, Distilled) or told is None else Distilled(told, then=given)
        if not _has_negative(request) or request.true_cfg_scale is None or request.true_cfg_scale <= 1:
            return Distilled(told)
        return Distilled(told, then=ClassifierFree(float(request.true_cfg_scale), batched=False))

    def schedule(self, request: Request, recipe: Recipe, num_cells: int) -> Schedule:
        """Equal steps, or the given sigmas, shifted as the scheduler's config says, by the size where it does."""
        return size_shifted_schedule(self.scheduler, request, recipe, num_cells // PATCH**2)

    def late(self, schedule: Schedule, strength: float) -> Schedule:
        """All but the first `int(n - n strength)` steps."""
        return late_steps(schedule, strength)

    def condition(
        self, encoders: Mapping[str, TextEncoder], prompts: Sequence[str], second: Sequence[str], request: Request
    ) -> Conditioning:
        """T5's states of the second texts, and CLIP's pooled vector of the prompts."""
        t5, length = encoders["t5"], request.max_sequence_length
        if length is not None:
            if not isinstance(t5, LimitedEncoder):
                raise ValueError(f"max_sequence_length: the encoder {type(t5).__name__} has no limit to set")
            t5 = t5.with_max_tokens(length)
        states = t5(second)
        pooled = encoders["clip"](prompts)
        warnings = tuple(dict.fromkeys((*pooled.warnings, *states.warnings)))
        return Conditioning(states=states.states, lengths=states.lengths, pooled=pooled.pooled, warnings=warnings)

    def described(self, request: Request) -> Mapping[str, Any]:
        """The length, where it is given."""
        length = request.max_sequence_length
        return {} if length is None else {"max_sequence_length": length}

    def warnings(self, request: Request) -> tuple[str, ...]:
        """What an argument does not do here."""
        found: list[str] = []
        if not self.guided and request.guidance_scale not in (None, 0, 0.0):
            found.append(f"guidance_scale {request.guidance_scale} has no effect: this model was made to run without")
        scale = request.true_cfg_scale
        if scale is not None and scale > 1 and not _has_negative(request):
            found.append("true_cfg_scale has no effect without a negative_prompt")
        if scale is not None and scale < 1:
            found.append(
                f"true_cfg_scale {scale} has no effect: it begins above 1; give guidance=ClassifierFree({scale})"
            )
        return tuple(found)


def load_flux(parts: Parts) -> ImagePipeline:
    """The pipeline of FLUX.1's parts.

    Raises:
        FileNotFoundError: a component or a file is missing. ValueError: a file is damaged, or they do not fit together.
    """
    if parts.scheduler is None or parts.folder is None:
        raise ValueError(f"{parts.name}: FLUX.1 loads from a folder in diffusers' layout")
    config = FluxConfig.from_entries(entries_of(parts.denoiser / "config.json"))
    scheduler = FlowMatchConfig.from_entries(entries_of(parts.scheduler / "scheduler_config.json"))
    _check_widths(parts, config)
    device, dtype = parts.device, parts.dtype
    denoiser = build_on_meta(lambda: FluxDenoiser(config))
    source = WeightSource.for_module(denoiser, parts.denoiser, flux_key_map())  # refuses a broken file first
    vae = load_kl(parts.vae, device=device, dtype=dtype)
    clip = load_clip(parts.encoders["clip"], parts.tokenizers["clip"], pooled="pooler", device=device, dtype=dtype)
    t5 = load_t5(
        *(parts.encoders["t5"], parts.tokenizers["t5"]),
        max_tokens=MAX_TOKENS[config.guided],
        pad_to_max=True,
        masked=False,
        device=device,
        dtype=dtype,
    )
    fill_denoiser(denoiser, source, HOISTED, device=device, dtype=dtype)
    denoiser.source = source
    return ImagePipeline(
        source=Source(family=FAMILY, name=parts.name, weights=weights_digests(parts.folder)),
        family=FluxFamily(scheduler=scheduler, guided=config.guided),
        recipe=recipe(guided=config.guided, downsampling=vae.downsampling),
        denoiser=denoiser,
        encoders={"clip": clip, "t5": t5},
        vae=vae,
        attention=parts.attention,
        device=device,
        dtype=dtype,
    )


def _check_widths(parts: Parts, config: FluxConfig) -> None:
    """The parts belong together, by what their configs say."""
    for folder, entry, wanted in (
        (parts.encoders["clip"], "hidden_size", config.pooled_width),
        (parts.encoders["t5"], "d_model", config.text_width),
        (parts.vae, "latent_channels", config.latent_channels),
    ):
        found = entries_of(folder / "config.json").get(entry)
        if found != wanted:
            raise ValueError(f"{folder} has {entry} {found}; the transformer needs {wanted}")


def recipe(*, guided: bool, downsampling: int = 8) -> Recipe:
    """dev's defaults, or schnell's; `downsampling` is the autoencoder's."""
    side = DEFAULT_CELLS * downsampling
    return Recipe(
        width=side,
        height=side,
        size_multiple=PATCH * downsampling,
        min_size=PATCH * downsampling,
        max_size=4 * side,
        num_inference_steps=28 if guided else 4,
        guidance_scale=3.5 if guided else 0.0,
        strength=0.6,
    )


def _has_negative(request: Request) -> bool:
    given = request.given_conditioning
    return request.negative_prompt is not None or (given is not None and given.negative is not None)
