"""Wan's denoisers against diffusers' on tiny random weights."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny_wan
import torch
from pairs import CPU, Kind, Pair, check_told_by_shapes
from pairs import clip_noise as noise
from parity import error, slopes
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from calotype.core.attention.approximate import SlidingTileAttention
from calotype.core.attention.registry import attention_selector
from calotype.core.copies import moved
from calotype.core.loading import build_on_meta
from calotype.denoisers.base import Conditioning
from calotype.denoisers.shapes import Shapes
from calotype.denoisers.wan import WanDenoiser
from calotype.denoisers.wan_config import MARKS, WanConfig
from calotype.denoisers.wan_keys import wan_key_map
from calotype.schedulers import flow_schedule

WAN = Kind(denoiser=WanDenoiser, config=WanConfig, key_map=wan_key_map())
CLIPS = [(frames, size) for frames in (1, 2, 3, 5) for size in ((4, 8), (6, 10))]


@pytest.fixture(scope="module", params=[*tiny_wan.KINDS])
def pair(request, tmp_path_factory):
    return made_pair(tmp_path_factory.mktemp("wan"), tiny_wan.KINDS[request.param])


@pytest.fixture(scope="module")
def text_pair(tmp_path_factory):
    return made_pair(tmp_path_factory.mktemp("wan"), {})


@pytest.fixture(scope="module")
def picture_pair(tmp_path_factory):
    return made_pair(tmp_path_factory.mktemp("wan"), tiny_wan.KINDS["pictures"])


def made_pair(folder: Path, changes: dict[str, Any]) -> Pair:
    return WAN.pair(tiny_wan.wan_transformer(**changes), folder)


def conditioning(config: WanConfig, lengths: tuple[int, ...], clip: tuple[int, tuple[int, int]], seed=0):
    """Rows of these lengths with rubbish after their ends, and what the model reads of pictures."""
    generator, rows = torch.Generator().manual_seed(seed), len(lengths)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator)

    frames, size = clip
    return Conditioning(
        states=drawn(max(lengths), config.text_width),
        lengths=torch.tensor(lengths),
        references=(drawn(config.beside_channels, frames, *size),) if config.beside_channels else (),
        picture_states=None if config.picture_width is None else drawn(10, config.picture_width),
    )


def padded(told):
    """States as diffusers' pipelines give them: cut to their lengths, then zeros up to 512."""
    rows = zip(told.states, told.lengths, strict=True)
    return torch.stack([functional.pad(states[:length], (0, 0, 0, 512 - int(length))) for states, length in rows])


def by_diffusers(model, told, x, point):
    """As its pipelines call the model."""
    pictures = told.picture_states
    if pictures is not None and model.config.pos_embed_seq_len is not None:
        pictures = pictures.reshape(2 * len(x), -1, pictures.shape[-1])  # the first picture, then the last, row by row
    return model(
        hidden_states=torch.cat((x, *told.references), dim=1),
        timestep=torch.tensor(1000 * point.time).expand(len(x)),
        encoder_hidden_states=padded(told),
        encoder_hidden_states_image=pictures,
        return_dict=False,
    )[0]


@pytest.mark.parametrize("clip", CLIPS)
def test_slopes_are_those_of_diffusers(pair, clip):
    told, x = conditioning(pair.ours.config, (3, 9), clip), noise(2, clip)
    found, points = slopes(pair.ours, told, x)
    for slope, point in zip(found, points, strict=True):
        assert error(slope, by_diffusers(pair.theirs, told, x, point)) < 1e-5


def by_diffusers_with_known_frames(model, told, x, point):
    """As the pipeline of TI2V-5B calls the model, with a time for each token."""
    (known,) = told.references
    mask = torch.ones(1, 1, *x.shape[2:])
    mask[:, :, : known.shape[2]] = 0
    there = functional.pad(known, (0, 0, 0, 0, 0, x.shape[2] - known.shape[2]))
    return model(
        hidden_states=(1 - mask) * there + mask * x,
        timestep=(mask[0][0][:, ::2, ::2] * torch.tensor(1000 * point.time)).flatten().expand(len(x), -1),
        encoder_hidden_states=padded(told),
        return_dict=False,
    )[0]


@pytest.mark.parametrize(("clip", "num_known"), [*((clip, 1) for clip in CLIPS), ((5, (6, 10)), 2)])
def test_known_frames_are_told_time_0_and_led_to(text_pair, clip, num_known):
    x = noise(2, clip)
    told = conditioning(text_pair.ours.config, (3, 9), clip)
    told = dataclasses.replace(told, references=(noise(2, (num_known, clip[1]), seed=4),))
    found, points = slopes(text_pair.ours, told, x)
    for slope, point in zip(found, points, strict=True):
        x0 = (x - point.sigma * slope)[:, :, :num_known]
        assert error(x0, told.references[0]) < 1e-5
        if clip[0] > num_known:
            wanted = by_diffusers_with_known_frames(text_pair.theirs, told, x, point)
            assert error(slope[:, :, num_known:], wanted[:, :, num_known:]) < 1e-5


