"""Qwen-Image's autoencoder against diffusers' on tiny random weights."""

import json

import pytest
import torch
from parity import error
from safetensors.torch import load_file, save_file

from calotype.core.copies import moved
from calotype.vae.qwen_image import load_qwen_image_vae, load_qwen_image_vae_file, read_qwen_image_vae_config
from calotype.vae.tiling import Tiling

from ..original_layouts import wan_name
from ..tiny_qwen_image import save_vae


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Ours, theirs and the folder."""
    folder = tmp_path_factory.mktemp("vae")
    theirs = save_vae(folder)
    return load_qwen_image_vae(folder), theirs, folder


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def statistics(model):
    return (
        torch.tensor(values).view(1, -1, 1, 1, 1) for values in (model.config.latents_mean, model.config.latents_std)
    )


@pytest.mark.parametrize("size", [(16, 24), (20, 12)])
def test_latents_and_pixels_are_those_of_diffusers(both, size):
    ours, theirs, _ = both
    pixels, mean_std = drawn(2, 3, 1, *size).clamp(-1, 1), tuple(statistics(theirs))
    posterior = theirs.encode(pixels).latent_dist
    noise = drawn(*posterior.mean.shape, seed=1)
    mean, std = mean_std
    assert error(ours.encode(pixels), (posterior.mean - mean) / std) < 1e-5
    assert error(ours.encode(pixels, noise), (posterior.mean + posterior.std * noise - mean) / std) < 1e-5
    latents = drawn(2, 4, 1, size[0] // 4, size[1] // 4, seed=2)
    expected = theirs.decode(latents * std + mean).sample
    assert (ours.decode(latents).clamp(-1, 1) - expected).abs().max() < 1e-5


def test_it_takes_pictures_of_whole_cells(both):
    ours, _, _ = both
    assert (ours.latent_channels, ours.downsampling) == (4, 4)
    with pytest.raises(ValueError, match="have 2 frames"):
        ours.decode(drawn(1, 4, 2, 4, 4))
    with pytest.raises(ValueError, match="the width is 18 pixels; it must be a multiple of 4, such as 16 or 20"):
        ours.encode(drawn(1, 3, 1, 16, 18))


def test_options_keep_the_result_close(both):
    """Rows one by one are the same; tiles see less, and leave no seam."""
    ours, _, folder = both
    latents = drawn(2, 4, 1, 12, 8)
    whole = ours.decode(latents)
    sliced = load_qwen_image_vae(folder, slicing=True)
    assert error(sliced.decode(latents), whole) < 1e-6
    tiled = load_qwen_image_vae(folder, tiling=Tiling(size=8, overlap=4))
    assert 1e-6 < error(tiled.decode(latents), whole) < 0.3
    assert torch.equal(tiled.decode(latents[..., :8, :8]), ours.decode(latents[..., :8, :8]))
    half = moved(ours, torch.device("cpu"), torch.bfloat16)
    assert error(half.decode(latents), whole) < 0.1


def test_files_of_wans_layout_load_as_well(both, tmp_path):
    ours, _, folder = both
    weights = load_file(folder / "diffusion_pytorch_model.safetensors")
    names = {name: wan_name(name) for name in weights}
    assert names["decoder.up_blocks.1.upsamplers.0.resample.1.weight"] == "decoder.upsamples.5.resample.1.weight"
    save_file({names[name]: tensor for name, tensor in weights.items()}, tmp_path / "qwen_image_vae.safetensors")
    other = load_qwen_image_vae_file(tmp_path / "qwen_image_vae.safetensors", read_qwen_image_vae_config(folder))
    assert all(torch.equal(other.module.state_dict()[name], each) for name, each in ours.module.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "AutoencoderKL"}, "_class_name is 'AutoencoderKL'"),
        ({"temperal_downsample": [True]}, "temperal_downsample has 1 entries for 3 of dim_mult"),
        ({"z_dim": 5}, "latents_mean has 4 values"),
        ({"base_dim": "6"}, "base_dim is '6'; it must be a whole number over 0"),
        ({"input_channels": 4}, "input_channels is 4"),
        ({"patch_size": 2}, "patch_size is 2; known entries are"),
    ],
)
def test_configs_that_make_no_model_are_refused(both, tmp_path, changes, message):
    entries = json.loads((both[2] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**entries, **changes}))
    with pytest.raises(ValueError, match=message):
        load_qwen_image_vae(tmp_path)
