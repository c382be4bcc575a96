"""Pipelines saved as folders in diffusers' layout: the same weights, files and pictures."""

import dataclasses
import json
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import calotype
from calotype.encoders.weighting import WeightedEncoder
from calotype.pipelines.origin import IndexedFamily, ScheduledFamily
from calotype.vae.tiling import Tiling

from ..tiny_families import FAMILIES, SIZE, SIZES
from ..tiny_flux import flux_pipeline
from ..tiny_flux import in_original_layout as flux_file
from ..tiny_qwen_image import qwen_image_edit_pipeline
from ..tiny_sd import sd_pipeline, sdxl_pipeline
from ..tiny_sd3 import in_original_layout as sd3_file

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

MAKERS: dict[str, Callable[[Path], Any]] = {
    **FAMILIES,
    "qwen-image-edit": qwen_image_edit_pipeline,
    "sd": sd_pipeline,
    "sdxl": sdxl_pipeline,
    "sdxl-refiner": lambda folder: sdxl_pipeline(folder, refiner=True),
}
NOT_OURS = {"feature_extractor", "image_encoder", "safety_checker"}


@pytest.fixture(scope="module", params=list(MAKERS))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A name, and a folder that diffusers saved."""
    folder = tmp_path_factory.mktemp("saving") / request.param
    MAKERS[request.param](folder)
    return request.param, folder


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a small FLUX.1 whose heads are wide enough to be told from shapes."""
    folder = tmp_path_factory.mktemp("saving") / "dev"
    flux_pipeline(True, folder, attention_head_dim=32, num_attention_heads=1, axes_dims_rope=(4, 14, 14))
    return folder


