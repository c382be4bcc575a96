"""Denoisers against diffusers', on random checkpoints of middle size: time of a step, its floor, memory, cold start.

    python benchmarks/denoise.py --against diffusers --threads 2 --json figures.json

A step is a guided one: as many passes as the family's pipelines make for their guidance. Both sides load the same file,
in the dtype that they compute in, and are given the same states and latents; how far their slopes differ is printed.
Times are medians of interleaved repeats in one process. `floor` is the time of the matrix products and attention calls
of our step alone, on its own weights. Memory and cold start are those of fresh processes, one per side: the denoiser's
tensors, and what is allocated on top of them while it steps; and from the start of Python to the end of the first step.
"""

import argparse
import ctypes
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from denoise_cases import CASES, IMAGES, Case, ours_by_name
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SIDES = ("ours", "diffusers")
RUN = 28  # steps over which the figures spread what is prepared once
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Latents [1, C, F, h, w], and for each side of the guidance states [1, Lt, Dt] and maybe pooled text [1, Dp]."""

    x: Tensor
    states: tuple[Tensor, ...]
    pooled: tuple[Tensor, ...]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.once:
        print(json.dumps(fresh_figures(options)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        root = options.folder or Path(scratch)
        report: dict[str, Any] = {"threads": torch.get_num_threads(), "rows": []}
        for name in options.families:
            for dtype in options.dtypes:
                report["rows"].append(rows_of(options, name, dtype, root))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", choices=("diffusers", "none"), default="none")
    parser.add_argument("--families", nargs="*", choices=CASES, default=list(IMAGES))
    parser.add_argument("--dtypes", nargs="*", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--cells", type=int, default=64, help="latent cells a side; a token is 2 x 2 of them")
    parser.add_argument("--repeats", type=int, default=5, help="steps that are timed on each side")
    parser.add_argument("--fresh", type=int, default=3, help="fresh processes of each side")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    parser.add_argument("--folder", type=Path, help="where checkpoints are kept, for the next time too")
    parser.add_argument("--tiny", action="store_true", help="models of two blocks, to try the benchmark itself")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--once", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def rows_of(options: argparse.Namespace, name: str, dtype: str, root: Path) -> dict[str, Any]:
    """All figures of a family in a dtype; they are printed as they are found."""
    case = CASES[name]
    folder = checkpoint(case, root / f"{name}-{dtype}{'-tiny' * options.tiny}", dtype, tiny=options.tiny)
    print(f"\n{name}, {dtype}, {case.frames * options.cells**2 // 4} tokens, {torch.get_num_threads()} threads")
    row: dict[str, Any] = {"family": name, "dtype": dtype, **speeds(options, name, dtype, folder)}
    for key in ("step s", f"step of a run of {RUN} s"):
        tell(key, row[key])
    print(f"  step, ours / floor{'':<18}{row['step s']['ours'] / row['floor s']:.3f}   floor {row['floor s']:.4f} s")
    if "difference" in row:
        print(f"  slopes differ by{'':<20}{row['difference']:.1e} (relative)")
    for key, sides in fresh_rows(options, name, dtype, root).items():
        tell(key, sides)
        row[key] = sides
    return row


def tell(name: str, row: Mapping[str, float]) -> None:
    ratio = f"   ratio {row['ours'] / row['diffusers']:.3f}" if "diffusers" in row else ""
    print(f"  {name:<36}" + "".join(f"{side} {value:<11.4f}" for side, value in row.items()) + ratio, flush=True)


def checkpoint(case: Case, folder: Path, dtype: str, *, tiny: bool) -> Path:
    """The folder of a random model that diffusers has saved; made unless it is there."""
    if (folder / "config.json").is_file():
        return folder
    torch.manual_seed(0)
    model = their_class(case)(**{**case.entries, **(case.tiny if tiny else {})})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0, 0.04)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def their_class(case: Case) -> Any:
    import diffusers

    return getattr(diffusers, case.theirs)


def inputs_of(options: argparse.Namespace, case: Case, folder: Path, dtype: torch.dtype) -> Inputs:
    """Random ones, the same on both sides."""
    entries = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    generator = torch.Generator().manual_seed(1)
    sides, text = 1 if case.guided == "told" else 2, min(case.text, 8) if options.tiny else case.text

    def drawn(*shape: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(1, *shape, generator=generator).to(dtype) for _ in range(sides))

    return Inputs(
        x=torch.randn(1, case.channels, case.frames, options.cells, options.cells, generator=generator),
        states=drawn(text, entries[case.widths["states"]]),
        pooled=drawn(entries[case.widths["pooled"]]) if "pooled" in case.widths else (),
    )


class Ours:
    """This library's denoiser, prepared for a run."""

    def __init__(self, case: Case, name: str, folder: Path, dtype: torch.dtype, *, attention: Any = None) -> None:
        self.case, self.dtype, self.attention = case, dtype, attention
        self.model = our_denoiser(name, folder, dtype)

    def prepare(self, inputs: Inputs, steps: int) -> None:
        """Everything before the loop."""
        from calotype.core.attention.registry import attention_selector
        from calotype.denoisers.base import Prompt
        from calotype.denoisers.guidance import ClassifierFree, Distilled, Run
        from calotype.schedulers import flow_schedule

        self.points, self.x = flow_schedule(steps).points[:-1], inputs.x
        run = Run(shape=tuple(inputs.x.shape), evaluations=self.points, attention=attention_selector(self.attention))
        sides = [conditioning(inputs, side) for side in range(len(inputs.states))]
        prompt = Prompt(positive=sides[0], negative=sides[1] if len(sides) > 1 else None)
        if self.case.guided == "told":
            guidance = Distilled(self.case.scale)
        else:
            guidance = ClassifierFree(self.case.scale, batched=self.case.guided == "batch")
        self.slope = guidance.bind(self.model, prompt, run)

    def step(self, i: int) -> Tensor:
        """The guided slope at step i."""
        return self.slope(self.x, self.points[i])


