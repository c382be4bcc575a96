"""`calotype doctor`: what is installed, what this machine can do, and whether the bundled model is whole."""

import argparse
import os
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import Commands, add_threads_option, use_threads

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "safetensors", "numpy", "tokenizers", "pillow", "av", "huggingface_hub", "tqdm")
OPTIONAL = ("diffusers", "transformers", "xformers", "flash-attn", "triton")
PROBE_SIDE, PROBE_ROUNDS = 384, 5
DAMAGED = 1


def add_to(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "doctor",
        help="what is installed and what this machine can do",
        description="Says what is installed, which devices and attention backends work and why others do not, which "
        "dtype to use, and whether the bundled model is whole. Exit code 1: it is not.",
        allow_abbrev=False,
    )
    add_threads_option(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints every section."""
    use_threads(options.threads)
    for title, lines in (
        ("versions", _versions()),
        ("devices", _devices()),
        ("attention", _attention()),
        ("dtype", _dtypes()),
    ):
        _section(title, list(lines))
    lines, whole = _bundled()
    _section("bundled model", lines)
    return 0 if whole else DAMAGED


def _section(title: str, lines: list[str]) -> None:
    print(f"{title}:")
    for line in lines:
        print(f"  {line}")


def _versions() -> Iterator[str]:
    from importlib import metadata

    from .._version import __version__

    machine = f"{platform.system()} {platform.machine()}"
    yield f"calotype {__version__}, python {platform.python_version()}, {machine}"
    for name in (*PACKAGES, *OPTIONAL):
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"{name}: not installed" + (" (not needed)" if name in OPTIONAL else ": needed; pip install calotype")


def _devices() -> Iterator[str]:
    import torch

    from ..core.ops.kernels import IS_BUILT

    cores, threads = os.cpu_count(), torch.get_num_threads()
    yield f"cpu: {torch.backends.cpu.get_cpu_capability()}, {cores} cores, {threads} threads in use"
    missing = "not built, so text is written more slowly (they need AVX2, and at installation a C compiler)"
    yield f"  calotype's kernels: {'built' if IS_BUILT else missing}"
    if cores is not None and threads > cores:
        yield f"  more threads than cores are slow: --threads {cores}"
    if not torch.cuda.is_available():
        yield "cuda: none" + ("" if torch.version.cuda else " (this torch was built without it)")
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        memory = f"{found.total_memory / 2**30:.0f} GiB"
        yield f"cuda:{index}: {found.name}, {memory}, compute capability {found.major}.{found.minor}"
    if torch.backends.mps.is_available():
        yield "mps: available"


def _attention() -> Iterator[str]:
    """What each backend says to an ordinary call on the best device here."""
    import torch

    from ..core.attention.registry import attention_report

    device = _best_device()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for name, refusal in attention_report(device, dtype).items():
        yield f"{name}: " + (f"works on {device.type}" if refusal is None else f"refuses: {refusal}")


def _dtypes() -> Iterator[str]:
    import torch

    device = _best_device()
    speeds = {dtype: _speed(device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    for dtype, speed in speeds.items():
        name = str(dtype).removeprefix("torch.")
        yield f"{name}: {speed / 1e9:.0f} GFLOP/s in a matrix product of {PROBE_SIDE} on {device.type}"
    low_is_fast = speeds[torch.bfloat16] > 1.2 * speeds[torch.float32]
    advice = "bfloat16 for large models, float32 for plate" if low_is_fast else "float32: bfloat16 is no faster here"
    yield f"advice: {advice}"


def _best_device() -> "torch.device":
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _speed(device: "torch.device", dtype: "torch.dtype") -> float:
    """Floating point operations a second of the fastest of a few matrix products."""
    import torch

    a = torch.ones((PROBE_SIDE, PROBE_SIDE), device=device, dtype=dtype)
    seconds: list[float] = []
    for _ in range(PROBE_ROUNDS):
        started = time.perf_counter()
        (a @ a).sum().item()
        seconds.append(time.perf_counter() - started)
    return 2 * PROBE_SIDE**3 / min(seconds)


def _bundled() -> tuple[list[str], bool]:
    """A line per file, and whether all are there and as they were made."""
    from ..pipelines.load import bundled_folder
    from ..pipelines.plate import FILES, read_config

    folder = bundled_folder()
    lines, whole = [str(folder)], True
    try:
        config = read_config(folder / "config.json")
    except ValueError:
        config = {}
    for name in FILES:
        try:
            lines.append(f"{name}: {_checked(folder / name, config)}")
        except (OSError, ValueError) as error:
            lines.append(f"{name}: {'missing' if isinstance(error, FileNotFoundError) else error}")
            whole = False
    return lines, whole


def _checked(path: Path, config: Mapping[str, Any]) -> str:
    """Size and digest of a file in words.

    Raises:
        FileNotFoundError: it is not there. ValueError: it is damaged.
    """
    from ..pipelines.plate import check_digest, entries, read_config

    digest = check_digest(path, config)
    if path.name == "config.json":
        read_config(path)
    on_record = ", as on record" if path.name in entries(config, "sha256") else ""
    return f"{path.stat().st_size / 1e6:.2f} MB, sha256 {digest[:12]}...{on_record}"