def test_a_row_is_that_row_alone(pair):
    clip = (2, (4, 6))
    told, x = conditioning(pair.ours.config, (5, 2, 9), clip), noise(3, clip, seed=2)
    together, _ = slopes(pair.ours, told, x)
    for row in range(3):
        wide = told.rows([row])
        for one in (wide, dataclasses.replace(wide, states=wide.states[:, : wide.lengths[0]])):
            alone, _ = slopes(pair.ours, one, x[row : row + 1])
            assert error(alone[-1], together[-1][row : row + 1]) < 1e-5


def test_everything_told_is_seen(picture_pair):
    """Each of text, channels beside and picture states changes the slope."""
    ours, clip = picture_pair.ours, (2, (4, 4))
    told, other = (conditioning(ours.config, (6,), clip, seed=seed) for seed in (0, 8))
    x = noise(1, clip)
    first = slopes(ours, told, x)[0][0]
    for name in ("states", "references", "picture_states"):
        changed = dataclasses.replace(told, **{name: getattr(other, name)})
        assert error(slopes(ours, changed, x)[0][0], first) > 1e-3


def test_a_second_conditioning_shares_what_does_not_depend_on_it(picture_pair):
    clip = (3, (4, 6))
    told, other = (conditioning(picture_pair.ours.config, (6, 2), clip, seed=seed) for seed in (0, 8))
    first, second = picture_pair.check_prepared_beside(told, other, noise(2, clip))
    assert second.rotary is first.rotary and second.projections is first.projections


def test_original_files_load_as_well(pair, tmp_path):
    file = tmp_path / "wan.safetensors"
    save_file(tiny_wan.in_original_layout(pair.theirs.state_dict()), file)
    pair.check_file(file)


def test_what_is_saved_is_what_was_loaded(pair):
    pair.check_saved()


def test_files_with_a_norm_that_nobody_uses_load(picture_pair, tmp_path):
    unused = {"blocks.1.attn2.norm_added_q.weight": torch.ones(42)}
    save_file(picture_pair.theirs.state_dict() | unused, tmp_path / "wan.safetensors")
    picture_pair.check_file(tmp_path / "wan.safetensors")


@pytest.mark.parametrize("kind", tiny_wan.KINDS)
def test_files_tell_their_config(kind):
    """In both layouts, but for epsilons, which shapes do not show."""
    changes = {**tiny_wan.KINDS[kind], "attention_head_dim": 128, "eps": 1e-6}
    if "added_kv_proj_dim" in changes:
        changes["added_kv_proj_dim"] = 3 * 128
    theirs = build_on_meta(lambda: tiny_wan_on_meta(changes))
    config = WanConfig.from_entries(dict(theirs.config))
    weights = theirs.state_dict()
    check_told_by_shapes(WanConfig, MARKS, config, weights, tiny_wan.in_original_layout(weights))
    again = tiny_wan_on_meta(config.entries())
    assert WanConfig.from_entries(dict(again.config)) == config


def tiny_wan_on_meta(changes):
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(**{**tiny_wan.SIZES, **changes})


def test_other_models_shapes_are_refused():
    shapes = {"patch_embedding.weight": (42, 4, 1, 2, 2), "proj_out.weight": (16, 42)}
    with pytest.raises(ValueError, match="42 wide"):
        WanConfig.from_shapes(Shapes(shapes))


def test_what_only_prepare_uses_may_stay_in_the_file(picture_pair):
    clip = (2, (4, 4))
    picture_pair.check_lean(conditioning(picture_pair.ours.config, (5, 3), clip), noise(2, clip, seed=6))


def test_half_precision_is_as_good_as_that_of_diffusers(picture_pair):
    """There modulations, norms and sums around sublayers are computed in float32 too."""
    from diffusers import WanTransformer3DModel

    clip, dtype = (3, (4, 6)), torch.bfloat16
    told, x = conditioning(picture_pair.ours.config, (5, 3), clip), noise(2, clip, seed=6)
    exact, points = slopes(picture_pair.ours, told, x)
    half = told.to(CPU, dtype)
    rounded = dataclasses.replace(half, references=tuple(each.to(dtype) for each in told.references))
    theirs = WanTransformer3DModel.from_pretrained(picture_pair.file.parent, torch_dtype=dtype)
    with torch.no_grad():
        reference = [by_diffusers(theirs, rounded, x.to(dtype), point).float() for point in points]
    allowed = 1.5 * max(error(slope, wanted) for slope, wanted in zip(reference, exact, strict=True))
    for model in (picture_pair.lean(dtype), moved(picture_pair.lean(), CPU, dtype)):
        found, _ = slopes(model, half, x)
        assert all(slope.dtype is torch.float32 for slope in found)
        assert max(error(slope, wanted) for slope, wanted in zip(found, exact, strict=True)) < allowed


