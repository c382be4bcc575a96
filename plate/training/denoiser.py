"""Train the denoiser on encoded scenes, on the states of the finished language model.

    python -m calotype.plate.training.denoiser --run runs/denoiser --latents runs/latents --language runs/language \\
        --steps 5000 --processes 2

With `--clips FOLDER` every other step is one of clips, and the model gets an embedding for each frame but the first.

Flow matching with sigma from a logit-normal (85 %) or uniform (15 %) distribution, half of them shifted by 3 (of clips,
three quarters); captions are dropped one time in ten. With `--clip-share 0.5` half of a clip's tokens are left out,
above all of its background, which costs half (as in Zheng et al. 2023, without their decoder); end with a run that has
them all. An auxiliary head on the middle of the stack names the object on
each picture token (weight 0.1); it is not shipped. Muon on the matrices of the blocks, AdamW on the rest, an
exponential moving average of the weights. Processes on one machine average their gradients through gloo.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from ...core.attention.base import AttentionSelector
from ...core.attention.sdpa import SDPAAttention
from ...core.rotary import rotary_table
from ...core.stream import Block, BlockInputs, Cache, Stream
from ...core.whole_file import whole_file
from ...denoisers.fitting import text_mask
from ...denoisers.patches import patchify
from ...denoisers.plate import PlateDenoiser, PlateDenoiserConfig, text_positions
from ...language.model import LanguageModel
from ...language.padding import padded
from ...language.tokenizer import load_tokenizer
from .courses import Course, Data, courses_of, figures, smoothed
from .language import language_config
from .motions import key_frames
from .muon import Muon, sum_over_processes
from .objects import object_names
from .runs import Log, learning_rate, load_state, optimiser_state, restore_optimiser, save_state
from .tokenizer import BOS, EOS

LAYER = 2  # of the language model, before the final norm
DROPPED = 0.1
BACKGROUND_WEIGHT = 0.15
SHIFT = 3.0  # of the noise levels
SHIFTED, CLIPS_SHIFTED = 0.5, 0.75  # the share of them that is shifted
OBJECTS_LUCK = 0.5  # by how much tokens of objects are likelier to be kept, where not all are
HEAD_RATE = 2e-3  # peak rate of the auxiliary head, which always begins from nothing


class Trainee(nn.Module):
    """The denoiser with its auxiliary head."""

    def __init__(self, config: PlateDenoiserConfig) -> None:
        super().__init__()
        self.denoiser = PlateDenoiser(config)
        self.head = nn.Linear(config.width, len(object_names()) + 1)
        self.tap = config.layers // 2
        self.head_teaches = True  # whether the head's loss also reaches the denoiser

    def forward(
        self, x: Tensor, sigma: Tensor, states: Tensor, lengths: Tensor, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Slopes [B, n, C P P] and class scores [B, n, classes] of the picture tokens `kept` [B, n] (None: all) for
        latents at sigma [B]; the others are not there."""
        model, attention = self.denoiser, AttentionSelector(backends=(SDPAAttention(),))
        shape = tuple(x.shape)
        tokens = model.image_tokens(x, x.dtype) + model.position_embedding(shape)
        places = model.places(shape, states).expand(len(x), -1, -1)
        if kept is not None:
            tokens, places = chosen(tokens, kept), chosen(places, kept)
        num_image = tokens.shape[1]
        modulation, final = model.modulations(sigma)
        all_places = torch.cat((places, text_positions(states).expand(len(x), -1, -1)), dim=1)
        inputs = BlockInputs(
            rotary=rotary_table(model.config.rotary(), all_places),
            mask=text_mask(lengths, states.shape[1], num_image),
            attention=attention,
            modulation=modulation,
        )
        middle: list[Tensor] = []

        def runner(blocks: Sequence[Block], stream: Stream, prepared: BlockInputs, cache: Cache) -> Stream:
            for index, block in enumerate(blocks):
                stream = block(stream, prepared, cache, index)
                if index + 1 == self.tap:
                    middle.append(stream.x[:, :num_image])
            return stream

        slopes = model.token_slopes(tokens, model.refine_text(states, lengths, attention), inputs, final, runner)
        return slopes, self.head(middle[0] if self.head_teaches else middle[0].detach())


