"""Z-Image's denoiser against diffusers' on tiny random weights."""

import dataclasses

import original_layouts
import pytest
import torch
from parity import error, slopes
from safetensors.torch import save_file

from calotype.core.attention.registry import attention_selector
from calotype.core.copies import moved
from calotype.core.loading import build_on_meta, load_weights
from calotype.core.weight_source import WeightSource
from calotype.denoisers.base import Conditioning
from calotype.denoisers.shapes import PREFIXES, Shapes
from calotype.denoisers.z_image import MARKS, ZImageConfig, ZImageDenoiser
from calotype.denoisers.z_image_keys import z_image_key_map
from calotype.schedulers import flow_schedule

ENTRIES = {
    "in_channels": 5,
    "dim": 48,
    "n_layers": 3,
    "n_refiner_layers": 2,
    "n_heads": 3,
    "norm_eps": 3e-4,
    "cap_feat_dim": 20,
    "rope_theta": 90.0,
    "t_scale": 700.0,
    "axes_dims": [4, 8, 4],
    "axes_lens": [140, 20, 24],
}


def reference(qk_norm):
    from diffusers import ZImageTransformer2DModel

    torch.manual_seed(3)
    model = ZImageTransformer2DModel(**ENTRIES, qk_norm=qk_norm).eval()
    for name, parameter in model.named_parameters():
        is_norm = parameter.ndim == 1 and name.endswith("weight")
        torch.nn.init.normal_(parameter, 1.0 if is_norm else 0.0, 0.3 if is_norm else 0.12)
    return model.requires_grad_(False)


@pytest.fixture(scope="module", params=[True, False], ids=["qk_norm", "no_qk_norm"])
def pair(request, tmp_path_factory):
    theirs = reference(request.param)
    file = tmp_path_factory.mktemp("z_image") / "model.safetensors"
    save_file(theirs.state_dict(), file)
    ours = build_on_meta(lambda: ZImageDenoiser(ZImageConfig.from_entries(dict(theirs.config))))
    load_weights(ours, file, z_image_key_map())
    return ours.requires_grad_(False).eval(), theirs


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    torch.manual_seed(5)
    model = ZImageDenoiser(ZImageConfig.from_entries(ENTRIES)).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.12)
    return model


def conditioning(*lengths, seed=0):
    """Rows of these lengths, with rubbish after their ends."""
    states = torch.randn(len(lengths), max(lengths), 20, generator=torch.Generator().manual_seed(seed))
    return Conditioning(states=states, lengths=torch.tensor(lengths))


def latents(rows, height, width, seed=1):
    return torch.randn(rows, 5, 1, height, width, generator=torch.Generator().manual_seed(seed))


def by_diffusers(model, told, x, point):
    """As the pipeline calls it, sign and clock included."""
    time = (1000 - torch.full((len(x),), point.time) * 1000) / 1000
    texts = [states[:length] for states, length in zip(told.states, told.lengths, strict=True)]
    return -torch.stack(model(list(x), time, texts, return_dict=False)[0])


@pytest.mark.parametrize(
    ("size", "lengths"), [((8, 8), (7, 7)), ((6, 14), (1, 40)), ((2, 2), (32, 33)), ((16, 8), (100,))]
)
def test_slopes_are_those_of_diffusers(pair, size, lengths):
    ours, theirs = pair
    told, x = conditioning(*lengths), latents(len(lengths), *size)
    found, points = slopes(ours, told, x)
    for slope, point in zip(found, points, strict=True):
        assert error(slope, by_diffusers(theirs, told, x, point)) < 1e-5


def test_a_row_is_that_row_alone(ours):
    """Whatever the lengths of its neighbours' texts are, and whatever comes after its own."""
    told, x = conditioning(5, 70, 33), latents(3, 4, 6)
    together, _ = slopes(ours, told, x)
    for row in range(3):
        wide = told.rows([row])
        for alone in (wide, dataclasses.replace(wide, states=wide.states[:, : wide.lengths[0]])):
            assert error(slopes(ours, alone, x[row : row + 1])[0][-1], together[-1][row : row + 1]) < 1e-5


