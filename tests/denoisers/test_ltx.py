"""LTX-Video's denoiser against diffusers' on tiny random weights."""

import dataclasses
from unittest import mock

import pytest
import tiny_ltx
import torch
from pairs import CPU, Kind, check_told_by_shapes
from pairs import clip_noise as noise
from parity import error, slopes
from safetensors.torch import save_file

from calotype.core.attention.approximate import SlidingTileAttention
from calotype.core.attention.registry import attention_selector
from calotype.core.loading import build_on_meta
from calotype.denoisers.base import Conditioning, Prompt
from calotype.denoisers.first_frames import FirstFramesKept
from calotype.denoisers.guidance import ClassifierFree, Run, Unguided
from calotype.denoisers.ltx import LTXDenoiser
from calotype.denoisers.ltx_config import FIXED, MARKS, SOUND, LTXConfig
from calotype.denoisers.ltx_keys import ltx_key_map
from calotype.denoisers.ltx_rotary import fractional_rotary
from calotype.denoisers.shapes import Shapes
from calotype.schedulers import flow_schedule

CLIPS = [(frames, size) for frames in (1, 2, 3) for size in ((4, 2), (3, 5))]
PLACES = (8 / 25, 32.0, 24.0, 1, 0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    kind = Kind(denoiser=LTXDenoiser, config=LTXConfig, key_map=ltx_key_map())
    return kind.pair(tiny_ltx.ltx_transformer(), tmp_path_factory.mktemp("ltx"))


def conditioning(lengths=(3, 9), units=PLACES, seed=0):
    """Rows of these lengths with rubbish after their ends."""
    states = torch.randn(len(lengths), 11, 20, generator=torch.Generator().manual_seed(seed))
    return Conditioning(states=states, lengths=torch.tensor(lengths), time_ids=torch.tensor([units] * len(lengths)))


def by_diffusers(model, told, x, point):
    """As its pipelines call the model, with a time for each token where frames are known."""
    known = next(iter(told.references), x[:, :, :0])
    count, (frames, height, width) = known.shape[2], x.shape[2:]
    shown = torch.cat((known, x[:, :, count:]), dim=2)
    times = torch.tensor(1000 * point.time).repeat(len(x), frames, height, width)
    times[:, :count] = 0
    slope = model(
        hidden_states=shown.flatten(2).transpose(1, 2),
        encoder_hidden_states=told.states,
        encoder_attention_mask=torch.arange(told.states.shape[1]) < told.lengths[:, None],
        timestep=times.flatten(1) if count else times[:, 0, 0, 0],
        num_frames=frames,
        height=height,
        width=width,
        rope_interpolation_scale=tuple(told.time_ids[0, :3].tolist()),
        return_dict=False,
    )[0]
    return slope.transpose(1, 2).unflatten(2, (frames, height, width))


@pytest.mark.parametrize("clip", CLIPS)
def test_slopes_are_those_of_diffusers(pair, clip):
    told, x = conditioning(), noise(2, clip)
    found, points = slopes(pair.ours, told, x)
    for slope, point in zip(found, points, strict=True):
        assert error(slope, by_diffusers(pair.theirs, told, x, point)) < 1e-5


@pytest.mark.parametrize(("clip", "num_known"), [*((clip, 1) for clip in CLIPS), ((3, (3, 5)), 2)])
def test_known_frames_are_told_time_0(pair, clip, num_known):
    """The whole slope is the network's, also where frames are known."""
    told, x = conditioning(), noise(2, clip)
    told = dataclasses.replace(told, references=(noise(2, (num_known, clip[1]), seed=4),))
    found, points = slopes(pair.ours, told, x)
    for slope, point in zip(found, points, strict=True):
        assert error(slope, by_diffusers(pair.theirs, told, x, point)) < 1e-5


@pytest.mark.parametrize("guidance", [Unguided(), ClassifierFree(2.5, rescale=0.6), ClassifierFree(2.5, batched=False)])
def test_first_frames_are_kept(pair, guidance):
    """x0 is the picture's where it is known; elsewhere what the guidance makes of both slopes, all frames together."""
    x, first = noise(2, (3, (2, 3))), noise(2, (1, (2, 3)), seed=4)
    sides = [dataclasses.replace(conditioning(seed=seed), references=(first,)) for seed in (0, 5)]
    points = flow_schedule(2, 1.7).points[:-1]
    run = Run(shape=tuple(x.shape), evaluations=points, attention=attention_selector())
    slope = FirstFramesKept(guidance).bind(pair.ours, Prompt(positive=sides[0], negative=sides[1]), run)
    for point in points:
        found = slope(x, point)
        c, u = (by_diffusers(pair.theirs, side, x, point) for side in sides)
        wanted = guidance.combine(c, u) if isinstance(guidance, ClassifierFree) else c
        assert error((x - point.sigma * found)[:, :, :1], first) < 1e-5
        assert error(found[:, :, 1:], wanted[:, :, 1:]) < 1e-5
    without = Prompt(positive=conditioning(), negative=conditioning(seed=5))
    both = [each.bind(pair.ours, without, run)(x, points[0]) for each in (FirstFramesKept(guidance), guidance)]
    assert torch.equal(*both)


@pytest.mark.parametrize("num_known", [0, 1])
def test_attention_within_windows_of_the_clip(pair, num_known):
    """As diffusers' with a mask among the clip's tokens; texts are seen whole, also in rows of different lengths."""
    clip = (3, (4, 6))
    references = (noise(2, (num_known, clip[1]), seed=4),) if num_known else ()
    told, x = dataclasses.replace(conditioning(), references=references), noise(2, clip)
    points = flow_schedule(2).points[:-1]

    def slope(window):
        attention = attention_selector(SlidingTileAttention(tile=(1, 2, 2), window=window) if window else None)
        return pair.ours.slope(x, pair.ours.prepare(told, tuple(x.shape), points, attention=attention), points[0])

    def distance(window):
        return error(slope(window), exact)

    exact = slope(None)
    assert distance((3, 2, 3)) < 1e-5
    assert 1e-3 < distance((3, 1, 2)) < distance((1, 1, 1))
    rows, columns = torch.arange(24) // 6 // 2, torch.arange(24) % 6 // 2
    hidden = torch.tensor([2, 2, 0])[columns]  # of 3 tiles of columns, the one outside each token's window
    seen = (rows[:, None] == rows) & (hidden[:, None] != columns)
    with masked_in_diffusers(seen.repeat(3, 3)):
        assert error(slope((3, 1, 2)), by_diffusers(pair.theirs, told, x, points[0])) < 1e-5


def masked_in_diffusers(seen):
    """A patch of diffusers' attention among a clip's tokens."""
    from diffusers.models.transformers import transformer_ltx

    attend = transformer_ltx.dispatch_attention_fn

    def masked(query, key, value, **told):
        mine = {"attn_mask": seen} if query.shape[1] == key.shape[1] else {}
        return attend(query, key, value, **{**told, **mine})

    return mock.patch.object(transformer_ltx, "dispatch_attention_fn", masked)


def test_tables_are_those_of_diffusers(pair):
    """Four of 40 channels do not turn; angles reach over 10,000."""
    wide = tiny_ltx.ltx_transformer(attention_head_dim=16, cross_attention_dim=64, num_layers=1)
    for model, width in ((pair.theirs, 40), (wide, 64)):
        rows = torch.tensor([[0.32, 32.0, 24.0, 1, 0], [8 / 30, 32.0, 32.0, 1, 0]])
        rotary = fractional_rotary(width, (3, 2, 5), rows)
        for row, units in enumerate(rows.tolist()):
            cos, sin = model.rope(torch.zeros(1, 30, width), 3, 2, 5, tuple(units[:3]))
            assert torch.allclose(rotary.cos[row].repeat_interleave(2, -1), cos[0], atol=1e-6)
            assert torch.allclose(rotary.sin[row].repeat_interleave(2, -1), sin[0], atol=1e-6)


def test_tables_of_clips_whose_first_frame_is_one_frame(pair):
    """As LTXConditionPipeline has them: after it, ticks of a frame each."""
    from diffusers import LTXConditionPipeline as Theirs

    coordinates = Theirs._scale_video_ids(Theirs._prepare_video_ids(1, 3, 2, 5), scale_factor=32, scale_factor_t=8)
    coordinates = coordinates.float()
    assert coordinates[0, 0, ::10].tolist() == [0, 1, 9]
    coordinates[:, 0] *= 1 / 30
    rotary = fractional_rotary(40, (3, 2, 5), torch.tensor([[1 / 30, 32.0, 32.0, 8, 7]]))
    cos, sin = pair.theirs.rope(torch.zeros(1, 30, 40), video_coords=coordinates)
    assert torch.allclose(rotary.cos[0].repeat_interleave(2, -1), cos[0], atol=1e-6)
    assert torch.allclose(rotary.sin[0].repeat_interleave(2, -1), sin[0], atol=1e-6)


def test_a_row_is_that_row_alone(pair):
    """Whatever the lengths of others are, and how fast their clips are shown."""
    x, rows = noise(3, (2, (2, 3)), seed=2), []
    for n, (length, unit) in enumerate(((5, 0.32), (2, 0.16), (9, 0.32))):
        rows.append(conditioning((length,), (unit, 32.0, 32.0, 1, 0), seed=n))
    together, _ = slopes(pair.ours, Conditioning.concatenate(rows), x)
    for row, told in enumerate(rows):
        for one in (told, dataclasses.replace(told, states=told.states[:, : told.lengths[0]])):
            alone, _ = slopes(pair.ours, one, x[row : row + 1])
            assert error(alone[-1], together[-1][row : row + 1]) < 1e-5


def test_everything_told_is_seen(pair):
    """Each of the text, its length, the units and known frames changes the slope."""
    told, x = conditioning((6,)), noise(1, (2, (2, 3)))
    first = slopes(pair.ours, told, x)[0][0]
    for changes in (
        {"states": conditioning((6,), seed=8).states},
        {"lengths": torch.tensor([5])},
        {"time_ids": torch.tensor([[0.16, 32.0, 24.0, 1, 0]])},
        {"references": (noise(1, (1, (2, 3)), seed=4),)},
    ):
        assert error(slopes(pair.ours, dataclasses.replace(told, **changes), x)[0][0], first) > 1e-3


def test_a_second_conditioning_shares_what_depends_on_time(pair):
    first, second = pair.check_prepared_beside(conditioning(), conditioning((7, 2), seed=8), noise(2, (2, (2, 3))))
    assert second.projections is first.projections


def test_original_files_load_as_well(pair, tmp_path):
    from diffusers.loaders.single_file_utils import convert_ltx_transformer_checkpoint_to_diffusers

    original = tiny_ltx.in_original_layout(pair.theirs.state_dict())
    assert convert_ltx_transformer_checkpoint_to_diffusers(dict(original)).keys() == pair.theirs.state_dict().keys()
    save_file(original, tmp_path / "ltx.safetensors")
    pair.check_file(tmp_path / "ltx.safetensors")


def test_what_is_saved_is_what_was_loaded(pair):
    pair.check_saved()


def test_files_tell_their_config():
    """In both layouts, but for the epsilon, which shapes do not show."""
    from diffusers import LTXVideoTransformer3DModel

    changes = {"num_attention_heads": 32, "attention_head_dim": 4, "cross_attention_dim": 128, "norm_eps": 1e-6}
    theirs = build_on_meta(lambda: LTXVideoTransformer3DModel(**{**tiny_ltx.SIZES, **changes}))
    config = LTXConfig.from_entries(dict(theirs.config))
    weights = theirs.state_dict()
    check_told_by_shapes(LTXConfig, MARKS, config, weights, tiny_ltx.in_original_layout(weights))
    again = build_on_meta(lambda: LTXVideoTransformer3DModel(**config.entries()))
    assert LTXConfig.from_entries(dict(again.config)) == config
    with pytest.raises(ValueError, match="it looks like LTX-2"):
        LTXConfig.from_shapes(Shapes({SOUND: (4, 4)}))
    with pytest.raises(ValueError, match="42 wide"):
        LTXConfig.from_shapes(Shapes({"proj_in.weight": (42, 4)}))


def test_what_only_prepare_uses_may_stay_in_the_file(pair):
    pair.check_lean(conditioning(), noise(2, (2, (2, 3)), seed=6))


def test_half_precision_is_as_good_as_that_of_diffusers(pair):
    from diffusers import LTXVideoTransformer3DModel

    dtype, told, x = torch.bfloat16, conditioning(), noise(2, (3, (4, 6)), seed=6)
    exact, points = slopes(pair.ours, told, x)
    half = told.to(CPU, dtype)
    theirs = LTXVideoTransformer3DModel.from_pretrained(pair.file.parent, torch_dtype=dtype)
    with torch.no_grad():
        reference = [by_diffusers(theirs, half, x.to(dtype), point).float() for point in points]
    allowed = 1.2 * max(error(slope, wanted) for slope, wanted in zip(reference, exact, strict=True))
    found, _ = slopes(pair.lean(dtype), half, x)
    assert all(slope.dtype is torch.float32 for slope in found)
    assert max(error(slope, wanted) for slope, wanted in zip(found, exact, strict=True)) < allowed


def test_what_does_not_fit_is_refused(pair):
    points = flow_schedule(1).points[:-1]

    def refused(match, shape=(2, 4, 2, 4, 4), **changes):
        told = dataclasses.replace(conditioning(), **changes)
        with pytest.raises(ValueError, match=match):
            pair.ours.prepare(told, shape, points, attention=attention_selector())

    refused("19 wide", states=torch.zeros(2, 4, 19))
    refused("takes no guidance value", guidance=2.0)
    refused("takes 4 channels", shape=(2, 5, 2, 4, 4))
    refused("3 rows of latents", shape=(3, 4, 2, 4, 4))
    refused("1 of width 18; this model reads none", picture_states=torch.zeros(2, 1, 18))
    refused("time_ids are missing; this model is told 5", time_ids=None)
    refused("time_ids are 2 numbers", time_ids=torch.zeros(2, 2))
    refused("at most one, of the clip's first frames", references=(torch.zeros(2, 4, 3, 4, 4),))
    known = torch.tensor([[*PLACES, 0, 1, 0.5, 0]] * 2)
    refused("another share in each row", time_ids=known + torch.tensor([[0.0], [0.25]]))
    refused("references: time_ids say already", time_ids=known, references=(torch.zeros(2, 4, 1, 4, 4),))
    alike = dataclasses.replace(conditioning(), time_ids=known)
    prepared = pair.ours.prepare(alike, (2, 4, 2, 4, 4), points, attention=attention_selector())
    with pytest.raises(ValueError, match="both sides of a guidance must know the same of each frame"):
        pair.ours.prepare_beside(prepared, conditioning(), (2, 4, 2, 4, 4))


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        *(("in_channels", 3), ("num_layers", "2"), ("attention_head_dim", 15), ("norm_eps", 0), ("out_channels", 5)),
        *(("patch_size", 2), ("qk_norm", None), ("cross_attention_dim", 32), ("activation_fn", "gelu")),
        *(("attention_bias", False), ("norm_elementwise_affine", True), ("caption_channels", 0)),
    ],
)
def test_configs_that_make_no_model_are_refused(entry, value):
    name = {"in_channels": "out_channels"}.get(entry, entry)
    with pytest.raises(ValueError, match=name):
        LTXConfig.from_entries({**FIXED, **tiny_ltx.SIZES, entry: value})


def test_the_published_sizes():
    default = LTXConfig()
    assert (default.width, default.block().hidden, default.text_width) == (2048, 8192, 4096)
