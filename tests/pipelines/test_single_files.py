"""Denoisers in single files, with the other parts from elsewhere."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import calotype
from calotype.denoisers.flux import FluxConfig
from calotype.denoisers.sd3_config import MARKS as SD3_MARKS
from calotype.pipelines.flux import SCHEDULERS
from calotype.vae.kl_config import FLUX_1

from ..gguf_files import write_gguf
from ..tiny_flux import flux_pipeline, in_original_layout

WIDE = {"attention_head_dim": 32, "num_attention_heads": 1, "axes_dims_rope": (4, 14, 14)}
RUN: dict[str, Any] = {
    "prompt": "a photo of a cat",
    "height": 16,
    "width": 24,
    "seed": 3,
    "schedule": calotype.flow_schedule(2),
    "max_sequence_length": 7,
    "output_type": "latent",
}
PARTS = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae")


class Model:
    """A folder, its pipeline, and the denoiser's weights in the original layout by their names."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder.with_name("flux.safetensors")
        flux_pipeline(True, folder, **WIDE)
        self.pipe = calotype.load(folder)
        config = self.pipe.denoiser.config
        weights = load_file(folder / "transformer/diffusion_pytorch_model.safetensors")
        self.weights = in_original_layout(weights, config)
        save_file(self.weights, self.file)
        self.latents = self.pipe(**RUN).latents

    def write(self, path: Path, weights: dict[str, torch.Tensor]) -> Path:
        save_file(weights, path)
        return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("single") / "dev")


def test_a_file_with_the_rest_from_a_folder(model: Model) -> None:
    pipe = calotype.load(str(model.file), encoders=str(model.folder), vae=model.folder)
    assert pipe.denoiser.config == model.pipe.denoiser.config
    assert pipe.family.scheduler == SCHEDULERS[True]
    assert pipe.source.name == str(model.file)
    assert set(pipe.source.weights) >= {"transformer/flux.safetensors", "vae/diffusion_pytorch_model.safetensors"}
    assert torch.equal(pipe(**RUN).latents, model.latents)


def test_parts_by_role_and_parts_that_are_loaded(model: Model) -> None:
    clip, t5, first, second, _ = (model.folder / name for name in PARTS)
    pipe = calotype.load(
        model.file, encoders={"clip": clip, "t5": t5}, tokenizers={"clip": first, "t5": second}, vae=model.pipe.vae
    )
    assert pipe.vae is model.pipe.vae
    assert torch.equal(pipe(**RUN).latents, model.latents)
    shared = calotype.load(model.file, encoders=model.pipe.encoders, vae=model.folder / "vae")
    assert shared.encoders == dict(model.pipe.encoders)
    assert torch.equal(shared(**RUN).latents, model.latents)


def test_a_tokenizer_beside_the_encoder(model: Model, tmp_path: Path) -> None:
    beside = shutil.copytree(model.folder / "text_encoder_2", tmp_path / "t5")
    shutil.copytree(model.folder / "tokenizer_2", beside, dirs_exist_ok=True)
    pipe = calotype.load(model.folder, encoders={"t5": beside})
    assert torch.equal(pipe(**RUN).latents, model.latents)


def test_a_folder_with_another_denoiser(model: Model, tmp_path: Path) -> None:
    changed = {name: 1.5 * tensor if "linear1.weight" in name else tensor for name, tensor in model.weights.items()}
    pipe = calotype.load(model.folder, denoiser=model.write(tmp_path / "other.safetensors", changed))
    assert pipe.family == model.pipe.family
    assert not torch.equal(pipe(**RUN).latents, model.latents)
    same = calotype.load(model.folder, denoiser=model.folder / "transformer")
    assert torch.equal(same(**RUN).latents, model.latents)