def chosen(tokens: Tensor, kept: Tensor) -> Tensor:
    """Of [B, N, D] those of the indices [B, n]: [B, n, D]."""
    return tokens.gather(1, kept[..., None].expand(-1, -1, tokens.shape[-1]))


def random_tokens(classes: Tensor, background: int, share: float, generator: torch.Generator) -> Tensor:
    """A share of all picture tokens, indices [B, n]; those of objects are likelier than those of the `background`
    class, `classes` [B, N]."""
    luck = torch.rand(classes.shape, generator=generator) + OBJECTS_LUCK * (classes != background)
    return luck.topk(round(share * classes.shape[1]), dim=1).indices


def random_sigmas(count: int, generator: torch.Generator, shifted_share: float = SHIFTED) -> Tensor:
    """Noise levels [count]: logit-normal 85 %, uniform 15 %; a share of them is shifted towards noise, where only the
    caption tells."""
    normal = torch.sigmoid(torch.randn(count, generator=generator))
    uniform = torch.rand(count, generator=generator)
    sigma = torch.where(torch.rand(count, generator=generator) < 0.15, uniform, normal)
    shifted = SHIFT * sigma / (1 + (SHIFT - 1) * sigma)
    return torch.where(torch.rand(count, generator=generator) < shifted_share, shifted, sigma)


def losses(
    trainee: Trainee, language: LanguageModel, data: Data, rows: list[int], seed: tuple[int, int], share: float
) -> tuple[Tensor, Tensor]:
    """The flow-matching loss and the auxiliary loss of one batch, on a `share` of its tokens."""
    generator = torch.Generator().manual_seed(seed[0] * 1000003 + seed[1])
    drop = torch.rand(len(rows), generator=generator) < DROPPED
    prompts = [[BOS, EOS] if gone else data.ids[row] for row, gone in zip(rows, drop.tolist(), strict=True)]
    ids, lengths = padded(prompts), torch.tensor([len(prompt) for prompt in prompts])
    with torch.no_grad():
        states = language.hidden_states(ids, lengths, layer=LAYER, normed=False)
    clean, is_clip = data.latents[rows].float(), data.latents.dim() == 5
    clean = clean if is_clip else clean[:, :, None]
    noise = torch.randn(clean.shape, generator=generator)
    sigma = random_sigmas(len(rows), generator, CLIPS_SHIFTED if is_clip else SHIFTED)
    level = sigma.view(-1, 1, 1, 1, 1)
    wanted = patchify(noise - clean, trainee.denoiser.config.patch)
    classes, background = data.classes[rows].flatten(1).long(), trainee.head.out_features - 1
    kept = None
    if share < 1:
        kept = random_tokens(classes, background, share, generator)
        wanted, classes = chosen(wanted, kept), classes.gather(1, kept)
    slopes, scores = trainee((1 - level) * clean + level * noise, sigma, states, lengths, kept)
    weight = torch.ones(scores.shape[-1])
    weight[background] = BACKGROUND_WEIGHT
    auxiliary = functional.cross_entropy(scores.flatten(0, 1), classes.flatten(), weight=weight)
    return functional.mse_loss(slopes, wanted), auxiliary


