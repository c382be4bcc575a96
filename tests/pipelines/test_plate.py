"""A tiny plate: the contract with real parts, saving and loading."""

import json
import shutil
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeVAE
from PIL import Image
from torch import Tensor

import calotype
from calotype.denoisers.guidance import ClassifierFree
from calotype.denoisers.plate import PlateDenoiser
from calotype.pipelines.finite import NonFiniteError
from calotype.pipelines.image import ImagePipeline
from calotype.pipelines.load import bundled_folder, load
from calotype.pipelines.load_text import load_language_model
from calotype.schedulers import sampler_names

PROMPTS = ("a red fox", "two big yellow cats and a small tree on a beach", "")


def run(pipe: ImagePipeline, prompt: Any = PROMPTS[0], **arguments: Any) -> Tensor:
    return pipe(prompt, **({"seed": 7, "output_type": "latent"} | arguments)).latents


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("sampler", sampler_names())
def test_rows_alone(tiny_plate: ImagePipeline, sampler: str):
    batch = run(tiny_plate, PROMPTS, sampler=sampler, seed=[5, 6, 5])
    for row, seed in enumerate([5, 6, 5]):
        assert relative(batch[row], run(tiny_plate, PROMPTS[row], sampler=sampler, seed=seed)[0]) <= 1e-5


def test_batched_guidance_equals_two_passes(tiny_plate: ImagePipeline):
    batched = run(tiny_plate, PROMPTS[1], guidance=ClassifierFree(3.0))
    assert relative(batched, run(tiny_plate, PROMPTS[1], guidance=ClassifierFree(3.0, batched=False))) <= 1e-5
    assert relative(batched, run(tiny_plate, PROMPTS[1], guidance=ClassifierFree(1.0))) > 1e-3


def test_prompts_sizes_and_seeds_matter(tiny_plate: ImagePipeline):
    assert relative(run(tiny_plate, "a red fox"), run(tiny_plate, "a tree")) > 1e-4
    assert run(tiny_plate, height=48, width=64).shape == (1, 8, 1, 6, 8)


def test_call_is_decode_of_stream(tiny_plate: ImagePipeline):
    mask = Image.new("L", (32, 32), 0)
    mask.paste(255, (8, 8, 24, 24))
    shared: Any = {"image": Image.new("RGB", (32, 32), "red"), "mask_image": mask, "seed": 3, "strength": 0.7}
    called = tiny_plate("a tree", **shared)
    streamed = tiny_plate.decode(calotype_last(tiny_plate, **shared))
    assert called.pil()[0].tobytes() == streamed.pil()[0].tobytes()
    assert called.pil()[0].getpixel((2, 2)) == (255, 0, 0)


def calotype_last(pipe: ImagePipeline, **arguments: Any) -> Any:
    return list(pipe.stream("a tree", **arguments))[-1]


def test_threads(tiny_plate: ImagePipeline):
    expected = {steps: run(tiny_plate, num_inference_steps=steps) for steps in (3, 5)}
    results: dict[int, Tensor] = {}

    def work(steps: int) -> None:
        results[steps] = run(tiny_plate, num_inference_steps=steps)

    threads = [threading.Thread(target=work, args=(steps,)) for steps in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[steps], expected[steps]) for steps in expected)


@pytest.mark.parametrize("block", [0, 1])
def test_a_broken_block_is_named(plate_folder: Path, block: int):
    pipe = load(plate_folder)
    assert isinstance(pipe.denoiser, PlateDenoiser)
    pipe.denoiser.blocks[block].mlp.down.weight[0, 0] = torch.nan  # type: ignore[index, union-attr, operator]
    with pytest.raises(NonFiniteError, match=f"step 0 of 3 .*, block {block} of 2"):
        pipe("a")


def test_saved_and_loaded_is_bit_equal(tiny_plate: ImagePipeline, plate_folder: Path, tmp_path: Path):
    loaded = load(plate_folder, attention="sdpa")
    assert loaded.recipe == tiny_plate.recipe
    assert torch.equal(run(loaded), run(tiny_plate))
    assert loaded("a", seed=1).pil()[0].tobytes() == tiny_plate("a", seed=1).pil()[0].tobytes()
    loaded.save(tmp_path / "deep" / "again")
    files = sorted(path.name for path in (tmp_path / "deep" / "again").iterdir())
    assert files == sorted(path.name for path in plate_folder.iterdir())
    assert all(
        (plate_folder / file).read_bytes() == (tmp_path / "deep" / "again" / file).read_bytes() for file in files
    )


