"""Stable Diffusion 3's denoiser against diffusers' on tiny random weights."""

import dataclasses

import pytest
import torch
from parity import error, slopes
from safetensors.torch import save_file

from calotype.core.attention.registry import attention_selector
from calotype.core.checkpoint import part_of
from calotype.core.copies import moved
from calotype.core.loading import build_on_meta, load_weights
from calotype.core.weight_source import WeightSource
from calotype.denoisers.base import Conditioning
from calotype.denoisers.sd3 import SD3Denoiser
from calotype.denoisers.sd3_config import SD3Config
from calotype.denoisers.sd3_keys import sd3_key_map
from calotype.denoisers.shapes import PREFIXES, Shapes
from calotype.schedulers import flow_schedule

from ..tiny_sd3 import in_original_layout

CPU = torch.device("cpu")
ENTRIES = {
    "sample_size": 12,
    "in_channels": 6,
    "out_channels": 6,
    "num_layers": 3,
    "attention_head_dim": 12,
    "num_attention_heads": 3,
    "caption_projection_dim": 36,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 14,
    "pos_embed_max_size": 9,
}
KINDS = {
    "3": {"qk_norm": None},
    "3.5-large": {"qk_norm": "rms_norm"},
    "3.5-medium": {"qk_norm": "rms_norm", "dual_attention_layers": (1,)},
}


def reference(kind):
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(3)
    model = SD3Transformer2DModel(**ENTRIES, **KINDS[kind]).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm_" in name and ".attn" in name else 0.0, 0.15)
    return model.requires_grad_(False)


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request, tmp_path_factory):
    """Ours, theirs, and the file that both are loaded from."""
    theirs = reference(request.param)
    file = tmp_path_factory.mktemp("sd3") / "model.safetensors"
    save_file(theirs.state_dict(), file)
    config = SD3Config.from_entries(dict(theirs.config))
    return loaded(config, file), theirs, file


def loaded(config, file):
    module = build_on_meta(lambda: SD3Denoiser(config))
    load_weights(module, file, sd3_key_map(config))
    return module.requires_grad_(False).eval()


def conditioning(rows, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Conditioning(
        states=torch.randn(rows, tokens, 24, generator=generator),
        lengths=torch.full((rows,), tokens),
        pooled=torch.randn(rows, 14, generator=generator),
    )


def latents(rows, height, width, seed=1):
    return torch.randn(rows, 6, 1, height, width, generator=torch.Generator().manual_seed(seed))


def by_diffusers(model, told, x, point):
    time = torch.tensor(point.time, dtype=torch.float32) * 1000
    out = model(
        hidden_states=x[:, :, 0],
        encoder_hidden_states=told.states,
        pooled_projections=told.pooled,
        timestep=time.expand(len(x)),
        return_dict=False,
    )[0]
    return out[:, :, None]


@pytest.mark.parametrize(("size", "tokens"), [((8, 8), 7), ((6, 18), 1), ((2, 10), 13)])
def test_slopes_are_those_of_diffusers(pair, size, tokens):
    """Sides of an odd number of tokens too: the table's middle is not even."""
    ours, theirs, _ = pair
    told, x = conditioning(2, tokens), latents(2, *size)
    found, points = slopes(ours, told, x)
    for slope, point in zip(found, points, strict=True):
        assert error(slope, by_diffusers(theirs, told, x, point)) < 1e-5


@pytest.mark.parametrize("lengths", [[5, 5, 5], [2, 5, 4], [3, 1, 2]])
def test_a_row_is_that_row_alone(pair, lengths):
    """Padded texts too: what stands past a row's length is not read."""
    ours, _, _ = pair
    told, x = dataclasses.replace(conditioning(3, 5), lengths=torch.tensor(lengths)), latents(3, 4, 6)
    together, _ = slopes(ours, told, x)
    for row in range(3):
        own = told.rows([row])
        own = dataclasses.replace(own, states=own.states[:, : lengths[row]])
        alone, _ = slopes(ours, own, x[row : row + 1])
        assert error(alone[-1], together[-1][row : row + 1]) < 1e-5


def test_modulations_and_positions_may_stay_in_the_file(pair):
    """Bit-equal, and a copy in another dtype reads them too."""
    ours, _, file = pair
    lean = build_on_meta(lambda: SD3Denoiser(ours.config))
    lean.fill(WeightSource.for_module(lean, file, sd3_key_map(ours.config)), device=CPU, dtype=torch.float32)
    absent = {name for name, parameter in lean.named_parameters() if parameter.is_meta}
    assert absent == {name for name, _ in ours.named_parameters() if name.startswith(SD3Denoiser.hoisted)}
    assert len(absent) == 2 * ours.config.layers + 1
    told, x = conditioning(2, 5), latents(2, 4, 8)
    expected = slopes(ours, told, x)[0]
    for one, other in zip(slopes(lean, told, x)[0], expected, strict=True):
        assert torch.equal(one, other)
    half = moved(lean, CPU, torch.bfloat16)
    assert error(slopes(half, told.to(CPU, torch.bfloat16), x)[0][0], expected[0]) < 0.1


@pytest.mark.parametrize("whole", [False, True], ids=["denoiser", "checkpoint"])
def test_original_files_load_as_well(pair, tmp_path, whole):
    """The weights written in Stability AI's layout, alone or in a file with the other parts of the model."""
    ours, theirs, _ = pair
    weights = in_original_layout(theirs.state_dict(), ours.config)
    if whole:
        weights = {f"model.diffusion_model.{name}": tensor for name, tensor in weights.items()}
        weights["first_stage_model.decoder.conv_in.weight"] = torch.ones(2, 2)
        weights["text_encoders.clip_l.transformer.text_model.embeddings.token_embedding.weight"] = torch.ones(2)
    save_file(weights, tmp_path / "sd3.safetensors")
    other = loaded(ours.config, part_of(tmp_path / "sd3.safetensors", PREFIXES))
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), other.state_dict().values(), strict=True))


