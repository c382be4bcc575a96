"""Configs that name sizes which their weights cannot have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from calotype.core.config_sizes import check_config_sizes, check_sizes
from calotype.core.shapes import Shapes
from calotype.core.stored_tensor import StoredTensor

PLACE = Path("x/config.json")


def stored(*shape: int) -> StoredTensor:
    return StoredTensor(name="a", file=PLACE, dtype=torch.float32, shape=shape, start=0, stop=0)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_layers": 10**9}, "num_layers is 1000000000; it can be at most 1024 here: the weights are 2 tensors"),
        ({"text_config": {"num_experts": 2000}}, "text_config.num_experts is 2000; it can be at most 1024"),
        ({"layers_per_block": [2, 10**6]}, "layers_per_block is 1000000; it can be at most 1024"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000; it can be at most 2000000 here: no tensor of the"),
        ({"block_out_channels": [4, 10**12]}, "block_out_channels is 1000000000000; it can be at most 2000000"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000; it can be at most 134217728"),
    ],
)
def test_sizes_that_the_weights_cannot_have(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{PLACE}: {message}"):
        check_sizes(PLACE, entries, [stored(2_000_000, 4), stored()])


def test_what_is_let_through() -> None:
    """Small values, sizes that a tensor shows, and numbers that are no sizes."""
    entries = {"num_layers": 1024, "vocab_size": 2_000_000, "rope_theta": 10**9, "max_position_embeddings": 10**7}
    entries |= {"pad_token_id": -1, "layer_norm_eps": 1, "vocab_size_per_layer_input": 262_144, "use_bias": True}
    check_sizes(PLACE, entries, [stored(2_000_000, 4)])
    check_sizes(PLACE, {"num_layers": 2000}, [stored()] * 2000)
    check_sizes(PLACE, {"num_layers": 3}, [])


def test_a_folder(tmp_path: Path) -> None:
    check_config_sizes(tmp_path, [])
    (tmp_path / "config.json").write_text(json.dumps({"num_layers": 10**9}))
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config.json: num_layers is 1000000000"):
        check_config_sizes(tmp_path, [])


def test_a_block_that_is_counted_too_high() -> None:
    with pytest.raises(ValueError, match=r"^blocks\.999999999 is there, but the checkpoint holds 1 tensors only"):
        Shapes({"blocks.999999999.weight": (1,)}).count("blocks.")
    assert Shapes({"blocks.59.weight": (1,)}).count("blocks.") == 60
