"""Which pipelines of diffusers load as which family, which are refused; what a file is where nothing in it tells."""

import ast
import dataclasses
import importlib.util
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import calotype
from calotype.denoisers.qwen_image import CLEAN_REFERENCES_KEY
from calotype.pipelines.families import FAMILIES, FolderFamily, alike, family_named, family_of_class, family_of_folder
from calotype.pipelines.inspection import inspect_model
from calotype.pipelines.other_classes import MISSING, needs

from ..tiny_flux import flux_pipeline
from ..tiny_qwen_image import qwen_image_edit_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

DENOISERS = {
    **dict.fromkeys(("FLUX.1", "FLUX.1 Kontext"), "FluxTransformer2DModel"),
    **dict.fromkeys(("Qwen-Image", "Qwen-Image-Edit", "Qwen-Image-Edit-Plus"), "QwenImageTransformer2DModel"),
    **dict.fromkeys(("Stable Diffusion 1 or 2", "Stable Diffusion XL"), "UNet2DConditionModel"),
    "FLUX.2": "Flux2Transformer2DModel",
    "Stable Diffusion 3": "SD3Transformer2DModel",
    "Z-Image": "ZImageTransformer2DModel",
    "HunyuanVideo 1.5": "HunyuanVideo15Transformer3DModel",
    "Wan": "WanTransformer3DModel",
    "LTX-Video": "LTXVideoTransformer3DModel",
}
"""diffusers' class of each family's denoiser."""
IGNORED = frozenset(("safety_checker", "feature_extractor", "image_encoder", "tokenizer"))
"""Components that a family does without where its layout has none of that name: a processor holds the tokenizer."""
MADE_OF = r"^class (\w+Pipeline)\((?:(?!^class ).)*?def __init__\(\s*self,(.*?)\n    \):"
"""A class and the arguments that it is made of, in a source."""
PLAIN = {"bool", "float", "int", "str"}


def pipelines() -> Iterator[tuple[str, dict[str, str]]]:
    """Each pipeline of diffusers with a denoiser of ours: its components and their types, as its source says them."""
    spec = importlib.util.find_spec("diffusers")
    assert spec is not None and spec.submodule_search_locations is not None
    for file in sorted(Path(spec.submodule_search_locations[0]).glob("pipelines/**/pipeline_*.py")):
        source = file.read_text(encoding="utf-8")
        if any(name in source for name in DENOISERS.values()):
            for name, arguments in re.findall(MADE_OF, source, re.MULTILINE | re.DOTALL):
                yield name, dict(components(arguments))


def components(arguments: str) -> Iterator[tuple[str, str]]:
    """The arguments that a pipeline is made of, but for numbers and the like."""
    (function,) = ast.parse(f"def made({arguments}\n): ...").body
    assert isinstance(function, ast.FunctionDef)
    for each in function.args.args:
        kind = "" if each.annotation is None else ast.unparse(each.annotation)
        if not set(kind.replace("|", " ").split()) & PLAIN:
            yield each.arg, kind


def has_parts(family: FolderFamily, parts: dict[str, str]) -> bool:
    """Whether a pipeline's parts are a family's."""
    layout = family.layout
    known = {*layout.folders, *IGNORED}
    needed = {*layout.folders} - layout.may_lack
    denoiser = DENOISERS[family.title] in parts.get(layout.denoiser, "").replace("|", " ").split()
    return denoiser and needed <= {*parts} <= known


def test_every_pipeline_of_our_parts_is_loaded_or_refused_by_name() -> None:
    found = {
        name: titles
        for name, parts in pipelines()
        if (titles := [family.title for family in FAMILIES if has_parts(family, parts)])
    }
    taken = {name for family in FAMILIES for name in family.layout.classes}
    assert {"FluxFillPipeline", "StableDiffusionXLPAGPipeline", "QwenImageLayeredPipeline"} <= {*found} - taken
    assert len({*found} & taken) > 30
    for name, titles in found.items():
        family = family_of_class(name)
        assert (family is None) != (needs(name) == ""), f"{name} has the parts of {titles}"
        assert family is None or family.title in titles


