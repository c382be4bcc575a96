"""Z-Image: base, and Turbo, which is distilled to run in 8 steps without guidance.

The two have one architecture and the same configs but for the scheduler's shift: 6 for base, 3 for Turbo. That is what
tells them apart here; names of folders are whatever a user made of them. Single files, which have no scheduler, are
taken for Turbo where their name says so. A model that was trained on from Turbo's files so that it can be guided again
has Turbo's defaults then, and a warning where guidance is asked for, which is done.

Turbo's 8 steps are those that its model card calls `num_inference_steps=9`: diffusers had a step from 0 to 0 among them
until its pull request 13730.

Source: diffusers' ZImagePipeline, ZImageImg2ImgPipeline and ZImageInpaintPipeline.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..core.loading import build_on_meta
from ..core.weight_source import WeightSource
from ..denoisers.base import Conditioning
from ..denoisers.guidance import ClassifierFree, Guidance, NormLimit, Unguided
from ..denoisers.z_image import MARKS, PATCH, ZImageConfig, ZImageDenoiser
from ..denoisers.z_image_keys import z_image_key_map
from ..encoders.base import TextEncoder
from ..encoders.decoder import Layer, load_decoder_encoder
from ..encoders.in_files import QWEN3
from ..encoders.templates import Z_IMAGE
from ..schedulers.flow_match import FlowMatchConfig
from ..vae.kl import load_kl
from ..vae.kl_config import FLUX_1
from ..vae.kl_shapes import load_kl_like
from .base import Source
from .distilled import check_not_told
from .family import COMMON, guidance_scale
from .few_steps import many_steps
from .flow import FlowFamily
from .folders import check_entries
from .image import ImagePipeline
from .parts import EncoderLoader, Layout, Parts
from .recipe import Recipe
from .request import Request
from .text_options import check_text, conditioning_of, limited
from .texts import OtherTexts

FAMILY = "z_image"
LAYOUT = Layout(
    classes=("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline"),
    encoders={"llm": "text_encoder"},
    tokenizers={"llm": "tokenizer"},
    marks=MARKS,
    inside={"llm": QWEN3},
)
SCHEDULERS = {True: FlowMatchConfig(shift=3.0), False: FlowMatchConfig(shift=6.0)}
"""Turbo's and base's, for files that have none."""
MAX_TOKENS = 512  # that the language model reads where nothing is said
BEFORE_LAST = Layer(index=-2, normed=False)
TURBO_BELOW = 4.5  # the scheduler's shift
TURBO_STEPS = 8
DEFAULT_CELLS = 128  # latent cells a side of a picture whose size is not given


@dataclass(frozen=True, kw_only=True)
class ZImageFamily(FlowFamily):
    """Z-Image's choices. `most_tokens`: the longest text the model has positions for.

    `guidance_scale` s over 0 is classifier-free guidance c + s (c - u), both passes in one batch; up to 0 there is
    none.
    """

    most_tokens: int
    turbo: bool

    @property
    def arguments(self) -> frozenset[str]:
        """All common ones, and these."""
        return COMMON | {"max_sequence_length", "cfg_normalization", "cfg_truncation"}

    def check(self, request: Request) -> None:
        """The length is within what the model has positions for; it is told no guidance value."""
        check_text(request, longest=self.most_tokens)
        check_not_told(request)

    def guidance(self, request: Request, recipe: Recipe) -> Guidance:
        """u + (1 + s) (c - u), while the noise's share is at least 1 - `cfg_truncation`; or c alone."""
        if request.guidance is not None:
            return request.guidance
        scale = guidance_scale(request, recipe)
        if scale <= 0:
            return Unguided()
        truncation = 1.0 if request.cfg_truncation is None else float(request.cfg_truncation)
        limit = float(request.cfg_normalization or 0.0)
        return ClassifierFree(
            1.0 + scale,
            interval=(min(1.0 - truncation, math.nextafter(1.0, 0.0)), 1.0),  # at 0 it still guides pure noise
            renormalise=NormLimit(limit) if limit > 0 else None,
        )

    def condition(
        self, encoders: Mapping[str, TextEncoder], prompts: Sequence[str], others: OtherTexts, request: Request
    ) -> Conditioning:
        """The language model's states."""
        text = limited(encoders["llm"], request)(prompts)
        return conditioning_of(text)

    def warnings(self, request: Request) -> tuple[str, ...]:
        """What an argument does not do here, or what the model was not made for."""
        scale = request.guidance_scale
        found = [*many_steps(request, TURBO_STEPS)] if self.turbo else []
        if self.turbo and scale is not None and scale > 0:
            return (f"guidance_scale {scale}: this model (Turbo) was made to run without guidance, at 0", *found)
        if scale is not None and scale < 0:
            other = f"give guidance=ClassifierFree({1 + scale})"
            found.append(f"guidance_scale {scale} has no effect: it begins above 0; {other}")
        is_guided = not self.turbo if scale is None else scale > 0
        given = {"cfg_normalization": request.cfg_normalization, "cfg_truncation": request.cfg_truncation}
        if is_guided:
            return tuple(found)
        unused = (f"{name} has no effect without guidance" for name, value in given.items() if value is not None)
        return (*found, *unused)


