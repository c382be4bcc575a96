"""Stable Diffusion XL, base and refiner. No watermark is added.

Source: diffusers' StableDiffusionXLPipeline, StableDiffusionXLImg2ImgPipeline and StableDiffusionXLInpaintPipeline.
Inpainting at strength 1 starts from the noised picture, as image-to-image does; theirs starts from noise alone there,
as models do here too that were made for inpainting and read the mask beside their latents.

Legend: P prompts, T numbers that the model is told.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..denoisers.base import Conditioning
from ..denoisers.unet import load_unet
from ..denoisers.unet_config import UNetConfig, unet_config
from ..denoisers.unet_shapes import SDXL_MARKS, is_refiner, unet_config_of_shapes
from ..encoders.base import TextEncoder
from ..encoders.clip import load_clip
from ..encoders.in_files import CLIP_G, CLIP_L, SDXL_CLIP, SDXL_CLIP_2
from ..vae.kl import load_kl
from ..vae.kl_config import SDXL
from ..vae.kl_shapes import load_kl_like
from .base import Source
from .discrete import DiscreteFamily, DiscreteScheduler, ScaledGuidance, mask_reader, scheduler_of, unet_recipe
from .family import COMMON
from .few_steps import BETAS
from .folders import check_entries, config_of
from .image import ImagePipeline
from .parts import Layout, Parts
from .recipe import Recipe
from .request import Request
from .text_options import check_text, conditioning_given, options_given, side_by_side, skipping
from .texts import OtherTexts
from .values import is_int, is_number

FAMILY, REFINER = "sdxl", "sdxl refiner"
MAX_TOKENS = 77
DEFAULT_CELLS = 128  # latent cells a side of a picture whose size is not given, where the UNet's config has none
DEFAULTS = Recipe(
    max_size=4, num_inference_steps=50, guidance_scale=5.0, strength=0.3, inpaint_strength=0.9999
)  # diffusers'; the largest size in sides of the usual one
AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5
NUM_TIME_IDS = {True: 5, False: 6}  # by whether the model is told a score (the refiner) or a target size
PAIRS = ("original_size", "target_size", "crops_coords_top_left")
TOLD = (*PAIRS, "aesthetic_score")
LAYOUT = Layout(
    classes=("StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline"),
    denoiser="unet",
    encoders={"clip": "text_encoder", "clip_2": "text_encoder_2"},
    tokenizers={"clip": "tokenizer", "clip_2": "tokenizer_2"},
    optional=frozenset(("text_encoder", "tokenizer")),
    marks=SDXL_MARKS,
    inside={"clip": (SDXL_CLIP, CLIP_L), "clip_2": (*SDXL_CLIP_2, CLIP_G)},
    inpainting="StableDiffusionXLInpaintPipeline",
    needed=lambda shapes: frozenset[str]() if is_refiner(shapes) else frozenset(("text_encoder", "tokenizer")),
)
POOLED_WIDTH = 1280  # of the published models' second text encoder
SCHEDULER = {"_class_name": "EulerDiscreteScheduler", **BETAS, "timestep_spacing": "leading"}
"""That of the published models, for files that have none."""


@dataclass(frozen=True, kw_only=True)
class SDXLFamily(DiscreteFamily):
    """Stable Diffusion XL's choices. `scored`: the model is told an aesthetic score, as the refiner is, else a target
    size; `both`: two encoders read the prompt, else the larger one alone. `empty_is_zero`: where no negative prompt is
    given, its states are zeros, else those of an empty one."""

    scored: bool
    both: bool
    empty_is_zero: bool

    def index(self) -> Mapping[str, Any]:
        """See `IndexedFamily`."""
        return {
            "_class_name": f"StableDiffusionXL{'Img2Img' if self.scored else ''}Pipeline",
            "force_zeros_for_empty_prompt": self.empty_is_zero,
            **({"requires_aesthetics_score": True} if self.scored else {}),
        }

    @property
    def arguments(self) -> frozenset[str]:
        """All common ones, and these."""
        own = {"guidance_rescale", "clip_skip", "original_size", "crops_coords_top_left"}
        own |= {"denoising_start", "denoising_end", "aesthetic_score" if self.scored else "target_size"}
        return COMMON | own | ({"prompt_2", "negative_prompt_2"} if self.both else set())

    def check(self, request: Request) -> None:
        """Guidance that the model can use, sizes and shares that make sense, whole conditioning."""
        self.guide.check(request)
        check_text(request, longest=MAX_TOKENS)
        _check_told(request)
        _check_shares(request)
        for part in conditioning_given(request):
            if part.pooled is None or part.time_ids is None:
                raise ValueError("conditioning: this model reads a pooled vector, and time_ids")

    def condition(
        self, encoders: Mapping[str, TextEncoder], prompts: Sequence[str], others: OtherTexts, request: Request
    ) -> Conditioning:
        """Both encoders' states side by side, the larger one's of the second texts; the larger one's pooled vector."""
        roles = {"clip": prompts, "clip_2": others.second} if self.both else {"clip_2": others.second}
        read = [skipping(encoders[role], request) for role in roles]
        parts = [encoder(texts) for encoder, texts in zip(read, roles.values(), strict=True)]
        together, large = side_by_side(read, parts), parts[-1]
        if large.pooled is None:
            raise ValueError("this model reads a pooled vector of its second text encoder")
        return Conditioning(
            states=together.states,
            lengths=together.lengths,
            pooled=large.pooled,
            time_ids=self.time_ids(request, len(prompts)).to(large.states.device),
            warnings=together.warnings,
        )

    def negative(self, positive: Conditioning, encode: Callable[[], Conditioning], request: Request) -> Conditioning:
        """See `NegativeFamily`: what `empty_is_zero` says, and, with scores, the lower one of a picture that was not
        cropped."""
        assert positive.pooled is not None
        assert positive.time_ids is not None
        numbers = positive.time_ids.clone()
        if self.scored:
            numbers[:, 2:4], numbers[:, 4] = 0.0, NEGATIVE_AESTHETIC_SCORE
        if request.negative_prompt is not None or not self.empty_is_zero:
            return dataclasses.replace(encode(), time_ids=numbers)
        states, pooled = torch.zeros_like(positive.states), torch.zeros_like(positive.pooled)
        return dataclasses.replace(positive, states=states, pooled=pooled, time_ids=numbers, warnings=())

    def time_ids(self, request: Request, rows: int) -> Tensor:
        """What the model is told of the picture, float32 [P, T]: original height and width, where it was cropped (y,
        x), and the target's height and width, or a score."""
        assert request.height is not None
        assert request.width is not None
        size = (request.height, request.width)
        score = AESTHETIC_SCORE if request.aesthetic_score is None else request.aesthetic_score
        last = (score,) if self.scored else request.target_size or size
        numbers = (*(request.original_size or size), *(request.crops_coords_top_left or (0, 0)), *last)
        return torch.tensor([numbers] * rows, dtype=torch.float32)

    def described(self, request: Request) -> Mapping[str, Any]:
        """The options for text and shares, and what the model is told, where they are given."""
        return options_given(request, "clip_skip", *TOLD, "denoising_start", "denoising_end")


