"""Measures pictures against the captions they were made from: adherence by kind, sharpness; and what the autoencoder
alone costs.

    python -m calotype.plate.training.evaluate --vae runs/vae/vae.safetensors

A generator is any function `(captions, seeds) -> uint8 pictures [N, 128, 128, 3]`: a pipeline (`from_pipeline`) or a
checkpoint in training.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...vae.plate import PlateVAE, PlateVAEConfig
from .autoencoder import read_weights
from .captions import Facts, Kind, Sample, held_out_sample
from .finder import Reading, Sighting
from .judge import Verdict, judge
from .scenes import LARGE, MEDIUM, SMALL, render, sprite_pixels

Pictures = NDArray[np.uint8]
Generator = Callable[[Sequence[str], Sequence[int]], Pictures]
BATCH = 16


@dataclass(frozen=True, kw_only=True)
class Group:
    """A part of the test set: its name, how its scenes are drawn, and how many there are in full."""

    name: str
    kind: Kind
    count: int
    sizes: tuple[tuple[int, ...], ...] = ()  # the scene has one of these, in any order; empty: any


GROUPS = (
    Group(name="one object", kind="one", count=200),
    Group(name="two of equal size", kind="two", count=150, sizes=((MEDIUM, MEDIUM), (SMALL, SMALL))),
    Group(name="large + small", kind="two", count=60, sizes=((LARGE, SMALL),)),
    Group(name="three in a row", kind="row", count=100),
    Group(name="two X", kind="two of", count=60),
    Group(name="three X", kind="three of", count=60),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One caption of the test set, with the seed to draw it with."""

    group: str
    sample: Sample
    seed: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """How many of a group's `count` pictures are right, in all (`right`) and by fact (`counted`: as many sprites as
    stated), and the mean sharpness inside the boxes of right objects (nan where there is none)."""

    group: str
    count: int
    right: int
    background: int
    counted: int
    objects: int
    place: int
    size: int
    sharpness: float

    @property
    def share(self) -> float:
        """Right / count."""
        return self.right / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of `share`."""
        return wilson(self.right, self.count)


def held_out_cases(share: float = 1.0, seed: int = 2024) -> list[Case]:
    """The test set: captions with a combination that training never saw, the same ones for a seed; `share` < 1 takes
    the first of each group.

    Raises `ValueError` where `share` is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}")
    cases: list[Case] = []
    for place, group in enumerate(GROUPS):
        random = np.random.default_rng((seed, place))
        for number in range(max(1, round(group.count * share))):
            sizes = group.sizes[0 if len(group.sizes) < 2 or random.random() < 0.8 else 1] if group.sizes else None
            sample = held_out_sample(group.kind, random, sizes=sizes)
            cases.append(Case(group=group.name, sample=sample, seed=100_000 * place + number))
    return cases


def generate(generator: Generator, cases: Sequence[Case], batch: int = BATCH) -> Pictures:
    """A picture of every case, uint8 [N, 128, 128, 3]."""
    parts = [cases[start : start + batch] for start in range(0, len(cases), batch)]
    return np.concatenate([generator([c.sample.caption for c in part], [c.seed for c in part]) for part in parts])


def evaluate(generator: Generator, cases: Sequence[Case], batch: int = BATCH) -> list[Score]:
    """Draw every case and score it: one row per group, then "all"."""
    return score(generate(generator, cases, batch), cases)


def score(pictures: Pictures, cases: Sequence[Case]) -> list[Score]:
    """Score given pictures of the cases: one row per group, then "all"."""
    verdicts = judge(pictures, [case.sample.facts for case in cases])
    edges = [sharpness(p, v.reading, c.sample.facts) for p, v, c in zip(pictures, verdicts, cases, strict=True)]
    names = list(dict.fromkeys(case.group for case in cases))
    rows = [_row(name, [n for n, case in enumerate(cases) if case.group == name], verdicts, edges) for name in names]
    return [*rows, _row("all", range(len(cases)), verdicts, edges)]


def sharpness(picture: Pictures, reading: Reading, facts: Facts) -> float:
    """Gradient energy inside the boxes of asked objects that were found, over that of true sprites on the same
    backdrop; nan where none was found."""
    asked = [s for s in reading.sprites if s.index in facts.objects]
    if not asked:
        return math.nan
    pairs = [_gradient_energies(picture, reading, sighting) for sighting in asked]
    return float(np.mean([drawn / true for drawn, true in pairs]))


def from_pipeline(pipe: "TextToImage", *, num_inference_steps: int, guidance_scale: float) -> Generator:
    """A generator over a Calotype pipeline."""

    def draw(captions: Sequence[str], seeds: Sequence[int]) -> Pictures:
        result = pipe(
            list(captions),
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            seed=list(seeds),
            output_type="np",
        )
        pictures = np.stack([np.asarray(image) for image in result.images])
        if pictures.dtype == np.uint8:
            return pictures
        return np.clip(pictures * 255 + 0.5, 0, 255).astype(np.uint8)

    return draw


class HasImages(Protocol):
    """What a pipeline returns, as far as it is read here."""

    @property
    def images(self) -> Sequence[object]:
        """Pictures [128, 128, 3], uint8 or 0..1."""
        ...


class TextToImage(Protocol):
    """What is asked of a pipeline here."""

    def __call__(
        self, prompt: list[str], *, num_inference_steps: int, guidance_scale: float, seed: list[int], output_type: str
    ) -> HasImages:
        """Draw the prompts."""
        ...


# -- the autoencoder alone


