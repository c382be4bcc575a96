"""Train the picture autoencoder: first whole, then its decoder alone on slightly noisy latents, and on those that a
denoiser has drawn again (`redrawn`).

    python -m calotype.plate.training.autoencoder --run runs/vae --steps 1600 --decoder-steps 3000

Crops of 64x64 pixels, chosen where the objects are, half of them in scenes with a small one. Loss: L1 + 4 MSE + L1 of
the gradients at two scales (+ 1e-4 KL in the first phase; + the local strength of edges and the MSE of means over 4x4
pixels in the second).
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from ...vae.plate import PlateVAE, PlateVAEConfig
from .captions import training_sample
from .crops import crops
from .redrawn import Redrawn, read_redrawn
from .runs import Log, learning_rate, load_state, optimiser_state, restore_optimiser, save_state
from .scenes import render


def reconstruction_loss(output: Tensor, target: Tensor) -> Tensor:
    """L1 + 4 MSE + gradient L1 at full and half resolution, of [N, 3, H, W]."""
    error = output - target
    half = functional.avg_pool2d(error, 2)
    return error.abs().mean() + 4 * error.square().mean() + _gradient(error) + 0.5 * _gradient(half)


def energy_loss(output: Tensor, target: Tensor) -> Tensor:
    """How far the local strength of edges is off, of [N, 3, H, W]: against blur, which costs the other terms little."""
    return (_edge_strength(output) - _edge_strength(target)).abs().mean()


def _edge_strength(x: Tensor) -> Tensor:
    """Root of the squared differences to the right and below, summed over colours, averaged over 4x4 pixels."""
    across = (x[..., 1:, 1:] - x[..., 1:, :-1]).square()
    down = (x[..., 1:, 1:] - x[..., :-1, 1:]).square()
    return functional.avg_pool2d((across + down).sum(1, keepdim=True), 4, stride=2).add(1e-4).sqrt()


def _gradient(x: Tensor) -> Tensor:
    return (x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()


def whole_loss(vae: PlateVAE, pixels: Tensor, generator: torch.Generator) -> Tensor:
    """The first phase's loss: reconstruction from a posterior sample + 1e-4 KL."""
    mean, log_variance = vae.posterior(pixels)
    noise = torch.randn(mean.shape, generator=generator)
    output = vae.decoder(mean + torch.exp(0.5 * log_variance) * noise)
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return reconstruction_loss(output, pixels) + 1e-4 * kl


def coarse_loss(output: Tensor, target: Tensor) -> Tensor:
    """MSE of means over 4x4 pixels, of [N, 3, H, W]: the shapes and colours that tell small objects apart."""
    return functional.avg_pool2d(output - target, 4).square().mean()


@torch.no_grad()
def noisy_latents(vae: PlateVAE, pixels: Tensor, generator: torch.Generator, noise: float) -> Tensor:
    """What the decoder reads of crops: latents with noise of U(0, `noise`) standard deviations on half of them."""
    mean, _ = vae.posterior(pixels)
    level = torch.rand(len(mean), 1, 1, 1, generator=generator) * noise
    level[::2] = 0
    return mean + level * vae.latent_std.view(1, -1, 1, 1) * torch.randn(mean.shape, generator=generator)


