"""Train what draws the frames between those that clips keep (`vae.plate.Between`), beside an autoencoder of pictures
that is left as it is.

    python -m calotype.plate.training.between --vae runs/vae/vae.safetensors --run runs/between --steps 1500

Each example is a group of frames of a clip: the latents of the key frames before and at its end, slightly noisy half of
the time, and the frames between. The loss is that of the decoder of pictures, over crops around what moves, and how far
warps are from the true moves.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from ...vae.between import FLOW_UNIT, STRIDE, Warps
from ...vae.plate import DOWNSAMPLING, PlateClipVAE, PlateClipVAEConfig
from .autoencoder import coarse_loss, energy_loss, make_optimiser, picture_weights, reconstruction_loss
from .motions import GROUP, Actor, Clip, Pose, key_frames, posed, render_clip, seen_width, training_clip
from .runs import Log, learning_rate, load_state, optimiser_state, restore_optimiser, save_state
from .scenes import SIDE, Array

CROP = 96  # pixels of a side
STILL_WEIGHT = 0.1  # of what does not move
MARGIN = 8  # pixels at the edges of a crop, which see too little of what is around them


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Key frames before and at the end of each group [N, 3, H, W], the T frames between [N, 3, T, H, W], all in -1..1;
    where their pixels are in the two, as offsets x, y in pixels [N, T, 2, H/4, W/4], and how sure that is [N, T, H/4,
    W/4]; the crops' upper left corners (x, y), in pixels."""

    before: Tensor
    after: Tensor
    frames: Tensor
    moves_before: Tensor
    moves_after: Tensor
    known: Tensor
    corners: list[tuple[int, int]]


def draw_groups(random: np.random.Generator, count: int, reshaped: float = 0.0) -> Groups:
    """A random group of each of `count` clips, in a share of which, at least, an object grows, shrinks or turns."""
    pictures: list[NDArray[np.uint8]] = []
    moves: list[tuple[Tensor, Tensor, Tensor]] = []
    corners: list[tuple[int, int]] = []
    for _ in range(count):
        clip, start = _group(random, reshaped)
        pictures.append(render_clip(clip, range(start, start + GROUP + 1)))
        moves.append(true_moves(clip, start))
        corners.append(corner(clip, start, random))
    pixels = torch.from_numpy(np.stack(pictures)).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    before, after, known = (torch.stack(each) for each in zip(*moves, strict=True))
    return Groups(
        before=pixels[:, :, 0],
        after=pixels[:, :, -1],
        frames=pixels[:, :, 1:-1],
        moves_before=before,
        moves_after=after,
        known=known,
        corners=corners,
    )


def _group(random: np.random.Generator, reshaped: float) -> tuple[Clip, int]:
    """A clip, and the key frame at which one of its groups begins."""
    must_reshape = random.random() < reshaped
    while True:
        clip, start = training_clip(random), int(random.choice(key_frames()[:-1]))
        if not must_reshape or any(_is_reshaped(actor, start) for actor in clip.actors):
            return clip, start


def _is_reshaped(actor: Actor, start: int) -> bool:
    before, after = actor.poses[start], actor.poses[start + GROUP]
    return (before.size, before.angle) != (after.size, after.angle)


