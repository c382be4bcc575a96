"""Qwen-Image's denoiser against diffusers' on tiny random weights."""

import dataclasses

import pytest
import torch
from parity import error, slopes
from safetensors.torch import save_file

from calotype.core.attention.registry import attention_selector
from calotype.core.copies import moved
from calotype.core.loading import build_on_meta, load_weights
from calotype.core.weight_source import WeightSource
from calotype.denoisers.base import Conditioning
from calotype.denoisers.patches import patchify, unpatchify
from calotype.denoisers.qwen_image import HOISTED, MARKS, QwenImageConfig, QwenImageDenoiser, qwen_image_key_map
from calotype.denoisers.shapes import PREFIXES, Shapes
from calotype.schedulers import flow_schedule

ENTRIES = {
    "patch_size": 2,
    "in_channels": 20,
    "out_channels": 5,
    "num_layers": 3,
    "attention_head_dim": 18,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 8, 6),
}


def reference(zero_cond_t):
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(3)
    model = QwenImageTransformer2DModel(**ENTRIES, zero_cond_t=zero_cond_t).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name and parameter.ndim == 1 else 0.0, 0.15)
    return model.requires_grad_(False)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "clean"])
def pair(request, tmp_path_factory):
    """Ours and theirs, and the file; clean: tokens of references are modulated as at time 0."""
    theirs = reference(request.param)
    file = tmp_path_factory.mktemp("qwen") / "model.safetensors"
    save_file(theirs.state_dict(), file)
    ours = build_on_meta(lambda: QwenImageDenoiser(QwenImageConfig.from_entries(dict(theirs.config))))
    load_weights(ours, file, qwen_image_key_map())
    return ours.requires_grad_(False).eval(), theirs, file