def conditioning(inputs: Inputs, side: int) -> Any:
    from calotype.denoisers.base import Conditioning

    states = inputs.states[side]
    pooled = inputs.pooled[side] if inputs.pooled else None
    return Conditioning(states=states, lengths=torch.full((1,), states.shape[1]), pooled=pooled)


def our_denoiser(name: str, folder: Path, dtype: torch.dtype) -> Any:
    from calotype.core.loading import build_on_meta
    from calotype.core.weight_source import WeightSource

    entries = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    build, key_map = ours_by_name(name, entries)
    model = build_on_meta(build)
    model.fill(WeightSource.for_module(model, folder, key_map), device=torch.device("cpu"), dtype=dtype)
    return model


class Theirs:
    """diffusers' model, called as its pipeline calls it."""

    def __init__(self, case: Case, name: str, folder: Path, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        self.model = their_class(case).from_pretrained(folder, torch_dtype=dtype).eval().requires_grad_(False)

    def prepare(self, inputs: Inputs, steps: int) -> None:
        """Their pipelines prepare nothing but the inputs."""
        self.inputs, self.steps = inputs, steps

    def step(self, i: int) -> Tensor:
        """The guided slope at step i."""
        x, told, case = self.inputs.x.to(self.dtype), self.inputs, self.case
        time = torch.tensor([1 - i / self.steps])
        if case.guided == "told":
            return case.call(self.model, x, told.states[0], told.pooled[:1], time, case.scale)
        if case.guided == "batch":
            pooled = (torch.cat(told.pooled),) if told.pooled else ()
            c, u = case.call(self.model, torch.cat((x, x)), torch.cat(told.states), pooled, time.expand(2)).chunk(2)
        else:
            c, u = (case.call(self.model, x, states, (), time) for states in told.states)
        return u + case.scale * (c - u)


@torch.no_grad()
def speeds(options: argparse.Namespace, name: str, dtype: str, folder: Path) -> dict[str, Any]:
    """Seconds of a step on each side and of its floor, taking turns; the first turn is not counted."""
    case, kind, steps = CASES[name], getattr(torch, dtype), options.repeats + 1
    inputs = inputs_of(options, case, folder, kind)
    sides: dict[str, Any] = {"ours": Ours(case, name, folder, kind)}
    if options.against == "diffusers":
        sides["diffusers"] = Theirs(case, name, folder, kind)
    prepared = {side: seconds(lambda one=one: one.prepare(inputs, steps)) for side, one in sides.items()}
    floor, times, spent = Floor(sides["ours"]), {side: list[float]() for side in sides}, list[float]()
    for i in range(steps):
        for side, one in sides.items():
            times[side].append(seconds(lambda one=one, i=i: one.step(i)))
        spent.append(seconds(floor.run))
    step = {side: statistics.median(found[1:]) for side, found in times.items()}
    found: dict[str, Any] = {"step s": step, "floor s": statistics.median(spent[1:])}
    found[f"step of a run of {RUN} s"] = {side: step[side] + prepared[side] / RUN for side in sides}
    if "diffusers" in sides:
        a, b = (one.step(0).float() for one in sides.values())
        found["difference"] = float((a - b).norm() / b.norm())
    return found


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class Floor(TorchDispatchMode):
    """The matrix products and attention calls of our first step: on the same weights, with others of the same layout in
    place of what is computed."""

    def __init__(self, ours: Ours) -> None:
        super().__init__()
        self.weights = {memory(weight) for weight in ours.model.parameters() if not weight.is_meta}
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.others: dict[object, Tensor] = {}
        with self:
            ours.step(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name in PRODUCTS or "attention" in name:
            self.calls.append((func, tuple(self._kept(each) for each in args), kwargs))
        return func(*args, **kwargs)

    def run(self) -> None:
        """All calls, one after the other."""
        for func, args, kwargs in self.calls:
            func(*args, **kwargs)

    def _kept(self, argument: Any) -> Any:
        if not isinstance(argument, Tensor) or memory(argument) in self.weights:
            return argument
        key = (tuple(argument.shape), argument.stride(), argument.dtype)
        if key not in self.others:
            self.others[key] = torch.empty_strided(*key[:2], dtype=key[2]).normal_()
        return self.others[key]


def memory(x: Tensor) -> int:
    """Where the memory begins that x is a view of."""
    return x.untyped_storage().data_ptr()


def fresh_rows(options: argparse.Namespace, name: str, dtype: str, root: Path) -> dict[str, dict[str, float]]:
    """Memory (the most of all processes) and cold start (their median) of each side, by what it is; nothing without
    fresh processes."""
    if not options.fresh:
        return {}
    command = [sys.executable, __file__, "--families", name, "--dtypes", dtype, "--folder", str(root)]
    command += ["--cells", str(options.cells), "--threads", str(options.threads), *["--tiny"] * options.tiny]
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES[: 1 + (options.against != "none")]}
    for _ in range(options.fresh):
        for side, runs in found.items():
            began = time.time()
            done = subprocess.run([*command, "--once", side], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr.strip())
            figures = json.loads(done.stdout.splitlines()[-1])
            runs.append(figures | {"cold start s": figures["cold start s"] - began})
    chosen = {key: statistics.median if key.endswith(" s") else max for key in found["ours"][0]}
    return {
        key: {side: pick([run[key] for run in runs]) for side, runs in found.items()} for key, pick in chosen.items()
    }


@torch.no_grad()
def fresh_figures(options: argparse.Namespace) -> dict[str, float]:
    """What one side takes in this process; the cold start is the time of day at which its first step was done."""
    name, dtype, case = options.families[0], options.dtypes[0], CASES[options.families[0]]
    folder, kind = options.folder / f"{name}-{dtype}{'-tiny' * options.tiny}", getattr(torch, dtype)
    side = (Ours if options.once == "ours" else Theirs)(case, name, folder, kind)
    inputs = inputs_of(options, case, folder, kind)
    weights = {id(x): x.nbytes for x in (*side.model.parameters(), *side.model.buffers()) if not x.is_meta}
    denoiser = sum(weights.values()) / 2**20
    trim()
    before = anonymous()
    preparing, _ = watched(lambda: side.prepare(inputs, 2))
    first, done = watched(lambda: (side.step(0), time.time())[1])
    second, _ = watched(lambda: side.step(1))
    return {
        "memory in the loop MB": denoiser + max(first, second) - before,
        "of it the denoiser MB": denoiser,
        "memory while preparing MB": denoiser + preparing - before,
        "cold start s": done,
    }


def anonymous() -> float:
    """Megabytes of this process that are no file's."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def trim() -> None:
    """Gives back what loading has let go, so that it does not hide what comes."""
    ctypes.CDLL(None).malloc_trim(0)


def watched(run: Callable[[], Any]) -> tuple[float, Any]:
    """The most anonymous memory while something runs, and its result."""
    done, peaks = threading.Event(), [anonymous()]

    def watch() -> None:
        while not done.wait(0.001):
            peaks.append(anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = run()
    finally:
        done.set()
        watcher.join()
    return max(*peaks, anonymous()), result


if __name__ == "__main__":
    main()