def load_sdxl(parts: Parts) -> ImagePipeline:
    """The pipeline of Stable Diffusion XL's parts, base or refiner.

    Raises:
        FileNotFoundError: a component or a file is missing. ValueError: a file is damaged, or they do not fit together.
    """
    config = parts.denoiser_config(unet_config, unet_config_of_shapes)
    masking = mask_reader(config)
    scheduler, few = scheduler_of(parts, DiscreteScheduler.from_entries, SCHEDULER, config)
    pooled = (config_of(parts.encoders["clip_2"]) or {}).get("projection_dim", POOLED_WIDTH)
    told = config.pooled_width(NUM_TIME_IDS[True]) == pooled
    scored = _switch(parts, "requires_aesthetics_score", default=parts.folder is None and told)
    _check_parts(parts, config, scored)
    vae = parts.autoencoder(load_kl, partial(load_kl_like, preset=SDXL), channels=config.out_channels)
    prediction = scheduler.config.prediction_type
    denoiser = load_unet(parts.denoiser_files, config, prediction=prediction, device=parts.device, dtype=parts.dtype)
    clip = partial(load_clip, skipped=1, normed=False)
    encoders = {"clip_2": parts.encoder("clip_2", partial(clip, pooled="projection"))}
    if "clip" in parts.encoders:
        encoders["clip"] = parts.encoder("clip", clip)
    family = SDXLFamily(
        scheduler=scheduler,
        guide=ScaledGuidance(told=config.time_cond_proj_dim is not None, few=few),
        scored=scored,
        both="clip" in encoders,
        empty_is_zero=_switch(parts, "force_zeros_for_empty_prompt", default=parts.folder is not None or not scored),
    )
    return ImagePipeline(
        source=Source(family=REFINER if scored else FAMILY, name=parts.name, weights=parts.digests(LAYOUT)),
        family=family,
        ends=scheduler.ends,
        masking=masking,
        recipe=unet_recipe(
            DEFAULTS, config.sample_size or DEFAULT_CELLS, scheduler, few, downsampling=vae.downsampling
        ),
        denoiser=denoiser,
        encoders=encoders,
        vae=vae,
        attention=parts.attention,
        device=parts.device,
        dtype=parts.dtype,
    )


