"""How often the bundled model draws what a held-out caption asks, by kind, number of steps and guidance.

    python benchmarks/quality.py                       # the whole test set at the defaults, then a part of it over
    steps and guidance
    python benchmarks/quality.py --share 0.1 --steps 10 --guidance 1.5 --json quality.json --sheet quality.png

Everything a caption states must be right: objects and their number, place, size, background. Intervals are 95 %
(Wilson).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

import calotype
from calotype.plate.training.evaluate import (
    Case,
    TextToImage,
    as_rows,
    from_pipeline,
    generate,
    held_out_cases,
    score,
    table,
)
from calotype.plate.training.judge import judge
from calotype.plate.training.sheet import contact_sheet

STEPS, GUIDANCE = 10, 1.5  # the defaults of the bundled model
SHEET = 64  # pictures on a sheet


def main(arguments: Sequence[str] | None = None, pipe: TextToImage | None = None) -> None:
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    if pipe is None:
        pipe = calotype.load(options.model)
    report: list[dict[str, object]] = []
    for steps, guidance, cases in runs(options):
        generator = from_pipeline(pipe, num_inference_steps=steps, guidance_scale=guidance)
        pictures = generate(generator, cases)
        scores = score(pictures, cases)
        print(f"\n{steps} steps, guidance {guidance:g}, {len(cases)} held-out captions\n{table(scores)}", flush=True)
        report.append({"steps": steps, "guidance": guidance, "groups": as_rows(scores)})
        if options.sheet and len(report) == 1:
            draw_sheet(pictures, cases, options.sheet)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="what to load; without it, the bundled model")
    parser.add_argument("--share", type=float, default=1.0, help="part of the test set at the first setting, 0..1")
    parser.add_argument("--sweep-share", type=float, default=0.25, help="part of the test set at the others")
    parser.add_argument("--steps", type=int, nargs="*", default=[STEPS, 4, 20])
    parser.add_argument("--guidance", type=float, nargs="*", default=[GUIDANCE, 1.0, 2.0, 5.0])
    parser.add_argument("--seed", type=int, default=2024, help="of the captions")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--sheet", type=Path, help="also draw some pictures of the first setting; wrong ones in red")
    return parser.parse_args(arguments)


def runs(options: argparse.Namespace) -> list[tuple[int, float, list[Case]]]:
    """The first steps with the first guidance in full; then each other value of one, with the other at its first."""
    steps, guidance = options.steps, options.guidance
    full = held_out_cases(options.share, options.seed)
    settings = [(n, guidance[0]) for n in steps[1:]] + [(steps[0], w) for w in guidance[1:]]
    if not settings:
        return [(steps[0], guidance[0], full)]
    part = held_out_cases(min(options.share, options.sweep_share), options.seed)
    return [(steps[0], guidance[0], full), *((n, w, part) for n, w in settings)]


def draw_sheet(pictures, cases: Sequence[Case], path: Path) -> None:
    """Evenly chosen pictures with their captions."""
    stride = max(1, len(cases) // SHEET)
    chosen, shown = cases[::stride][:SHEET], pictures[::stride][:SHEET]
    right = [verdict.right for verdict in judge(shown, [case.sample.facts for case in chosen])]
    contact_sheet(shown, [case.sample.caption for case in chosen], path, right=right)


if __name__ == "__main__":
    main()