def load_z_image(parts: Parts) -> ImagePipeline:
    """The pipeline of Z-Image's parts.

    Raises:
        FileNotFoundError: a component or a file is missing. ValueError: a file is damaged, or they do not fit together.
    """
    config = parts.denoiser_config(ZImageConfig.from_entries, ZImageConfig.from_shapes)
    scheduler = parts.scheduler_config(
        FlowMatchConfig.from_entries, SCHEDULERS["turbo" in Path(parts.name).name.lower()]
    )
    check_entries(
        (
            (parts.encoders["llm"], "hidden_size", config.text_width),
            (parts.vae, "latent_channels", config.latent_channels),
        )
    )
    denoiser = build_on_meta(lambda: ZImageDenoiser(config))
    source = WeightSource.for_module(denoiser, parts.denoiser_files, z_image_key_map())  # refuses a broken file first
    vae = parts.autoencoder(load_kl, partial(load_kl_like, preset=FLUX_1), channels=config.latent_channels)
    llm = parts.encoder("llm", _reader(parts, config))
    denoiser.fill(source, device=parts.device, dtype=parts.dtype, block_device=parts.block_device)
    turbo = is_turbo(scheduler)
    return ImagePipeline(
        source=Source(family=FAMILY, name=parts.name, weights=parts.digests(LAYOUT)),
        family=ZImageFamily(scheduler=scheduler, most_tokens=config.most_tokens, turbo=turbo),
        recipe=recipe(config, turbo=turbo, downsampling=vae.downsampling),
        denoiser=denoiser,
        encoders={"llm": llm},
        vae=vae,
        attention=parts.attention,
        device=parts.device,
        dtype=parts.dtype,
    )


def is_turbo(scheduler: FlowMatchConfig) -> bool:
    """Whether a scheduler is Turbo's (see the module's first lines)."""
    return not scheduler.use_dynamic_shifting and scheduler.shift < TURBO_BELOW


def recipe(config: ZImageConfig, *, turbo: bool, downsampling: int = 8) -> Recipe:
    """Turbo's defaults, or those of diffusers for base; `downsampling` is the autoencoder's."""
    most = config.most_cells * downsampling
    side = min(DEFAULT_CELLS * downsampling, most)
    return Recipe(
        width=side,
        height=side,
        size_multiple=PATCH * downsampling,
        min_size=PATCH * downsampling,
        max_size=min(4 * side, most),
        num_inference_steps=TURBO_STEPS if turbo else 50,
        guidance_scale=0.0 if turbo else 5.0,
        strength=0.6,
    )


def _reader(parts: Parts, config: ZImageConfig) -> EncoderLoader:
    """Qwen3 before its last block, without the final norm; its own tokens alone."""
    return partial(
        load_decoder_encoder,
        template=Z_IMAGE,
        layers=(BEFORE_LAST,),
        max_tokens=min(MAX_TOKENS, config.most_tokens),
        attention=parts.attention,
    )