def test_no_class_that_is_loaded_is_said_to_need_more() -> None:
    assert [name for family in FAMILIES for name in family.layout.classes if needs(name)] == []


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("FluxInpaintPipeline", "FLUX.1"),
        ("FluxKontextInpaintPipeline", "FLUX.1 Kontext"),
        ("Flux2KleinInpaintPipeline", "FLUX.2"),
        ("QwenImageImg2ImgPipeline", "Qwen-Image"),
        ("QwenImageInpaintPipeline", "Qwen-Image"),
        ("QwenImageEditInpaintPipeline", "Qwen-Image-Edit"),
        ("StableDiffusion3InpaintPipeline", "Stable Diffusion 3"),
        ("StableDiffusionXLInpaintPipeline", "Stable Diffusion XL"),
        ("LatentConsistencyModelImg2ImgPipeline", "Stable Diffusion 1 or 2"),
        ("ZImageImg2ImgPipeline", "Z-Image"),
        ("WanVideoToVideoPipeline", "Wan"),
    ],
)
def test_pipelines_of_other_tasks_are_their_family(tmp_path: Path, name: str, title: str) -> None:
    assert family_of_folder(named(tmp_path, name)).title == title


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("FluxFillPipeline", "a denoiser that reads the mask and the covered picture beside its latents"),
        ("FluxControlInpaintPipeline", "a denoiser that reads the latents of a control picture"),
        ("FluxControlNetPipeline", "a ControlNet beside its denoiser"),
        ("StableDiffusionXLControlNetUnionPipeline", "a ControlNet beside its denoiser"),
        ("StableDiffusion3PAGPipeline", "guidance by perturbed attention"),
        ("QwenImageLayeredPipeline", "a denoiser that makes several layers"),
        ("ZImageOmniPipeline", "a denoiser that reads SigLIP's states"),
        ("StableDiffusionXLInstructPix2PixPipeline", "a UNet that reads the latents of the picture to change"),
        ("WanVACEPipeline", "a denoiser that reads clips and masks"),
    ],
)
def test_other_networks_are_refused_before_anything_is_read(tmp_path: Path, name: str, missing: str) -> None:
    """There is nothing but the index to read."""
    message = rf"a diffusers folder of {name}, which needs {missing}[^;]*; supported today are FLUX\.1, "
    with pytest.raises(ValueError, match=message) as caught:
        calotype.load(named(tmp_path, name))
    assert "\n" not in str(caught.value)


def test_a_class_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a diffusers folder of KandinskyPipeline; supported today are"):
        calotype.load(named(tmp_path, "KandinskyPipeline"))
    marks = [mark for each in MISSING.values() for mark in each]
    assert len(marks) == len(set(marks))


def named(folder: Path, name: str) -> Path:
    """A folder of a pipeline without any part."""
    (folder / "model_index.json").write_text(json.dumps({"_class_name": name}))
    return folder


WIDE: dict[str, Any] = {"attention_head_dim": 32, "num_attention_heads": 1, "axes_dims_rope": (4, 14, 14)}
"""Heads whose rotary axes can be told."""
RUN: dict[str, Any] = {"num_inference_steps": 1, "height": 24, "width": 40, "seed": 3, "output_type": "latent"}


@pytest.fixture(scope="module")
def edit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of the first Qwen-Image-Edit, and a file of its denoiser, whose name says nothing."""
    folder = tmp_path_factory.mktemp("kinds") / "first"
    qwen_image_edit_pipeline(folder, "QwenImageEditPipeline", **WIDE)
    return folder, denoiser_file(folder, folder.with_name("model.safetensors"))


@pytest.fixture(scope="module")
def kontext(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same of FLUX.1 Kontext."""
    folder = tmp_path_factory.mktemp("kinds") / "kontext"
    flux_pipeline(True, folder, "FluxKontextPipeline", **WIDE)
    return folder, denoiser_file(folder, folder.with_name("model.safetensors"))


def denoiser_file(folder: Path, file: Path) -> Path:
    shutil.copy(folder / "transformer" / "diffusion_pytorch_model.safetensors", file)
    return file


def smaller(pipe: Any) -> Any:
    """Reads small copies of pictures."""
    if "sizes" in vars(pipe.editing):
        return dataclasses.replace(pipe, editing=dataclasses.replace(pipe.editing, sizes=((40, 24),)))
    return dataclasses.replace(pipe, editing=dataclasses.replace(pipe.editing, seen=50**2, read=50**2))


@pytest.mark.parametrize(
    ("kind", "name", "title"),
    [("edit", "qwen_image-edit", "Qwen-Image-Edit"), ("kontext", "flux.1-kontext", "FLUX.1 Kontext")],
)
def test_a_file_is_what_the_user_says(kind: str, name: str, title: str, request: Any, tmp_path: Path) -> None:
    """It edits as its folder does, is saved as what it is, and is taken for its nearest family where none is said."""
    folder, file = request.getfixturevalue(kind)
    whole, index = calotype.load(folder), json.loads((folder / "model_index.json").read_text())
    others = {"encoders": folder, "vae": folder}
    pipe = calotype.load(file, family=name, **others)
    assert (pipe.source.family, pipe.editing) == (whole.source.family, whole.editing)
    same = dataclasses.replace(pipe, family=dataclasses.replace(pipe.family, scheduler=whole.family.scheduler))
    shown = {"image": torch.rand(3, 24, 40, generator=torch.Generator().manual_seed(0)), **RUN}
    expected = smaller(whole)("a red fox", **shown).latents
    assert torch.equal(smaller(same)("a red fox", **shown).latents, expected)
    pipe.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/model_index.json").read_text())["_class_name"] == index["_class_name"]
    assert family_of_folder(tmp_path / "saved").title == title
    plain = calotype.load(file, **others)
    assert (plain.editing, plain.source.family) == (None, {"edit": "qwen-image", "kontext": "flux"}[kind])


