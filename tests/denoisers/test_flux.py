"""FLUX.1's denoiser against diffusers' on tiny random weights."""

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
from calotype.denoisers.flux import HOISTED, MARKS, FluxConfig, FluxDenoiser, flux_key_map
from calotype.denoisers.guidance import Run, slopes_of_both
from calotype.denoisers.patches import patchify, unpatchify
from calotype.denoisers.shapes import PREFIXES, Shapes
from calotype.schedulers import flow_schedule

from ..tiny_flux import in_original_layout

ENTRIES = {
    "in_channels": 32,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 20,
    "num_attention_heads": 3,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 14,
    "axes_dims_rope": (4, 10, 6),
}


def reference(guided):
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(3)
    model = FluxTransformer2DModel(**ENTRIES, guidance_embeds=guided).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm_q" in name or "norm_k" in name else 0.0, 0.15)
    return model.requires_grad_(False)


@pytest.fixture(scope="module", params=[False, True], ids=["schnell", "dev"])
def pair(request, tmp_path_factory):
    theirs = reference(request.param)
    file = tmp_path_factory.mktemp("flux") / "model.safetensors"
    save_file(theirs.state_dict(), file)
    config = FluxConfig.from_entries(dict(theirs.config))
    ours = build_on_meta(lambda: FluxDenoiser(config))
    load_weights(ours, file, flux_key_map())
    return ours.requires_grad_(False).eval(), theirs


def conditioning(rows, tokens, guided, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Conditioning(
        states=torch.randn(rows, tokens, 24, generator=generator),
        lengths=torch.full((rows,), tokens),
        pooled=torch.randn(rows, 14, generator=generator),
        guidance=3.5 if guided else None,
    )


def by_diffusers(model, told, x, point):
    tokens = patchify(x, 2)
    rows, columns = x.shape[3] // 2, x.shape[4] // 2
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] += torch.arange(rows)[:, None]
    ids[..., 2] += torch.arange(columns)[None]
    out = model(
        hidden_states=tokens,
        encoder_hidden_states=told.states,
        pooled_projections=told.pooled,
        timestep=torch.full((len(x),), point.time) * 1000 / 1000,
        guidance=None if told.guidance is None else torch.full((len(x),), told.guidance),
        img_ids=ids.flatten(0, 1),
        txt_ids=torch.zeros(told.states.shape[1], 3),
        return_dict=False,
    )[0]
    return unpatchify(out, x.shape, 2)


@pytest.mark.parametrize(("size", "tokens"), [((8, 8), 7), ((6, 12), 1), ((2, 2), 13)])
def test_slopes_are_those_of_diffusers(pair, size, tokens):
    ours, theirs = pair
    told = conditioning(2, tokens, ours.config.guided)
    x = torch.randn(2, 8, 1, *size, generator=torch.Generator().manual_seed(1))
    found, points = slopes(ours, told, x)
    for slope, point in zip(found, points, strict=True):
        assert error(slope, by_diffusers(theirs, told, x, point)) < 1e-5


def test_a_row_is_that_row_alone(pair):
    ours, _ = pair
    told = conditioning(3, 5, ours.config.guided)
    x = torch.randn(3, 8, 1, 4, 6, generator=torch.Generator().manual_seed(2))
    together, _ = slopes(ours, told, x)
    for row in range(3):
        alone, _ = slopes(ours, told.rows([row]), x[row : row + 1])
        assert error(alone[-1], together[-1][row : row + 1]) < 1e-5


def test_original_files_load_as_well(pair, tmp_path):
    """The weights written in Black Forest Labs' layout give the same slopes."""
    ours, theirs = pair
    save_file(in_original_layout(theirs.state_dict(), ours.config), tmp_path / "flux1.safetensors")
    other = build_on_meta(lambda: FluxDenoiser(ours.config))
    load_weights(other, tmp_path / "flux1.safetensors", flux_key_map())
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), other.state_dict().values(), strict=True))


def test_files_tell_their_config(pair):
    """In both layouts, but for the rotary axes: they are the usual shares of a head."""
    ours, theirs = pair
    wide = {**ENTRIES, "attention_head_dim": 32, "num_attention_heads": 2, "axes_dims_rope": (4, 14, 14)}
    with torch.device("meta"):
        model = type(theirs)(**wide, guidance_embeds=ours.config.guided)
    config = FluxConfig.from_entries(dict(model.config))
    weights = model.state_dict()
    for layout in (weights, in_original_layout(weights, config)):
        shapes = Shapes({name: tuple(weight.shape) for name, weight in layout.items()}).within(*PREFIXES)
        assert MARKS.share(shapes.shapes) == 1
        assert FluxConfig.from_shapes(shapes) == config
    with pytest.raises(ValueError, match="heads are 20 wide; which rotary axes they have is known for 128 only"):
        FluxConfig.from_shapes(Shapes({name: tuple(weight.shape) for name, weight in theirs.state_dict().items()}))