def test_original_files_load_as_well(pair, tmp_path):
    """The weights written as ComfyUI's files have them are the same weights."""
    ours, theirs = pair
    save_file(original_layouts.z_image(theirs.state_dict()), tmp_path / "z_image.safetensors")
    other = build_on_meta(lambda: ZImageDenoiser(ours.config))
    load_weights(other, tmp_path / "z_image.safetensors", z_image_key_map())
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), other.state_dict().values(), strict=True))


def test_files_tell_their_config(pair):
    """In both layouts, but for what shapes do not show."""
    ours, theirs = pair
    default, weights = ZImageConfig(), theirs.state_dict()
    expected = dataclasses.replace(
        ours.config,
        norm_eps=default.norm_eps,
        rotary_axes=(4, 6, 6),
        rotary_lengths=default.rotary_lengths,
        rotary_theta=default.rotary_theta,
        time_scale=default.time_scale,
    )
    for layout in (weights, original_layouts.z_image(weights)):
        shapes = Shapes({name: tuple(weight.shape) for name, weight in layout.items()}).within(*PREFIXES)
        assert MARKS.share(shapes.shapes) == 1
        if ours.config.qk_norm:
            assert ZImageConfig.from_shapes(shapes) == expected
        else:
            with pytest.raises(ValueError, match=r"the checkpoint holds no layers.0.attention.q_norm.weight"):
                ZImageConfig.from_shapes(shapes)


def test_modulations_may_stay_in_the_file(pair, tmp_path):
    """Bit-equal, and a copy in another dtype reads them too."""
    ours, theirs = pair
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    lean = build_on_meta(lambda: ZImageDenoiser(ours.config))
    source = WeightSource.for_module(lean, tmp_path / "model.safetensors", z_image_key_map())
    lean.fill(source, device=torch.device("cpu"), dtype=torch.float32)
    absent = {name for name, parameter in lean.named_parameters() if parameter.is_meta}
    assert absent == {name for name, _ in ours.named_parameters() if name.startswith(lean.hoisted)}
    assert len(absent) == 2 * (ours.config.layers + ours.config.refiner_layers)
    told, x = conditioning(9, 40), latents(2, 4, 4)
    for one, other in zip(slopes(lean, told, x)[0], slopes(ours, told, x)[0], strict=True):
        assert torch.equal(one, other)
    half, whole = (moved(model, torch.device("cpu"), torch.bfloat16) for model in (lean, ours))
    told = told.to(torch.device("cpu"), torch.bfloat16)
    assert torch.equal(slopes(half, told, x)[0][0], slopes(whole, told, x)[0][0])


def test_what_does_not_fit_is_refused(ours):
    told, points = conditioning(4), flow_schedule(1).points[:-1]

    def prepare(told, shape=(1, 5, 1, 4, 4)):
        return ours.prepare(told, shape, points, attention=attention_selector())

    with pytest.raises(ValueError, match="takes none"):
        prepare(dataclasses.replace(told, guidance=2.0))
    with pytest.raises(ValueError, match="0 to 4 tokens a row"):
        prepare(dataclasses.replace(conditioning(4, 4), lengths=torch.tensor([4, 0])), (2, 5, 1, 4, 4))
    prepare(conditioning(128))
    with pytest.raises(ValueError, match="takes 1 to 128"):
        prepare(conditioning(129))
    with pytest.raises(ValueError, match="sides in steps of 2"):
        prepare(told, (1, 5, 1, 5, 4))
    prepare(told, (1, 5, 1, 40, 48))
    with pytest.raises(ValueError, match="positions for 40 x 48 cells"):
        prepare(told, (1, 5, 1, 42, 4))
    with pytest.raises(ValueError, match="2 rows of latents"):
        prepare(told, (2, 5, 1, 4, 4))
    with pytest.raises(ValueError, match="21 wide"):
        prepare(dataclasses.replace(told, states=torch.zeros(1, 4, 21)))


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        *(("in_channels", 0), ("n_layers", "2"), ("axes_dims", [4, 4, 4]), ("axes_lens", [4, 4]), ("dim", 50)),
        *(("all_patch_size", [2, 4]), ("siglip_feat_dim", 8), ("norm_eps", 0), ("qk_norm", 1)),
    ],
)
def test_configs_that_make_no_model_are_refused(entry, value):
    with pytest.raises(ValueError, match=entry):
        ZImageConfig.from_entries(ENTRIES | {entry: value})
