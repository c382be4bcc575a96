"""Factors of float8 weights: which keys they are, and what they do to a weight that is read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from calotype.core.checkpoint import read_checkpoint
from calotype.core.key_map import KeyMap, Layout, Rule
from calotype.core.loading import load_weights
from calotype.core.weight_source import WeightSource, are_equal

SPELLINGS = (("scale_weight", "scale_input"), ("weight_scale", "input_scale"))
MAP = KeyMap((Layout("l", (Rule(("q.weight", "k.weight"), "weight"), Rule("bias", "bias"))),))


def checkpoint(path: Path, spelling: tuple[str, str], **changes: Tensor) -> tuple[Path, Tensor]:
    """Two scaled matrices and a plain bias, and the matrices' values, one after the other."""
    generator, (factor, unused) = torch.Generator().manual_seed(0), spelling
    stored = {name: torch.randn(4, 6, generator=generator).to(torch.float8_e4m3fn) for name in "qk"}
    tensors = {f"{name}.weight": value for name, value in stored.items()}
    tensors |= {f"q.{factor}": torch.tensor(0.25), f"k.{factor}": torch.tensor([3.0])}
    tensors |= {f"q.{unused}": torch.ones(()), "scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}
    tensors["bias"] = torch.randn(8, generator=generator)
    save_file(tensors | changes, path)
    return path, torch.cat((stored["q"].float() * 0.25, stored["k"].float() * 3.0))


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_what_they_stand_for(tmp_path: Path, spelling: tuple[str, str], dtype: torch.dtype) -> None:
    path, values = checkpoint(tmp_path / "x.safetensors", spelling)
    module = nn.Linear(6, 8, device="meta")
    load_weights(module, path, MAP, dtype=dtype)
    assert torch.equal(module.weight, values.to(dtype))
    source = WeightSource.for_module(module, path, MAP)
    assert source.stored_dtype("weight") is torch.float32
    assert torch.equal(source.read_rows("weight", slice(3, 6)), values[3:6])


def test_only_weights_with_factors_change(tmp_path: Path) -> None:
    path, _ = checkpoint(tmp_path / "x.safetensors", SPELLINGS[0])
    tensors = read_checkpoint(path)
    assert set(tensors) == {"q.weight", "k.weight", "bias"}
    factor = tensors["q.weight"].factor
    assert factor is not None
    assert factor.name == "q.scale_weight"
    assert tensors["bias"].factor is None
    assert not are_equal(tensors["q.weight"], tensors["q.weight"])  # the factors were not looked at
    save_file({"a.scale_weight": torch.ones(())}, tmp_path / "alone.safetensors")
    assert set(read_checkpoint(tmp_path / "alone.safetensors")) == {"a.scale_weight"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q.weight": torch.zeros(4, 6, dtype=torch.int8)}, r"'q.weight' is stored as int8 with a factor .*\(not int8"),
        ({"q.scale_weight": torch.ones(4, 1)}, r"the factor 'q.scale_weight' has the shape \[4, 1\]"),
        ({"q.scale_weight": torch.ones((), dtype=torch.int64)}, "only float8 weights with one factor"),
    ],
)
def test_other_formats_are_refused(tmp_path: Path, changes: dict[str, Tensor], message: str) -> None:
    path, _ = checkpoint(tmp_path / "x.safetensors", SPELLINGS[0], **changes)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(path)
