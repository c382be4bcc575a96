"""FLUX.2's denoiser against diffusers' on tiny random weights."""

import dataclasses

import pytest
import torch
from parity import error, slopes
from safetensors.torch import save_file
from tiny_flux2 import in_original_layout

from calotype.core.attention.registry import attention_selector
from calotype.core.copies import moved
from calotype.core.loading import build_on_meta, load_weights
from calotype.core.weight_source import WeightSource
from calotype.denoisers.base import Conditioning
from calotype.denoisers.flux2 import MARKS, Flux2Config, Flux2Denoiser, flux2_key_map
from calotype.denoisers.patches import patchify, unpatchify
from calotype.denoisers.shapes import Shapes
from calotype.schedulers import flow_schedule

ENTRIES = {
    "in_channels": 12,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 24,
    "num_attention_heads": 2,
    "joint_attention_dim": 20,
    "timestep_guidance_channels": 32,
    "mlp_ratio": 2.5,
    "axes_dims_rope": (4, 8, 6, 6),
    "rope_theta": 700,
    "eps": 3e-6,
}
SIZES = {0: (), 1: ((3, 5),), 2: ((4, 2), (1, 6))}


def reference(guided):
    from diffusers import Flux2Transformer2DModel

    torch.manual_seed(3)
    model = Flux2Transformer2DModel(**ENTRIES, guidance_embeds=guided).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm_q" in name or "norm_k" in name else 0.0, 0.15)
    return model.requires_grad_(False)


@pytest.fixture(scope="module", params=[False, True], ids=["klein", "dev"])
def pair(request, tmp_path_factory):
    theirs = reference(request.param)
    file = tmp_path_factory.mktemp("flux2") / "model.safetensors"
    save_file(theirs.state_dict(), file)
    config = Flux2Config.from_entries(dict(theirs.config))
    ours = build_on_meta(lambda: Flux2Denoiser(config))
    load_weights(ours, file, flux2_key_map())
    return ours.requires_grad_(False).eval(), theirs


def conditioning(rows, tokens, guided, references=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Conditioning(
        states=torch.randn(rows, tokens, 20, generator=generator),
        lengths=torch.full((rows,), tokens),
        guidance=3.5 if guided else None,
        references=tuple(torch.randn(rows, 12, 1, *size, generator=generator) for size in SIZES[references]),
    )


def by_diffusers(model, told, x, point):
    from diffusers import Flux2Pipeline

    maps = [latents[:, :, 0] for latents in told.references]
    ids = Flux2Pipeline._prepare_latent_ids(x[:, :, 0])[:1]
    if maps:
        ids = torch.cat((ids, Flux2Pipeline._prepare_image_ids([each[:1] for each in maps])), dim=1)
    count = x.shape[3] * x.shape[4]
    out = model(
        hidden_states=torch.cat([patchify(each, 1) for each in (x, *told.references)], dim=1),
        encoder_hidden_states=told.states,
        timestep=torch.full((len(x),), point.time) * 1000 / 1000,
        guidance=None if told.guidance is None else torch.full((len(x),), told.guidance),
        img_ids=ids,
        txt_ids=Flux2Pipeline._prepare_text_ids(told.states)[:1],
        return_dict=False,
    )[0]
    return unpatchify(out[:, :count], x.shape, 1)


@pytest.mark.parametrize("references", [0, 1, 2])
@pytest.mark.parametrize(("size", "tokens"), [((4, 4), 7), ((3, 5), 1)])
def test_slopes_are_those_of_diffusers(pair, size, tokens, references):
    ours, theirs = pair
    told = conditioning(2, tokens, ours.config.guided, references)
    x = torch.randn(2, 12, 1, *size, generator=torch.Generator().manual_seed(1))
    found, points = slopes(ours, told, x)
    for slope, point in zip(found, points, strict=True):
        assert error(slope, by_diffusers(theirs, told, x, point)) < 1e-5


def test_a_row_is_that_row_alone(pair):
    ours, _ = pair
    told = conditioning(3, 5, ours.config.guided, references=2)
    x = torch.randn(3, 12, 1, 4, 6, generator=torch.Generator().manual_seed(2))
    together, _ = slopes(ours, told, x)
    for row in range(3):
        alone, _ = slopes(ours, told.rows([row]), x[row : row + 1])
        assert error(alone[-1], together[-1][row : row + 1]) < 1e-5


def test_the_order_of_references_counts(pair):
    ours, _ = pair
    told = conditioning(1, 5, ours.config.guided, references=2)
    x = torch.randn(1, 12, 1, 4, 4, generator=torch.Generator().manual_seed(3))
    turned = dataclasses.replace(told, references=told.references[::-1])
    assert error(slopes(ours, told, x)[0][0], slopes(ours, turned, x)[0][0]) > 1e-3


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_original_files_load_as_well(pair, tmp_path, prefix):
    """The weights written in Black Forest Labs' layout are the same weights; diffusers reads the file so, too."""
    from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers

    ours, theirs = pair
    original = in_original_layout(theirs.state_dict())
    converted = convert_flux2_transformer_checkpoint_to_diffusers(dict(original))
    assert all(torch.equal(tensor, converted[name]) for name, tensor in theirs.state_dict().items())
    save_file({prefix + name: tensor for name, tensor in original.items()}, tmp_path / "flux2.safetensors")
    other = build_on_meta(lambda: Flux2Denoiser(ours.config))
    load_weights(other, tmp_path / "flux2.safetensors", flux2_key_map())
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), other.state_dict().values(), strict=True))