def conditioning(lengths, references=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(len(lengths), max(lengths), 24, generator=generator)
    for row, length in enumerate(lengths):
        states[row, length:] = 0
    pictures = tuple(torch.randn(len(lengths), 5, 1, *size, generator=generator) for size in references)
    return Conditioning(states=states, lengths=torch.tensor(lengths), references=pictures)


def noise(rows, size, seed=1):
    return torch.randn(rows, 5, 1, *size, generator=torch.Generator().manual_seed(seed))


def by_diffusers(model, told, x, point):
    tokens = patchify(x, 2)
    shapes = [(1, each.shape[3] // 2, each.shape[4] // 2) for each in (x, *told.references)]
    mask = torch.arange(told.states.shape[1]) < told.lengths[:, None]
    out = model(
        hidden_states=torch.cat([tokens, *(patchify(each, 2) for each in told.references)], dim=1),
        encoder_hidden_states=told.states,
        encoder_hidden_states_mask=None if mask.all() else mask.long(),
        timestep=torch.full((len(x),), point.time) * 1000 / 1000,
        img_shapes=[shapes] * len(x),
        return_dict=False,
    )[0]
    return unpatchify(out[:, : tokens.shape[1]], x.shape, 2)


@pytest.mark.parametrize(
    ("size", "lengths", "references"),
    [
        ((8, 8), (7, 7), ()),
        ((6, 10), (4, 9), ()),
        ((2, 2), (5, 1), ((6, 4),)),
        ((6, 4), (3, 8), ((2, 10), (8, 6))),
    ],
)
def test_slopes_are_those_of_diffusers(pair, size, lengths, references):
    ours, theirs, _ = pair
    told, x = conditioning(lengths, references), noise(2, size)
    found, points = slopes(ours, told, x)
    for slope, point in zip(found, points, strict=True):
        assert error(slope, by_diffusers(theirs, told, x, point)) < 1e-5


def test_references_are_seen_in_their_order(pair):
    ours, _, _ = pair
    told, x = conditioning((4,), ((4, 4), (4, 4))), noise(1, (4, 4))
    swapped = dataclasses.replace(told, references=told.references[::-1])
    bare = dataclasses.replace(told, references=())
    first, other, without = (slopes(ours, each, x)[0][0] for each in (told, swapped, bare))
    assert error(other, first) > 1e-3 and error(without, first) > 1e-2


def test_a_row_is_that_row_alone(pair):
    ours, _, _ = pair
    told, x = conditioning((5, 2, 9), ((4, 6),)), noise(3, (4, 6), seed=2)
    together, _ = slopes(ours, told, x)
    for row in range(3):
        alone, _ = slopes(ours, told.rows([row]), x[row : row + 1])
        assert error(alone[-1], together[-1][row : row + 1]) < 1e-5


def test_padding_changes_nothing(pair):
    ours, _, _ = pair
    told, x = conditioning((5, 5)), noise(2, (4, 4))
    longer = dataclasses.replace(told, states=torch.cat((told.states, torch.full((2, 3, 24), 7.0)), dim=1))
    for one, other in zip(slopes(ours, told, x)[0], slopes(ours, longer, x)[0], strict=True):
        assert torch.equal(one, other)


def test_modulations_may_stay_in_the_file(pair):
    """Bit-equal, and a copy in another dtype reads them too."""
    ours, _, file = pair
    device = torch.device("cpu")
    lean = build_on_meta(lambda: QwenImageDenoiser(ours.config))
    lean.fill(WeightSource.for_module(lean, file, qwen_image_key_map()), device=device, dtype=torch.float32)
    absent = {name for name, parameter in lean.named_parameters() if parameter.is_meta}
    assert absent == {name for name, _ in ours.named_parameters() if name.startswith(HOISTED)}
    assert len(absent) == 2 * ours.config.layers
    told, x = conditioning((5, 3), ((4, 4),)), noise(2, (4, 4), seed=6)
    for one, other in zip(slopes(lean, told, x)[0], slopes(ours, told, x)[0], strict=True):
        assert torch.equal(one, other)
    half = moved(lean, device, torch.bfloat16)
    assert error(slopes(half, told.to(device, torch.bfloat16), x)[0][0], slopes(ours, told, x)[0][0]) < 0.1


def test_a_second_conditioning_shares_the_modulations(pair):
    """Bit-equal to preparing it alone, without reading their weights again."""
    ours, _, file = pair
    device, x = torch.device("cpu"), noise(2, (4, 4), seed=6)
    lean = build_on_meta(lambda: QwenImageDenoiser(ours.config))
    lean.fill(WeightSource.for_module(lean, file, qwen_image_key_map()), device=device, dtype=torch.float32)
    first, second = conditioning((5, 3), ((4, 4),)), conditioning((2, 7), ((4, 4),), seed=1)
    points = flow_schedule(3).points[:-1]
    prepared = lean.prepare(first, tuple(x.shape), points, attention=attention_selector())
    alone = lean.prepare(second, tuple(x.shape), points, attention=attention_selector())
    lean.source = None  # nothing can be read
    beside = lean.prepare_beside(prepared, second, tuple(x.shape))
    assert beside.modulation is prepared.modulation
    for point in points:
        assert torch.equal(lean.slope(x, beside, point), lean.slope(x, alone, point))
    with pytest.raises(ValueError, match="references have 0 tokens; the prompt's have 4"):
        lean.prepare_beside(prepared, conditioning((2, 7)), tuple(x.shape))


def test_single_files_load_as_well(pair, tmp_path):
    """ComfyUI's: the same names, maybe with a prefix, and an empty entry that says `zero_cond_t`. Rotary axes are known
    in proportion to the real model's."""
    ours, theirs, _ = pair
    weights = {f"model.diffusion_model.{name}": tensor for name, tensor in theirs.state_dict().items()}
    if ours.config.clean_references:
        weights["model.diffusion_model.__index_timestep_zero__"] = torch.zeros(0)
    file = tmp_path / "qwen_image.safetensors"
    save_file(weights, file)
    shapes = Shapes.read(file, PREFIXES)
    assert MARKS.share(shapes.shapes) == 1.0
    with pytest.raises(ValueError, match="heads are 18 wide"):
        QwenImageConfig.from_shapes(shapes)
    real = {**shapes.shapes, "transformer_blocks.0.attn.norm_q.weight": (64,), "img_in.weight": (128, 20)}
    assert QwenImageConfig.from_shapes(Shapes(real)) == dataclasses.replace(
        ours.config, head_width=64, rotary_axes=(8, 28, 28)
    )
    other = build_on_meta(lambda: QwenImageDenoiser(ours.config))
    load_weights(other, file, qwen_image_key_map())
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), other.state_dict().values(), strict=True))


def test_what_does_not_fit_is_refused(pair):
    ours, _, _ = pair
    told, points = conditioning((4,)), flow_schedule(1).points[:-1]

    def prepare(told, shape=(1, 5, 1, 4, 4)):
        return ours.prepare(told, shape, points, attention=attention_selector())

    with pytest.raises(ValueError, match="23 wide"):
        prepare(dataclasses.replace(told, states=told.states[..., :23]))
    with pytest.raises(ValueError, match="takes no guidance value"):
        prepare(dataclasses.replace(told, guidance=2.0))
    with pytest.raises(ValueError, match="sides in steps of 2"):
        prepare(told, (1, 5, 1, 5, 4))
    with pytest.raises(ValueError, match=r"references are .* 5 channels"):
        prepare(dataclasses.replace(told, references=(torch.zeros(1, 4, 1, 4, 4),)))
    with pytest.raises(ValueError, match="2 rows of latents"):
        prepare(told, (2, 5, 1, 4, 4))


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("in_channels", 16),
        ("num_layers", "2"),
        ("axes_dims_rope", (4, 4, 4)),
        ("patch_size", 1),
        ("guidance_embeds", True),
        ("use_layer3d_rope", True),
        ("zero_cond_t", 1),
    ],
)
def test_configs_that_make_no_model_are_refused(entry, value):
    with pytest.raises(ValueError, match=entry):
        QwenImageConfig.from_entries(ENTRIES | {entry: value})