def test_time_is_embedded_and_modulations_are_held_in_float32_in_half_precision(text_pair):
    ours, half, clip = text_pair.ours, text_pair.lean(torch.bfloat16), (1, (4, 4))
    times, points = [0.93, 0.4, 0.0], flow_schedule(2).points[:-1]
    assert torch.equal(half.embed(times), ours.embed(times).bfloat16())
    told = conditioning(ours.config, (4,), clip)
    exact, found = (
        each.prepare(told, (1, 4, 1, 4, 4), points, attention=attention_selector()) for each in (ours, half)
    )
    assert torch.equal(found.tables, exact.tables) and torch.equal(found.final_table, exact.final_table)


def test_what_does_not_fit_is_refused(text_pair, picture_pair):
    points = flow_schedule(1).points[:-1]

    def refused(pair, match, clip=(2, (4, 4)), shape=(1, 4, 2, 4, 4), **changes):
        told = dataclasses.replace(conditioning(pair.ours.config, (4,), clip), **changes)
        with pytest.raises(ValueError, match=match):
            pair.ours.prepare(told, shape, points, attention=attention_selector())

    refused(text_pair, "19 wide", states=torch.zeros(1, 4, 19))
    refused(text_pair, "takes no guidance value", guidance=2.0)
    refused(text_pair, "sides in steps of 2", shape=(1, 4, 2, 5, 4))
    refused(text_pair, "takes 4 channels", shape=(1, 5, 2, 4, 4))
    refused(text_pair, "2 rows of latents", shape=(2, 4, 2, 4, 4))
    refused(text_pair, "513 tokens.*up to 512", states=torch.zeros(1, 513, 20), lengths=torch.tensor([513]))
    refused(text_pair, "1 of width 18; this model reads none", picture_states=torch.zeros(1, 1, 18))
    for shapes in ([(1, 4, 3, 4, 4)], [(1, 4, 1, 4, 6)], [(1, 4, 1, 4, 4)] * 2):
        references = tuple(torch.zeros(shape) for shape in shapes)
        refused(text_pair, "at most one, of the clip's first frames", references=references)
    refused(picture_pair, r"reads one of \(1, 7, 2, 4, 4\)", references=())
    refused(picture_pair, r"reads one of \(1, 7, 2, 4, 4\)", clip=(1, (4, 4)))
    refused(picture_pair, "are none; this model reads any number of width 18", picture_states=None)
    refused(picture_pair, "3 of width 17", picture_states=torch.zeros(1, 3, 17))


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        *(("in_channels", 3), ("num_layers", "2"), ("attention_head_dim", 15), ("eps", 0), ("out_channels", 0)),
        *(("patch_size", [2, 2, 2]), ("qk_norm", None), ("image_dim", 18), ("added_kv_proj_dim", 42)),
        *(("pos_embed_seq_len", 6), ("cross_attn_norm", 1)),
    ],
)
def test_configs_that_make_no_model_are_refused(entry, value):
    name = {"image_dim": "added_kv_proj_dim"}.get(entry, entry)
    with pytest.raises(ValueError, match=name):
        WanConfig.from_entries({"qk_norm": "rms_norm_across_heads", **tiny_wan.SIZES, entry: value})


def test_attention_within_windows_of_the_clip(text_pair):
    config, clip = text_pair.ours.config, (3, (8, 8))
    told = conditioning(config, (4, 7), clip)
    x = torch.randn(2, config.latent_channels, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    points = flow_schedule(2).points[:-1]

    def slope(attention):
        selector = attention_selector(attention)
        return text_pair.ours.slope(
            x, text_pair.ours.prepare(told, tuple(x.shape), points, attention=selector), points[0]
        )

    exact = slope(None)
    assert error(slope(SlidingTileAttention(tile=(1, 2, 2), window=(3, 2, 2))), exact) < 1e-5
    near = error(slope(SlidingTileAttention(tile=(1, 2, 2), window=(3, 1, 2))), exact)
    nearest = error(slope(SlidingTileAttention(tile=(1, 2, 2), window=(1, 1, 1))), exact)
    assert 1e-3 < near < nearest