def test_modulations_may_stay_in_the_file(pair, tmp_path):
    """Bit-equal, and a copy in another dtype reads them too."""
    ours, theirs = pair
    file, device = tmp_path / "model.safetensors", torch.device("cpu")
    save_file(theirs.state_dict(), file)
    lean = build_on_meta(lambda: Flux2Denoiser(ours.config))
    lean.fill(WeightSource.for_module(lean, file, flux2_key_map()), device=device, dtype=torch.float32)
    absent = {name for name, parameter in lean.named_parameters() if parameter.is_meta}
    assert absent == {"picture_modulation.weight", "text_modulation.weight", "single_modulation.weight"}
    told = conditioning(2, 5, ours.config.guided, references=1)
    x = torch.randn(2, 12, 1, 4, 4, generator=torch.Generator().manual_seed(6))
    for one, other in zip(slopes(lean, told, x)[0], slopes(ours, told, x)[0], strict=True):
        assert torch.equal(one, other)
    half = moved(lean, device, torch.bfloat16)
    narrow = told.to(device, torch.bfloat16)
    assert error(slopes(half, narrow, x)[0][0], slopes(ours, told, x)[0][0]) < 0.1


def test_a_second_conditioning_shares_the_modulations(pair):
    """Bit-equal to preparing it alone."""
    ours, _ = pair[:2]
    points, shape = flow_schedule(2).points[:-1], (1, 12, 1, 4, 4)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    first, second = (conditioning(1, n, ours.config.guided, references=1, seed=n) for n in (3, 5))
    prepared, alone = (ours.prepare(each, shape, points, attention=attention_selector()) for each in (first, second))
    beside = ours.prepare_beside(prepared, second, shape)
    assert beside.modulation is prepared.modulation
    for point in points:
        assert torch.equal(ours.slope(x, beside, point), ours.slope(x, alone, point))


def test_what_does_not_fit_is_refused(pair):
    ours, _ = pair
    told = conditioning(1, 4, ours.config.guided)
    points = flow_schedule(1).points[:-1]

    def prepare(told, shape=(1, 12, 1, 4, 4)):
        return ours.prepare(told, shape, points, attention=attention_selector())

    with pytest.raises(ValueError, match="guidance"):
        prepare(dataclasses.replace(told, guidance=None if ours.config.guided else 2.0))
    with pytest.raises(ValueError, match="padded"):
        prepare(dataclasses.replace(told, lengths=torch.tensor([3])))
    with pytest.raises(ValueError, match=r"latents of shape \(1, 8, 1, 4, 4\): this model takes 12 channels"):
        prepare(told, (1, 8, 1, 4, 4))
    with pytest.raises(ValueError, match="reference 1 of shape"):
        prepare(dataclasses.replace(told, references=(torch.zeros(1, 12, 2, 4, 4),)))
    with pytest.raises(ValueError, match="2 rows of latents"):
        prepare(told, (2, 12, 1, 4, 4))


def test_sizes_are_read_from_files_of_both_layouts(pair):
    """All but what no shape shows: the bases of rotary tables and norms."""
    ours, theirs = pair
    original = in_original_layout(theirs.state_dict())
    for weights in (theirs.state_dict(), original):
        shapes = Shapes({name: tuple(tensor.shape) for name, tensor in weights.items()})
        assert MARKS.share(shapes.shapes) == 1
        found = Flux2Config.from_shapes(shapes)
        assert found.rotary_axes == (6, 6, 6, 6)
        hidden = {"theta": 700, "norm_eps": 3e-6, "rotary_axes": (4, 8, 6, 6)}
        assert dataclasses.replace(found, **hidden) == ours.config
    with pytest.raises(ValueError, match="12 values going in and 10 coming out"):
        Flux2Config.from_shapes(Shapes({**shapes.shapes, "final_layer.linear.weight": (10, 48)}))


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("in_channels", 0),
        ("mlp_ratio", "3"),
        ("axes_dims_rope", (4, 4, 4)),
        ("patch_size", 2),
        ("out_channels", 8),
        ("guidance_embeds", 1),
        ("rope_theta", -1),
    ],
)
def test_configs_that_make_no_model_are_refused(entry, value):
    with pytest.raises(ValueError, match=entry):
        Flux2Config.from_entries(ENTRIES | {entry: value})
