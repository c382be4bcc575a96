"""Video against diffusers, on random checkpoints: a guided step of a denoiser over a clip, and the decoding of clips.

    python benchmarks/video.py --against diffusers --threads 2 --json figures.json

The step is measured as in `denoise.py`; `--attention` names approximations, whose seconds and error are told, with how
many of the calls of attention they took. `--tile` and `--window` are of sliding_tile: its own ones see clips of this
size whole.
Decoding is measured in fresh processes, one per clip and side: the most memory above that of the loaded autoencoder and
of what goes in and comes out, and the seconds. Ours gives frames as they are ready, and they are let go; theirs gives
the whole clip. The longest clip over the shortest says how memory grows.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import denoise
import torch
from denoise_cases import CASES
from torch import Tensor

from calotype.core.attention.approximate import BlockedAttention, SlidingTileAttention
from calotype.core.attention.base import AttentionBackend, AttentionCall

APPROXIMATIONS: Mapping[str, Callable[[argparse.Namespace], AttentionBackend]] = {
    "sliding_tile": lambda options: SlidingTileAttention(tile=tuple(options.tile), window=tuple(options.window)),
    "blocked_bfloat16": lambda options: BlockedAttention(),
}
FAMILIES = tuple(name for name, case in CASES.items() if case.frames > 1)
CELLS = 48  # latent cells a side: 9 latent frames are 5,184 tokens


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """An autoencoder: diffusers' class, its config in middle and tiny size, channels of its latents, frames per latent
    frame, pixels per cell, and our loader."""

    theirs: str
    entries: Mapping[str, Any]
    tiny: Mapping[str, Any]
    channels: int
    group: int
    downsampling: int
    load: Callable[[Path], Any]


def load_wan(folder: Path) -> Any:
    from calotype.vae.wan import load_wan_vae

    return load_wan_vae(folder)


def load_hunyuan_video(folder: Path) -> Any:
    from calotype.vae.hunyuan_video import load_hunyuan_video_vae

    return load_hunyuan_video_vae(folder)


DECODERS = {
    "wan": Decoder(
        theirs="AutoencoderKLWan",
        entries={"base_dim": 32},
        tiny={"base_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
        channels=16,
        group=4,
        downsampling=8,
        load=load_wan,
    ),
    "hunyuan-1.5": Decoder(
        theirs="AutoencoderKLHunyuanVideo15",
        entries={"block_out_channels": [32, 64, 128, 256, 256]},
        tiny={"block_out_channels": [4, 8, 16, 32, 64], "layers_per_block": 1},
        channels=32,
        group=4,
        downsampling=16,
        load=load_hunyuan_video,
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.once:
        print(json.dumps(decode_figures(options)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        options.folder = options.folder or Path(scratch)
        report: dict[str, Any] = {"threads": torch.get_num_threads(), "steps": [], "decoding": []}
        for name in options.families:
            for dtype in options.dtypes:
                row = denoise.rows_of(step_options(options), name, dtype, options.folder)
                row["approximations"] = {each: approximate(options, name, dtype, each) for each in options.attention}
                report["steps"].append(row)
        for name in options.decoders:
            report["decoding"].append(decode_rows(options, name))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", choices=("diffusers", "none"), default="none")
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES), help="denoisers")
    parser.add_argument("--dtypes", nargs="*", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--cells", type=int, default=CELLS, help="latent cells a side for the denoisers")
    parser.add_argument("--repeats", type=int, default=3, help="steps that are timed on each side")
    parser.add_argument("--fresh", type=int, default=1, help="fresh processes of each side for the denoisers")
    parser.add_argument("--attention", nargs="*", default=[], choices=APPROXIMATIONS, help="approximations")
    parser.add_argument("--tile", nargs=3, type=int, default=(3, 4, 4), help="tokens: frames, rows, columns")
    parser.add_argument("--window", nargs=3, type=int, default=(3, 3, 3), help="tiles: frames, rows, columns")
    parser.add_argument("--decoders", nargs="*", choices=DECODERS, default=list(DECODERS), help="autoencoders")
    parser.add_argument("--frames", nargs="*", type=int, default=[17, 61, 81], help="of the clips that are decoded")
    parser.add_argument("--pixels", type=int, default=128, help="a side, of the clips that are decoded")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    parser.add_argument("--folder", type=Path, help="where checkpoints are kept, for the next time too")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the benchmark itself")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--once", choices=denoise.SIDES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def step_options(options: argparse.Namespace) -> argparse.Namespace:
    """What `denoise.py` is to be told."""
    given = ["--against", options.against, "--cells", str(options.cells), "--repeats", str(options.repeats)]
    given += ["--fresh", str(options.fresh), "--threads", str(options.threads), *["--tiny"] * options.tiny]
    return denoise.parse(given)


class Counted:
    """A backend, and how many calls it took of those it was asked."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend, self.name = backend, backend.name
        self.taken = self.asked = 0

    def refuses(self, call: AttentionCall) -> str | None:
        """The backend's reason."""
        reason = self.backend.refuses(call)
        self.asked += 1
        self.taken += reason is None
        return reason

    def __call__(self, call: AttentionCall) -> Tensor:
        """The backend's result."""
        return self.backend(call)


