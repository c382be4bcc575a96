"""How often the bundled model's clips show what a held-out caption asks: the objects in every frame, how they move, and
the background; how sharp they are, how still what does not move is, and how near its autoencoder comes to true clips.

    python benchmarks/clips.py
    python benchmarks/clips.py --share 0.1 --kinds one --json clips.json --sheet clips.png

Captions and seeds are fixed; `calotype.plate.training.clip_judge` says what is right.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

import calotype
from calotype.plate.training.between import decibels
from calotype.plate.training.clip_judge import Clips, ClipVerdict, held_out_clips, judge_clip, table
from calotype.plate.training.motions import FRAMES, Clip, key_frames
from calotype.plate.training.sheet import contact_sheet
from calotype.vae.plate import PlateClipVAE

COUNTS = {"one": 200, "two": 100}
BATCH = 4
SHOWN = 8  # clips on a sheet


class TextToClips(Protocol):
    """What is asked of a pipeline here; results have `clips()`, a list of uint8 [F, H, W, 3]."""

    def __call__(self, prompt: list[str], **arguments: Any) -> Any:
        """Make clips."""
        ...


@dataclass(frozen=True, kw_only=True)
class Made:
    """Held-out clips, the frames that were made for each, and the seconds a clip took."""

    clips: list[Clip]
    frames: list[Clips]
    seconds: float


def main(arguments: Sequence[str] | None = None, pipe: TextToClips | None = None) -> None:
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    pipe = pipe if pipe is not None else calotype.load(options.model)
    report: dict[str, object] = {}
    for kind in options.kinds:
        made = make(pipe, held_out_clips(kind, max(1, round(COUNTS[kind] * options.share)), options.seed), options)
        verdicts = judged(made, options.processes)
        print(f"\n{kind}, {options.steps} steps, guidance {options.guidance:g}, {made.seconds:.2f} s a clip")
        print(f"{table(verdicts)}\n{by_motion(made.clips, verdicts)}", flush=True)
        report[kind] = {"right": [verdict.right for verdict in verdicts], "seconds": made.seconds}
        if options.sheet and kind == options.kinds[0]:
            draw_sheet(made, verdicts, options.sheet)
    if isinstance(pipe, calotype.ImagePipeline) and isinstance(pipe.vae, PlateClipVAE):
        keys, others = decibels(pipe.vae, max(1, round(64 * options.share)), seed=options.seed)
        print(f"\nround trips of the autoencoder: key frames {keys:.2f} dB, others {others:.2f} dB")
        report["decibels"] = {"keys": keys, "others": others}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="what to load; without it, the bundled model")
    parser.add_argument("--kinds", nargs="+", choices=COUNTS, default=[*COUNTS], help="how many objects move")
    parser.add_argument("--share", type=float, default=1.0, help="part of the test set, 0..1")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--guidance", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=2024, help="of the captions")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    parser.add_argument("--processes", type=int, default=1, help="that judge")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--sheet", type=Path, help="also draw key frames of some clips; wrong ones in red")
    return parser.parse_args(arguments)


def make(pipe: TextToClips, clips: list[Clip], options: argparse.Namespace) -> Made:
    """Clips of all captions; the n-th one has seed n."""
    frames: list[Clips] = []
    seconds: list[float] = []
    for first in range(0, len(clips), BATCH):
        part = clips[first : first + BATCH]
        start = time.perf_counter()
        result = pipe(
            [clip.caption for clip in part],
            num_frames=FRAMES,
            num_inference_steps=options.steps,
            guidance_scale=options.guidance,
            seed=[*range(first, first + len(part))],
            output_type="np",
            progress=False,
        )
        seconds.append((time.perf_counter() - start) / len(part))
        frames += result.clips()
    return Made(clips=clips, frames=frames, seconds=statistics.median(seconds))


def judged(made: Made, processes: int) -> list[ClipVerdict]:
    if processes < 2:
        return [judge_clip(frames, clip) for frames, clip in zip(made.frames, made.clips, strict=True)]
    with ProcessPoolExecutor(processes) as pool:
        return [*pool.map(judge_clip, made.frames, made.clips, chunksize=4)]


def by_motion(clips: Sequence[Clip], verdicts: Sequence[ClipVerdict]) -> str:
    """How many are right of each way to move; a clip of two objects counts for both."""
    told: dict[str, list[bool]] = {}
    for clip, verdict in zip(clips, verdicts, strict=True):
        for actor in clip.actors:
            told.setdefault(actor.motion, []).append(verdict.right)
    return "  ".join(f"{motion} {sum(right)}/{len(right)}" for motion, right in sorted(told.items()))


def draw_sheet(made: Made, verdicts: Sequence[ClipVerdict], path: Path) -> None:
    """Key frames, and those in the middle between them, of evenly chosen clips."""
    shown = range(0, FRAMES, key_frames().step // 2)
    chosen = range(0, len(made.clips), max(1, len(made.clips) // SHOWN))[:SHOWN]
    pictures = np.concatenate([made.frames[n][list(shown)] for n in chosen])
    captions = [made.clips[n].caption if frame == 0 else "" for n in chosen for frame in shown]
    right = [verdicts[n].right for n in chosen for _ in shown]
    contact_sheet(pictures, captions, path, columns=len(shown), right=right)


if __name__ == "__main__":
    main()