def make_optimisers(
    trainee: Trainee, arguments: argparse.Namespace, rank: int
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the matrices of the blocks, AdamW for the rest and for the auxiliary head, each with its peak rate."""
    matrices, parts, rest = [], [], []
    for name, parameter in trainee.denoiser.named_parameters():
        if "blocks." in name and parameter.dim() == 2:
            matrices.append(parameter)
            parts.append(3 if ".qkv." in name else 2 if ".gate_up." in name else 1)
        else:
            rest.append(parameter)
    return [
        (Muon(matrices, parts, lr=arguments.muon_rate, rank=rank, processes=arguments.processes), arguments.muon_rate),
        (_adam(rest, arguments.rate), arguments.rate),
        (_adam(list(trainee.head.parameters()), HEAD_RATE), HEAD_RATE),
    ]


def _adam(parameters: list[nn.Parameter], rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)


@dataclass(kw_only=True)
class Run:
    """One process's part of a training run."""

    arguments: argparse.Namespace
    rank: int
    trainee: Trainee
    average: dict[str, Tensor]
    step: int = 0

    def save(self, optimisers: list[tuple[torch.optim.Optimizer, float]]) -> None:
        """Write the checkpoint and the averaged weights."""
        state = {
            "trainee": self.trainee.state_dict(),
            "average": self.average,
            "optimisers": {str(n): optimiser_state(optimiser) for n, (optimiser, _) in enumerate(optimisers)},
        }
        folder: Path = self.arguments.run
        save_state(folder / "state.safetensors", state, step=self.step)
        weights = {k.removeprefix("denoiser."): v for k, v in self.average.items() if k.startswith("denoiser.")}
        with whole_file(folder / "denoiser.safetensors") as part:
            save_file(weights, part)

    def update_average(self) -> None:
        """One step of the moving average."""
        decay = min(self.arguments.average, (1 + self.step) / (10 + self.step))
        for name, value in self.trainee.state_dict().items():
            self.average[name].lerp_(value, 1 - decay)


def start_run(
    arguments: argparse.Namespace, rank: int, config: PlateDenoiserConfig
) -> tuple[Run, list[tuple[torch.optim.Optimizer, float]]]:
    """A new run, one from given weights, or the one that the folder's checkpoint continues."""
    torch.manual_seed(arguments.seed)
    trainee = Trainee(config)
    initialise(trainee)
    if arguments.start is not None:
        read_start(trainee.denoiser, arguments.start)
    run = Run(arguments=arguments, rank=rank, trainee=trainee, average={})
    optimisers = make_optimisers(trainee, arguments, rank)
    path: Path = arguments.run / "state.safetensors"
    if path.exists():
        state, run.step = load_state(path)
        trainee.load_state_dict(state["trainee"])
        run.average = state["average"]
        for n, (optimiser, _) in enumerate(optimisers):
            restore_optimiser(optimiser, state["optimisers"][str(n)])
    else:
        run.average = {name: value.clone() for name, value in trainee.state_dict().items()}
    return run, optimisers


def read_start(denoiser: PlateDenoiser, path: Path) -> None:
    """Loads weights, which may be those of a model that makes pictures only: frames then begin alike.

    Raises:
        RuntimeError: other weights are missing or too many.
    """
    fresh = {} if denoiser.frame is None else {"frame": denoiser.frame.detach()}
    denoiser.load_state_dict(fresh | load_file(path))


def initialise(trainee: Trainee) -> None:
    """Gates begin at 0, outputs at 0, so that the first slopes are 0."""
    for linear in trainee.denoiser.modulation:
        assert isinstance(linear, nn.Linear)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        width = trainee.denoiser.config.width
        linear.bias.data[width : 2 * width] = 1.0
        linear.bias.data[3 * width :] = 1.0
    for module in (trainee.denoiser.final_modulation, trainee.denoiser.output):
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)