@torch.no_grad()
def approximate(options: argparse.Namespace, name: str, dtype: str, attention: str) -> dict[str, float]:
    """Seconds of our step with an approximation over those without, taking turns, how far its slope is off, and the
    share of the calls of attention that it took."""
    case, kind = CASES[name], getattr(torch, dtype)
    folder = options.folder / f"{name}-{dtype}{'-tiny' * options.tiny}"
    inputs = denoise.inputs_of(step_options(options), case, folder, kind)
    counted = Counted(APPROXIMATIONS[attention](options))
    exact, other = (denoise.Ours(case, name, folder, kind, attention=each) for each in (None, counted))
    times: dict[denoise.Ours, list[float]] = {exact: [], other: []}
    for side in times:
        side.prepare(inputs, options.repeats + 1)
    for i in range(options.repeats + 1):
        for side, spent in times.items():
            spent.append(denoise.seconds(lambda side=side, i=i: side.step(i)))
    whole, part = (statistics.median(spent[1:]) for spent in times.values())
    a, b = (side.step(0).float() for side in times)
    row = {"ratio": part / whole, "error": float((b - a).norm() / a.norm()), "taken": counted.taken / counted.asked}
    told = f"error of the slope {row['error']:.1e} (relative), in {row['taken']:.0%} of the calls"
    print(f"  {attention}, step / exact{'':<16}{row['ratio']:.3f}   {told}")
    return row


def decode_rows(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Memory and seconds of each clip on each side; they are printed as they are found."""
    folder = autoencoder(options, name)
    print(f"\n{name} decoder, {options.pixels} x {options.pixels} pixels, {torch.get_num_threads()} threads")
    command = [sys.executable, __file__, "--decoders", name, "--folder", str(folder), "--pixels", str(options.pixels)]
    command += ["--threads", str(options.threads), *["--tiny"] * options.tiny]
    clips: dict[str, dict[str, dict[str, float]]] = {}
    for count in options.frames:
        runs: dict[str, dict[str, float]] = {}
        for side in denoise.SIDES[: 1 + (options.against != "none")]:
            done = subprocess.run(
                [*command, "--frames", str(count), "--once", side], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise SystemExit(done.stderr.strip())
            runs[side] = json.loads(done.stdout.splitlines()[-1])
        clips[str(count)] = {key: {side: run[key] for side, run in runs.items()} for key in runs["ours"]}
        for key, row in clips[str(count)].items():
            denoise.tell(f"{count} frames, {key}", row)
    peaks = [clips[str(count)]["memory MB"]["ours"] for count in (max(options.frames), min(options.frames))]
    print(f"  memory, {max(options.frames)} / {min(options.frames)} frames{'':<11}ours {peaks[0] / peaks[1]:.3f}")
    return {"decoder": name, "clips": clips, "growth": peaks[0] / peaks[1]}


def autoencoder(options: argparse.Namespace, name: str) -> Path:
    """The folder of a random autoencoder that diffusers has saved; made unless it is there."""
    import diffusers

    case = DECODERS[name]
    folder = options.folder / f"{name}-vae{'-tiny' * options.tiny}"
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        getattr(diffusers, case.theirs)(**{**case.entries, **(case.tiny if options.tiny else {})}).save_pretrained(
            folder
        )
    return folder


@torch.no_grad()
def decode_figures(options: argparse.Namespace) -> dict[str, float]:
    """Of one clip on one side, in this process."""
    case, (count,) = DECODERS[options.decoders[0]], options.frames
    cells = options.pixels // case.downsampling
    latents = torch.randn(1, case.channels, 1 + (count - 1) // case.group, cells, cells)
    decode = (our_frames if options.once == "ours" else their_frames)(case, options.folder)
    for frames in decode(latents[:, :, :1]):  # what a first call sets up stays
        del frames
    denoise.trim()
    before, sizes = denoise.anonymous(), list[float]()
    took: list[float] = []

    def run() -> None:
        took.append(denoise.seconds(lambda: [sizes.append(frames.nbytes) for frames in decode(latents)]))

    peak, _ = denoise.watched(run)
    return {"memory MB": peak - before - max(sizes) / 2**20, "seconds": took[0]}


def our_frames(case: Decoder, folder: Path) -> Callable[[Tensor], Iterator[Tensor]]:
    """Groups of frames of latents, as they are ready."""
    vae = case.load(folder)
    return vae.stream_decode


def their_frames(case: Decoder, folder: Path) -> Callable[[Tensor], Iterator[Tensor]]:
    """All frames of latents at once."""
    import diffusers

    vae = getattr(diffusers, case.theirs).from_pretrained(folder).eval().requires_grad_(False)
    return lambda latents: iter([vae.decode(latents, return_dict=False)[0]])


if __name__ == "__main__":
    main()
