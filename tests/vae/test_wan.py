"""Wan's autoencoders against diffusers' on tiny random weights."""

import json

import pytest
import torch
from clip_vae import (
    check_calls_share_nothing,
    check_groups_come_as_they_are_ready,
    check_its_folder_is_that_of_diffusers,
    check_later_frames_change_nothing_before_them,
    check_options_keep_the_result_close,
    check_same_weights,
    check_what_is_no_clip_is_refused,
    clip,
    drawn,
    streaming_peak,
)
from parity import error
from peak_memory import Alive
from safetensors.torch import load_file, save_file

from calotype.core.shapes import Shapes
from calotype.vae.tiling import Tiling
from calotype.vae.wan import load_wan_vae, load_wan_vae_file
from calotype.vae.wan_config import WAN_2_1, WAN_2_2, read_wan_vae_config, sized_wan_vae_config, wan_vae_config

from ..original_layouts import wan_name
from ..tiny_wan_vae import WAN_2_1 as TINY_2_1
from ..tiny_wan_vae import WAN_2_2 as TINY_2_2
from ..tiny_wan_vae import save_wan_vae, wan_vae_class

SIZES = {"2.1": TINY_2_1, "2.2": TINY_2_2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """diffusers' model and its folder, by kind."""
    made = {}
    for kind, sizes in SIZES.items():
        folder = tmp_path_factory.mktemp("vae")
        made[kind] = save_wan_vae(folder, sizes), folder
    return made


@pytest.fixture(scope="module", params=SIZES)
def both(request, folders):
    """Ours, theirs and the folder."""
    theirs, folder = folders[request.param]
    return load_wan_vae(folder), theirs, folder


def statistics(model):
    return (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (model.config.latents_mean, model.config.latents_std))


@pytest.mark.parametrize("cells", [(3, 4), (2, 3)])
@pytest.mark.parametrize("frames", [1, 5, 9, 17])
def test_latents_and_pixels_are_those_of_diffusers(both, frames, cells):
    ours, theirs, _ = both
    pixels, (mean, std) = clip(ours, frames, cells, rows=2), statistics(theirs)
    posterior = theirs.encode(pixels).latent_dist
    noise = drawn(*posterior.mean.shape, seed=1)
    assert error(ours.encode(pixels), (posterior.mean - mean) / std) < 1e-5
    assert error(ours.encode(pixels, noise), (posterior.mean + posterior.std * noise - mean) / std) < 1e-5
    latents = drawn(*posterior.mean.shape, seed=2)
    expected = theirs.decode(latents / (1.0 / std) + mean).sample
    found = ours.decode(latents)
    assert found.shape == expected.shape == (2, 3, frames, *pixels.shape[3:])
    assert (found.clamp(-1, 1) - expected).abs().max() < 1e-5


def test_frames_come_as_they_are_ready(both):
    check_groups_come_as_they_are_ready(both[0], both[0].module.decoder)


def test_later_frames_change_nothing_before_them(both):
    check_later_frames_change_nothing_before_them(both[0])


def test_calls_share_no_caches(both):
    check_calls_share_nothing(both[0], (3, 5), (3, 2))


def test_options_keep_the_result_close(both):
    ours, _, folder = both
    latents, tiling = drawn(2, 4, 2, 9, 6), Tiling(size=6, overlap=3)
    check_options_keep_the_result_close(load_wan_vae, folder, latents, tiling, most=0.3)
    in_tiles, one_tile = load_wan_vae(folder, tiling=tiling, slicing=True), latents[..., :6, :6]
    assert torch.equal(in_tiles.decode(one_tile), load_wan_vae(folder, slicing=True).decode(one_tile))
    pixels = clip(ours, 1 + ours.temporal_downsampling, (9, 6), rows=2)
    assert 1e-6 < error(in_tiles.encode(pixels), ours.encode(pixels)) < 0.3


def test_what_is_no_clip_is_refused(both):
    check_what_is_no_clip_is_refused(both[0])


@pytest.mark.parametrize("kind", SIZES)
def test_memory_does_not_grow_with_the_clip(folders, kind):
    """21 latent frames (81 frames, of 4 a group) as 3: all that is alive at once after any operation, beside the
    latents; and less than diffusers' at 9."""
    theirs, folder = folders[kind]
    ours = load_wan_vae(folder)
    short, middle, long = (streaming_peak(ours, drawn(1, 4, frames, 6, 6)) for frames in (1, 3, 21))
    assert long <= 1.01 * middle
    assert middle > 1.2 * short
    with Alive() as alive:
        theirs.decode(drawn(1, 4, 9, 6, 6))
    assert long < 0.9 * alive.peak


def test_its_folder_is_that_of_diffusers(both):
    check_its_folder_is_that_of_diffusers(load_wan_vae, both[2], wan_vae_config)


def nested_name(name):
    """A name of diffusers' as Wan 2.2 has it, for one resnet a level of the encoder and two of the decoder."""
    for side, way, last in (("encoder", "down", "1"), ("decoder", "up", "2")):
        if name.startswith(f"{side}.{way}_blocks"):
            _, _, level, kind, *rest = name.split(".")
            place, inner = (last, rest) if kind == f"{way}sampler" else (rest[0], rest[1:])
            plain = wan_name(".".join(("encoder.mid_block.resnets.0", *inner))).removeprefix("encoder.middle.0.")
            return ".".join((side, f"{way}samples", level, f"{way}samples", place, plain))
    return wan_name(name)


@pytest.mark.parametrize(("kind", "named"), [("2.1", wan_name), ("2.2", nested_name)])
def test_files_of_wans_layout_load_as_well(folders, tmp_path, kind, named):
    _, folder = folders[kind]
    ours, config = load_wan_vae(folder), read_wan_vae_config(folder)
    weights = load_file(folder / "diffusion_pytorch_model.safetensors")
    names = {name: named(name) for name in weights}
    if kind == "2.2":
        assert names["decoder.up_blocks.0.upsampler.time_conv.bias"] == "decoder.upsamples.0.upsamples.2.time_conv.bias"
        assert names["encoder.down_blocks.1.resnets.0.norm1.gamma"] == (
            "encoder.downsamples.1.downsamples.0.residual.0.gamma"
        )
    save_file({names[name]: tensor for name, tensor in weights.items()}, tmp_path / "wan_vae.safetensors")
    save_file({f"vae.{names[name]}": tensor for name, tensor in weights.items()}, tmp_path / "within.safetensors")
    for file in ("wan_vae.safetensors", "within.safetensors"):
        check_same_weights(ours, load_wan_vae_file(tmp_path / file, config))


@pytest.mark.parametrize(("kind", "named"), [("2.1", wan_name), ("2.2", nested_name)])
def test_a_file_shows_its_sizes(kind, named):
    usual = {"2.1": WAN_2_1, "2.2": WAN_2_2}[kind]
    own = {"latents_mean": usual.latents_mean, "latents_std": usual.latents_std, "z_dim": usual.z_dim}
    with torch.device("meta"):
        module = wan_vae_class()(**{**SIZES[kind], **own})
    config = wan_vae_config(json.loads(module.to_json_string()))
    weights = {name: tuple(each.shape) for name, each in module.state_dict().items()}
    for layout in (named, str):
        assert sized_wan_vae_config(Shapes({layout(name): shape for name, shape in weights.items()})) == config


@pytest.mark.parametrize("config", [WAN_2_1, WAN_2_2], ids=["2.1", "2.2"])
def test_published_sizes_are_told_apart(config):
    with torch.device("meta"):
        weights = wan_vae_class()(**config.entries()).state_dict()
    assert sized_wan_vae_config(Shapes({name: tuple(each.shape) for name, each in weights.items()})) == config


def test_published_files_say_what_ours_say():
    """Wan 2.2's config.json has an entry that diffusers does not read; Wan 2.1's says the defaults."""
    entries = {**WAN_2_2.entries(), "_class_name": "AutoencoderKLWan", "attn_scales": [], "dropout": 0.0}
    assert wan_vae_config({**entries, "clip_output": False}) == WAN_2_2
    assert wan_vae_config({"_class_name": "AutoencoderKLWan"}) == WAN_2_1
    assert (len(WAN_2_2.latents_mean), WAN_2_2.scale_factor_spatial, WAN_2_2.scale_factor_temporal) == (48, 16, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "AutoencoderKL"}, "_class_name is 'AutoencoderKL'"),
        ({"temperal_downsample": [True]}, "temperal_downsample has 1 entries for 3 of dim_mult"),
        ({"z_dim": 5}, "latents_mean has 4 values"),
        ({"latents_std": [1.0, 0.0, 1.0, 1.0]}, "all must be over 0"),
        ({"base_dim": "6"}, "base_dim is '6'; it must be a whole number over 0"),
        ({"patch_size": 2}, "in_channels is 3; it must be 12 by the levels and patch_size"),
        ({"scale_factor_temporal": 8}, "scale_factor_temporal is 8; it must be 4"),
        ({"scale_factor_spatial": 8}, "scale_factor_spatial is 8; it must be 4"),
        ({"attn_scales": [0.5]}, r"attn_scales is \[0.5\]; known entries are"),
        ({"use_quant_conv": True}, "use_quant_conv is True; known entries are"),
    ],
)
def test_configs_that_make_no_model_are_refused(folders, tmp_path, changes, message):
    entries = json.loads((folders["2.1"][1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**entries, **changes}))
    with pytest.raises(ValueError, match=message):
        load_wan_vae(tmp_path)
