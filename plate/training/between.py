"""Train what draws the frames between those that clips keep (`vae.plate.Between`), beside an autoencoder of pictures
that is left as it is.

    python -m calotype.plate.training.between --vae runs/vae/vae.safetensors --run runs/between --steps 1500

Each example is a group of frames of a clip: the latents of the key frames before and at its end, slightly noisy half of
the time, and its four frames. The loss is that of the decoder of pictures, over crops around what moves.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from ...vae.plate import DOWNSAMPLING, Between, PlateClipVAE, PlateClipVAEConfig
from .autoencoder import coarse_loss, energy_loss, make_optimiser, picture_weights, reconstruction_loss
from .motions import GROUP, Clip, key_frames, render_clip, training_clip
from .runs import Log, learning_rate, load_state, optimiser_state, restore_optimiser, save_state
from .scenes import SIDE

CROP = 96  # pixels of a side
MARGIN = 8  # pixels at the edges of a crop, which see too little of what is around them


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Frames of clips: key frames before and at the end of each group [N, 3, H, W], the group itself [N, 3, G, H, W],
    all in -1..1, and the crops' upper left corners (x, y), in pixels."""

    before: Tensor
    after: Tensor
    frames: Tensor
    corners: list[tuple[int, int]]


def draw_groups(random: np.random.Generator, count: int) -> Groups:
    """A random group of each of `count` clips."""
    pictures: list[NDArray[np.uint8]] = []
    corners: list[tuple[int, int]] = []
    for _ in range(count):
        clip, start = training_clip(random), int(random.choice(key_frames()[:-1]))
        pictures.append(render_clip(clip, range(start, start + GROUP + 1)))
        corners.append(corner(clip, start, random))
    pixels = torch.from_numpy(np.stack(pictures)).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    return Groups(before=pixels[:, :, 0], after=pixels[:, :, -1], frames=pixels[:, :, 1:], corners=corners)


def corner(clip: Clip, start: int, random: np.random.Generator) -> tuple[int, int]:
    """The upper left corner (x, y) of a crop around an object in the group that begins at a frame, on the grid of
    latent cells."""
    actor = clip.actors[random.integers(len(clip.actors))]
    first, last = actor.poses[start], actor.poses[start + GROUP]
    middle = (
        (first.x + last.x + (first.size + last.size) / 2) / 2,
        (first.y + last.y + (first.size + last.size) / 2) / 2,
    )
    x, y = (np.array(middle) + random.uniform(-8, 8, 2) - CROP / 2) // DOWNSAMPLING * DOWNSAMPLING
    return int(np.clip(x, 0, SIDE - CROP)), int(np.clip(y, 0, SIDE - CROP))


@torch.no_grad()
def features(vae: PlateClipVAE, pictures: Tensor, levels: Tensor, generator: torch.Generator) -> Tensor:
    """The decoder's features of pictures [N, 3, H, W], whose latents get noise of `levels` [N] deviations."""
    mean, _ = vae.posterior(pictures)
    spread = levels.view(-1, 1, 1, 1) * vae.latent_std.view(1, -1, 1, 1)
    return vae.decoder.features(mean + spread * torch.randn(mean.shape, generator=generator))