def _check_told(request: Request) -> None:
    """What the model is told are pairs of whole numbers, and a number; a conditioning holds them already."""
    values: Mapping[str, Any] = vars(request)
    for name in TOLD:
        if values[name] is not None and request.prompt is None:
            raise ValueError(f"{name}: conditioning already holds what the model is told; give one of the two")
    for name in PAIRS:
        value = values[name]
        if value is not None and not (isinstance(value, list) and len(value) == 2 and all(map(is_int, value))):
            raise ValueError(f"{name} is {value!r}; it must be two whole numbers, height before width")
    if request.aesthetic_score is not None and not is_number(request.aesthetic_score):
        raise ValueError(f"aesthetic_score is {request.aesthetic_score!r}; it must be a finite number")


def _check_shares(request: Request) -> None:
    start, end = request.denoising_start, request.denoising_end
    if start is not None and not (is_number(start) and 0 < start < 1):
        raise ValueError(f"denoising_start is {start!r}; it must be over 0 and below 1")
    if end is not None and not (is_number(end) and 0 < end <= 1):
        raise ValueError(f"denoising_end is {end!r}; it must be over 0, and at most 1")
    if start is not None and end is not None and start >= end:
        raise ValueError(f"denoising_start is {start} and denoising_end {end}; a run must start before it ends")


def _switch(parts: Parts, name: str, *, default: bool) -> bool:
    """An entry of model_index.json."""
    value: object = parts.index_entries().get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"model_index.json: {name} is {value!r}; it must be true or false")
    return value


def _check_parts(parts: Parts, config: UNetConfig, scored: bool) -> None:
    """They belong together, by what their configs say."""
    if not config.is_told_numbers:
        raise ValueError(f"{parts.denoiser}: addition_embed_type is null; Stable Diffusion XL's is 'text_time'")
    large, first = parts.encoders["clip_2"], parts.encoders.get("clip")
    small = config_of(first) if first is not None else {"hidden_size": 0}
    check_entries(((large, "projection_dim", config.pooled_width(NUM_TIME_IDS[scored])),))
    if small is not None:
        check_entries(((large, "hidden_size", config.text_width - int(small.get("hidden_size", 0))),))
