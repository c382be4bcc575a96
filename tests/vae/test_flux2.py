"""FLUX.2's autoencoder against diffusers'."""

import pytest
import tiny_flux2
import torch
from safetensors.torch import save_file

from calotype.core.copies import moved
from calotype.vae.flux2 import Flux2KLConfig, load_flux2_kl, load_flux2_kl_file

WEIGHTS = "diffusion_pytorch_model.safetensors"
KINDS = {"plain": {}, "small decoder": {"decoder_block_out_channels": (4, 8, 12), "use_quant_conv": False}}


@pytest.fixture(scope="module", params=KINDS)
def both(request, tmp_path_factory):
    torch.manual_seed(4)
    theirs = tiny_flux2.autoencoder(**KINDS[request.param])
    folder = tmp_path_factory.mktemp("vae") / "vae"
    theirs.save_pretrained(folder)
    return load_flux2_kl(folder), theirs, folder


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pixels_of(size, rows=2):
    return torch.rand(rows, 3, 1, *size, generator=torch.Generator().manual_seed(3)) * 2 - 1


def statistics(vae):
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    return mean, torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)


@pytest.mark.parametrize("size", [(16, 24), (8, 40)])
def test_both_ways_as_diffusers(both, size):
    from diffusers import Flux2Pipeline

    ours, theirs, _ = both
    pixels = pixels_of(size)
    mean, std = statistics(theirs)
    raw = theirs.encode(pixels[:, :, 0]).latent_dist.mode()
    expected = (Flux2Pipeline._patchify_latents(raw) - mean) / std
    found = ours.encode(pixels)
    assert found.shape == (2, ours.latent_channels, 1, size[0] // ours.downsampling, size[1] // ours.downsampling)
    torch.testing.assert_close(found[:, :, 0], expected, rtol=1e-5, atol=1e-5)
    latents = random(*found.shape)
    expected = theirs.decode(Flux2Pipeline._unpatchify_latents(latents[:, :, 0] * std + mean)).sample
    torch.testing.assert_close(ours.decode(latents)[:, :, 0], expected, rtol=1e-5, atol=1e-5)


def test_a_sample_of_the_posterior(both):
    """mean + std * noise before the statistics, each latent with the noise at its own place."""
    from diffusers import Flux2Pipeline

    ours, theirs, _ = both
    pixels, (mean, std) = pixels_of((16, 24)), statistics(theirs)
    posterior = theirs.encode(pixels[:, :, 0]).latent_dist
    noise = random(2, ours.latent_channels, 1, 2, 3, seed=5)
    raw = posterior.mean + posterior.std * Flux2Pipeline._unpatchify_latents(noise[:, :, 0])
    expected = (Flux2Pipeline._patchify_latents(raw) - mean) / std
    torch.testing.assert_close(ours.encode(pixels, noise)[:, :, 0], expected, rtol=1e-5, atol=1e-5)


def test_statistics_stay_wide(both):
    ours, _, _ = both
    half = moved(ours, torch.device("cpu"), torch.bfloat16)
    assert half.mean.dtype is half.std.dtype is torch.float32
    assert torch.equal(half.mean, ours.mean)
    assert next(half.kl.module.parameters()).dtype is torch.bfloat16
    latents = random(1, ours.latent_channels, 1, 2, 3)
    assert float((half.decode(latents) - ours.decode(latents)).norm() / ours.decode(latents).norm()) < 0.05


def in_original_layout(weights, levels):
    """diffusers' names put into Black Forest Labs', written without the key map."""
    out = {}
    for name, tensor in weights.items():
        new = name.replace("mid_block.attentions.0.", "mid.attn_1.").replace("conv_norm_out", "norm_out")
        new = new.replace("mid_block.resnets.0", "mid.block_1").replace("mid_block.resnets.1", "mid.block_2")
        new = new.replace("conv_shortcut", "nin_shortcut").replace("group_norm", "norm")
        new = new.replace("downsamplers.0", "downsample").replace("upsamplers.0", "upsample")
        for level in range(levels):
            new = new.replace(f"down_blocks.{level}.", f"down.{level}.")
            new = new.replace(f"up_blocks.{level}.", f"up.{levels - 1 - level}.")
        new = new.replace(".resnets.", ".block.")
        for theirs, ours in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out")):
            new = new.replace(f"attn_1.{theirs}.", f"attn_1.{ours}.")
        if ".attn_1." in new and tensor.ndim == 2:
            tensor = tensor[:, :, None, None]
        if name.startswith(("quant_conv", "post_quant_conv")):
            new = ("decoder." if name.startswith("post") else "encoder.") + new
        out[new] = tensor.contiguous()
    return out


@pytest.mark.parametrize(("prefix", "decoder"), [("", None), ("vae.", (64, 32, 96))])
def test_original_files_load_as_well(tmp_path, prefix, decoder):
    """Sizes are read from the tensors, but for what no file holds: 32 groups, and a variance of 1e-4 more."""
    torch.manual_seed(5)
    sizes = {"block_out_channels": (32, 96, 64), "norm_num_groups": 32, "batch_norm_eps": 1e-4}
    theirs = tiny_flux2.autoencoder(**sizes, decoder_block_out_channels=decoder)
    theirs.save_pretrained(tmp_path / "vae")
    ours = load_flux2_kl(tmp_path / "vae")
    weights = in_original_layout(theirs.state_dict(), 3)
    assert "encoder.quant_conv.weight" in weights
    save_file({prefix + name: tensor for name, tensor in weights.items()}, tmp_path / "ae.safetensors")
    latents, pixels = random(1, 16, 1, 2, 3), pixels_of((16, 24), 1)
    for file in (tmp_path / "ae.safetensors", tmp_path / "vae" / WEIGHTS):
        other = load_flux2_kl_file(file)
        assert torch.equal(ours.decode(latents), other.decode(latents))
        assert torch.equal(ours.encode(pixels), other.encode(pixels))


def test_the_released_sizes():
    """What diffusers makes of a config that says nothing is what ours says by itself."""
    from diffusers import AutoencoderKLFlux2

    default = Flux2KLConfig()
    assert default == Flux2KLConfig.from_entries({"_class_name": "AutoencoderKLFlux2"})
    with torch.device("meta"):
        entries = dict(AutoencoderKLFlux2().config)
    entries = {name: list(value) if isinstance(value, tuple) else value for name, value in entries.items()}
    assert default == Flux2KLConfig.from_entries({**entries, "_class_name": "AutoencoderKLFlux2"})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"_class_name": "AutoencoderKL"}, "this one is 'AutoencoderKLFlux2'"),
        ({"patch_size": [4, 4]}, "patch_size is"),
        ({"batch_norm_eps": 0}, "batch_norm_eps is 0; it must be a number over 0"),
        ({"strange": 1}, "strange is 1; known entries are"),
    ],
)
def test_configs_that_cannot_be_used(entries, message):
    with pytest.raises(ValueError, match=message):
        Flux2KLConfig.from_entries({"_class_name": "AutoencoderKLFlux2", **entries})


def test_shapes_that_do_not_fit(both):
    ours, _, _ = both
    with pytest.raises(ValueError, match="the width is 28 pixels; it must be a multiple of 8"):
        ours.encode(pixels_of((16, 28)))
    with pytest.raises(ValueError, match=r"latents have shape \[1, 4, 1, 2, 2\]; it must be \[rows, 16, 1"):
        ours.decode(random(1, 4, 1, 2, 2))
    with pytest.raises(ValueError, match="noise has shape"):
        ours.encode(pixels_of((16, 16)), random(2, 16, 1, 2, 3))