def group_loss(vae: PlateClipVAE, groups: Groups, generator: torch.Generator, arguments: argparse.Namespace) -> Tensor:
    """How far the drawn frames are off, in crops without their edges."""
    levels = torch.rand(len(groups.before), generator=generator) * arguments.noise
    levels[::2] = 0
    pairs = [features(vae, each, levels, generator) for each in (groups.before, groups.after)]
    before, after = (_crops(each, groups.corners, CROP // DOWNSAMPLING, DOWNSAMPLING) for each in pairs)
    drawn, true = vae.between(before, after), _crops(groups.frames, groups.corners, CROP, 1)
    inner = slice(MARGIN, CROP - MARGIN)
    output, target = (x[..., inner, inner].transpose(1, 2).flatten(0, 1) for x in (drawn, true))
    extra = arguments.energy * energy_loss(output, target) + arguments.coarse * coarse_loss(output, target)
    return reconstruction_loss(output, target) + extra


def _crops(x: Tensor, corners: list[tuple[int, int]], side: int, unit: int) -> Tensor:
    """Those of [N, ..., h, w], whose corners are given in pixels, `unit` of which are a cell."""
    return torch.stack(
        [
            row[..., top // unit : top // unit + side, left // unit : left // unit + side]
            for row, (left, top) in zip(x, corners, strict=True)
        ]
    )


@torch.no_grad()
def decibels(vae: PlateClipVAE, count: int, seed: int = 1) -> tuple[float, float]:
    """Mean PSNR of whole decoded clips that training may show: of their key frames, and of those between."""
    random, by_frame = np.random.default_rng(seed), list[Tensor]()
    for _ in range(count):
        pixels = torch.from_numpy(render_clip(training_clip(random))).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
        output = vae.decode(vae.encode(pixels)).clamp(-1, 1)
        by_frame.append(10 * torch.log10(4 / (output - pixels).square().mean((0, 1, 3, 4)).clamp(min=1e-6)))
    table, is_key = torch.stack(by_frame), torch.zeros(len(by_frame[0]), dtype=torch.bool)
    is_key[list(key_frames())] = True
    return float(table[:, is_key].mean()), float(table[:, ~is_key].mean())


def start_from(vae: PlateClipVAE, path: Path) -> None:
    """Reads an autoencoder of pictures, whose tail becomes that of the frames between too, and freezes it.

    Raises:
        RuntimeError: the file is of other sizes.
    """
    fresh = {name: value for name, value in vae.state_dict().items() if name.startswith("between.")}
    vae.load_state_dict(fresh | picture_weights(path))
    for mine, theirs in zip(vae.between.tail, [*vae.decoder][vae.decoder.depth :], strict=True):
        mine.load_state_dict(theirs.state_dict())
    vae.requires_grad_(False)
    vae.between.requires_grad_(True)


def begin_as_a_fade(between: Between) -> None:
    """Nothing is moved at first, and nothing refined."""
    torch.nn.init.zeros_(between.spread.weight)
    assert between.spread.bias is not None
    torch.nn.init.zeros_(between.spread.bias)
    for name, parameter in between.refine.named_parameters():
        if ".conv_2." in name:
            torch.nn.init.zeros_(parameter)


def train(arguments: argparse.Namespace, config: PlateClipVAEConfig | None = None) -> None:
    """Run, resuming from the folder's checkpoint; `config` None: the bundled model's sizes."""
    log, path, step, average = Log(arguments.run), arguments.run / "state.safetensors", 0, 0.0
    torch.manual_seed(arguments.seed)
    vae = PlateClipVAE(config or PlateClipVAEConfig())
    begin_as_a_fade(vae.between)
    start_from(vae, arguments.vae)
    vae.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] (torch's types leave it out)
    optimiser = make_optimiser(vae.between, arguments.rate)
    if path.exists():
        state, step = load_state(path)
        vae.between.load_state_dict(state["between"])
        restore_optimiser(optimiser, state["optimiser"])
    while step < arguments.steps:
        random, generator = np.random.default_rng((arguments.seed, step)), torch.Generator().manual_seed(step)
        for group in optimiser.param_groups:
            group["lr"] = arguments.rate * learning_rate(step, total=arguments.steps, warm_up=50, decay_share=0.7)
        loss = group_loss(vae, draw_groups(random, arguments.batch), generator, arguments)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.between.parameters(), 1.0)
        optimiser.step()
        step += 1
        average = 0.98 * average + 0.02 * loss.item() if average else loss.item()
        if step % arguments.every == 0 or step == arguments.steps:
            keys, others = decibels(vae, arguments.test)
            log.write(step=step, loss=round(average, 5), keys=round(keys, 2), between=round(others, 2))
            save_state(path, {"between": vae.between.state_dict(), "optimiser": optimiser_state(optimiser)}, step=step)
    save_file({k: v.contiguous() for k, v in vae.state_dict().items()}, arguments.run / "vae.safetensors")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder for log, checkpoint and vae.safetensors")
    parser.add_argument("--vae", type=Path, required=True, help="the autoencoder of pictures")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=8, help="groups of frames in a step")
    parser.add_argument("--rate", type=float, default=1.2e-3)
    parser.add_argument("--noise", type=float, default=0.1, help="the most noise on latents, in standard deviations")
    parser.add_argument("--energy", type=float, default=1.0, help="weight of the edge strength")
    parser.add_argument("--coarse", type=float, default=30.0, help="weight of the 4x4 means")
    parser.add_argument("--test", type=int, default=16, help="clips that the decibels in the log are measured on")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments)


if __name__ == "__main__":
    main()