def train(rank: int, arguments: argparse.Namespace, config: PlateDenoiserConfig | None = None) -> None:
    """One process of the run; `config` None: the bundled model's sizes."""
    torch.set_num_threads(max(1, arguments.threads // arguments.processes))
    if arguments.processes > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(arguments.port)}
        distributed.init_process_group("gloo", rank=rank, world_size=arguments.processes)
    tokenizer = load_tokenizer(arguments.language / "tokenizer.json")
    language = LanguageModel(language_config(), attention=AttentionSelector(backends=(SDPAAttention(),)))
    language.load_state_dict(load_file(arguments.language / "language.safetensors"))
    run, optimisers = start_run(arguments, rank, config or sizes(arguments))
    log = Log(arguments.run) if rank == 0 else None
    courses = courses_of(arguments, tokenizer, run.step)
    while run.step < arguments.steps:
        course = courses[run.step % len(courses)]
        rows = next(course.stream)
        share = len(rows) // arguments.processes
        rows = rows[rank * share : (rank + 1) * share]
        for optimiser, _ in optimisers:
            optimiser.zero_grad(set_to_none=False)
        course.means = smoothed(course.means, backward(run, language, course, rows))
        average_gradients(run.trainee, arguments.processes)
        torch.nn.utils.clip_grad_norm_(run.trainee.parameters(), 1.0)
        factor = learning_rate(run.step, total=arguments.steps, warm_up=60, decay_share=arguments.decay)
        for optimiser, peak in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = peak * factor
            optimiser.step()
        run.step += 1
        run.update_average()
        if log is not None and run.step % 20 == 0:
            log.write(step=run.step, **figures(courses), rate=round(factor, 4))
        if rank == 0 and (run.step % arguments.save_every == 0 or run.step == arguments.steps):
            run.save(optimisers)


def sizes(arguments: argparse.Namespace) -> PlateDenoiserConfig:
    """The bundled model's, with embeddings of frames where there are clips."""
    return PlateDenoiserConfig(frames=len(key_frames()) if arguments.clips else 1)


def backward(run: Run, language: LanguageModel, course: Course, rows: list[int]) -> tuple[float, float]:
    """Add the gradients of one batch, part by part (small parts stay in the processor's cache); both mean losses."""
    arguments, sums = run.arguments, [0.0, 0.0]
    run.trainee.head_teaches = run.step >= arguments.head_first
    parts = [rows[n : n + course.part] for n in range(0, len(rows), course.part)]
    for number, part in enumerate(parts):
        seed = (arguments.seed + 7919 * run.rank + 104729 * number, run.step)
        flow, auxiliary = losses(run.trainee, language, course.data, part, seed, course.share)
        weight = len(part) / len(rows)
        (weight * (flow + arguments.auxiliary * auxiliary)).backward()
        sums[0] += weight * flow.item()
        sums[1] += weight * auxiliary.item()
    return sums[0], sums[1]


def average_gradients(module: nn.Module, processes: int) -> None:
    """Average all gradients over the processes."""
    if processes == 1:
        return
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    sum_over_processes(gradients)
    for gradient in gradients:
        gradient /= processes


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder for log, checkpoint and denoiser.safetensors")
    parser.add_argument("--latents", type=Path, required=True)
    parser.add_argument(
        "--language", type=Path, required=True, help="folder of language.safetensors and tokenizer.json"
    )
    parser.add_argument("--start", type=Path, help="begin from these weights")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--part", type=int, default=16, help="samples that go through the network at once")
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--clips", type=Path, help="folder of clips' latents, for every other step")
    parser.add_argument("--clip-shards", type=int, default=20)
    parser.add_argument("--clip-batch", type=int, default=16)
    parser.add_argument("--clip-part", type=int, default=4)
    parser.add_argument("--clip-share", type=float, default=1.0, help="of a clip's tokens that are there, 0 to 1")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--decay", type=float, default=0.6, help="share of the steps over which the rates fall to zero")
    parser.add_argument("--average", type=float, default=0.998)
    parser.add_argument("--head-first", type=int, default=0, help="steps at first in which the head only learns itself")
    parser.add_argument("--auxiliary", type=float, default=0.1)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--port", type=int, default=29501)
    arguments = parser.parse_args()
    if arguments.processes == 1:
        train(0, arguments)
    else:
        spawn(train, (arguments,), arguments.processes)


if __name__ == "__main__":
    main()
