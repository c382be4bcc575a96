"""What is special about diffusers' pipelines of clips.

Legend: N tokens of a clip, C latent channels, h w latent cells of a frame, L tokens of a text.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..encoders.hunyuan_video import GlyphEncoder, glyph_text
from ..vae.frames import check_frames
from .compare_run import BESIDE, Adapter, Call, Run, Tokens, Trace, by_scheduler, flow_levels, guided, opened, sized
from .frames import BesideLatents, frames_in_group
from .image import ImagePipeline
from .ltx import DECODING, LTXFamily

_BEGINNING = {"LTXPipeline": "LTXImageToVideoPipeline", "WanPipeline": "WanImageToVideoPipeline"}
_ALONE = {"LTXImageToVideoPipeline": "LTXPipeline"}
"""Where one model's clips with and without a first picture are of two classes."""
_TEXTS = (("states", ""), ("other_states", "_2"))


def class_for(pipeline: str, run: Run) -> str:
    """The class of diffusers that makes a run, where a folder names `pipeline`."""
    return (_BEGINNING if run.images else _ALONE).get(pipeline, pipeline)


def _wan_told(call: Call) -> Trace:
    """Texts are padded with zeros; pictures' states are a row each. The latents have theirs beside them."""
    states: Tensor = call[1]["encoder_hidden_states"]
    num_read = int(states[0].any(dim=1).sum())
    told = {"states": states[:1, :num_read], BESIDE: call[1]["hidden_states"][:1]}
    pictures: Tensor | None = call[1].get("encoder_hidden_states_image")
    return told if pictures is None else told | {"picture_states": pictures.flatten(0, 1)[None]}


def _hunyuan_told(call: Call) -> Trace:
    """Texts are padded; latents have a picture's, and a mask, beside them."""
    told = {name: _own(call[1], f"encoder_hidden_states{end}", f"encoder_attention_mask{end}") for name, end in _TEXTS}
    return told | {"picture_states": call[1]["image_embeds"][:1], BESIDE: call[1]["hidden_states"][:1]}


def _ltx_told(call: Call) -> Trace:
    """The prompts' rows are the last, and padded. A picture's latents are the first ones [1, C, 1, h, w]."""
    values = call[1]
    told = {"states": _own(values, "encoder_hidden_states", "encoder_attention_mask", -1)}
    if "num_frames" not in values:
        return told
    frames = values["hidden_states"][-1:].unflatten(1, (-1, values["height"], values["width"]))
    return told | {BESIDE: frames.movedim(-1, 1)[:, :, :1]}


def _own(values: Mapping[str, Any], states: str, mask: str, row: int = 0) -> Tensor:
    """The states [1, L, D] of a row that are not masked."""
    return values[states][row][values[mask][row].bool()][None]


def _frames(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """The frames of a clip, of which diffusers would leave out some, or fail, where they are no whole groups."""
    count = run.num_frames or ours.recipe.num_frames
    check_frames(count, frames_in_group(ours.vae))
    return {"num_frames": count}


def _wan_guided(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """A clip of the prompt alone."""
    return {**guided(ours, run), **_frames(ours, run)}


def _wan_shown(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """A clip that begins with a picture, and may end with another."""
    if ours.looking is None:
        return _wan_guided(ours, run)
    ends = isinstance(ours.looking, BesideLatents)
    if not 1 <= len(run.images) <= 1 + ends:
        may_end = ", and may end with another" if ends else ""
        raise ValueError(f"{len(run.images)} pictures; this pipeline makes clips that begin with one{may_end}")
    pictures = dict(zip(("image", "last_image"), opened(run), strict=False))
    return {**_wan_guided(ours, dataclasses.replace(run, images=())), **pictures}


def _hunyuan_guided(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """A clip of the prompt alone; the checkpoint says how it is guided."""
    return {**sized(ours, run), **_frames(ours, run)}


def _hunyuan_shown(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """A clip that begins with a picture, whose size diffusers takes from this."""
    if len(run.images) != 1 or (run.width, run.height) != (None, None):
        raise ValueError(
            f"{len(run.images)} pictures; this pipeline makes clips that begin with one, which gives the size"
        )
    return {"image": opened(run)[0], **_frames(ours, run)}


def _glyphs(ours: ImagePipeline, run: Run) -> Tokens:
    """What is in quotes."""
    encoder, text = ours.encoders["byt5"], glyph_text(run.prompt)
    assert isinstance(encoder, GlyphEncoder)
    return {} if text is None else {"byt5": encoder.t5.tokens([text])[0][0]}


def _ltx_guided(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """A clip of the prompt alone, decoded as Lightricks recommends where the decoder is told a time."""
    decoding = {"decode_timestep": DECODING.time, "decode_noise_scale": DECODING.noise_scale}
    told_time = isinstance(ours.family, LTXFamily) and ours.family.told_time
    return {**_wan_guided(ours, run), **(decoding if told_time else {})}


def _ltx_shown(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """A clip that begins with a picture."""
    if len(run.images) != 1:
        raise ValueError(f"{len(run.images)} pictures; this pipeline makes clips that begin with one")
    return {**_ltx_guided(ours, dataclasses.replace(run, images=())), "image": opened(run)[0]}


def _ltx_conditioned(ours: ImagePipeline, run: Run) -> Mapping[str, Any]:
    """A clip that may begin with a picture."""
    return _ltx_shown(ours, run) if run.images else _ltx_guided(ours, run)


def _undistilled(ours: ImagePipeline) -> ImagePipeline:
    """Steps are those of models that are not distilled, as diffusers knows of no others."""
    assert isinstance(ours.family, LTXFamily)
    return dataclasses.replace(ours, family=dataclasses.replace(ours.family, distilled=False))


_HUNYUAN = Adapter(
    told=_hunyuan_told,
    arguments=_hunyuan_guided,
    levels=flow_levels,
    read=_glyphs,
    watched=by_scheduler,
    made="frames",
)
_LTX_VIDEO = Adapter(
    told=_ltx_told,
    arguments=_ltx_guided,
    levels=flow_levels,
    ready=_undistilled,
    untold=frozenset(("time_ids",)),
    made="frames",
)
CLIPS: Mapping[str, Adapter] = {
    "HunyuanVideo15Pipeline": _HUNYUAN,
    "HunyuanVideo15ImageToVideoPipeline": dataclasses.replace(_HUNYUAN, arguments=_hunyuan_shown),
    "LTXPipeline": _LTX_VIDEO,
    "LTXImageToVideoPipeline": dataclasses.replace(_LTX_VIDEO, arguments=_ltx_shown),
    "LTXConditionPipeline": dataclasses.replace(_LTX_VIDEO, arguments=_ltx_conditioned),
    "WanPipeline": Adapter(told=_wan_told, arguments=_wan_guided, levels=flow_levels, made="frames"),
    "WanImageToVideoPipeline": Adapter(told=_wan_told, arguments=_wan_shown, levels=flow_levels, made="frames"),
}
