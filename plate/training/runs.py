"""What every training script shares: resumable checkpoints (safetensors), a learning-rate schedule, a log."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...core.whole_file import whole_file

_SEPARATOR = "//"


def save_state(path: Path, state: Mapping[str, Any], *, step: int) -> None:
    """Write nested dictionaries of tensors and numbers to one safetensors file, replacing it in one move."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for name, value in _flatten(state, ""):
        if isinstance(value, Tensor):
            tensors[name] = value.detach().clone().contiguous()
        else:
            plain[name] = value
    with whole_file(path) as part:
        save_file(tensors, part, metadata={"step": str(step), "plain": json.dumps(plain)})


def load_state(path: Path) -> tuple[dict[str, Any], int]:
    """What `save_state` wrote, and its step."""
    with safe_open(path, framework="pt") as file:
        metadata, names = file.metadata(), file.keys()
        flat: dict[str, Any] = {name: file.get_tensor(name) for name in names}
    flat |= json.loads(metadata["plain"])
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *folders, leaf = name.split(_SEPARATOR)
        place = nested
        for folder in folders:
            place = place.setdefault(folder, {})
        place[leaf] = value
    return nested, int(metadata["step"])


def _flatten(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}{_SEPARATOR}{key}" if name else str(key))
    else:
        yield name, value


def optimiser_state(optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """The per-parameter state of an optimiser, by the parameter's index."""
    return {str(index): state for index, state in optimiser.state_dict()["state"].items()}


def restore_optimiser(optimiser: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Put back what `optimiser_state` took."""
    whole = optimiser.state_dict()
    whole["state"] = {int(index): entry for index, entry in state.items()}
    optimiser.load_state_dict(whole)


def learning_rate(step: int, *, total: int, warm_up: int, decay_share: float) -> float:
    """Factor on the peak rate: linear warm-up, constant, then linear to zero over the last `decay_share` of the run."""
    rising = min(1.0, (step + 1) / warm_up)
    falling = min(1.0, (total - step) / (total * decay_share))
    return rising * max(0.0, falling)


class Log:
    """Prints a line and appends it to `log.jsonl` in the run's folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        self.started = time.monotonic()

    def write(self, **values: float | int | str) -> None:
        """One entry; the seconds since the start of this process are added."""
        entry = {"seconds": round(time.monotonic() - self.started, 1), **values}
        print(json.dumps(entry), flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