def test_files_with_other_keys_are_refused(pair, tmp_path):
    ours, theirs, _ = pair
    weights = {name: tensor for name, tensor in theirs.state_dict().items() if "pos_embed.pos_embed" not in name}
    save_file(weights | {"lonely": torch.ones(2)}, tmp_path / "sd3.safetensors")
    with pytest.raises(ValueError, match=r"1 of .* keys match nothing \(lonely\).*positions from pos_embed.pos_embed"):
        loaded(ours.config, tmp_path / "sd3.safetensors")


def test_sizes_are_told_by_the_tensors(pair):
    """Where there are no norms of queries and keys, heads are 64 wide."""
    ours, theirs, _ = pair
    for weights in (theirs.state_dict(), in_original_layout(theirs.state_dict(), ours.config)):
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        if ours.config.qk_norm:
            assert SD3Config.from_shapes(Shapes(shapes)) == dataclasses.replace(ours.config, sample_cells=128)
            shapes |= {"x_embedder.proj.weight": (36, 33, 2, 2), "pos_embed.proj.weight": (36, 33, 2, 2)}
        with pytest.raises(ValueError, match="only SD3 with 2 x 2 cells"):
            SD3Config.from_shapes(Shapes(shapes))
    wide = {name: (64, *shape[1:]) if shape[0] == 36 else shape for name, shape in shapes.items()}
    if not ours.config.qk_norm:
        found = SD3Config.from_shapes(Shapes(wide))
        assert (found.heads, found.head_width, found.qk_norm) == (1, 64, False)


def test_what_does_not_fit_is_refused(pair):
    ours, _, _ = pair
    told = conditioning(1, 4)
    points = flow_schedule(1).points[:-1]

    def prepare(told, shape=(1, 6, 1, 4, 4)):
        return ours.prepare(told, shape, points, attention=attention_selector())

    with pytest.raises(ValueError, match="pooled text is none"):
        prepare(dataclasses.replace(told, pooled=None))
    with pytest.raises(ValueError, match="takes no guidance value"):
        prepare(dataclasses.replace(told, guidance=2.0))
    with pytest.raises(ValueError, match="sides in steps of 2"):
        prepare(told, (1, 6, 1, 5, 4))
    with pytest.raises(ValueError, match="positions of 18 cells a side"):
        prepare(told, (1, 6, 1, 4, 20))
    with pytest.raises(ValueError, match="2 rows of latents"):
        prepare(told, (2, 6, 1, 4, 4))


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("in_channels", 33),
        ("num_layers", "2"),
        ("patch_size", 1),
        ("qk_norm", "layer_norm"),
        ("caption_projection_dim", 40),
        ("pos_embed_max_size", None),
        ("dual_attention_layers", [2]),
        ("dual_attention_layers", 1),
    ],
)
def test_configs_that_make_no_model_are_refused(entry, value):
    with pytest.raises(ValueError, match="out_channels" if entry == "in_channels" else entry):
        SD3Config.from_entries(ENTRIES | {entry: value})
