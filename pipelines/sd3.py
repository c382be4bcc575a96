"""Stable Diffusion 3 and 3.5 (medium, large, turbo).

Source: diffusers' StableDiffusion3Pipeline, StableDiffusion3Img2ImgPipeline and StableDiffusion3InpaintPipeline.

Legend: B rows, L tokens, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ..core.loading import build_on_meta
from ..core.weight_source import WeightSource
from ..denoisers.base import Conditioning
from ..denoisers.guidance import ClassifierFree, Guidance
from ..denoisers.sd3 import SD3Denoiser
from ..denoisers.sd3_config import MARKS, PATCH, SD3Config
from ..denoisers.sd3_keys import sd3_key_map
from ..encoders.base import EncodedText, TextEncoder
from ..encoders.clip import load_clip
from ..encoders.in_files import CLIP_G, PROJECTED_CLIP_L, T5
from ..encoders.t5 import load_t5
from ..language.checkpoints import StoredModel
from ..schedulers import Schedule
from ..schedulers.flow_match import FlowMatchConfig, flow_match_schedule
from ..vae.kl import load_kl
from ..vae.kl_config import SD_3
from ..vae.kl_shapes import load_kl_like
from .base import Source
from .distilled import check_not_told
from .family import COMMON, guidance_scale, num_steps
from .few_steps import many_steps
from .flow import FlowFamily, size_shifted_schedule
from .folders import NAME, check_entries, config_of
from .image import ImagePipeline
from .parts import Layout, Parts
from .recipe import Recipe
from .request import Request
from .text_options import check_pooled, check_text, limited, options_given, side_by_side, skipping
from .texts import OTHER_NEGATIVES, OTHERS, OtherTexts
from .true_cfg import below_1

FAMILY = "sd3"
MAX_TOKENS, LONGEST = 256, 512  # that T5 reads where nothing is said, and at most
CLIP_WIDTH = 512  # transformers' default for both widths
LAYOUT = Layout(
    classes=("StableDiffusion3Pipeline", "StableDiffusion3Img2ImgPipeline", "StableDiffusion3InpaintPipeline"),
    encoders={"clip": "text_encoder", "clip_2": "text_encoder_2", "t5": "text_encoder_3"},
    tokenizers={"clip": "tokenizer", "clip_2": "tokenizer_2", "t5": "tokenizer_3"},
    optional=frozenset(("text_encoder_3", "tokenizer_3")),
    marks=MARKS,
    inside={"clip": (PROJECTED_CLIP_L,), "clip_2": (CLIP_G,), "t5": (T5,)},
)
TURBO_STEPS = 4
SCHEDULER = FlowMatchConfig(shift=3.0)
"""That of every model, for files that have none."""
NO_T5 = "the model has no text_encoder_3 (T5)"
WITHOUT_T5 = f"{NO_T5}, so that long or exact descriptions are followed less well"


@dataclass(frozen=True, kw_only=True)
class SD3Family(FlowFamily):
    """SD3's choices. `distilled`: turbo, which was made to run without guidance; `text_width` is T5's.

    `guidance_scale` over 1 is classifier-free guidance with both passes in one batch; up to 1 there is none.
    """

    text_width: int
    distilled: bool

    @property
    def arguments(self) -> frozenset[str]:
        """All common ones, and these."""
        return COMMON | {*OTHERS, *OTHER_NEGATIVES, "max_sequence_length", "clip_skip"}

    def check(self, request: Request) -> None:
        """The length is within what the model was made for; it is told no guidance value."""
        check_text(request, longest=LONGEST)
        check_pooled(request)
        check_not_told(request)

    def guidance(self, request: Request, recipe: Recipe) -> Guidance:
        """u + scale (c - u), or c alone."""
        if request.guidance is not None:
            return request.guidance
        scale = guidance_scale(request, recipe)
        return ClassifierFree(max(scale, 1.0))

    def schedule(self, request: Request, recipe: Recipe, num_cells: int) -> Schedule:
        """The scheduler's own steps, whose ends are shifted twice as the reference's are, or the given sigmas,
        shifted."""
        tokens = num_cells // PATCH**2
        if request.sigmas is not None:
            return size_shifted_schedule(self.scheduler, request, recipe, tokens)
        return flow_match_schedule(self.scheduler, num_steps(request, recipe), num_image_tokens=tokens)

    def condition(
        self, encoders: Mapping[str, TextEncoder], prompts: Sequence[str], others: OtherTexts, request: Request
    ) -> Conditioning:
        """Both CLIPs' states side by side, the larger one's of the second texts, then T5's of the third; both pooled
        vectors."""
        _check_third(encoders, request)
        clip, clip_2 = (skipping(encoders[role], request) for role in ("clip", "clip_2"))
        t5 = limited(encoders["t5"], request) if "t5" in encoders else None
        small, large = clip(prompts), clip_2(others.second)
        if small.pooled is None or large.pooled is None:
            raise ValueError("this model reads pooled vectors of both CLIP encoders")
        short = side_by_side((clip, clip_2), (small, large))
        long = self._zeros(short.states, request) if t5 is None else t5(others.third)
        wide = functional.pad(short.states, (0, long.states.shape[2] - short.states.shape[2]))
        return Conditioning(
            states=_one_after_the_other(wide, short.lengths, long.states),
            lengths=short.lengths + long.lengths.to(short.lengths.device),
            pooled=torch.cat((small.pooled, large.pooled), dim=-1),
            warnings=tuple(dict.fromkeys((*short.warnings, *long.warnings))),
        )

    def described(self, request: Request) -> Mapping[str, Any]:
        """The length and the layers skipped, where they are given."""
        return options_given(request, "max_sequence_length", "clip_skip")

    def warnings(self, request: Request) -> tuple[str, ...]:
        """What an argument does not do here."""
        scale = request.guidance_scale
        many = many_steps(request, TURBO_STEPS) if self.distilled else ()
        if scale is not None and self.distilled and scale > 1:
            return (f"guidance_scale {scale}: this model was made to run without guidance", *many)
        return (*below_1("guidance_scale", scale), *many)

    def _zeros(self, like: Tensor, request: Request) -> EncodedText:
        """What stands for the states of a T5 that is not there."""
        rows, length = len(like), request.max_sequence_length or MAX_TOKENS
        states = like.new_zeros(rows, length, self.text_width)
        lengths = torch.full((rows,), length, device=like.device)
        return EncodedText(states=states, lengths=lengths, warnings=(WITHOUT_T5,))


def load_sd3(parts: Parts) -> ImagePipeline:
    """The pipeline of SD3's parts; T5 may be missing.

    Raises:
        FileNotFoundError: a component or a file is missing. ValueError: a file is damaged, or they do not fit together.
    """
    config = parts.denoiser_config(SD3Config.from_entries, SD3Config.from_shapes)
    scheduler = parts.scheduler_config(FlowMatchConfig.from_entries, SCHEDULER)
    _check_widths(parts, config)
    denoiser = build_on_meta(lambda: SD3Denoiser(config))
    source = WeightSource.for_module(denoiser, parts.denoiser_files, sd3_key_map(config))  # refuses a broken file first
    vae = parts.autoencoder(load_kl, partial(load_kl_like, preset=SD_3), channels=config.latent_channels)
    clip = partial(load_clip, skipped=1, normed=False, pooled="projection")
    # The smaller one's vector is not projected: its projection is the identity in folders, and anything in files.
    in_file = isinstance(parts.encoders["clip"], StoredModel)
    small = partial(clip, projection="identity" if in_file else "stored")
    encoders = {"clip": parts.encoder("clip", small), "clip_2": parts.encoder("clip_2", clip)}
    if "t5" in parts.encoders:
        t5 = partial(load_t5, max_tokens=MAX_TOKENS, pad_to_max=True, masked=False)
        encoders["t5"] = parts.encoder("t5", t5)
    denoiser.fill(source, device=parts.device, dtype=parts.dtype, block_device=parts.block_device)
    names = (parts.name, str(parts.index_entries().get(NAME, "")))
    distilled = any("turbo" in part.lower() for name in names for part in Path(name).parts[-3:])  # configs are large's
    return ImagePipeline(
        source=Source(family=FAMILY, name=parts.name, weights=parts.digests(LAYOUT)),
        family=SD3Family(scheduler=scheduler, text_width=config.text_width, distilled=distilled),
        recipe=recipe(config, distilled=distilled, downsampling=vae.downsampling),
        denoiser=denoiser,
        encoders=encoders,
        vae=vae,
        attention=parts.attention,
        device=parts.device,
        dtype=parts.dtype,
    )


def _one_after_the_other(short: Tensor, lengths: Tensor, long: Tensor) -> Tensor:
    """The first `lengths` [B] of each row's states [B, L, D], then all of its states [B, Lt, D]; zeros at the end of
    rows that have fewer than others."""
    rows = [torch.cat((row[:length], text)) for row, length, text in zip(short, lengths.tolist(), long, strict=True)]
    return pad_sequence(rows, batch_first=True)


def _check_third(encoders: Mapping[str, TextEncoder], request: Request) -> None:
    """Makes sure that texts for T5 are read. ValueError otherwise."""
    for name, text in (("prompt_3", request.prompt_3), ("negative_prompt_3", request.negative_prompt_3)):
        if text is not None and "t5" not in encoders:
            raise ValueError(f"{name}: {NO_T5} to read it")


def _check_widths(parts: Parts, config: SD3Config) -> None:
    """The parts belong together, by what their configs say."""
    t5 = parts.encoders.get("t5")
    check_entries(
        ((t5, "d_model", config.text_width), (parts.vae, "latent_channels", config.latent_channels)),
    )
    configs = [config_of(parts.encoders[role]) for role in ("clip", "clip_2")]
    clips = [entries for entries in configs if entries is not None]
    if len(clips) < len(configs):
        return
    if (pooled := _total(clips, "projection_dim")) != config.pooled_width:
        raise ValueError(
            f"the CLIP encoders have projection_dim {pooled} in all; the transformer needs {config.pooled_width}"
        )
    if (width := _total(clips, "hidden_size")) > config.text_width:
        raise ValueError(
            f"the CLIP encoders have hidden_size {width} in all; the transformer reads {config.text_width}"
        )


def _total(clips: Sequence[Mapping[str, Any]], entry: str) -> int:
    """The sum of what the configs say there, or of transformers' default."""
    values = [clip.get(entry, CLIP_WIDTH) for clip in clips]
    if any(type(value) is not int for value in values):
        raise ValueError(f"the CLIP encoders have {entry} {values[0]!r} and {values[1]!r}; they must be whole numbers")
    return sum(values)


def recipe(config: SD3Config, *, distilled: bool = False, downsampling: int = 8) -> Recipe:
    """What Stability AI recommends for SD3, 3.5 large, 3.5 medium (which has second attentions) and turbo;
    `downsampling` is the autoencoder's."""
    steps, scale = (28, 3.5) if config.qk_norm else (28, 7.0)
    if config.dual_layers:
        steps, scale = 40, 4.5
    if distilled:
        steps, scale = TURBO_STEPS, 0.0
    side = config.sample_cells * downsampling
    return Recipe(
        width=side,
        height=side,
        size_multiple=PATCH * downsampling,
        min_size=PATCH * downsampling,
        max_size=config.grid * PATCH * downsampling,
        num_inference_steps=steps,
        guidance_scale=scale,
        strength=0.6,
    )