def latents(pipe: calotype.ImagePipeline, name: str) -> torch.Tensor:
    height, width = SIZES.get(name, SIZE)
    arguments: dict[str, Any] = {"height": height, "width": width, "num_inference_steps": 2}
    if name == "sdxl-refiner":
        arguments |= {"image": torch.linspace(0, 1, 3 * 24 * 40).view(3, 24, 40), "strength": 1.0}
    if name == "qwen-image-edit":
        arguments |= {"image": torch.linspace(0, 1, 3 * 32 * 32).view(3, 32, 32), "height": 32, "width": 32}
        small = dataclasses.replace(pipe.editing, seen=64**2, read=64**2, made=64**2)
        pipe = dataclasses.replace(pipe, editing=small)
    result = pipe("a photo of a red fox", seed=3, progress=False, output_type="latent", **arguments)
    return result.latents


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model, by component and name."""
    files = folder.glob("*/*.safetensors")
    return {f"{file.parent.name}/{key}": tensor for file in files for key, tensor in load_file(file).items()}


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_all_weights_and_configs_come_back(family: tuple[str, Path], tmp_path: Path) -> None:
    """Those of parts that we never read among them; files that stay away are read as they are written."""
    name, folder = family
    offload = "encoders" if name.startswith("sd") and name != "sd3" else "blocks"
    pipe = calotype.load(folder, offload=offload)
    target = tmp_path / "deep" / "saved"
    pipe.save(target)
    theirs, ours = weights(folder), weights(target)
    assert ours.keys() == theirs.keys()
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []
    assert {each.dtype for each in ours.values()} == {each.dtype for each in theirs.values()}
    assert files(target) >= files(folder)
    for path in (*folder.glob("*/config.json"), *folder.glob("*/scheduler_config.json")):
        assert json.loads((target / path.relative_to(folder)).read_text()) == json.loads(path.read_text())
    index, old = (json.loads((each / "model_index.json").read_text()) for each in (target, folder))
    assert all(index[key] == value for key, value in old.items() if key not in NOT_OURS)
    assert [path.name for path in target.parent.iterdir()] == ["saved"]


def test_pictures_are_bit_equal(family: tuple[str, Path], tmp_path: Path) -> None:
    """Also where the weights were changed in memory since they were read, and in another dtype."""
    name, folder = family
    pipe = calotype.load(folder, dtype="bfloat16")
    with torch.no_grad():
        for module in (pipe.denoiser, *(vars(each).get("model") for each in pipe.encoders.values())):
            for parameter in () if module is None else module.parameters():
                if not parameter.is_meta:
                    parameter.mul_(0.75)
    pipe.save(tmp_path / "saved")
    again = calotype.load(tmp_path / "saved", dtype="bfloat16")
    assert again.recipe == pipe.recipe
    assert torch.equal(latents(again, name), latents(pipe, name))
    stored = weights(tmp_path / "saved").values()
    assert {each.dtype for each in stored if each.is_floating_point()} <= {torch.bfloat16, torch.float32}


def test_diffusers_loads_it(family: tuple[str, Path], tmp_path: Path) -> None:
    import diffusers

    name, folder = family
    if name == "qwen-image-edit":
        pytest.skip("diffusers' processor of pictures needs torchvision")
    pipe = calotype.load(folder)
    pipe.save(tmp_path / "saved")
    old, new = (diffusers.DiffusionPipeline.from_pretrained(each) for each in (folder, tmp_path / "saved"))
    assert type(old) is type(new)
    for key in ("transformer", "unet", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
        before, after = old.components.get(key), new.components.get(key)
        assert (before is None) == (after is None)
        if before is not None:
            state = after.state_dict()
            assert all(torch.equal(value, state[place]) for place, value in before.state_dict().items())


def test_configs_are_made_again_where_there_are_none(family: tuple[str, Path], tmp_path: Path) -> None:
    """Of single files, that is; tiny ones of most families cannot be told from shapes."""
    name, folder = family
    pipe = calotype.load(folder)
    origin = pipe.origin
    assert origin is not None
    if isinstance(pipe.family, IndexedFamily):
        assert pipe.family.index().items() <= origin.index.items()
    assert isinstance(pipe.family, ScheduledFamily)
    own = pipe.family.scheduler.entries()
    nothing = dataclasses.replace(origin, configs={}, scheduler=own)
    dataclasses.replace(pipe, origin=nothing).save(tmp_path / "saved")
    again = calotype.load(tmp_path / "saved")
    assert (again.recipe, again.denoiser.config, again.vae.config) == (
        pipe.recipe,
        pipe.denoiser.config,
        pipe.vae.config,
    )
    theirs, ours = weights(folder), weights(tmp_path / "saved")
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    assert torch.equal(latents(again, name), latents(pipe, name))


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_a_file_becomes_a_folder(name: str, flux: Path, tmp_path: Path) -> None:
    """Names, configs and an index that the file does not have are those that diffusers knows."""
    folder = flux
    if name == "sd3":
        folder = tmp_path / "folder"
        MAKERS["sd3"](folder)
    source = calotype.load(folder)
    stored = load_file(folder / "transformer/diffusion_pytorch_model.safetensors")
    convert = flux_file if name == "flux" else sd3_file
    save_file(convert(stored, source.denoiser.config), tmp_path / "one.safetensors")
    pipe = calotype.load(tmp_path / "one.safetensors", encoders=folder, vae=folder / "vae")
    pipe.save(tmp_path / "saved")
    assert weights(tmp_path / "saved").keys() == weights(folder).keys()
    written = load_file(tmp_path / "saved/transformer/diffusion_pytorch_model.safetensors")
    assert all(torch.equal(written[key], value) for key, value in stored.items())
    again = calotype.load(tmp_path / "saved")
    assert again.denoiser.config == pipe.denoiser.config
    assert (again.family, again.recipe) == (pipe.family, pipe.recipe)
    assert torch.equal(latents(again, name), latents(pipe, name))


def test_encoders_of_another_pipeline_are_those_that_are_saved(flux: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    flux_pipeline(True, other, attention_head_dim=32, num_attention_heads=1, axes_dims_rope=(4, 14, 14))
    file = other / "text_encoder/model.safetensors"
    save_file({key: 2 * value for key, value in load_file(file).items()}, file)
    pipe = calotype.load(flux)
    changed = dataclasses.replace(pipe, encoders={**pipe.encoders, "clip": calotype.load(other).encoders["clip"]})
    changed.save(tmp_path / "saved")
    saved = weights(tmp_path / "saved")
    assert all(torch.equal(saved[f"text_encoder/{key}"], value) for key, value in load_file(file).items())
    assert torch.equal(latents(calotype.load(tmp_path / "saved"), "flux"), latents(changed, "flux"))


def changed_encoder(pipe: calotype.ImagePipeline, change: Callable[[Any], Any], role: str = "clip") -> Any:
    return dataclasses.replace(pipe, encoders={**pipe.encoders, role: change(pipe.encoders[role])})


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a setting": (
        lambda pipe: changed_encoder(pipe, lambda each: dataclasses.replace(each, long_prompts="chunks")),
        r"encoders\['clip'\]: its long_prompts is 'chunks', which a folder does not hold.* 'cut'",
    ),
    "weights in prompts": (
        lambda pipe: changed_encoder(pipe, lambda each: WeightedEncoder(encoder=each)),
        r"encoders\['clip'\]: a WeightedEncoder has no place",
    ),
    "a tokenizer": (
        lambda pipe: changed_encoder(pipe, lambda each: dataclasses.replace(each, tokenizer=type(each.tokenizer)())),
        r"encoders\['clip'\]: its tokenizer is not the one of",
    ),
    "made in memory": (
        lambda pipe: changed_encoder(pipe, lambda each: dataclasses.replace(each, origin=None)),
        r"encoders\['clip'\]: this ClipEncoder was not loaded from files",
    ),
    "no encoder": (
        lambda pipe: dataclasses.replace(pipe, encoders={"clip": pipe.encoders["clip"]}),
        "encoders for 'clip'; this family has 'clip', 't5'",
    ),
    "a recipe": (
        lambda pipe: dataclasses.replace(pipe, recipe=dataclasses.replace(pipe.recipe, num_inference_steps=9)),
        "cannot save recipe: it is not the one that was loaded",
    ),
    "tiles": (
        lambda pipe: dataclasses.replace(pipe, vae=dataclasses.replace(pipe.vae, tiling=Tiling())),
        "cannot save vae: its tiling is Tiling",
    ),
    "a denoiser": (lambda pipe: dataclasses.replace(pipe, denoiser=object()), "cannot save denoiser: a object has"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_folder_cannot_hold_is_refused(change: str, flux: Path, tmp_path: Path) -> None:
    make, message = CHANGES[change]
    with pytest.raises(ValueError, match=message):
        make(calotype.load(flux)).save(tmp_path / "new" / "saved")
    assert list(tmp_path.iterdir()) == []


def test_where_it_cannot_be_saved(flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, before = calotype.load(flux), files(flux)
    with pytest.raises(ValueError, match="is not empty; pipelines are saved to new folders"):
        pipe.save(flux)
    assert files(flux) == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file, not a folder"):
        pipe.save(tmp_path / "file")
    with pytest.raises(ValueError, match=r"cannot write .*: "):
        pipe.save(tmp_path / "file" / "below")
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"it takes 0.00 GB, 0.00 GB are free"):
        pipe.save(tmp_path / "full")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_fills_up_leaves_nothing(flux: Path, tmp_path: Path) -> None:
    pipe = calotype.load(flux)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(ValueError, match=r"cannot write .*/saved: "):
            pipe.save(tmp_path / "deep" / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    pipe.save(tmp_path)  # an empty folder
    assert torch.equal(latents(calotype.load(tmp_path), "flux"), latents(pipe, "flux"))


def test_files_that_changed_since_are_not_mixed_in(flux: Path, tmp_path: Path) -> None:
    calotype.load(flux).save(tmp_path / "copy")
    pipe = calotype.load(tmp_path / "copy")
    file = tmp_path / "copy/text_encoder/model.safetensors"
    save_file({key: value.half() for key, value in load_file(file).items()}, file)
    with pytest.raises(ValueError, match="text_encoder has changed since it was loaded"):
        pipe.save(tmp_path / "saved")
    file.unlink()
    with pytest.raises(FileNotFoundError, match="cannot save encoders"):
        pipe.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
