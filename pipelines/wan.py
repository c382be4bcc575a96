"""Wan 2.1 and 2.2: clips from text, and from pictures that they begin and end with.

Of Wan 2.2, two denoisers share a run of A14B (`Experts`), and TI2V-5B is one for both tasks. Where a clip has no whole
number of groups of frames after its first, the rest of the last one is cut off. Models that make clips chunk by chunk
are loaded here too (`causal`).

Source: diffusers' WanPipeline, WanImageToVideoPipeline and WanVideoToVideoPipeline.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ..core.copies import moved
from ..core.loading import build_on_meta
from ..core.shapes import Shapes
from ..core.weight_source import WeightSource
from ..denoisers.base import Denoiser
from ..denoisers.experts import Experts, PerExpert
from ..denoisers.guidance import ClassifierFree, Guidance, Unguided
from ..denoisers.wan import WanDenoiser
from ..denoisers.wan_config import MARKS, PATCH, PICTURE_KEYS, TEXT_TOKENS, WanConfig
from ..denoisers.wan_keys import wan_key_map
from ..encoders.clip_vision import load_clip_vision
from ..encoders.in_files import UMT5
from ..encoders.t5 import load_t5
from ..schedulers import Schedule
from ..schedulers.flow_match import FLOW_MATCH, FlowMatchConfig, flow_match_schedule
from ..schedulers.samplers.unipc import UniPC
from ..schedulers.unipc import UniPCConfig, unipc_schedule
from ..vae.base import Autoencoder
from ..vae.wan import load_wan_vae, load_wan_vae_file
from .base import Source
from .causal import PIPELINE, causal, check_causal, chunks_told, shift_told
from .distilled import check_not_told
from .family import COMMON, OF_CLIPS, STARTING, guidance_scale, num_steps
from .folders import check_entries
from .frames import BesideLatents, FirstLatents, Looking, frames_in_group
from .image import ImagePipeline
from .parts import ClipSize, Layout, Parts
from .recipe import Recipe
from .request import Request
from .text_options import check_text
from .true_cfg import below_1, leads_away
from .wan_text import WanTexts

FAMILY = "wan"
EXPERT, PICTURES, PROCESSOR = "transformer_2", "image_encoder", "image_processor"
LAYOUT = Layout(
    classes=("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline", PIPELINE),
    encoders={"t5": "text_encoder"},
    tokenizers={"t5": "tokenizer"},
    second=EXPERT,
    pictures=(PICTURES, PROCESSOR),
    needed=lambda shapes: frozenset((PICTURES,)) if shapes.has(*PICTURE_KEYS) else frozenset[str](),
    marks=MARKS,
    inside={"t5": (UMT5,)},
    clip=lambda shapes: ClipSize(width=WIDTH, height=HEIGHT, frames=FRAMES, group=4, side=_token_side(shapes)),
)
SCHEDULER = UniPCConfig(flow_shift=3.0)
"""For files that have none: what Wan is run with at 480p."""
SchedulerConfig = UniPCConfig | FlowMatchConfig
Begins = Literal["never", "maybe", "always"]
TI2V_CHANNELS = 48  # of TI2V-5B's latents
WIDTH, HEIGHT, LARGEST = 832, 480, 4096
FRAMES = 81


@dataclass(frozen=True, kw_only=True)
class WanFamily(WanTexts):
    """Wan's choices.

    A scale over 1 is classifier-free guidance, one pass after the other. `boundary`: where the second expert's turn
    comes, whose scale may be another. `begins`: whether clips begin with a picture.
    """

    scheduler: SchedulerConfig
    boundary: float | None = None
    begins: Begins = "never"

    @property
    def arguments(self) -> frozenset[str]:
        """All common ones but those for starting from a picture, and these."""
        second = set[str]() if self.boundary is None else {"guidance_scale_2"}
        pictures = set[str]() if self.begins == "never" else {"image", "last_image"}
        clips = set[str]() if self.begins == "always" else {"video", "strength"}
        return (COMMON - STARTING) | OF_CLIPS | {"max_sequence_length"} | second | pictures | clips

    def check(self, request: Request) -> None:
        """The length is within what the model was made for, and there is no value to be told."""
        check_text(request, longest=TEXT_TOKENS)
        check_not_told(request)

    def guidance(self, request: Request, recipe: Recipe) -> Guidance:
        """Classifier-free guidance where the scale is over 1, with the second expert's own scale."""
        if request.guidance is not None:
            return request.guidance
        scale = guidance_scale(request, recipe)
        if scale <= 1:
            return Unguided()
        high, second = ClassifierFree(scale, batched=False), request.guidance_scale_2
        if self.boundary is None or second is None or second == scale:
            return high
        return PerExpert(high, ClassifierFree(float(second), batched=False), self.boundary)

    def schedule(self, request: Request, recipe: Recipe, num_cells: int) -> Schedule:
        """Equal steps, or the given sigmas, shifted as the scheduler's config says."""
        sigmas = request.sigmas
        given = None if sigmas is None else list(sigmas[:-1] if len(sigmas) > 1 and sigmas[-1] == 0 else sigmas)
        count = num_steps(request, recipe) if given is None else len(given)
        if isinstance(self.scheduler, UniPCConfig):
            return unipc_schedule(self.scheduler, count, sigmas=given)
        return flow_match_schedule(self.scheduler, count, sigmas=given)

    def index(self) -> Mapping[str, Any]:
        """See `IndexedFamily`."""
        name = LAYOUT.classes[self.begins == "always"]
        return {"_class_name": name, "boundary_ratio": self.boundary, "expand_timesteps": self.begins == "maybe"}

    def warnings(self, request: Request) -> tuple[str, ...]:
        """What a scale does not do here."""
        scale, second = request.guidance_scale, request.guidance_scale_2
        if scale is not None and scale <= 1 and second not in (None, scale):
            return (f"guidance_scale_2 has no effect: guidance_scale {scale} turns guidance off for both experts",)
        away = () if second is None or second >= 0 else (leads_away("guidance_scale_2", second),)
        return (*below_1("guidance_scale", scale), *away)


