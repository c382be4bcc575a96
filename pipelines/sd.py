"""Stable Diffusion 1.5 and 2.x, and what was tuned from them. No safety checker is run.

2.x has OpenCLIP's H as its text encoder, read at the last layer but one, and at 768 pixels predicts v. A folder says
both; a file of 2.x is taken for one of 768 pixels unless its name says "512", "base" or "turbo", as published names do.

Source: diffusers' StableDiffusionPipeline, StableDiffusionImg2ImgPipeline and StableDiffusionInpaintPipeline. They give
other pictures in two cases. Inpainting at strength 1 starts from noise alone there; here from the noised picture, as
image-to-image does. PNDM with a strength below 1 begins there in the middle of a list of timesteps that holds one twice
at its start, and so tells the model a time that is not its latents'; here it begins as a whole run does.

Models that were made for inpainting read the mask and the covered picture beside their latents, and start from noise
alone at strength 1, as there.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..denoisers.base import Conditioning
from ..denoisers.unet import load_unet
from ..denoisers.unet_config import UNetConfig, unet_config
from ..denoisers.unet_shapes import SD_MARKS, unet_config_of_shapes
from ..encoders.base import TextEncoder
from ..encoders.clip import load_clip
from ..encoders.in_files import CLIP_L, SD_2_CLIP, SD_CLIP
from ..vae.kl import load_kl
from ..vae.kl_config import SD_1
from ..vae.kl_shapes import load_kl_like
from .base import Source
from .discrete import DiscreteFamily, DiscreteScheduler, ScaledGuidance, mask_reader, scheduler_of, unet_recipe
from .family import COMMON
from .few_steps import BETAS
from .folders import check_entries
from .image import ImagePipeline
from .parts import Layout, Parts
from .recipe import Recipe
from .request import Request
from .text_options import check_text, conditioning_of, options_given, skipping
from .texts import OtherTexts

FAMILY = "sd"
MAX_TOKENS = 77
DEFAULT_CELLS = 64  # latent cells a side of a picture whose size is not given, where the UNet's config has none
DEFAULTS = Recipe(
    max_size=8, num_inference_steps=50, guidance_scale=7.5, strength=0.8, inpaint_strength=1.0
)  # diffusers'; the largest size in sides of the usual one
LAYOUT = Layout(
    classes=(
        "StableDiffusionPipeline",
        "StableDiffusionImg2ImgPipeline",
        "StableDiffusionInpaintPipeline",
        "LatentConsistencyModelPipeline",
        "LatentConsistencyModelImg2ImgPipeline",
    ),
    denoiser="unet",
    encoders={"clip": "text_encoder"},
    tokenizers={"clip": "tokenizer"},
    marks=SD_MARKS,
    inside={"clip": (SD_CLIP, SD_2_CLIP, CLIP_L)},
    inpainting="StableDiffusionInpaintPipeline",
    side=512,
)
SCHEDULER = {"_class_name": "PNDMScheduler", **BETAS, "skip_prk_steps": True, "set_alpha_to_one": False}
"""That of the published model, for files that have none."""
CELLS_2 = 96  # latent cells a side of the pictures of 2.x that are not of 512 pixels
SCHEDULER_2 = {"_class_name": "DDIMScheduler", **BETAS, "prediction_type": "v_prediction", "set_alpha_to_one": False}
"""That of 2.x for such pictures."""
SMALL_2 = ("512", "base", "turbo")
"""What names of files of the others hold."""


@dataclass(frozen=True, kw_only=True)
class SDFamily(DiscreteFamily):
    """Stable Diffusion's choices: CLIP reads the prompt, classifier-free guidance over 1."""

    @property
    def arguments(self) -> frozenset[str]:
        """All common ones, and these."""
        return COMMON | {"guidance_rescale", "clip_skip"}

    def check(self, request: Request) -> None:
        """Guidance that the model can use, and a prompt where there is an option for reading it."""
        self.guide.check(request)
        check_text(request, longest=MAX_TOKENS)

    def condition(
        self, encoders: Mapping[str, TextEncoder], prompts: Sequence[str], others: OtherTexts, request: Request
    ) -> Conditioning:
        """CLIP's states."""
        text = skipping(encoders["clip"], request)(prompts)
        return conditioning_of(text)

    def described(self, request: Request) -> Mapping[str, Any]:
        """The layers skipped, where they are given."""
        return options_given(request, "clip_skip")


def sd_scheduler(entries: Mapping[str, object]) -> DiscreteScheduler:
    """The scheduler of these entries as diffusers' pipelines of this family take it: they set `steps_offset` to 1 and
    `clip_sample` to false, whatever the file says."""
    taken = DiscreteScheduler.from_entries({**entries, "steps_offset": 1, "clip_sample": False})
    return dataclasses.replace(taken, options=entries)


def load_sd(parts: Parts) -> ImagePipeline:
    """The pipeline of Stable Diffusion's parts.

    Raises:
        FileNotFoundError: a component or a file is missing. ValueError: a file is damaged, or they do not fit together.
    """
    config = _config(parts)
    masking = mask_reader(config)
    preset = SCHEDULER_2 if config.use_linear_projection and config.sample_size == CELLS_2 else SCHEDULER
    scheduler, few = scheduler_of(parts, sd_scheduler, preset, config)
    check_entries(((parts.encoders["clip"], "hidden_size", config.text_width),))
    vae = parts.autoencoder(load_kl, partial(load_kl_like, preset=SD_1), channels=config.out_channels)
    prediction = scheduler.config.prediction_type
    denoiser = load_unet(parts.denoiser_files, config, prediction=prediction, device=parts.device, dtype=parts.dtype)
    clip = parts.encoder("clip", load_clip)
    return ImagePipeline(
        source=Source(family=FAMILY, name=parts.name, weights=parts.digests(LAYOUT)),
        family=SDFamily(scheduler=scheduler, guide=ScaledGuidance(told=config.time_cond_proj_dim is not None, few=few)),
        ends=scheduler.ends,
        masking=masking,
        recipe=unet_recipe(
            DEFAULTS, config.sample_size or DEFAULT_CELLS, scheduler, few, downsampling=vae.downsampling
        ),
        denoiser=denoiser,
        encoders={"clip": clip},
        vae=vae,
        attention=parts.attention,
        device=parts.device,
        dtype=parts.dtype,
    )


def _config(parts: Parts) -> UNetConfig:
    """The UNet's; shapes do not tell for which size it was made."""
    config, name = parts.denoiser_config(unet_config, unet_config_of_shapes), parts.denoiser.name.lower()
    is_small = config.beside_channels > 0 or any(each in name for each in SMALL_2)
    if parts.denoiser.is_dir() or not config.use_linear_projection or is_small:
        return config
    return dataclasses.replace(config, sample_size=CELLS_2)
