"""Checkpoints of the autoencoder of SD, SDXL, SD3 and FLUX.1: the names in them, configs, and damaged ones."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from original_layouts import is_linear, kl, renamed
from safetensors.torch import load_file, save_file
from tiny_kl import KINDS, WEIGHTS, copied, edit_config, save
from torch import Tensor

from calotype.vae.kl import KLAutoencoder, load_kl, load_kl_file
from calotype.vae.kl_config import FLUX_1, SD_1, SD_3, SDXL, KLConfig, kl_config


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each of two kinds."""
    return {name: save(tmp_path_factory.mktemp(name), KINDS[name]) for name in ("quantised", "shifted")}


@pytest.fixture
def damaged(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    return copied(folders["quantised"], tmp_path / "damaged")


@pytest.fixture
def nothing_allocated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No weight is read while a test runs."""

    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("calotype.core.weight_source.WeightSource.read", refuse)
    yield


@pytest.mark.parametrize("kind", ["quantised", "shifted"])
@pytest.mark.parametrize("convolutions", [False, True])
def test_attention_as_it_was_spelt(kind: str, convolutions: bool, folders: dict[str, Path], tmp_path: Path) -> None:
    spelt = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
    weights = {
        renamed(name, spelt): weight[:, :, None, None].clone() if convolutions and is_linear(name, weight) else weight
        for name, weight in load_file(folders[kind] / WEIGHTS).items()
    }
    assert sum(".query." in name for name in weights) == 4
    save_file(weights, copied(folders[kind], tmp_path) / WEIGHTS)
    check_same(load_kl(tmp_path), load_kl(folders[kind]))


@pytest.mark.parametrize(("prefix", "others"), [("", ()), ("first_stage_model.", ("model.x.y", "betas")), ("vae.", ())])
def test_the_original_layout(prefix: str, others: tuple[str, ...], folders: dict[str, Path], tmp_path: Path) -> None:
    for kind in ("quantised", "shifted"):
        ours = load_kl(folders[kind])
        weights = kl(load_file(folders[kind] / WEIGHTS), ours.config)
        file = {prefix + name: weight for name, weight in weights.items()}
        save_file({**file, **{name: torch.zeros(2) for name in others}}, tmp_path / f"{kind}.safetensors")
        check_same(load_kl_file(tmp_path / f"{kind}.safetensors", ours.config), ours)
        check_against_diffusers(weights, ours)


def check_against_diffusers(weights: dict[str, Tensor], ours: KLAutoencoder) -> None:
    """That `kl` makes the names that diffusers takes for the original ones."""
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    converted = convert_ldm_vae_checkpoint(weights, ours.config.entries())
    module = ours.module.state_dict()
    assert {name: tuple(weight.shape) for name, weight in converted.items()} == {
        name: tuple(weight.shape) for name, weight in module.items()
    }
    assert all(torch.equal(weight, module[name]) for name, weight in converted.items())


def check_same(a: KLAutoencoder, b: KLAutoencoder) -> None:
    others = b.module.state_dict()
    assert a.module.state_dict().keys() == others.keys()
    assert all(torch.equal(weight, others[name]) for name, weight in a.module.state_dict().items())


def truncate(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "diffusion_pytorch_model.bin").write_bytes(b"PK\x03\x04")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "is truncated"),
    "pickled": (pickle, "only pickled weights"),
    "class": (lambda f: edit_config(f, _class_name="AutoencoderKLWan"), "_class_name is 'AutoencoderKLWan'"),
    "no class": (lambda f: edit_config(f, _class_name=None), "_class_name is None"),
    "text": (lambda f: (f / "config.json").write_text("{"), "config.json: not a config file"),
    "list": (lambda f: (f / "config.json").write_text("[]"), "holds no JSON object"),
    "unknown entry": (lambda f: edit_config(f, patch_size=2), "patch_size is 2; known entries are in_channels"),
    "wrong type": (lambda f: edit_config(f, latent_channels="4"), "latent_channels is '4'; it must be a whole"),
    "no scale": (lambda f: edit_config(f, scaling_factor=0), "scaling_factor is 0; it must be a number over 0"),
    "wrong blocks": (lambda f: edit_config(f, up_block_types=["UpDecoderBlock2D"]), "up_block_types is"),
    "wrong groups": (lambda f: edit_config(f, norm_num_groups=7), "config.json: no AutoencoderKL can be made"),
    "lone mean": (lambda f: edit_config(f, latents_mean=[0.0] * 4), "must be given together"),
    "other shapes": (lambda f: edit_config(f, latent_channels=8), r"misfits \(.*conv_out"),
    "too many keys": (lambda f: edit_config(f, use_quant_conv=False), r"2 of \d+ keys match nothing \(quant_conv"),
    "too few keys": (lambda f: edit_config(f, layers_per_block=2), "parameters have no value"),
}


@pytest.mark.usefixtures("nothing_allocated")
@pytest.mark.parametrize("damage", DAMAGES)
def test_folders_that_cannot_be_loaded(damage: str, damaged: Path) -> None:
    change, message = DAMAGES[damage]
    change(damaged)
    with pytest.raises(ValueError, match=message):
        load_kl(damaged)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_missing_files(name: str, damaged: Path) -> None:
    (damaged / name).unlink()
    with pytest.raises(FileNotFoundError, match="damaged"):
        load_kl(damaged)


def test_variants(damaged: Path) -> None:
    weights = load_file(damaged / WEIGHTS)
    save_file({name: weight.half() for name, weight in weights.items()}, damaged / WEIGHTS.replace(".s", ".fp16.s"))
    exact, rounded = load_kl(damaged), load_kl(damaged, variant="fp16")
    name = "encoder.conv_in.weight"
    assert torch.equal(rounded.module.state_dict()[name], exact.module.state_dict()[name].half().float())
    assert not torch.equal(rounded.module.state_dict()[name], exact.module.state_dict()[name])
    with pytest.raises(FileNotFoundError, match="no variant 'ema'"):
        load_kl(damaged, variant="ema")
    (damaged / WEIGHTS).unlink()
    check_same(load_kl(damaged), rounded)


def test_configs() -> None:
    plain = kl_config({"_class_name": "AutoencoderKL", "sample_size": 64, "new_entry": None})
    assert plain == KLConfig() and plain.downsampling == 1 and not plain.force_upcast
    assert [config.downsampling for config in (SD_1, SDXL, SD_3, FLUX_1)] == [8] * 4
    assert SDXL.scale == (0.13025,) * 4 and FLUX_1.shift == (0.1159,) * 16
    with pytest.raises(ValueError, match="only one can be"):
        KLConfig(shift_factor=0.1, latents_mean=(0.0,) * 4, latents_std=(1.0,) * 4)
    with pytest.raises(ValueError, match="latents_std has 3 values; there are 4 latent channels"):
        KLConfig(latents_mean=(0.0,) * 4, latents_std=(1.0,) * 3)
