"""A run's state in a file, to go on in another process."""

from pathlib import Path

from ..core.checkpoint import read_header
from ..core.whole_file import whole_file
from ..schedulers.base import State
from .checks import check_kind


def save_state(state: State, path: str | Path) -> Path:
    """Writes a state as safetensors; the file appears whole or not at all.

    Raises:
        ValueError: not a state. FileNotFoundError: the folder does not exist. OSError: it cannot be written to.
    """
    from safetensors.torch import save

    check_kind("state", state, State, "the state of a step (step.state)")
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent}: no such folder to write to")
    with whole_file(target) as beside:
        beside.write_bytes(save(state.to_tensors()))
    return target


def load_state(path: str | Path) -> State:
    """The state that `save_state` wrote, on the CPU; give it to `denoise(encoded, resume=...)` of the same request.

    Raises:
        FileNotFoundError: no such file. ValueError: not a safetensors file, or not one of a state.
    """
    from safetensors.torch import load

    read_header(path)
    return State.from_tensors(load(Path(path).read_bytes()))