def test_a_saved_folder_that_rots_is_refused(tiny_plate: ImagePipeline, tmp_path: Path):
    tiny_plate.save(tmp_path)
    file = tmp_path / "denoiser.safetensors"
    data = bytearray(file.read_bytes())
    data[-40:] = bytes(40)
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"denoiser.safetensors is damaged: its sha256 is"):
        load(tmp_path)


def test_the_manifest_names_the_weights(plate_folder: Path):
    pipe = load(plate_folder)
    assert pipe.source.name == str(plate_folder.resolve())
    assert set(pipe.source.weights) == {
        "denoiser.safetensors",
        "vae.safetensors",
        "language.safetensors",
        "tokenizer.json",
    }
    assert pipe("a").manifest.weights == pipe.source.weights  # type: ignore[union-attr]


def test_preview_is_saved(tiny_plate: ImagePipeline, plate_folder: Path, tmp_path: Path):
    loaded = load(plate_folder)
    assert loaded.preview_projection is not None and tiny_plate.preview_projection is not None
    assert torch.equal(loaded.preview_projection.weight, tiny_plate.preview_projection.weight)
    step = next(iter(loaded.stream("a", seed=1)))
    assert loaded.preview(step)[0].size == (4, 4)
    replace(loaded, preview_projection=None).save(tmp_path)
    assert load(tmp_path).preview_projection is None


def test_bfloat16(tiny_plate: ImagePipeline, plate_folder: Path):
    half = tiny_plate.to(dtype="bfloat16")
    assert isinstance(half.denoiser, PlateDenoiser) and isinstance(tiny_plate.denoiser, PlateDenoiser)
    assert half.denoiser.output.weight.dtype is torch.bfloat16
    assert tiny_plate.denoiser.output.weight.dtype is torch.float32
    step = list(half.stream("a red fox", seed=7))[-1]
    assert step.latents.dtype is step.denoised.dtype is torch.float32
    assert relative(step.latents, run(tiny_plate)) < 0.1
    assert half("a", image=Image.new("RGB", (32, 32)), seed=1).pil()[0].size == (32, 32)
    assert torch.equal(run(load(plate_folder, dtype=torch.bfloat16)), run(half))
    noise = [pipe.encode(calotype.Request(prompt="a", seed=3)).noise[0] for pipe in (half, tiny_plate)]
    assert torch.equal(*noise)


def test_to_without_change_shares_the_weights(tiny_plate: ImagePipeline):
    same = tiny_plate.to("cpu")
    assert isinstance(same.denoiser, PlateDenoiser) and isinstance(tiny_plate.denoiser, PlateDenoiser)
    assert same is not tiny_plate
    assert same.denoiser.output.weight.data_ptr() == tiny_plate.denoiser.output.weight.data_ptr()
    with pytest.raises(ValueError, match="dtype is int8"):
        tiny_plate.to(dtype="int8")


def test_a_long_prompt_is_a_warning(tiny_plate: ImagePipeline):
    long = "a red fox and " * 20
    assert "left out" in tiny_plate(long, output_type="latent").warnings[0]


def test_the_language_model(plate_folder: Path):
    model = load_language_model(plate_folder)
    assert model.generate("a red", max_tokens=3, seed=1).token_ids


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_attention_backends_agree(tiny_plate: ImagePipeline, plate_folder: Path, attention: str):
    pipe = load(plate_folder, attention=attention)
    assert relative(run(pipe), run(tiny_plate)) <= 1e-4
    assert pipe("a").manifest.attention == attention  # type: ignore[union-attr]


