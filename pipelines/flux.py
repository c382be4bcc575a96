"""FLUX.1 (dev, schnell), and what Kontext shares with it.

Source: diffusers' FluxPipeline and FluxImg2ImgPipeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..core.loading import build_on_meta
from ..core.weight_source import WeightSource
from ..denoisers.base import Conditioning
from ..denoisers.flux import MARKS, FluxConfig, FluxDenoiser, flux_key_map
from ..denoisers.guidance import ClassifierFree, Distilled, Guidance
from ..encoders.base import TextEncoder
from ..encoders.clip import load_clip
from ..encoders.in_files import CLIP_L, T5
from ..encoders.t5 import load_t5
from ..schedulers.flow_match import FlowMatchConfig
from ..vae.kl import load_kl
from ..vae.kl_config import FLUX_1
from ..vae.kl_shapes import load_kl_like
from .base import Source
from .distilled import check_told, with_told
from .family import COMMON, guidance_scale
from .few_steps import many_steps
from .flow import FlowFamily
from .folders import check_entries
from .image import ImagePipeline
from .parts import Layout, Parts
from .recipe import Recipe
from .request import Request
from .text_options import check_pooled, check_text, check_unpadded, limited
from .texts import OtherTexts
from .true_cfg import has_negative, true_cfg_warnings

FAMILY = "flux"
PATCH = 2
MAX_TOKENS = {True: 512, False: 256}  # that T5 reads, by whether the model is guided (dev) or not (schnell)
LONGEST = 512
LAYOUT = Layout(
    classes=("FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline"),
    encoders={"clip": "text_encoder", "t5": "text_encoder_2"},
    tokenizers={"clip": "tokenizer", "t5": "tokenizer_2"},
    marks=MARKS,
    inside={"clip": (CLIP_L,), "t5": (T5,)},
)
SCHEDULERS = {True: FlowMatchConfig(shift=3.0, use_dynamic_shifting=True), False: FlowMatchConfig()}
"""dev's and schnell's, for files that have none."""
STEPS = {True: 28, False: 4}
"""dev's and schnell's."""
DEFAULT_CELLS = 128  # latent cells a side of a picture whose size is not given


@dataclass(frozen=True, kw_only=True)
class FluxFamily(FlowFamily):
    """FLUX.1's choices. `guided`: dev, which is told a guidance value; schnell is not.

    `guidance_scale` is that value. `true_cfg_scale` over 1 with a negative prompt adds classifier-free guidance, one
    pass after the other.
    """

    guided: bool

    @property
    def arguments(self) -> frozenset[str]:
        """All common ones, and these."""
        return COMMON | {"prompt_2", "negative_prompt_2", "true_cfg_scale", "max_sequence_length"}

    def check(self, request: Request) -> None:
        """The length is within what the model was made for."""
        check_text(request, longest=LONGEST)
        check_pooled(request)
        check_unpadded(request)
        check_told(request, guided=self.guided)

    def guidance(self, request: Request, recipe: Recipe) -> Guidance:
        """The distilled value, and classifier-free guidance where it is asked for."""
        scale = guidance_scale(request, recipe)
        told = scale if self.guided else None
        if request.guidance is not None:
            return with_told(request.guidance, told)
        if not has_negative(request) or request.true_cfg_scale is None or request.true_cfg_scale <= 1:
            return Distilled(told)
        return Distilled(told, then=ClassifierFree(float(request.true_cfg_scale), batched=False))

    def condition(
        self, encoders: Mapping[str, TextEncoder], prompts: Sequence[str], others: OtherTexts, request: Request
    ) -> Conditioning:
        """See `read_texts`."""
        return read_texts(encoders, prompts, others, request)

    def warnings(self, request: Request) -> tuple[str, ...]:
        """What an argument does not do here, or what the model was not made for."""
        found: list[str] = []
        if not self.guided and request.guidance_scale not in (None, 0, 0.0):
            found.append(f"guidance_scale {request.guidance_scale} has no effect: this model was made to run without")
        many = () if self.guided else many_steps(request, STEPS[self.guided])
        return (*found, *many, *true_cfg_warnings(request, "true_cfg_scale", request.true_cfg_scale))


def load_flux(parts: Parts) -> ImagePipeline:
    """The pipeline of FLUX.1's parts.

    Raises:
        FileNotFoundError: a component or a file is missing. ValueError: a file is damaged, or they do not fit together.
    """
    return pipeline_of(parts, LAYOUT, FAMILY, FluxFamily)


def pipeline_of(parts: Parts, layout: Layout, name: str, family: type[FluxFamily]) -> ImagePipeline:
    """The pipeline of parts in `layout`, of a `family` called `name`. Errors as for `load_flux`."""
    config = parts.denoiser_config(FluxConfig.from_entries, FluxConfig.from_shapes)
    scheduler = _scheduler(parts, guided=config.guided)
    _check_widths(parts, config)
    denoiser = build_on_meta(lambda: FluxDenoiser(config))
    source = WeightSource.for_module(denoiser, parts.denoiser_files, flux_key_map())  # refuses a broken file first
    vae = parts.autoencoder(load_kl, partial(load_kl_like, preset=FLUX_1), channels=config.latent_channels)
    clip = parts.encoder("clip", partial(load_clip, pooled="pooler"))
    t5 = parts.encoder("t5", partial(load_t5, max_tokens=MAX_TOKENS[config.guided], pad_to_max=True, masked=False))
    denoiser.fill(source, device=parts.device, dtype=parts.dtype, block_device=parts.block_device)
    return ImagePipeline(
        source=Source(family=name, name=parts.name, weights=parts.digests(layout)),
        family=family(scheduler=scheduler, guided=config.guided),
        recipe=recipe(guided=config.guided, downsampling=vae.downsampling),
        denoiser=denoiser,
        encoders={"clip": clip, "t5": t5},
        vae=vae,
        attention=parts.attention,
        device=parts.device,
        dtype=parts.dtype,
    )


def read_texts(
    encoders: Mapping[str, TextEncoder], prompts: Sequence[str], others: OtherTexts, request: Request
) -> Conditioning:
    """T5's states of the second texts, and CLIP's pooled vector of the prompts."""
    states = limited(encoders["t5"], request)(others.second)
    pooled = encoders["clip"](prompts)
    warnings = tuple(dict.fromkeys((*pooled.warnings, *states.warnings)))
    return Conditioning(states=states.states, lengths=states.lengths, pooled=pooled.pooled, warnings=warnings)


def _scheduler(parts: Parts, *, guided: bool) -> FlowMatchConfig:
    """That of the folder, unless a denoiser of the other kind, told a guidance value or not, took the place of its own:
    dev's sigmas depend on the size, schnell's do not."""
    usual = SCHEDULERS[guided]
    found = parts.scheduler_config(FlowMatchConfig.from_entries, usual)
    is_its_own = parts.folder is None or parts.denoiser.is_relative_to(parts.folder)
    return found if is_its_own or found.use_dynamic_shifting == usual.use_dynamic_shifting else usual


def _check_widths(parts: Parts, config: FluxConfig) -> None:
    """The parts belong together, by what their configs say."""
    check_entries(
        (
            (parts.encoders["clip"], "hidden_size", config.pooled_width),
            (parts.encoders["t5"], "d_model", config.text_width),
            (parts.vae, "latent_channels", config.latent_channels),
        )
    )


def recipe(*, guided: bool, downsampling: int = 8) -> Recipe:
    """dev's defaults, or schnell's; `downsampling` is the autoencoder's."""
    side = DEFAULT_CELLS * downsampling
    return Recipe(
        width=side,
        height=side,
        size_multiple=PATCH * downsampling,
        min_size=PATCH * downsampling,
        max_size=4 * side,
        num_inference_steps=STEPS[guided],
        guidance_scale=3.5 if guided else 0.0,
        strength=0.6,
    )