@dataclass(frozen=True, kw_only=True)
class RoundTrip:
    """What the autoencoder keeps of true scenes: decibels (mean of the scenes' PSNR) over the picture and in the
    object boxes, and the judge's rows."""

    decibels: float
    decibels_in_boxes: float
    scores: tuple[Score, ...]


def round_trip(vae: PlateVAE, pictures: Pictures, batch: int = BATCH) -> Pictures:
    """Encode and decode uint8 pictures [N, H, W, 3]."""
    out: list[Pictures] = []
    for start in range(0, len(pictures), batch):
        x = torch.from_numpy(pictures[start : start + batch]).permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.no_grad():
            y = vae.decode(vae.encode(x[:, :, None]))[:, :, 0].clamp(-1, 1)
        out.append(((y + 1) * 127.5 + 0.5).to(torch.uint8).permute(0, 2, 3, 1).numpy())
    return np.concatenate(out)


def evaluate_autoencoder(vae: PlateVAE, cases: Sequence[Case]) -> RoundTrip:
    """Round trips of the cases' true scenes."""
    true = np.stack([render(case.sample.scene) for case in cases])
    kept = round_trip(vae, true)
    whole = [_decibels(a, b) for a, b in zip(kept, true, strict=True)]
    boxes = [
        _decibels(a[s.y : s.y + s.size, s.x : s.x + s.size], b[s.y : s.y + s.size, s.x : s.x + s.size])
        for a, b, case in zip(kept, true, cases, strict=True)
        for s in case.sample.scene.sprites
    ]
    return RoundTrip(
        decibels=float(np.mean(whole)), decibels_in_boxes=float(np.mean(boxes)), scores=tuple(score(kept, cases))
    )


# -- tables


def table(scores: Sequence[Score]) -> str:
    """The rows as text, one line each."""
    heads = "".join(f"{name:>8}" for name in ("place", "count", "size", "ground", "sharp"))
    lines = [f"{'group':<20}{'right':>16}{'95 %':>16}{'objects':>9}{heads}"]
    for row in scores:
        low, high = row.interval
        facts = "".join(f"{n / row.count:>8.0%}" for n in (row.place, row.counted, row.size, row.background))
        counts = f"{row.share:.1%} ({row.right}/{row.count})"
        interval, objects = f"{low:.1%}-{high:.1%}", f"{row.objects / row.count:>9.0%}"
        lines.append(f"{row.group:<20}{counts:>16}{interval:>16}{objects}{facts}{row.sharpness:>8.2f}")
    return "\n".join(lines)


def as_rows(scores: Sequence[Score]) -> list[dict[str, float | int | str | None]]:
    """The rows as plain dictionaries for JSON, with the share and its interval (None for a missing sharpness)."""
    rows: list[dict[str, float | int | str | None]] = []
    for row in scores:
        low, high = row.interval
        entry = asdict(row) | {"share": row.share, "low": low, "high": high}
        rows.append(entry | {"sharpness": None if math.isnan(row.sharpness) else row.sharpness})
    return rows


def wilson(right: int, count: int) -> tuple[float, float]:
    """The Wilson 95 % interval of a share (Wilson, 1927)."""
    z = 1.959964
    middle = (right + z * z / 2) / (count + z * z)
    reach = z / (count + z * z) * math.sqrt(right * (count - right) / count + z * z / 4)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def _row(name: str, members: Sequence[int], verdicts: Sequence[Verdict], edges: Sequence[float]) -> Score:
    chosen = [verdicts[n] for n in members]
    sharp = [edges[n] for n in members if verdicts[n].objects and not math.isnan(edges[n])]
    return Score(
        group=name,
        count=len(chosen),
        right=sum(v.right for v in chosen),
        background=sum(v.background for v in chosen),
        counted=sum(v.count for v in chosen),
        objects=sum(v.objects for v in chosen),
        place=sum(v.place for v in chosen),
        size=sum(v.size for v in chosen),
        sharpness=float(np.mean(sharp)) if sharp else math.nan,
    )


def _gradient_energies(picture: Pictures, reading: Reading, sighting: Sighting) -> tuple[float, float]:
    """Sums of squared finite differences in a sprite's box: as drawn, and of the true sprite on the fitted backdrop."""
    box = slice(sighting.y, sighting.y + sighting.size), slice(sighting.x, sighting.x + sighting.size)
    ink = sprite_pixels(sighting.size)[sighting.index]
    true = np.clip(reading.backdrop[box] * (1 - ink[..., 3:]) + ink[..., :3], 0, 255)
    return gradient_energy(picture[box].astype(np.float32)), gradient_energy(true)


def gradient_energy(pixels: NDArray[np.float32]) -> float:
    """The sum of squared finite differences, across and down."""
    return float(np.square(np.diff(pixels, axis=0)).sum() + np.square(np.diff(pixels, axis=1)).sum())


def _decibels(a: Pictures, b: Pictures) -> float:
    error = np.square(a.astype(np.float32) - b.astype(np.float32)).mean()
    return float(10 * np.log10(255**2 / max(float(error), 1e-3)))


def main() -> None:
    """Command line: what an autoencoder keeps of the held-out scenes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vae", type=Path, required=True, help="weights of the autoencoder")
    parser.add_argument("--share", type=float, default=1.0, help="part of the test set, 0..1")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    vae = PlateVAE(PlateVAEConfig())
    read_weights(vae, arguments.vae)
    result = evaluate_autoencoder(vae, held_out_cases(arguments.share))
    print(f"{result.decibels:.2f} dB, {result.decibels_in_boxes:.2f} dB in the object boxes")
    print(table(result.scores))


if __name__ == "__main__":
    main()
