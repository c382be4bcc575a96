"""Single files that hold all weights of a model, in the layouts that they are published in: they are the folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import calotype
from calotype.pipelines.image import ImagePipeline

from ..gguf_files import write_gguf
from ..tiny_whole import DENOISER, FAMILIES, Whole, sd, sd2, sdxl, sdxl_refiner, without

RUN: dict[str, Any] = {"prompt": "a photo of a cat", "height": 64, "width": 96, "seed": 3, "num_inference_steps": 2}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@dataclass(frozen=True)
class Made:
    """A model on disk."""

    whole: Whole
    folder: Path
    file: Path


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(FAMILIES[request.param](), tmp_path_factory.mktemp("whole") / request.param)


@pytest.fixture(scope="module")
def stable(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(sd(), tmp_path_factory.mktemp("stable") / "sd")


def make(whole: Whole, folder: Path) -> Made:
    return Made(whole, folder, whole.save(folder))


def modules(pipe: ImagePipeline) -> dict[str, nn.Module]:
    """The encoders' and the autoencoder's."""
    found: dict[str, Any] = {"vae": vars(pipe.vae)["module"]}
    for role, encoder in pipe.encoders.items():
        parts = vars(encoder)
        found[role] = parts.get("model") or parts["language_model"]
    return found


def test_the_file_is_the_folder(made: Made) -> None:
    """Bit-equal weights and pictures, with no more given than tokenizers."""
    pipe, expected = calotype.load(made.file, tokenizers=made.folder), calotype.load(made.folder)
    theirs = modules(expected)
    for name, module in modules(pipe).items():
        weights, others = module.state_dict(), theirs[name].state_dict()
        assert weights.keys() == others.keys()
        assert all(torch.equal(weight, others[key]) for key, weight in weights.items()), name
    assert pipe.recipe == expected.recipe
    one, other = (each(**RUN, output_type="pt") for each in (pipe, expected))
    assert torch.equal(one.latents, other.latents)
    assert torch.equal(torch.as_tensor(one.images), torch.as_tensor(other.images))


def test_offloaded_parts_are_read_from_the_file(made: Made) -> None:
    pipe = calotype.load(made.file, tokenizers=made.folder, offload="encoders")
    whole = calotype.load(made.file, tokenizers=made.folder)
    run = {**RUN, "num_inference_steps": 1, "output_type": "latent"}
    assert torch.equal(pipe(**run).latents, whole(**run).latents)


def test_conversions_are_those_of_diffusers(made: Made) -> None:
    """What it makes of the text encoders in the file."""
    from diffusers.loaders import single_file_utils as theirs

    weights, pipe = load_file(made.file), calotype.load(made.file, tokenizers=made.folder)
    found: dict[str, dict[str, torch.Tensor]] = {}
    prefixes = [name.removesuffix("text_projection") for name in weights if name.endswith("model.text_projection")]
    if "clip_2" in pipe.encoders and prefixes:
        model: Any = modules(pipe)["clip_2"]
        found["clip_2"] = theirs.convert_open_clip_checkpoint(model, weights, prefix=prefixes[0])
    elif "clip_2" in pipe.encoders:
        found["clip_2"] = theirs.convert_ldm_clip_checkpoint(weights, "text_encoders.clip_g.transformer.")
    if "clip" in pipe.encoders:  # of SD3 diffusers makes the projection the identity
        found["clip"] = theirs.convert_ldm_clip_checkpoint(weights, "text_encoders.clip_l.transformer.")
        found["clip"].pop("text_projection.weight", None)
    if "clip_2" not in pipe.encoders and prefixes:  # of Stable Diffusion 2: a last layer and a projection are left out
        model = modules(pipe)["clip"]
        converted = theirs.convert_open_clip_checkpoint(model, weights, prefix=prefixes[0])
        unread = (".layers.2.", "text_projection")
        found["clip"] = {name: x for name, x in converted.items() if not any(part in name for part in unread)}
        assert len(found["clip"]) == len(model.state_dict())
    if "t5" in pipe.encoders:
        found["t5"] = theirs.convert_sd3_t5_checkpoint_to_diffusers(weights)
    assert found.keys() == pipe.encoders.keys() - {"llm"}
    for role, converted in found.items():
        ours = modules(pipe)[role].state_dict()
        for name, weight in converted.items():
            ids = name.endswith("position_ids")
            key = name if name in ours else name.removeprefix("text_model.")
            assert ids or torch.equal(ours[key], weight), (role, name)


def test_what_the_file_lacks_is_named(stable: Made, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing are the tokenizer of 'clip'") as one:
        calotype.load(stable.file)
    alone = "a folder in diffusers' layout, or a hub id, as tokenizers= gives all tokenizers"
    assert str(one.value).endswith(f"(tokenizers={{'clip': folder}}); {alone}")
    assert "holds the denoiser, the text encoder 'clip' and the autoencoder of Stable Diffusion 1 or 2" in str(
        one.value
    )
    bare = make(without(stable.whole, "cond_stage_model.", "first_stage_model."), tmp_path / "bare")
    with pytest.raises(ValueError, match=r"holds the denoiser of .* the text encoder 'clip' .* the autoencoder") as all:
        calotype.load(bare.file)
    assert str(all.value).endswith("as encoders= gives all encoders and tokenizers, as vae= the autoencoder")
    with pytest.raises(ValueError, match="missing are the autoencoder") as last:
        calotype.load(bare.file, encoders=stable.folder)
    assert str(last.value).endswith("a folder in diffusers' layout, or a hub id, as vae= gives the autoencoder")
    pipe = calotype.load(bare.file, encoders=stable.file, tokenizers=stable.folder, vae=stable.file)
    assert torch.equal(pipe(**RUN).latents, calotype.load(stable.folder)(**RUN).latents)


def test_given_parts_come_first(stable: Made, tmp_path: Path) -> None:
    """An encoder's own file, as ComfyUI takes it, and a folder's."""
    weights = load_file(stable.folder / "text_encoder/model.safetensors")
    save_file({f"text_model.{name}": 1.1 * x for name, x in weights.items()}, tmp_path / "clip_l.safetensors")
    other = calotype.load(stable.file, encoders=tmp_path / "clip_l.safetensors", tokenizers=stable.folder)
    same = calotype.load(stable.file, encoders=stable.folder)
    latents = calotype.load(stable.folder)(**RUN).latents
    assert torch.equal(same(**RUN).latents, latents)
    assert not torch.equal(other(**RUN).latents, latents)
    with pytest.raises(ValueError, match=r"tokenizers: .* is a file; tokenizers are folders"):
        calotype.load(stable.file, tokenizers=stable.file)


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        ("control_model.x.weight", (2,), r"1 of .* tensors belong to no part that is known \(control_model.x"),
        ("cond_stage_model.transformer.text_model.more.weight", (2,), "match nothing \\(text_model.more.weight\\)"),
        (
            "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight",
            (50, 100),
            "no text encoder can be read from cond_stage_model.transformer.: states are 100 wide, .* multiple of 64",
        ),
    ],
)
def test_files_that_are_strange(stable: Made, tmp_path: Path, key: str, shape: tuple[int, ...], message: str) -> None:
    save_file({**load_file(stable.file), key: torch.zeros(shape)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=message):
        calotype.load(tmp_path / "x.safetensors", tokenizers=stable.folder)


def test_inspect_tells_what_is_there(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    from calotype.cli import main

    assert main(["inspect", str(made.file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parts = {part["name"]: part for part in found["components"]}
    assert set(parts) == {name for name in made.whole.parts if "tokenizer" not in name and name != "scheduler"}
    tokenizers = sum("tokenizer" in name for name in made.whole.parts)
    assert len(found["missing"]) == tokenizers
    assert all(line.startswith("the tokenizer of ") for line in found["missing"])
    assert found["advice"] == "a folder in diffusers' layout, or a hub id, as tokenizers= gives all tokenizers"
    vae = load_file(made.folder / "vae/diffusion_pytorch_model.safetensors")
    assert parts["vae"]["parameters"] == sum(x.numel() for x in vae.values())


def test_inspect_tells_of_encoders_that_not_all_of_a_family_need(tmp_path: Path) -> None:
    """The base of Stable Diffusion XL reads the smaller CLIP, its refiner does not."""
    from calotype.pipelines.inspection import inspect_model

    whole = without(sdxl(), "conditioner.embedders.0.")
    found = inspect_model(make(whole, tmp_path / "base").file).missing
    assert "the text encoder 'clip' (encoders={'clip': folder})" in found
    assert "the tokenizer of 'clip' (tokenizers={'clip': folder})" in found
    found = inspect_model(make(sdxl_refiner(), tmp_path / "refiner").file).missing
    assert found == ("the tokenizer of 'clip_2' (tokenizers={'clip_2': folder})",)


@pytest.mark.parametrize("reshaped", [False, True])
def test_gguf(made: Made, tmp_path: Path, reshaped: bool) -> None:
    """As city96 writes it: the denoiser alone, without a prefix; of UNets, what has rows that are no whole blocks in
    another shape."""
    weights = {
        name.removeprefix(DENOISER): x.float() for name, x in load_file(made.file).items() if name.startswith(DENOISER)
    }
    file = tmp_path / f"{made.folder.name}.gguf"
    read = write_gguf(file, weights, reshaped=reshaped)
    assert any(not torch.equal(read[name], x) for name, x in weights.items())
    save_file(read, file.with_suffix(".safetensors"))
    rest: dict[str, Any] = {"encoders": made.folder, "vae": made.folder}
    one, other = (calotype.load(each, **rest)(**RUN).latents for each in (file, file.with_suffix(".safetensors")))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "prediction", "side"),
    [("v2-1_768", "v_prediction", 96), ("my-model", "v_prediction", 96), ("v2-1_512", "epsilon", 64)],
)
def test_names_tell_what_a_file_of_stable_diffusion_2_predicts(
    tmp_path: Path, name: str, prediction: str, side: int
) -> None:
    made = make(sd2(), tmp_path / name)
    pipe = calotype.load(made.file, tokenizers=made.folder)
    assert pipe.denoiser.prediction == prediction
    assert (pipe.recipe.width, pipe.recipe.height) == (2 * side, 2 * side)
    assert pipe.recipe.sampler.name == ("ddim" if prediction == "v_prediction" else "pndm")


def test_a_file_of_an_inpainting_model(tmp_path: Path) -> None:
    inpainting = make(sd(in_channels=9), tmp_path / "inpainting")
    picture = torch.rand(3, 64, 96, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(1, 64, 96)
    mask[:, 16:40, 8:64] = 1
    run = {"prompt": "a cat", "seed": 3, "num_inference_steps": 2, "image": picture, "mask_image": mask}
    pipe = calotype.load(inpainting.file, tokenizers=inpainting.folder)
    assert torch.equal(pipe(**run).latents, calotype.load(inpainting.folder)(**run).latents)


def test_saved_as_a_folder(made: Made, tmp_path: Path) -> None:
    """Under diffusers' and transformers' names, with configs that the file does not have."""
    pipe = calotype.load(made.file, tokenizers=made.folder)
    pipe.save(tmp_path / "saved")
    again, run = calotype.load(tmp_path / "saved"), {**RUN, "num_inference_steps": 1, "output_type": "latent"}
    assert again.recipe == pipe.recipe
    assert torch.equal(again(**run).latents, pipe(**run).latents)
    for file in made.folder.glob("*/*.safetensors"):
        saved, expected = (unprefixed(each) for each in (tmp_path / "saved" / file.relative_to(made.folder), file))
        assert expected.keys() <= saved.keys(), file
        assert all(torch.equal(saved[key], value) for key, value in expected.items())


def unprefixed(file: Path) -> dict[str, torch.Tensor]:
    """By names without the prefix that transformers takes away where a decoder is alone."""
    return {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