def load_wan(parts: Parts) -> ImagePipeline:
    """The pipeline of Wan's parts.

    Raises:
        FileNotFoundError: a component or a file is missing. ValueError: a file is damaged, or they do not fit together.
    """
    index = parts.index_entries()
    boundary, chunks = _boundary(index), chunks_told(parts)
    scheduler = SCHEDULER if chunks is not None else parts.scheduler_config(_scheduler, SCHEDULER)
    config = _config(parts)
    if chunks is not None:
        check_causal(parts.name, config, boundary)
    check_entries([(parts.encoders["t5"], "d_model", config.text_width)])
    experts = [parts] if boundary is None else [parts, _second(parts)]
    built = [_built(each) for each in experts]  # refuses broken files
    vae = parts.autoencoder(load_wan_vae, load_wan_vae_file, channels=config.latent_channels)
    takes_first = index.get("expand_timesteps", parts.folder is None and config.latent_channels == TI2V_CHANNELS)
    looking = _looking(parts, config, vae, takes_first=takes_first is True)
    text = partial(load_t5, max_tokens=TEXT_TOKENS, pad_to_max=False, masked=True)
    t5 = parts.encoder("t5", text)
    for each, (denoiser, source) in zip(experts, built, strict=True):
        denoiser.fill(source, device=each.device, dtype=each.dtype, block_device=each.block_device)
    high, *low = [denoiser for denoiser, _ in built]
    denoiser: Denoiser[Any] = Experts(high=high, low=low[0], boundary=boundary or 0.0) if low else high
    pipe = ImagePipeline(
        source=Source(family=FAMILY, name=parts.name, weights=parts.digests(LAYOUT)),
        family=WanFamily(scheduler=scheduler, boundary=boundary, begins=_begins(looking)),
        recipe=recipe(scheduler, vae.downsampling, fps=24 if config.latent_channels == TI2V_CHANNELS else 16),
        denoiser=denoiser,
        encoders={"t5": t5},
        vae=vae,
        attention=parts.attention,
        looking=looking,
        device=parts.device,
        dtype=parts.dtype,
    )
    return pipe if chunks is None else causal(pipe, chunks, shift=shift_told(parts))


