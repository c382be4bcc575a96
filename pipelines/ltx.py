"""LTX-Video 0.9 to 0.9.8 (2B and 13B): clips from text, and from a picture that they begin with.

Where a clip has no whole number of groups of frames after its first, the rest of the last one is cut off. Models from
0.9.5 on are told that the first latent frame stands for one frame, read texts whose padding the encoder does not see,
and take steps by a rule of their own. Their clips show pictures and clips at any frames, of which a first picture is
one, and start from other clips. Distilled models are known by their names: they were made for eight noise levels,
without guidance.

Source: diffusers' LTXPipeline, LTXImageToVideoPipeline and LTXConditionPipeline; for what models were made for,
Lightricks' configs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..core.loading import build_on_meta
from ..core.weight_source import WeightSource
from ..denoisers.base import Conditioning
from ..denoisers.first_frames import FirstFramesKept
from ..denoisers.guidance import ClassifierFree, Guidance, Unguided
from ..denoisers.ltx import LTXDenoiser
from ..denoisers.ltx_config import MARKS, LTXConfig
from ..denoisers.ltx_keys import ltx_key_map
from ..denoisers.ltx_rotary import NUM_PLACES
from ..encoders.base import TextEncoder
from ..encoders.in_files import T5
from ..encoders.t5 import load_t5
from ..schedulers import Schedule, flow_schedule_from_sigmas
from ..schedulers.flow_match import FlowMatchConfig, flow_match_schedule
from ..vae.base import Autoencoder
from ..vae.ltx import LTXAutoencoder, load_ltx_vae, load_ltx_vae_file
from .base import Source
from .conditions import Condition
from .distilled import check_not_told
from .family import COMMON, OF_CLIPS, STARTING, guidance_rescale, guidance_scale, num_steps
from .flow import size_shifted_schedule
from .folders import NAME, check_entries
from .frames import FirstLatents, frames_in_group
from .image import ImagePipeline
from .parts import ClipSize, Layout, Parts
from .placing import Placing
from .recipe import Recipe
from .request import Request
from .text_options import check_text, conditioning_given, conditioning_of, limited, options_given
from .texts import OtherTexts
from .timed_decoding import TimedDecoding
from .true_cfg import below_1
from .values import is_number

FAMILY = "ltx"
MAX_TOKENS, LATER_TOKENS, LONGEST = 128, 256, 512  # that T5 reads where nothing is said, from 0.9.5 on, and at most
FIRST, LATER = "LTXPipeline", "LTXConditionPipeline"
LAYOUT = Layout(
    classes=(FIRST, "LTXImageToVideoPipeline", LATER),
    encoders={"t5": "text_encoder"},
    tokenizers={"t5": "tokenizer"},
    marks=MARKS,
    inside={"t5": (T5,)},
    clip=lambda shapes: ClipSize(width=WIDTH, height=HEIGHT, frames=FRAMES, group=8, side=32),
)
SCHEDULER = FlowMatchConfig(
    use_dynamic_shifting=True,
    base_shift=0.95,
    max_shift=2.05,
    base_image_seq_len=1024,
    max_image_seq_len=4096,
    shift_terminal=0.1,
)
"""That of the models before 0.9.5, for files that have none."""
DISTILLED_SIGMAS = (1.0, 0.9937, 0.9875, 0.9812, 0.975, 0.9094, 0.725, 0.4219)
"""Those that distilled models were made for, before the end."""
DECODING = TimedDecoding(time=0.05, noise_scale=0.025)
"""What Lightricks recommends for decoders that are told a time."""
WIDTH, HEIGHT, LARGEST = 704, 512, 4096
FRAMES, FRAME_RATE, FASTEST = 161, 25, 1000
DECODE = ("decode_timestep", "decode_noise_scale")
LATER_TAKE = frozenset(("conditions", "image_cond_noise_scale", "video", "strength"))
CONDITION_NOISE = 0.15
"""`image_cond_noise_scale` where it is not given, as the reference has it."""


@dataclass(frozen=True, kw_only=True)
class LTXFamily:
    """LTX-Video's choices. `cell`: frames, and pixels a side, of a latent cell; `later`: of 0.9.5 or later;
    `told_time`: whether the decoder is told one; `distilled`: the model was made for `DISTILLED_SIGMAS`, without
    guidance.

    A scale over 1 is classifier-free guidance, with both passes in one batch.
    """

    scheduler: FlowMatchConfig
    cell: tuple[int, int]
    later: bool
    told_time: bool
    distilled: bool

    @property
    def arguments(self) -> frozenset[str]:
        """All common ones but those for starting from a picture, and these; later models start from clips as well."""
        own = {"image", "frame_rate", "max_sequence_length", "guidance_rescale"}
        own |= LATER_TAKE if self.later else set[str]()
        return (COMMON - STARTING) | OF_CLIPS | own | (set(DECODE) if self.told_time else set())

    @property
    def draws_posterior(self) -> bool:
        """No: the reference is given the latents that a clip starts from."""
        return False

    def check(self, request: Request) -> None:
        """Numbers that make sense, and go with what else is given; there is no value to be told; whole conditioning."""
        check_text(request, longest=LONGEST)
        check_not_told(request)
        rate = request.frame_rate
        if rate is not None and not (is_number(rate) and 0 < rate <= FASTEST):
            raise ValueError(f"frame_rate is {rate!r}; it must be over 0, and at most {FASTEST}")
        for name in DECODE:
            value = vars(request)[name]
            if value is not None and not (is_number(value) and 0 <= value <= 1):
                raise ValueError(f"{name} is {value!r}; it must be from 0 to 1")
        if request.strength is not None and request.video is None:
            raise ValueError("strength: it needs a video to start from; a picture's is that of its calotype.Condition")
        given = conditioning_given(request)
        if given and rate is not None:
            raise ValueError("frame_rate: conditioning is given, which says it already; give one of the two")
        if any(part.time_ids is None or part.time_ids.shape[1] != NUM_PLACES for part in given):
            raise ValueError(f"conditioning: this model reads time_ids of {NUM_PLACES} numbers")

    def guidance(self, request: Request, recipe: Recipe) -> Guidance:
        """u + scale (c - u), or c alone; a first frame that is known is kept (by later models' runs: see `placing`)."""
        chosen = self._guidance(request, recipe)
        begins = request.image is not None and not self.later and not isinstance(chosen, FirstFramesKept)
        return FirstFramesKept(chosen) if begins else chosen

    def _guidance(self, request: Request, recipe: Recipe) -> Guidance:
        if request.guidance is not None:
            return request.guidance
        scale = guidance_scale(request, recipe)
        return Unguided() if scale <= 1 else ClassifierFree(scale, rescale=guidance_rescale(request, recipe))

    def schedule(self, request: Request, recipe: Recipe, num_cells: int) -> Schedule:
        """Equal steps, or later models' own, or the given sigmas, shifted as the scheduler's config says; those that a
        distilled model was made for as they are."""
        count = num_steps(request, recipe)
        if self.distilled and request.sigmas is None and count == len(DISTILLED_SIGMAS):
            return flow_schedule_from_sigmas(DISTILLED_SIGMAS)
        if self.later and request.sigmas is None and not self.scheduler.use_dynamic_shifting:
            return flow_match_schedule(self.scheduler, count, sigmas=linear_quadratic_sigmas(count))
        return size_shifted_schedule(self.scheduler, request, recipe, num_cells)

    def late(self, schedule: Schedule, strength: float) -> Schedule:
        """The last `int(n strength)` steps."""
        return schedule.starting_at(strength)

    def condition(
        self, encoders: Mapping[str, TextEncoder], prompts: Sequence[str], others: OtherTexts, request: Request
    ) -> Conditioning:
        """The states of the prompts, and where latent cells are: see `fractional_rotary`."""
        told = conditioning_of(limited(encoders["t5"], request)(prompts))
        frames, pixels = self.cell
        rate = FRAME_RATE if request.frame_rate is None else request.frame_rate
        tick, *ticks = (1 / rate, frames, frames - 1) if self.later else (frames / rate, 1, 0)
        places = torch.tensor([[tick, pixels, pixels, *ticks]] * len(prompts), device=told.states.device)
        return dataclasses.replace(told, time_ids=places)

    def placing(self, request: Request) -> Placing | None:
        """What is given; a picture that clips of later models begin with is a condition at their first frame."""
        named = [(f"conditions[{n}]", condition) for n, condition in enumerate(request.given_conditions)]
        if self.later and request.image is not None:
            named = [("image", Condition(image=request.image))]
        scale = request.image_cond_noise_scale
        noise_scale = CONDITION_NOISE if scale is None else float(scale)
        return Placing(conditions=named, noise_scale=noise_scale) if named else None

    def index(self) -> Mapping[str, Any]:
        """See `IndexedFamily`."""
        return {"_class_name": LATER if self.later else FIRST}

    def decoding(self, request: Request) -> TimedDecoding | None:
        """What is given; the time stands for the noise where that is not given, as in the reference."""
        time, share = request.decode_timestep, request.decode_noise_scale
        if not self.told_time:
            return None
        if time is None:
            return DECODING if share is None else dataclasses.replace(DECODING, noise_scale=float(share))
        return TimedDecoding(time=float(time), noise_scale=float(time if share is None else share))

    def described(self, request: Request) -> Mapping[str, Any]:
        """The numbers that are given, and where what is shown goes."""
        numbers = options_given(request, "max_sequence_length", "frame_rate", "image_cond_noise_scale", *DECODE)
        conditions = [each.described() for each in request.given_conditions]
        return {**numbers, **({"conditions": conditions} if conditions else {})}

    def warnings(self, request: Request) -> tuple[str, ...]:
        """What the user should know about the arguments."""
        scale, steps, found = request.guidance_scale, request.num_inference_steps, list[str]()
        if self.distilled and scale is not None and scale > 1:
            found.append(f"guidance_scale {scale}: this model was made to run without guidance, at 1")
        if self.distilled and steps is not None and steps != len(DISTILLED_SIGMAS):
            found.append(f"num_inference_steps {steps}: this model was made for {len(DISTILLED_SIGMAS)}")
        return (*found, *below_1("guidance_scale", scale))


def load_ltx(parts: Parts) -> ImagePipeline:
    """The pipeline of LTX-Video's parts.

    Raises:
        FileNotFoundError: a component or a file is missing. ValueError: a file is damaged, or they do not fit together.
    """
    config = parts.denoiser_config(LTXConfig.from_entries, LTXConfig.from_shapes)
    distilled = _is_distilled(parts)
    check_entries(
        [(parts.encoders["t5"], "d_model", config.text_width), (parts.vae, "latent_channels", config.latent_channels)]
    )
    denoiser = build_on_meta(lambda: LTXDenoiser(config))
    source = WeightSource.for_module(denoiser, parts.denoiser_files, ltx_key_map())  # refuses a broken file first
    vae = _decoding_at(parts.autoencoder(load_ltx_vae, load_ltx_vae_file, channels=config.latent_channels))
    later = _is_later(parts, vae)
    preset = FlowMatchConfig() if distilled or later else SCHEDULER
    tokens = LATER_TOKENS if later else MAX_TOKENS
    text = partial(load_t5, max_tokens=tokens, pad_to_max=not later, masked=later, keeps_pads=False)
    t5 = parts.encoder("t5", text)
    denoiser.fill(source, device=parts.device, dtype=parts.dtype, block_device=parts.block_device)
    return ImagePipeline(
        source=Source(family=FAMILY, name=parts.name, weights=parts.digests(LAYOUT)),
        family=LTXFamily(
            scheduler=parts.scheduler_config(FlowMatchConfig.from_entries, preset),
            cell=(frames_in_group(vae), vae.downsampling),
            later=later,
            told_time=isinstance(vae, LTXAutoencoder) and vae.is_told_time,
            distilled=distilled,
        ),
        recipe=recipe(vae.downsampling, distilled=distilled),
        denoiser=denoiser,
        encoders={"t5": t5},
        vae=vae,
        attention=parts.attention,
        looking=None if later else FirstLatents(draws=True),
        device=parts.device,
        dtype=parts.dtype,
    )


def recipe(downsampling: int = 32, *, distilled: bool = False) -> Recipe:
    """The reference's defaults, or what distilled models were made for; `downsampling` is the autoencoder's."""
    return Recipe(
        width=WIDTH,
        height=HEIGHT,
        size_multiple=downsampling,
        min_size=downsampling,
        max_size=LARGEST,
        num_inference_steps=len(DISTILLED_SIGMAS) if distilled else 50,
        guidance_scale=1.0 if distilled else 3.0,
        num_frames=FRAMES,
        fps=FRAME_RATE,
    )


def linear_quadratic_sigmas(count: int) -> list[float]:
    """Noise levels of `count` steps: in the first half they fall evenly by 0.025 in all, then faster and faster."""
    half = count // 2
    if not half:
        return [1.0]
    rise, rest = 0.025 / half, count - half
    bend = (half - 0.025 * count) / (half * rest**2)
    slope, start = rise - 2 * bend * half, bend * half**2
    done = [rise * i if i < half else bend * i**2 + slope * i + start for i in range(count)]
    return torch.tensor([1 - share for share in done]).tolist()


def _is_later(parts: Parts, vae: Autoencoder) -> bool:
    """Whether a model is of 0.9.5 or later: by its folder's class of pipeline, else by its autoencoder."""
    name = parts.index_entries().get("_class_name")
    return name == LATER if name is not None else isinstance(vae, LTXAutoencoder) and vae.config.is_later


def _decoding_at(vae: Autoencoder) -> Autoencoder:
    """The autoencoder, told what it is told where a run says nothing."""
    return vae.at(DECODING.time) if isinstance(vae, LTXAutoencoder) else vae


def _is_distilled(parts: Parts) -> bool:
    """By the name of the file or folder, and that which a saved folder keeps."""
    names = (parts.name, str(parts.index_entries().get(NAME, "")))
    return any("distilled" in part.lower() for name in names for part in Path(name).parts[-3:])