def with_redrawn(
    vae: PlateVAE, latents: Tensor, pixels: Tensor, redrawn: Redrawn | None, random: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Latents and pixels whose second half is replaced by crops that were drawn again, where there are any."""
    if redrawn is None:
        return latents, pixels
    half = len(latents) // 2
    chosen = torch.from_numpy(random.integers(len(redrawn.latents), size=len(latents) - half))
    again = redrawn.latents[chosen].float() * vae.latent_std.view(1, -1, 1, 1) + vae.latent_mean.view(1, -1, 1, 1)
    true = redrawn.pixels[chosen].float() / 127.5 - 1
    return torch.cat((latents[:half], again)), torch.cat((pixels[:half], true))


def decoder_loss(vae: PlateVAE, latents: Tensor, pixels: Tensor, *, energy: float, coarse: float) -> Tensor:
    """The second phase's loss: of what the decoder makes of latents, against the pixels."""
    output = vae.decoder(latents)
    extra = energy * energy_loss(output, pixels) + coarse * coarse_loss(output, pixels)
    return reconstruction_loss(output, pixels) + extra


def measure_latents(vae: PlateVAE, random: np.random.Generator, count: int) -> None:
    """Set `latent_mean` and `latent_std` from whole scenes."""
    scenes = np.stack([render(training_sample(random).scene) for _ in range(count)])
    pixels = torch.from_numpy(scenes).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        mean = torch.cat([vae.posterior(part)[0] for part in pixels.split(32)])
    vae.latent_mean.copy_(mean.mean((0, 2, 3)))
    vae.latent_std.copy_(mean.std((0, 2, 3)))


def decibels(vae: PlateVAE, random: np.random.Generator, count: int) -> float:
    """Mean PSNR of round trips of whole scenes."""
    scenes = np.stack([render(training_sample(random).scene) for _ in range(count)])
    pixels = torch.from_numpy(scenes).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        output = torch.cat([vae.decoder(vae.posterior(part)[0]) for part in pixels.split(16)]).clamp(-1, 1)
    return float((10 * torch.log10(4 / (output - pixels).square().mean((1, 2, 3)))).mean())


def read_weights(vae: PlateVAE, path: Path) -> None:
    """Load `picture_weights`."""
    vae.load_state_dict(picture_weights(path))


def picture_weights(path: Path) -> dict[str, Tensor]:
    """What this script wrote, or the bundled model's file without the preview's projection."""
    return {name: value for name, value in load_file(path).items() if not name.startswith("preview.")}


def make_optimiser(module: nn.Module, rate: float) -> torch.optim.AdamW:
    """AdamW over a module."""
    return torch.optim.AdamW(module.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=1e-4)


def update(vae: PlateVAE, optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step down the gradient of a loss."""
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
    optimiser.step()


def freeze_encoder(vae: PlateVAE) -> None:
    """Only the decoder learns from here on. The encoder's last gradients go: they would count in every clipping."""
    vae.encoder.requires_grad_(False)
    vae.encoder.zero_grad()


def rate_factor(step: int, first: int, second: int) -> float:
    """The share of the peak rate at a step of two phases, of `first` and `second` steps; each has its own curve."""
    local, length = (step - first, second) if step >= first else (step, first)
    return learning_rate(local, total=length, warm_up=50, decay_share=0.6)


def train(arguments: argparse.Namespace, config: PlateVAEConfig | None = None) -> None:
    """Run both phases, resuming from the folder's checkpoint; `config` None: the bundled model's sizes."""
    log, path = Log(arguments.run), arguments.run / "state.safetensors"
    vae = PlateVAE(config or PlateVAEConfig())
    vae.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] (torch's types leave it out)
    total, first, step = arguments.steps + arguments.decoder_steps, arguments.steps, 0
    if arguments.start is not None:
        read_weights(vae, arguments.start)
    optimiser = make_optimiser(vae, arguments.rate)
    if path.exists():
        state, step = load_state(path)
        vae.load_state_dict(state["vae"])
        if step > first:
            optimiser = make_optimiser(vae.decoder, arguments.rate)
        restore_optimiser(optimiser, state["optimiser"])
    redrawn = None if arguments.redrawn is None else read_redrawn(arguments.redrawn)
    average = 0.0
    while step < total:
        random, generator = np.random.default_rng((arguments.seed, step)), torch.Generator().manual_seed(step)
        pixels = crops(random, arguments.batch).contiguous(memory_format=torch.channels_last)
        if step == first:
            if arguments.start is None:
                measure_latents(vae, random, arguments.scenes)
            freeze_encoder(vae)
            optimiser = make_optimiser(vae.decoder, arguments.rate)
        for group in optimiser.param_groups:
            group["lr"] = arguments.rate * rate_factor(step, first, arguments.decoder_steps)
        if step >= first:
            latents = noisy_latents(vae, pixels, generator, arguments.noise)
            latents, pixels = with_redrawn(vae, latents, pixels, redrawn, random)
            loss = decoder_loss(vae, latents, pixels, energy=arguments.energy, coarse=arguments.coarse)
        else:
            loss = whole_loss(vae, pixels, generator)
        update(vae, optimiser, loss)
        step += 1
        average = 0.98 * average + 0.02 * loss.item() if average else loss.item()
        if step % arguments.every == 0 or step == total:
            quality = decibels(vae, np.random.default_rng(1), arguments.test)
            log.write(step=step, loss=round(average, 5), decibels=round(quality, 2))
            save_state(path, {"vae": vae.state_dict(), "optimiser": optimiser_state(optimiser)}, step=step)
    save_file({k: v.contiguous() for k, v in vae.state_dict().items()}, arguments.run / "vae.safetensors")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder for log, checkpoint and vae.safetensors")
    parser.add_argument("--start", type=Path, help="begin from these weights")
    parser.add_argument("--steps", type=int, default=1600, help="steps of the whole autoencoder")
    parser.add_argument("--decoder-steps", type=int, default=3000, help="steps of the decoder alone, after it")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--noise", type=float, default=0.15)
    parser.add_argument("--redrawn", type=Path, help="folder of latents drawn again: half of the decoder's crops")
    parser.add_argument("--energy", type=float, default=1.0, help="weight of the edge strength in the second phase")
    parser.add_argument("--coarse", type=float, default=30.0, help="weight of the 4x4 means in the second phase")
    parser.add_argument("--scenes", type=int, default=256, help="scenes that the mean and spread of latents come from")
    parser.add_argument("--test", type=int, default=64, help="scenes that the decibels in the log are measured on")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    train(arguments)


if __name__ == "__main__":
    main()