def recipe(scheduler: SchedulerConfig, downsampling: int = 8, *, fps: int = 16) -> Recipe:
    """The reference's defaults; `downsampling` is the autoencoder's."""
    return Recipe(
        width=WIDTH,
        height=HEIGHT,
        size_multiple=PATCH * downsampling,
        min_size=PATCH * downsampling,
        max_size=LARGEST,
        num_inference_steps=50,
        guidance_scale=5.0,
        strength=0.8,
        sampler=UniPC(order=scheduler.solver_order) if isinstance(scheduler, UniPCConfig) else "euler",
        num_frames=FRAMES,
        fps=fps,
    )


def _token_side(shapes: Shapes) -> int:
    """Pixels a side of a token, by the channels that the denoiser reads."""
    return PATCH * (16 if shapes.of("patch_embedding.weight", axes=5)[1] == TI2V_CHANNELS else 8)


def _scheduler(entries: Mapping[str, Any]) -> SchedulerConfig:
    """The checkpoint's own, or Euler's method in its place."""
    kind = FlowMatchConfig if entries.get("_class_name") == FLOW_MATCH else UniPCConfig
    return kind.from_entries(entries)


def _config(parts: Parts) -> WanConfig:
    return parts.denoiser_config(WanConfig.from_entries, WanConfig.from_shapes)


def _built(parts: Parts) -> tuple[WanDenoiser, WeightSource]:
    """A denoiser without its weights, and where they are."""
    config = _config(parts)
    denoiser = build_on_meta(lambda: WanDenoiser(config))
    return denoiser, WeightSource.for_module(denoiser, parts.denoiser_files, wan_key_map())


def _boundary(index: Mapping[str, Any]) -> float | None:
    """Where the second expert's turn comes, None where there is none."""
    found = index.get("boundary_ratio")
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= 1:
        raise ValueError(f"model_index.json: boundary_ratio is {found!r}; it must be a number from 0 to 1")
    return float(found)


def _second(parts: Parts) -> Parts:
    """The parts, with the second expert as the denoiser."""
    if EXPERT not in parts.others:
        raise FileNotFoundError(f"{parts.folder} has no folder {EXPERT!r}, the expert that its boundary_ratio asks for")
    return dataclasses.replace(parts, denoiser=parts.others[EXPERT])


def _looking(parts: Parts, config: WanConfig, vae: Autoencoder, *, takes_first: bool) -> Looking | None:
    """How pictures are seen, where the denoiser can."""
    if not config.beside_channels:
        return FirstLatents() if takes_first else None
    wanted = frames_in_group(vae) + config.latent_channels
    if config.beside_channels != wanted:
        found = config.beside_channels
        raise ValueError(f"the transformer reads {found} channels beside its latents; image-to-video needs {wanted}")
    if config.picture_width is None:
        return BesideLatents()
    if PICTURES not in parts.others:
        raise FileNotFoundError(
            f"{parts.name} has no folder {PICTURES!r}, which this transformer needs; encoders= may be a folder in "
            "diffusers' layout that has one"
        )
    check_entries([(parts.others[PICTURES], "hidden_size", config.picture_width)])
    place, processor = parts.others[PICTURES], parts.others[PICTURES].parent / PROCESSOR
    encoder = load_clip_vision(
        place, processor, variant=parts.variant_of(place), device=parts.encoder_device, dtype=parts.dtype
    )
    encoder = moved(encoder, parts.device, None)  # where weights that stay in their files will go
    return BesideLatents(encoder=encoder, needs_last=config.picture_positions is not None, takes_last=False)


def _begins(looking: Looking | None) -> Begins:
    if looking is None:
        return "never"
    return "always" if isinstance(looking, BesideLatents) else "maybe"
