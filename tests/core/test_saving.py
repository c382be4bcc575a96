"""Key maps followed backwards: what was fused, permuted or reshaped is written as it is stored."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from calotype.core.key_map import KeyMap, Layout, Part, Reshape, RowPermutation, Rows, Rule, Share
from calotype.core.loading import build_on_meta, load_weights
from calotype.core.saving import Held, as_stored, stored_again, weights_of, write_weights
from calotype.core.weight_source import WeightSource

SWAPPED = (Part("norm.{leaf}", (Share(1, 2),)), Part("norm.{leaf}", (Share(0, 2),)))
MAP = KeyMap(
    (
        Layout(
            "theirs",
            (
                Rule(("q.{leaf}", "k.{leaf}"), "qk.{leaf}"),
                Rule(SWAPPED, "modulation.{leaf}"),
                Rule("patch.weight", "patch.weight", (Reshape((0, -1)),)),
                Rule("out.weight", "out.weight", (RowPermutation((2, 2, -1), (2, 0, 1)),)),
                Rule(Part("table", (Rows(0, 2),)), "first"),
                Rule(Part("table", (Rows(2),)), "second"),
                Rule("scale", "scale"),
            ),
            drops=("unused.{any*}", "copy.weight"),
        ),
    )
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(3, 9)
        self.modulation = nn.Linear(3, 8)
        self.patch = nn.Linear(12, 4, bias=False)
        self.out = nn.Linear(3, 12, bias=False)
        self.first = nn.Parameter(torch.zeros(2, 3))
        self.second = nn.Parameter(torch.zeros(5, 3))
        self.scale = nn.Parameter(torch.zeros(()))


def stored() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {
        "q.weight": (4, 3),
        "q.bias": (4,),
        "k.weight": (5, 3),
        "k.bias": (5,),
        "norm.weight": (8, 3),
        "norm.bias": (8,),
        "patch.weight": (4, 3, 2, 2),
        "out.weight": (12, 3),
        "table": (7, 3),
        "scale": (),
        "unused.head": (2, 2),
    }
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    return tensors | {"copy.weight": tensors["q.weight"].clone(), "unused.steps": torch.tensor(7)}


def loaded(file: Path, dtype: torch.dtype | None = None) -> Model:
    model = build_on_meta(Model)
    load_weights(model, file, MAP, dtype=dtype)
    return model


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(stored(), tmp_path / "theirs.safetensors")
    return tmp_path / "theirs.safetensors"


def held(model: nn.Module, source: WeightSource | None = None) -> Held:
    return Held(module=model, key_map=MAP, source=source, copies={"copy.weight": "q.weight"})


def test_what_was_read_is_written_again(file: Path, tmp_path: Path) -> None:
    weights = stored_again(file, (held(loaded(file)),))
    write_weights(tmp_path / "again.safetensors", weights)
    again = load_file(tmp_path / "again.safetensors")
    assert again.keys() == stored().keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in stored().items())


def test_held_values_count_and_all_others_are_read(file: Path) -> None:
    model = loaded(file, torch.bfloat16)
    with torch.no_grad():
        model.qk.weight.fill_(2.0)
        model.second.fill_(3.0)
    again = {name: weight.read() for name, weight in stored_again(file, (held(model),)).items()}
    assert {tensor.dtype for name, tensor in again.items() if name != "unused.steps"} == {torch.bfloat16}
    assert again["q.weight"].unique().tolist() == again["copy.weight"].unique().tolist() == [2.0]
    assert again["table"][2:].unique().tolist() == [3.0]
    assert torch.equal(again["table"][:2], stored()["table"][:2].bfloat16())
    assert torch.equal(again["unused.head"], stored()["unused.head"].bfloat16())
    assert again["unused.steps"].dtype is torch.int64


def test_weights_that_stay_in_their_file(file: Path) -> None:
    model = build_on_meta(Model)
    with pytest.raises(ValueError, match="cannot save first: it is on the meta device"):
        held(model).weights()
    source = WeightSource.for_module(model, file, MAP)
    again = stored_again(file, (held(model, source),))
    assert all(torch.equal(again[name].read(), tensor) for name, tensor in stored().items())


def test_a_layout_that_no_file_has(file: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in stored().items()}
    again = as_stored(weights_of(loaded(file)), MAP, shapes)
    assert again.keys() == {name for name in shapes if name != "copy.weight" and not name.startswith("unused")}
    assert all(torch.equal(weight.read(), stored()[name]) for name, weight in again.items())
    with pytest.raises(ValueError, match="the layout does not fit the model"):
        as_stored(weights_of(loaded(file)), MAP, {**shapes, "q.weight": (3, 3)})


def test_tensors_of_which_a_part_is_held_are_refused() -> None:
    rule = Rule(Part("table", (Rows(0, 2),)), "first")
    key_map = KeyMap((Layout("part", (rule,), drops=("table",)),))
    model = nn.Module()
    model.first = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="cannot save table: 6 of its 21 numbers are held"):
        as_stored(weights_of(model), key_map, {"table": (7, 3)})