def test_the_denoiser_of_another_family_is_named(model: Model, tmp_path: Path) -> None:
    """By the names in it, with the class that its folder says."""
    folder = tmp_path / "transformer"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"_class_name": "SD3Transformer2DModel", "patch_size": 2}))
    _, names = SD3_MARKS.layouts
    file = model.write(folder / "diffusion_pytorch_model.safetensors", {name: torch.zeros(2, 2) for name in names})
    wanted = "; the denoiser of FLUX.1 is wanted"
    message = f"^{folder} holds the denoiser of Stable Diffusion 3 \\(SD3Transformer2DModel\\){wanted}$"
    with pytest.raises(ValueError, match=message):
        calotype.load(model.folder, denoiser=folder)
    with pytest.raises(ValueError, match=f"^{file} holds the denoiser of Stable Diffusion 3{wanted}$"):
        calotype.load(model.folder, denoiser=file)
    other = model.write(tmp_path / "x.safetensors", {"controlnet_x_embedder.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=f"^{other} holds a ControlNet{wanted}$"):
        calotype.load(model.folder, denoiser=other)


def test_missing_parts_are_listed(model: Model) -> None:
    with pytest.raises(ValueError, match="missing are the text encoder 'clip'") as caught:
        calotype.load(model.file)
    for part in ("encoders={'t5': folder}", "tokenizers={'clip': folder}", "the autoencoder (vae=file or folder)"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="the denoiser of FLUX") as caught:
        calotype.load(model.file, encoders={"clip": model.folder}, vae=model.folder)
    assert "missing are the text encoder 't5' (encoders={'t5': folder}), the tokenizer of 't5'" in str(caught.value)
    assert "'clip'" not in str(caught.value)
    assert "vae=file" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"encoders": {"llm": "x"}}, "encoders: FLUX.1 has no text encoder 'llm'; it has 'clip', 't5'"),
        ({"vae": 3}, "vae is of type int; it must be a file, a folder, a hub id or an autoencoder"),
        ({"denoiser": 3}, "denoiser is of type int; it must be a file, a folder or a hub id"),
        ({"encoders": {"clip": 3}}, "encoders holds a int"),
        ({"tokenizers": 3}, "tokenizers holds a int"),
        ({"denoiser": "x.safetensors"}, "give a folder in diffusers' layout to replace its denoiser"),
    ],
)
def test_parts_that_are_none(model: Model, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calotype.load(model.file, **arguments)


def test_one_folder_for_two_encoders(model: Model) -> None:
    with pytest.raises(ValueError, match=r"is no folder in diffusers' layout; give encoders={'clip': folder, 't5'"):
        calotype.load(model.file, encoders=model.folder / "text_encoder", vae=model.folder)


def test_float8(model: Model, tmp_path: Path) -> None:
    """Plain, and with a factor for each weight, as two programs write it: the values that they stand for."""
    plain, scaled, new, values = {}, {}, {}, {}
    for name, tensor in model.weights.items():
        stem = name.removesuffix(".weight")
        if tensor.ndim < 2 or stem == name:
            plain[name] = scaled[name] = new[name] = values[name] = tensor
            continue
        factor = tensor.abs().max() / 448
        plain[name] = tensor.to(torch.float8_e4m3fn)
        scaled[name] = new[name] = (tensor / factor).to(torch.float8_e4m3fn)
        scaled[f"{stem}.scale_weight"], new[f"{stem}.weight_scale"] = factor.clone(), factor[None].clone()
        scaled[f"{stem}.scale_input"] = new[f"{stem}.input_scale"] = torch.ones(())
        values[name] = scaled[name].float() * factor
    scaled["model.diffusion_model.scaled_fp8"] = torch.zeros(2).to(torch.float8_e4m3fn)
    rest: dict[str, Any] = {"encoders": model.pipe.encoders, "vae": model.pipe.vae}
    exact = calotype.load(model.write(tmp_path / "exact.safetensors", values), **rest)(**RUN).latents
    for name, weights in (("comfy", scaled), ("new", new)):
        found = calotype.load(model.write(tmp_path / f"{name}.safetensors", weights), **rest)(**RUN).latents
        assert torch.equal(found, exact)
    rounded = {name: tensor.float() for name, tensor in plain.items()}
    exact = calotype.load(model.write(tmp_path / "rounded.safetensors", rounded), **rest)(**RUN).latents
    found = calotype.load(model.write(tmp_path / "plain.safetensors", plain), **rest)(**RUN).latents
    assert torch.equal(found, exact)
    assert 0 < float((exact - model.latents).norm() / model.latents.norm()) < 0.5


def test_gguf(model: Model, tmp_path: Path) -> None:
    """As city96 writes it: names without a prefix, wide matrices in blocks, the rest as it is."""
    prefix = "model.diffusion_model."
    short = {name.removeprefix(prefix): tensor for name, tensor in model.weights.items()}
    values = {f"{prefix}{name}": tensor for name, tensor in write_gguf(tmp_path / "flux.gguf", short).items()}
    rest: dict[str, Any] = {"encoders": model.pipe.encoders, "vae": model.pipe.vae}
    exact = calotype.load(model.write(tmp_path / "values.safetensors", values), **rest)(**RUN).latents
    assert torch.equal(calotype.load(tmp_path / "flux.gguf", **rest)(**RUN).latents, exact)


def test_an_autoencoder_in_a_file(model: Model, tmp_path: Path) -> None:
    from diffusers import AutoencoderKL

    sizes: dict[str, Any] = {"block_out_channels": (32, 32), "layers_per_block": 2, "latent_channels": 4}
    theirs = AutoencoderKL(
        **sizes,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    weights = {f"vae.{name}": tensor for name, tensor in theirs.state_dict().items()}
    file = model.write(tmp_path / "ae.safetensors", dict(theirs.state_dict()))
    pipe = calotype.load(model.file, encoders=model.pipe.encoders, vae=file)
    assert pipe.vae.config == replace(FLUX_1, **sizes)
    latents = torch.randn(1, 4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs.decode(latents[:, :, 0] / 0.3611 + 0.1159).sample
    assert torch.allclose(pipe.vae.decode(latents)[:, :, 0], expected, atol=1e-4)
    wrong = model.write(
        tmp_path / "wrong.safetensors", {**weights, "vae.decoder.conv_in.weight": torch.zeros(32, 16, 3, 3)}
    )
    with pytest.raises(ValueError, match="does not fit the model"):
        calotype.load(model.file, encoders=model.pipe.encoders, vae=wrong)
    with pytest.raises(ValueError, match=f"^vae: {model.file}: the checkpoint holds no decoder.conv_in.weight$"):
        calotype.load(model.file, encoders=model.pipe.encoders, vae=model.file)


def test_variants(model: Model, tmp_path: Path) -> None:
    """Copies under other names are taken where they are asked for, of the parts that have them."""
    folder = shutil.copytree(model.folder, tmp_path / "model")
    file = folder / "transformer/diffusion_pytorch_model.safetensors"
    changed = {name: 1.5 * tensor for name, tensor in load_file(file).items()}
    save_file(changed, file.with_name("diffusion_pytorch_model.fp16.safetensors"))
    assert torch.equal(calotype.load(folder)(**RUN).latents, model.latents)
    other = calotype.load(folder, variant="fp16")
    assert not torch.equal(other(**RUN).latents, model.latents)
    assert "transformer/diffusion_pytorch_model.fp16.safetensors" in other.source.weights
    with pytest.raises(FileNotFoundError, match="has a variant 'bf16'"):
        calotype.load(folder, variant="bf16")


BROKEN = {
    "cut.safetensors": (lambda whole: whole[:-100], "is truncated"),
    "lfs.safetensors": (lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
    "page.safetensors": (lambda whole: b"<!doctype html>" + bytes(60), "error page of a failed download"),
    "torch.safetensors": (lambda whole: b"PK\x03\x04" + bytes(60), "pickled weights are never loaded"),
    "model.ckpt": (lambda whole: b"PK\x03\x04" + bytes(60), "pickled weights are never loaded"),
    "llm.safetensors": (lambda whole: b"GGUF" + bytes(60), "its name must end in .gguf"),
    "x.incomplete": (lambda whole: whole[:-100], "a download that did not finish"),
    "notes.txt": (lambda whole: b"hello", "a .txt file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_first(model: Model, tmp_path: Path, name: str) -> None:
    damage, message = BROKEN[name]
    (tmp_path / name).write_bytes(damage(model.file.read_bytes()))
    with pytest.raises(ValueError, match=message):
        calotype.load(tmp_path / name, encoders=model.folder, vae=model.folder)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (("img_in.weight", "txt_in.weight"), "nearest family is FLUX.1, of whose names 25% are there"),
        (("decoder.conv_in.weight", "encoder.conv_in.weight"), "an autoencoder alone, which is given as vae="),
        (("model.layers.0.self_attn.q_proj.weight",), "a language model, which calotype.load_language_model loads"),
        (("distilled_guidance_layer.in_proj.weight",), "it looks like Chroma"),
        (("a", "b", "c", "d"), "4 tensors, such as a, b, c; known are FLUX.1, "),
        (("img_in.weight", "img_in.weight.absmax"), "bitsandbytes"),
        (("img_in.qweight", "img_in.wscales"), "Nunchaku"),
        (("img_in.qzeros",), "GPTQ"),
    ],
)
def test_families_that_cannot_be_told(tmp_path: Path, tensors: tuple[str, ...], message: str) -> None:
    save_file({name: torch.zeros(1) for name in tensors}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=message):
        calotype.load(tmp_path / "x.safetensors")


def test_other_kinds_of_flux(model: Model, tmp_path: Path) -> None:
    fill = {**model.weights, "model.diffusion_model.img_in.weight": torch.zeros(32, 96)}
    with pytest.raises(ValueError, match=r"tokens have 96 values going in and 16 coming out; .* not Fill or Control"):
        calotype.load(model.write(tmp_path / "fill.safetensors", fill), encoders=model.folder, vae=model.folder)


def test_quantised_components_are_named(model: Model, tmp_path: Path) -> None:
    folder = shutil.copytree(model.folder, tmp_path / "model")
    config = folder / "transformer/config.json"
    entries = json.loads(config.read_text())
    config.write_text(json.dumps({**entries, "quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(ValueError, match="the weights are quantised \\(bitsandbytes\\)"):
        calotype.load(folder)


@pytest.mark.parametrize(
    ("part", "entry", "value"),
    [
        ("transformer", "num_layers", 10**9),
        ("text_encoder", "hidden_size", 10**12),
        ("text_encoder_2", "num_layers", 10**9),
        ("vae", "layers_per_block", 10**9),
    ],
)
def test_huge_sizes_are_refused_first(model: Model, tmp_path: Path, part: str, entry: str, value: int) -> None:
    folder = shutil.copytree(model.folder, tmp_path / "model")
    config = folder / part / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), entry: value}))
    with pytest.raises(ValueError, match=f"^{config}: {entry} is {value}; it can be at most"):
        calotype.load(folder)


def test_presets_of_dev_and_schnell() -> None:
    assert FluxConfig().guided is False
    assert SCHEDULERS[False].shift == 1.0
    assert not SCHEDULERS[False].use_dynamic_shifting
    assert SCHEDULERS[True].use_dynamic_shifting