def true_moves(clip: Clip, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """For the frames between the key frame `start` and the next one: offsets to both, and how sure they are (see
    `Groups`). Objects move as their poses do; far from all objects nothing moves; near them nothing is known."""
    side, between = SIDE // STRIDE, range(start + 1, start + GROUP)
    before, after = (np.zeros((len(between), 2, side, side), dtype=np.float32) for _ in range(2))
    known = np.full((len(between), side, side), STILL_WEIGHT, dtype=np.float32)
    middles = np.arange(side) * STRIDE + STRIDE // 2
    for n, frame in enumerate(between):
        for actor in clip.actors:
            pose = actor.poses[frame]
            rows, columns = ((middles >= at - STRIDE) & (middles < at + pose.size + STRIDE) for at in (pose.y, pose.x))
            near = rows[:, None] & columns
            known[n][near] = 0
            covered = _alpha(actor.index, pose)[np.ix_(middles, middles)] > 0.5
            known[n][covered] = 1
            for moves, key in ((before, start), (after, start + GROUP)):
                offsets = _offsets(pose, actor.poses[key], middles)
                moves[n][:, covered] = offsets[:, covered]
    return torch.from_numpy(before), torch.from_numpy(after), torch.from_numpy(known)


def _alpha(index: int, pose: Pose) -> Array:
    """How much of each pixel an object covers, [H, W]."""
    whole = np.zeros((SIDE, SIDE), dtype=np.float32)
    whole[pose.y : pose.y + pose.size, pose.x : pose.x + pose.size] = posed(index, pose.size, pose.angle)[..., 3]
    return whole


def _offsets(pose: Pose, key: Pose, middles: NDArray[np.int64]) -> Array:
    """From places on a grid in one pose to the same spots of the object in another, [2, n, n]: x, y, in pixels."""
    x, y = np.meshgrid(middles, middles)
    across, down = x - (pose.x + pose.size / 2), y - (pose.y + pose.size / 2)
    scale, squeezed = key.size / pose.size, seen_width(key.angle) / seen_width(pose.angle)
    new_x = key.x + key.size / 2 + scale * squeezed * across
    new_y = key.y + key.size / 2 + scale * down
    return np.stack((new_x - x, new_y - y)).astype(np.float32)


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
def seen(vae: PlateClipVAE, pictures: Tensor, levels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The decoder's features and pixels of pictures [N, 3, H, W]; latents get noise of `levels` [N] deviations."""
    mean, _ = vae.posterior(pictures)
    spread = levels.view(-1, 1, 1, 1) * vae.latent_std.view(1, -1, 1, 1)
    return vae.features_and_pixels(mean + spread * torch.randn(mean.shape, generator=generator))


def group_loss(vae: PlateClipVAE, groups: Groups, generator: torch.Generator, arguments: argparse.Namespace) -> Tensor:
    """How far the drawn frames are off, in crops without their edges, and the warps from what truly moved."""
    levels = torch.rand(len(groups.before), generator=generator) * arguments.noise
    levels[::2] = 0
    cells = CROP // DOWNSAMPLING
    pairs = [seen(vae, each, levels, generator) for each in (groups.before, groups.after)]
    features = [_crops(each, groups.corners, cells, DOWNSAMPLING) for each, _ in pairs]
    pixels = [_crops(each, groups.corners, CROP, 1) for _, each in pairs]
    drawn, warps = vae.between.drawn((features[0], features[1]), (pixels[0], pixels[1]))
    inner = slice(MARGIN, CROP - MARGIN)
    true = _crops(groups.frames, groups.corners, CROP, 1)
    output, target = (x[..., inner, inner].transpose(1, 2).flatten(0, 1) for x in (drawn, true))
    extra = arguments.energy * energy_loss(output, target) + arguments.coarse * coarse_loss(output, target)
    return reconstruction_loss(output, target) + extra + arguments.moves * _flow_loss(warps, groups)


def _flow_loss(warps: Warps, groups: Groups) -> Tensor:
    """Mean distance between warps and true moves, in `FLOW_UNIT`s, where these are known."""
    side = CROP // STRIDE
    before, after, weight = (
        _crops(each, groups.corners, side, STRIDE) for each in (groups.moves_before, groups.moves_after, groups.known)
    )
    far = (warps.before - before).abs().sum(2) + (warps.after - after).abs().sum(2)
    return (weight * far).sum() / (weight.sum() * FLOW_UNIT)


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
    """Reads an autoencoder of pictures, and freezes it.

    Raises:
        RuntimeError: the file is of other sizes.
    """
    fresh = {name: value for name, value in vae.state_dict().items() if name.startswith("between.")}
    vae.load_state_dict(fresh | picture_weights(path))
    vae.requires_grad_(False)
    vae.between.requires_grad_(True)


def train(arguments: argparse.Namespace, config: PlateClipVAEConfig | None = None) -> None:
    """Run, resuming from the folder's checkpoint; `config` None: the bundled model's sizes."""
    log, path, step, average = Log(arguments.run), arguments.run / "state.safetensors", 0, 0.0
    torch.manual_seed(arguments.seed)
    vae = PlateClipVAE(config or PlateClipVAEConfig())
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
        loss = group_loss(vae, draw_groups(random, arguments.batch, arguments.reshaped), generator, arguments)
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
    parser.add_argument("--reshaped", type=float, default=0.0, help="share of groups that must show a change of shape")
    parser.add_argument("--moves", type=float, default=0.1, help="weight of how far warps are from true moves")
    parser.add_argument("--test", type=int, default=16, help="clips that the decibels in the log are measured on")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments)


if __name__ == "__main__":
    main()
