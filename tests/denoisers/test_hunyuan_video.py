"""HunyuanVideo 1.5's denoiser against diffusers' on tiny random weights."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny_hunyuan_video as tiny
import torch
from pairs import Kind, Pair, check_told_by_shapes
from pairs import clip_noise as noise
from parity import error, slopes
from safetensors.torch import save_file
from torch import Tensor

from calotype.core.attention.approximate import SlidingTileAttention
from calotype.core.attention.registry import attention_selector
from calotype.core.loading import build_on_meta
from calotype.denoisers.base import Conditioning
from calotype.denoisers.hunyuan_video import HunyuanVideoDenoiser
from calotype.denoisers.hunyuan_video_config import MARKS, HunyuanVideoConfig
from calotype.denoisers.hunyuan_video_keys import hunyuan_video_key_map
from calotype.denoisers.shapes import Shapes
from calotype.schedulers import flow_schedule

HUNYUAN = Kind(denoiser=HunyuanVideoDenoiser, config=HunyuanVideoConfig, key_map=hunyuan_video_key_map())
CLIPS = [(frames, size) for frames in (1, 2, 3, 5) for size in ((4, 6), (2, 4))]
PUBLISHED: dict[str, Any] = {
    "num_attention_heads": 1,
    "attention_head_dim": 128,
    "rope_axes_dim": (16, 56, 56),
    "rope_theta": 256.0,
    "target_size": 640,
    "task_type": "i2v",
}
"""What files do not show."""


@pytest.fixture(scope="module", params=[*tiny.KINDS])
def pair(request, tmp_path_factory):
    return made_pair(tmp_path_factory.mktemp("hunyuan"), tiny.KINDS[request.param])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return made_pair(tmp_path_factory.mktemp("hunyuan"), {})


def made_pair(folder: Path, changes: dict[str, Any]) -> Pair:
    return HUNYUAN.pair(tiny.hunyuan_video_transformer(**changes), folder)


def conditioning(lengths, glyphs, clip=None, seed=0):
    """Rows of these lengths with rubbish after their ends, and of as many glyphs; with a clip, what the model reads of
    pictures."""
    generator, rows = torch.Generator().manual_seed(seed), len(lengths)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator)

    frames, size = (1, (1, 1)) if clip is None else clip
    states, others = drawn(max(lengths), 32), drawn(max(glyphs), 20)
    pictures, beside = drawn(5, 18), drawn(5, frames, *size)
    return Conditioning(
        states=states,
        lengths=torch.tensor(lengths),
        other_states=others,
        other_lengths=torch.tensor(glyphs),
        references=() if clip is None else (beside,),
        picture_states=None if clip is None else pictures,
    )


def by_diffusers(model, told, x, point, following):
    """As its pipelines call the model: the one for pictures says where a step leads to, the other does not."""
    beside = next(iter(told.references), x.new_zeros(len(x), 5, *x.shape[2:]))
    pictures = told.picture_states
    shown = pictures is not None
    return model(
        hidden_states=torch.cat((x, beside), dim=1),
        timestep=torch.tensor(1000 * point.time).expand(len(x)),
        timestep_r=torch.tensor(1000 * following).expand(len(x)) if shown and model.config.use_meanflow else None,
        encoder_hidden_states=told.states,
        encoder_attention_mask=mask(told.states, told.lengths),
        encoder_hidden_states_2=told.other_states,
        encoder_attention_mask_2=mask(told.other_states, told.other_lengths),
        image_embeds=pictures if shown else x.new_zeros(len(x), 5, 18),
        return_dict=False,
    )[0]


def mask(states, lengths):
    return (torch.arange(states.shape[1]) < lengths[:, None]).float()


def check(pair, told, x):
    found, points = slopes(pair.ours, told, x)
    following = [*(point.time for point in points[1:]), 0.0]
    for slope, point, time in zip(found, points, following, strict=True):
        assert error(slope, by_diffusers(pair.theirs, told, x, point, time)) < 1e-5


@pytest.mark.parametrize("clip", CLIPS)
def test_slopes_are_those_of_diffusers(pair, clip):
    check(pair, conditioning((3, 9), (4, 0)), noise(2, clip))
    check(pair, conditioning((3, 9), (2, 5), clip), noise(2, clip))


def test_rows_of_one_length_need_no_mask(plain):
    """Padding that no row fills is not there."""
    told, x = conditioning((6, 6), (3, 3)), noise(2, (2, (4, 4)))
    prepared = plain.ours.prepare(told, tuple(x.shape), flow_schedule(1).points[:-1], attention=attention_selector())
    assert prepared.mask.is_full and prepared.text_mask.is_full
    check(plain, told, x)
    ragged = dataclasses.replace(told, lengths=torch.tensor([4, 5]), other_lengths=torch.tensor([3, 2]))
    prepared = plain.ours.prepare(ragged, tuple(x.shape), flow_schedule(1).points[:-1], attention=attention_selector())
    assert prepared.mask.is_full and not prepared.text_mask.is_full
    check(plain, ragged, x)


def test_attention_within_windows_of_the_clip(plain):
    """Texts see all of the clip, and are seen, also in rows of different lengths."""
    clip = (3, (8, 8))
    told, x = conditioning((3, 9), (4, 0), clip), noise(2, clip)
    points = flow_schedule(2).points[:-1]

    def slope(attention):
        selector = attention_selector(attention)
        return plain.ours.slope(x, plain.ours.prepare(told, tuple(x.shape), points, attention=selector), points[0])

    exact = slope(None)
    assert error(slope(SlidingTileAttention(tile=(1, 4, 4), window=(3, 2, 2))), exact) < 1e-5
    near = error(slope(SlidingTileAttention(tile=(1, 4, 4), window=(3, 1, 2))), exact)
    nearest = error(slope(SlidingTileAttention(tile=(1, 4, 4), window=(1, 1, 1))), exact)
    assert 1e-3 < near < nearest


def test_a_row_is_that_row_alone(pair):
    clip = (2, (4, 6))
    told, x = conditioning((5, 2, 9), (0, 4, 1), clip), noise(3, clip, seed=2)
    together, _ = slopes(pair.ours, told, x)
    for row in range(3):
        wide = told.rows([row])
        short = dataclasses.replace(
            wide,
            states=wide.states[:, : wide.lengths[0]],
            other_states=wide.other_states[:, : wide.other_lengths[0]],
        )
        for one in (wide, short):
            alone, _ = slopes(pair.ours, one, x[row : row + 1])
            assert error(alone[-1], together[-1][row : row + 1]) < 1e-5


def test_conditionings_are_joined_by_padding(plain):
    parts = conditioning((5,), (0,)), conditioning((2,), (3,), seed=4)
    both, x = Conditioning.concatenate(parts), noise(2, (2, (4, 4)))
    assert both.lengths.tolist() == [5, 2] and both.other_lengths.tolist() == [0, 3]
    together, _ = slopes(plain.ours, both, x)
    for row, part in enumerate(parts):
        assert error(slopes(plain.ours, part, x[row : row + 1])[0][-1], together[-1][row : row + 1]) < 1e-5
    with pytest.raises(ValueError, match="of different kinds"):
        Conditioning.concatenate((parts[0], dataclasses.replace(parts[1], other_states=None, other_lengths=None)))


def test_everything_told_is_seen(plain):
    ours, clip = plain.ours, (2, (4, 4))
    told, other = (conditioning((6,), (3,), clip, seed=seed) for seed in (0, 8))
    x = noise(1, clip)
    first = slopes(ours, told, x)[0][0]
    for name in ("states", "other_states", "references", "picture_states"):
        changed = dataclasses.replace(told, **{name: getattr(other, name)})
        assert error(slopes(ours, changed, x)[0][0], first) > 1e-4


def test_a_second_conditioning_shares_what_does_not_depend_on_it(plain):
    told, other = conditioning((6, 2), (3, 0)), conditioning((4, 3), (0, 0), seed=8)
    first, second = plain.check_prepared_beside(told, other, noise(2, (3, (4, 6))))
    assert second.modulation is first.modulation


@pytest.mark.parametrize(("layout", "part"), [(tiny.in_original_layout, "k"), (tiny.in_comfy_layout, "qkv")])
def test_original_files_load_as_well(pair, layout, part, tmp_path):
    file = tmp_path / "hunyuan.safetensors"
    original = layout(pair.theirs.state_dict())
    assert "double_blocks.1.txt_attn_k_norm.weight" in original
    assert f"double_blocks.1.txt_attn_{part}.bias" in original
    assert "txt_in.individual_token_refiner.blocks.0.self_attn_qkv.weight" in original
    save_file(original, file)
    pair.check_file(file)


def test_what_is_saved_is_what_was_loaded(pair):
    pair.check_saved()


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_files_tell_their_config(kind):
    from diffusers import HunyuanVideo15Transformer3DModel

    sizes = {**tiny.SIZES, **tiny.KINDS[kind], **PUBLISHED}
    theirs = build_on_meta(lambda: HunyuanVideo15Transformer3DModel(**sizes))
    config = HunyuanVideoConfig.from_entries(dict(theirs.config))
    weights = theirs.state_dict()
    others = (tiny.in_original_layout(weights), tiny.in_comfy_layout(weights))
    check_told_by_shapes(HunyuanVideoConfig, MARKS, config, weights, *others)


def test_published_sizes():
    """Those that the class has by default, with 8.33 B parameters."""
    from diffusers import HunyuanVideo15Transformer3DModel

    theirs = build_on_meta(HunyuanVideo15Transformer3DModel)
    assert HunyuanVideoConfig.from_entries(dict(theirs.config)) == HunyuanVideoConfig()
    ours = build_on_meta(lambda: HunyuanVideoDenoiser(HunyuanVideoConfig()))
    counts = [sum(weight.numel() for weight in each.parameters()) for each in (ours, theirs)]
    assert counts[0] == counts[1]


def test_what_only_prepare_uses_may_stay_in_the_file(plain):
    plain.check_lean(conditioning((3, 9), (2, 0)), noise(2, (2, (4, 4))))


def test_what_does_not_fit_is_refused(plain):
    points = flow_schedule(1).points[:-1]

    def refused(match, shape=(1, 4, 2, 4, 4), clip=None, **changes):
        told = dataclasses.replace(conditioning((4,), (2,), clip), **changes)
        with pytest.raises(ValueError, match=match):
            plain.ours.prepare(told, shape, points, attention=attention_selector())

    refused("19 wide", states=torch.zeros(1, 4, 19))
    refused("second text encoder are none; .* of width 20", other_states=None, other_lengths=None)
    refused("second text encoder are of width 21", other_states=torch.zeros(1, 2, 21))
    refused("takes no guidance value", guidance=2.0)
    refused("takes 4 channels", shape=(1, 5, 2, 4, 4))
    refused("2 rows of latents", shape=(2, 4, 2, 4, 4))
    refused("5 of width 17", picture_states=torch.zeros(1, 5, 17))
    refused(r"reads none, or one of \(1, 5, 2, 4, 4\)", clip=(1, (4, 4)))
    refused(r"lengths are \[0\]", lengths=torch.tensor([0]))
    with pytest.raises(ValueError, match="other_lengths of shape None"):
        dataclasses.replace(conditioning((4,), (2,)), other_lengths=None)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        *(("in_channels", 8), ("num_layers", "2"), ("rope_axes_dim", [4, 4, 4]), ("patch_size_t", 2)),
        *(("qk_norm", None), ("task_type", "v2v"), ("use_meanflow", 1), ("rope_theta", 0)),
    ],
)
def test_configs_that_make_no_model_are_refused(entry, value):
    with pytest.raises(ValueError, match=entry):
        HunyuanVideoConfig.from_entries({**tiny.SIZES, entry: value})


def test_other_models_shapes_are_refused():
    shapes = {"img_in.proj.weight": (42, 16, 1, 2, 2), "final_layer.linear.weight": (64, 42)}
    with pytest.raises(ValueError, match="reads 16 channels"):
        HunyuanVideoConfig.from_shapes(Shapes(shapes))