def test_modulations_may_stay_in_the_file(pair, tmp_path):
    """Bit-equal, and a copy in another dtype reads them too."""
    ours, theirs = pair
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    device = torch.device("cpu")
    lean, file = build_on_meta(lambda: FluxDenoiser(ours.config)), tmp_path / "model.safetensors"
    lean.fill(WeightSource.for_module(lean, file, flux_key_map()), device=device, dtype=torch.float32)
    absent = {name for name, parameter in lean.named_parameters() if parameter.is_meta}
    assert absent == {name for name, _ in ours.named_parameters() if name.startswith(HOISTED)}
    assert len(absent) == 2 * (ours.config.layers + ours.config.single_layers)
    told = conditioning(2, 5, ours.config.guided)
    x = torch.randn(2, 8, 1, 4, 4, generator=torch.Generator().manual_seed(6))
    for one, other in zip(slopes(lean, told, x)[0], slopes(ours, told, x)[0], strict=True):
        assert torch.equal(one, other)
    half = moved(lean, device, torch.bfloat16)
    told = told.to(device, torch.bfloat16)
    assert error(slopes(half, told, x)[0][0], slopes(ours, told.to(device, torch.float32), x)[0][0]) < 0.1


def test_both_sides_of_guidance_read_modulations_once(pair, tmp_path, monkeypatch):
    """Bit-equal to preparing each alone; texts of two lengths are never one batch."""
    ours, theirs = pair
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    lean = build_on_meta(lambda: FluxDenoiser(ours.config))
    source = WeightSource.for_module(lean, tmp_path / "model.safetensors", flux_key_map())
    lean.fill(source, device=torch.device("cpu"), dtype=torch.float32)
    x = torch.randn(1, 8, 1, 4, 6, generator=torch.Generator().manual_seed(2))
    run = Run(shape=tuple(x.shape), evaluations=flow_schedule(2).points[:-1], attention=attention_selector())
    told = [conditioning(1, tokens, ours.config.guided, seed=tokens) for tokens in (5, 3)]
    alone = [lean.prepare(each, run.shape, run.evaluations, attention=run.attention) for each in told]
    names, read = [], source.read
    monkeypatch.setattr(source, "read", lambda name, **options: [names.append(name), read(name, **options)][1])
    c, u = slopes_of_both(lean, *told, run, batched=True)(x, run.evaluations[1])
    assert torch.equal(c, lean.slope(x, alone[0], run.evaluations[1]))
    assert torch.equal(u, lean.slope(x, alone[1], run.evaluations[1]))
    modulations = [name for name in source if name.startswith(HOISTED)]
    assert sorted(names) == sorted(modulations)


def test_what_does_not_fit_is_refused(pair):
    ours, _ = pair
    told = conditioning(1, 4, ours.config.guided)
    points = flow_schedule(1).points[:-1]

    def prepare(told, shape=(1, 8, 1, 4, 4)):
        return ours.prepare(told, shape, points, attention=attention_selector())

    with pytest.raises(ValueError, match="pooled text is none"):
        prepare(dataclasses.replace(told, pooled=None))
    with pytest.raises(ValueError, match="guidance"):
        prepare(dataclasses.replace(told, guidance=None if ours.config.guided else 2.0))
    with pytest.raises(ValueError, match="padded"):
        prepare(dataclasses.replace(told, lengths=torch.tensor([3])))
    with pytest.raises(ValueError, match="sides in steps of 2"):
        prepare(told, (1, 8, 1, 5, 4))
    with pytest.raises(ValueError, match="2 rows of latents"):
        prepare(told, (2, 8, 1, 4, 4))


@pytest.mark.parametrize(
    ("entry", "value"),
    [("in_channels", 0), ("num_layers", "2"), ("axes_dims_rope", (4, 4, 4)), ("patch_size", 2), ("out_channels", 8)],
)
def test_configs_that_make_no_model_are_refused(entry, value):
    with pytest.raises(ValueError, match=entry):
        FluxConfig.from_entries(ENTRIES | {entry: value})
