"""Time and memory of the bundled model: each repeat is a fresh process, the figures are medians.

    python benchmarks/plate.py --repeats 5 --threads 1

`floor` is the time that a guided step's multiplications alone would take at the rate measured for a large matrix
product in the same process.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

PROMPT, CLIP_PROMPT, FRAMES = "a fox on a beach", "a frog jumps up on a green field", 17
ROWS = {
    "cold_s": "calotype image, start to file",
    "cold_clip_s": "calotype video, start to file",
    "import_s": "import calotype, beyond torch",
    "load_s": "load",
    "first_image_s": "first picture, after loading",
    "image_s": "a picture, warm",
    "clip_s": "a clip of 17 frames, warm",
    "step_s": "a guided step",
    "floor_s": "floor of a guided step",
    "gflop": "GFLOP a guided step",
    "gflops": "GFLOP/s of a matrix product",
    "peak_mb": "peak memory, MB",
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.once:
        print(json.dumps(measure(options)))
        return
    runs = [run_fresh(options) for _ in range(options.repeats)]
    medians = {name: statistics.median(run[name] for run in runs) for name in ROWS if name in runs[0]}
    print(f"{options.steps} steps guided, {options.repeats} fresh processes, {options.threads or 'default'} threads")
    for name, median in medians.items():
        values = [run[name] for run in runs]
        print(f"{ROWS[name]:<32}{median:>10.4g}   ({min(values):.4g} to {max(values):.4g})")
    if options.json:
        options.json.write_text(json.dumps({"medians": medians, "runs": runs}, indent=1) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    parser.add_argument("--model", help="what to load; without it, the bundled model")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_fresh(options: argparse.Namespace) -> dict[str, float]:
    """One repeat in its own process."""
    command = [sys.executable, __file__, "--once", "--steps", str(options.steps), "--threads", str(options.threads)]
    if options.model:
        command += ["--model", options.model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.strip() or f"a repeat ended with code {done.returncode}")
    figures = json.loads(done.stdout.splitlines()[-1]) | {"cold_s": cold_start(options, "image", PROMPT, "picture.png")}
    clip = {"cold_clip_s": cold_start(options, "video", CLIP_PROMPT, "clip.mp4")} if "clip_s" in figures else {}
    return figures | clip


def cold_start(options: argparse.Namespace, kind: str, prompt: str, name: str) -> float:
    """Seconds of `calotype image` or `calotype video` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "calotype", kind, prompt, "-o", f"{folder}/{name}"]
        command += ["--steps", str(options.steps)]
        if options.model:
            command += ["--model", options.model]
        if options.threads:
            command += ["--threads", str(options.threads)]
        began = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - began


def measure(options: argparse.Namespace) -> dict[str, float]:
    """All figures of this process; call it before anything else imports calotype."""
    import torch

    began = time.perf_counter()
    import calotype

    figures = {"import_s": time.perf_counter() - began}
    if options.threads:
        torch.set_num_threads(options.threads)
    began = time.perf_counter()
    pipe = calotype.load(options.model)
    figures["load_s"] = time.perf_counter() - began

    def draw(steps: int, prompt: str = PROMPT, **arguments: int) -> float:
        start = time.perf_counter()
        pipe(prompt, num_inference_steps=steps, seed=7, progress=False, **arguments)
        return time.perf_counter() - start

    figures["first_image_s"] = draw(options.steps)
    figures["image_s"] = statistics.median(draw(options.steps) for _ in range(3))
    if makes_clips(pipe):
        figures["clip_s"] = statistics.median(draw(options.steps, CLIP_PROMPT, num_frames=FRAMES) for _ in range(3))
    figures["step_s"] = statistics.median(step_seconds(pipe, options.steps))
    figures["peak_mb"] = peak_megabytes()
    figures["gflop"] = step_operations(pipe) / 1e9
    figures["gflops"] = matrix_rate() / 1e9
    figures["floor_s"] = figures["gflop"] / figures["gflops"]
    return figures


def makes_clips(pipe) -> bool:
    """Whether the model learnt clips."""
    from calotype.vae.plate import PlateClipVAE

    return isinstance(pipe.vae, PlateClipVAE)


def step_seconds(pipe, steps: int) -> list[float]:
    """Seconds of each step of one run."""
    times, last = [], time.perf_counter()
    for _ in pipe.stream(PROMPT, num_inference_steps=steps, seed=7):
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return times[1:] or times


def step_operations(pipe) -> int:
    """Floating-point operations of a guided step's matrix products (a run of two steps less a run of one)."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    onednn = {torch.ops.mkldnn._linear_pointwise: product_operations}  # which the counter does not know
    totals = []
    for steps in (1, 2):
        counter = FlopCounterMode(display=False, custom_mapping=onednn)
        with counter:
            for _ in pipe.stream(PROMPT, num_inference_steps=steps, seed=7):
                pass
        totals.append(counter.get_total_flops())
    return totals[1] - totals[0]


def product_operations(x_shape, weight_shape, *_others, **_named) -> int:
    """Of x W^T for x [..., K] and W [N, K]."""
    return 2 * math.prod(x_shape) * weight_shape[0]


def matrix_rate(side: int = 1024, repeats: int = 5) -> float:
    """Operations per second of a float32 product of two square matrices, at its best."""
    import torch

    a, b = torch.randn(side, side), torch.randn(side, side)
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - began)
    return 2 * side**3 / best


def peak_megabytes() -> float:
    """The most memory that this process has held (ru_maxrss is in KB on Linux, in bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024**2 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