def test_a_file_of_edit_plus_before_2511(edit: tuple[Path, Path]) -> None:
    folder, file = edit
    pipe = calotype.load(file, family="Qwen-Image-Edit-Plus", encoders=folder, vae=folder)
    assert pipe.editing.most is None
    component = calotype.load(folder / "transformer", family="Qwen-Image-Edit", encoders=folder, vae=folder)
    assert component.editing.most == 1


@pytest.mark.parametrize("name", ["qwen_image_edit_fp8.safetensors", "Qwen-Image-Edit-2509.safetensors"])
def test_a_name_that_says_what_nothing_else_does(edit: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    """It is asked for, not guessed."""
    folder, file = edit
    shutil.copy(file, tmp_path / name)
    message = "its name says 'edit', but nothing in it tells what it is; say it by family=, one of 'Qwen-Image', 'Qwen-"
    with pytest.raises(ValueError, match=message):
        calotype.load(tmp_path / name, encoders=folder, vae=folder)
    plain = calotype.load(tmp_path / name, family="Qwen-Image", encoders=folder, vae=folder)
    assert plain.source.family == "qwen-image"
    shutil.copy(file, tmp_path / "credit.safetensors")
    assert calotype.load(tmp_path / "credit.safetensors", encoders=folder, vae=folder).editing is None


def test_a_kontext_by_its_name(kontext: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copy(kontext[1], tmp_path / "flux1-dev-kontext_fp8.safetensors")
    with pytest.raises(ValueError, match=r"says 'kontext', .* one of 'FLUX\.1', 'FLUX\.1 Kontext'$"):
        calotype.load(tmp_path / "flux1-dev-kontext_fp8.safetensors")


def test_what_inspecting_says(edit: tuple[Path, Path], kontext: tuple[Path, Path], tmp_path: Path) -> None:
    assert inspect_model(edit[1]).others == ("Qwen-Image-Edit-Plus", "Qwen-Image-Edit")
    assert inspect_model(kontext[1]).others == ("FLUX.1 Kontext",)
    assert [inspect_model(each[0]).others for each in (edit, kontext)] == [(), ()]
    marked = {**load_file(edit[1]), CLEAN_REFERENCES_KEY: torch.zeros(0)}
    save_file(marked, tmp_path / "qwen_image_edit_2511.safetensors")
    found = inspect_model(tmp_path / "qwen_image_edit_2511.safetensors")
    assert (found.family, found.others) == ("Qwen-Image-Edit-Plus", ())


def test_which_families_files_cannot_be_told_apart() -> None:
    found = {family.title: [each.title for each in others] for family in FAMILIES if (others := alike(family))}
    assert found.pop("FLUX.1") == ["FLUX.1 Kontext"]
    assert found.pop("Qwen-Image") == ["Qwen-Image-Edit-Plus", "Qwen-Image-Edit"]
    assert {*found} <= {"FLUX.1 Kontext", "Qwen-Image-Edit"}  # which no file is taken for


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("Qwen", "family is 'Qwen'; it must be one of FLUX.1, FLUX.1 Kontext, "),
        (3, "family is of type int; it must be a name"),
        ("FLUX.2", "holds the denoiser of Qwen-Image; the denoiser of FLUX.2 is wanted"),
    ],
)
def test_families_that_it_is_not(edit: tuple[Path, Path], family: Any, message: str) -> None:
    folder, file = edit
    with pytest.raises(ValueError, match=message):
        calotype.load(file, family=family, encoders=folder, vae=folder)


def test_folders_say_what_they_are(edit: tuple[Path, Path]) -> None:
    folder, _ = edit
    assert calotype.load(folder, family="Qwen-Image-Edit").editing.most == 1
    with pytest.raises(ValueError, match=r"family is 'Qwen-Image'; .* says that it is Qwen-Image-Edit$"):
        calotype.load(folder, family="Qwen-Image")
    with pytest.raises(ValueError, match="family: plate does not use this argument"):
        calotype.load(family="FLUX.1")
    assert family_named("stable diffusion XL").title == "Stable Diffusion XL"
