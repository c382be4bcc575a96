"""Weights that come only in variants: the error says which to ask for."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import calotype
from calotype.pipelines.inspection import inspect_model
from calotype.pipelines.variants import check_variants, only_variants

from ..tiny_qwen_image import qwen_image_pipeline
from ..tiny_sd import sd_pipeline

RUN = {"height": 16, "width": 16, "num_inference_steps": 1, "seed": 0, "output_type": "latent"}


@pytest.fixture(scope="module")
def stable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "sd"
    sd_pipeline(folder)
    return folder


def in_variants(folder: Path, copy: Path, *variants: str) -> Path:
    """A copy of a model whose weights come in these variants alone."""
    shutil.copytree(folder, copy)
    for file in list(copy.rglob("*.safetensors")):
        for variant in variants:
            shutil.copy(file, file.with_name(f"{file.stem}.{variant}.safetensors"))
        file.unlink()
    return copy


def test_the_only_variant_is_named(stable: Path, tmp_path: Path) -> None:
    copy = in_variants(stable, tmp_path / "copy", "fp16")
    with pytest.raises(ValueError, match=r"text_encoder has its weights only in variants: pass variant='fp16'$"):
        calotype.load(copy)
    with pytest.raises(FileNotFoundError, match=r"none of .* has a variant 'bf16'|no model"):
        calotype.load(copy, variant="bf16")
    pipe, same = calotype.load(copy, variant="fp16"), calotype.load(stable)
    assert (pipe("a fox", **RUN).latents == same("a fox", **RUN).latents).all()


def test_inspection_of_a_variant(stable: Path, tmp_path: Path) -> None:
    copy = in_variants(stable, tmp_path / "copy", "fp16")
    refused = inspect_model(copy).refused
    assert refused is not None and refused.endswith("has its weights only in variants: pass variant='fp16'")
    with pytest.raises(FileNotFoundError, match=r"none of .* has a variant 'bf16'|no model"):
        inspect_model(copy, "bf16")
    found, wanted = inspect_model(copy, "fp16"), inspect_model(stable)
    assert found.refused is None and found.parameters == wanted.parameters
    (unet,) = (part for part in found.components if part.name == "unet")
    assert unet.path.endswith(".fp16.safetensors")


def test_what_has_no_variants(stable: Path, tmp_path: Path) -> None:
    (file,) = (stable / "unet").glob("*.safetensors")
    for source in ("plate", file):
        with pytest.raises(ValueError, match=r"variant is 'fp16'; .* has one copy of its weights and takes none"):
            inspect_model(source, "fp16")


def test_shards_of_several_variants_with_indices(stable: Path, tmp_path: Path) -> None:
    """The index of a variant does not tell which one is meant."""
    names = [f"model.{kind}-0000{n}-of-00002.safetensors" for kind in ("fp16", "ema") for n in (1, 2)]
    names += [f"model.{kind}.safetensors.index.json" for kind in ("fp16", "ema")]
    with pytest.raises(ValueError, match=r"here has its weights only in variants: pass variant='ema' or"):
        check_variants("here", names, None)


def test_one_of_several_must_be_told(stable: Path, tmp_path: Path) -> None:
    copy = in_variants(stable, tmp_path / "copy", "fp16", "ema")
    with pytest.raises(
        ValueError, match=r"unet has its weights only in variants: pass variant='ema' or variant='fp16'"
    ):
        calotype.load(copy)


def test_another_mistake_stays_what_it_is(stable: Path, tmp_path: Path) -> None:
    """That weights come in variants is told only where they are what is not found."""
    copy = in_variants(stable, tmp_path / "copy", "fp16")
    (copy / "text_encoder/config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config.json"):
        calotype.load(copy, variant="fp16")


def test_a_single_file_is_no_question(tmp_path: Path) -> None:
    """Where each part has one file, and is read whatever that is called, nothing needs to be told."""
    qwen_image_pipeline(tmp_path / "qwen")
    calotype.load(in_variants(tmp_path / "qwen", tmp_path / "copy", "fp16"))


def test_shards_of_a_variant(stable: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(stable, tmp_path / "copy")
    (file,) = (copy / "unet").glob("*.safetensors")
    weights = sorted(load_file(file).items())
    for n, part in enumerate((weights[::2], weights[1::2]), start=1):
        save_file(dict(part), file.with_name(f"{file.stem}.fp16-0000{n}-of-00002.safetensors"))
    file.unlink()
    with pytest.raises(ValueError, match=r"unet has its weights only in variants: pass variant='fp16'$"):
        calotype.load(copy)


@pytest.mark.parametrize(
    ("names", "variants"),
    [
        (["model.fp16.safetensors"], ("fp16",)),
        (["model-00001-of-00002.fp16.safetensors", "model.bf16-00001-of-00002.safetensors"], ("bf16", "fp16")),
        (["model.fp16.safetensors", "model.safetensors"], ()),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], ()),
        (["wan2.1_t2v.safetensors", "model.fp16.safetensors"], ()),
        ([], ()),
    ],
)
def test_names(names: list[str], variants: tuple[str, ...]) -> None:
    assert only_variants(names) == variants


def test_an_index_says_which_files_are_read() -> None:
    names = ["model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors"]
    with pytest.raises(ValueError, match=r"^it has its weights only in variants"):
        check_variants("it", names, None)
    check_variants("it", [*names, "model.fp16.safetensors.index.json"], None)
    check_variants("it", names, "fp16")