@pytest.mark.parametrize("file", ["denoiser.safetensors", "vae.safetensors", "language.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "garbage", "missing"])
def test_damaged_weights(plate_folder: Path, tmp_path: Path, file: str, damage: str):
    folder = tmp_path / "model"
    shutil.copytree(plate_folder, folder)
    data = (folder / file).read_bytes()
    if damage == "missing":
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(data[: len(data) // 2] if damage == "truncated" else b"x" * 100)
    with pytest.raises(FileNotFoundError if damage == "missing" else ValueError, match=file):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "flux"}, "family is 'flux'; the only family that loads today is 'plate'"),
        ({"denoiser": {"depth": 3}}, "config's denoiser does not fit PlateDenoiserConfig: .*depth"),
        ({"denoiser": [3]}, r"config's denoiser is \[3\]"),
        ({"recipe": {"steps": 3}}, "recipe has unknown entries steps"),
        ({"text": {"layer": 9}}, "layer is 9; the language model has layers 0 to 3"),
        ({"vae": {"latent_channels": 4}}, "does not fit the model"),
        ({"denoiser": {"width": "wide"}}, "config's denoiser has width 'wide'; it must be of type <class 'int'>"),
        ({"denoiser": {"layers": 10**9}}, "config.json: denoiser.layers is 1000000000; it can be at most 1024 here"),
        ({"denoiser": {"width": 0}}, r"config.json: config's denoiser has width 0; it must be more than 0"),
        ({"denoiser": {"frame_offset": -1}}, r"config.json: .* frame_offset -1; it must be 0 or more"),
        (
            {"vae": {"encoder_widths": [8, -8]}},
            r"config.json: config's vae has encoder_widths \(8, -8\); it must be more",
        ),
        ({"text": {"max_tokens": 0}}, "config.json: config's text has max_tokens 0; it must be more than 0"),
        ({"recipe": {"sampler": "warp"}}, "config.json: recipe's sampler is 'warp'"),
        (
            {"denoiser": {"rotary_axes": [4, 6]}},
            r"config's denoiser has rotary_axes \(4, 6\); it must be of type tuple",
        ),
        (
            {"sha256": {"vae.safetensors": "0" * 64}},
            r"vae.safetensors is damaged: its sha256 is \w+\.\.\. instead of 0",
        ),
    ],
)
def test_wrong_configs(plate_folder: Path, tmp_path: Path, change: dict[str, Any], message: str):
    folder = tmp_path / "model"
    shutil.copytree(plate_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        load(folder)
    for text in ("{", "[" * 100_000):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match="not a config file"):
            load(folder)


def test_without_a_network(plate_folder: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load(plate_folder)("a fox").images
    assert load_language_model(plate_folder).generate("a", max_tokens=1).token_ids
    with pytest.raises(FileNotFoundError, match="'some/model' is not downloaded yet, and the hub cannot be reached"):
        load("some/model")


def test_sources(tmp_path: Path):
    (tmp_path / "diffusers").mkdir()
    (tmp_path / "diffusers" / "model_index.json").write_text('{"_class_name": "KolorsPipeline"}')
    (tmp_path / "a.safetensors").write_bytes(b"")
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for source, looks in {
        str(tmp_path): r"a folder without a config.json or a model_index.json; it holds a.safetensors, .*; supported",
        str(tmp_path / "diffusers"): "a diffusers folder of KolorsPipeline, which needs .*; supported today are FLUX",
        str(tmp_path / "llm"): "a language model's folder, which calotype.load_language_model may load; supported",
    }.items():
        with pytest.raises(ValueError, match=f"cannot load '{source}', {looks}"):
            load(source)
    with pytest.raises(ValueError, match="it is empty"):
        load(tmp_path / "a.safetensors")
    with pytest.raises(FileNotFoundError, match=r"no file or folder 'nowhere', .*; supported today are 'plate'"):
        load("nowhere")
    with pytest.raises(ValueError, match="cannot load 3, of type int; supported today are 'plate'"):
        load(3)  # type: ignore[arg-type]
    assert bundled_folder().parent.name == "plate"


@pytest.mark.parametrize(
    "name", ["denoiser", "vae", "encoders", "tokenizers", "offload", "revision", "variant", "token"]
)
def test_arguments_that_plate_does_not_use(plate_folder: Path, name: str):
    with pytest.raises(ValueError, match=f"{name}: .* does not use this argument"):
        load(plate_folder, **{name: "x"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "toaster"}, "device is 'toaster'"),
        ({"dtype": "int4"}, "dtype is int4"),
        ({"attention": "slow"}, "attention is 'slow'; it must be one of reference, sdpa"),
    ],
)
def test_wrong_places(plate_folder: Path, arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        load(plate_folder, **arguments)


def test_what_cannot_be_saved(tiny_plate: ImagePipeline, tmp_path: Path):
    with pytest.raises(ValueError, match="cannot save PlateDenoiser, FakeVAE"):
        replace(tiny_plate, vae=FakeVAE()).save(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot make this folder"):
        tiny_plate.save(tmp_path / "file")
