"""Train the bundled model's language model: captions, and captions that expand a short prompt.

    python -m calotype.plate.training.tokenizer --output runs/language/tokenizer.json
    python -m calotype.plate.training.language --run runs/language

Two sequences in three are `<bos> caption <eos>`, one is `<bos> short prompt <expand> caption <eos>`, where only what
follows `<expand>` is learnt. Held-out pairs never appear. The first phase trains everything and writes
language-lower.safetensors, whose states after `READ_LAYER` blocks the denoiser may be trained on from then on; the
second trains the blocks above alone, mostly to expand prompts, and writes language.safetensors (both float32): the same
states, better texts. A finished run goes on, with a new anneal, when `--upper-steps` is raised.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from ...core.attention.base import AttentionSelector
from ...core.attention.reference import ReferenceAttention
from ...language.model import LanguageModel, LanguageModelConfig
from ...language.padding import padded
from .captions import Sample, background_in, nouns_in, training_sample
from .objects import with_article
from .runs import Log, learning_rate, load_state, optimiser_state, restore_optimiser, save_state
from .tokenizer import BOS, EOS, EXPAND, PAD, VOCAB_SIZE

IGNORED = -100  # the label of a token that is not learnt
READ_LAYER = 2  # the denoiser reads the states after this many blocks
EXPANDED_SHARE, UPPER_EXPANDED_SHARE = 1 / 3, 2 / 3  # of the sequences, in the two phases
BARE_SHARE = 0.08  # of plain captions lose their articles
_BUCKETS = 2  # one batch is made of this many groups of like length


def language_config() -> LanguageModelConfig:
    """The bundled language model: 1.7 M parameters."""
    return LanguageModelConfig(
        vocab_size=VOCAB_SIZE,
        width=192,
        layers=4,
        heads=3,
        kv_heads=3,
        head_width=64,
        hidden=384,
        qk_norm=True,
        context_length=64,
    )


def short_prompt(sample: Sample, random: np.random.Generator) -> str:
    """What a user in a hurry might type for a scene: its objects, some with articles, some with the background."""
    nouns = nouns_in(sample)
    if sample.facts.kind in ("two of", "three of"):
        nouns = (f"{sample.facts.kind.split()[0]} {nouns[0]}",)
    elif random.random() < 0.5:
        nouns = tuple(with_article(noun) for noun in nouns)
    *first, last = nouns
    words = f"{', '.join(first)} and {last}" if first and random.random() < 0.7 else ", ".join(nouns)
    background = background_in(sample)
    return f"{words} {background}" if background is not None and random.random() < 0.3 else words


def is_rich(sample: Sample) -> bool:
    """Whether a caption says more than its objects: a background and, of one object, its place or size."""
    facts = sample.facts
    if facts.background is None or sample.caption.startswith(_OPENINGS):
        return False
    return facts.kind != "one" or facts.column is not None or facts.row is not None or facts.sizes[0] is not None


_OPENINGS = (
    "a picture of",
    "a drawing of",
    "an image of",
    "an emoji of",
    "a photo of",
    "an illustration of",
    "a painting of",
)


def random_texts(random: np.random.Generator, expanded: float = EXPANDED_SHARE) -> tuple[str | None, str]:
    """A short prompt (a share of `expanded`), or None, and the caption to learn."""
    sample = training_sample(random)
    if random.random() >= expanded:
        bare = random.random() < BARE_SHARE
        return None, " ".join(
            w for w in sample.caption.split() if w not in ("a", "an", "the")
        ) if bare else sample.caption
    while not is_rich(sample):
        sample = training_sample(random)
    return short_prompt(sample, random), sample.caption


class Sequences:
    """Makes batches of token sequences with a tokenizer file."""

    def __init__(self, tokenizer: Path) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(tokenizer))

    def batches(
        self, random: np.random.Generator, count: int, *, expanded: float = EXPANDED_SHARE
    ) -> list[tuple[Tensor, Tensor]]:
        """`count` sequences as groups of like length: ids [n, L] and the labels of their next tokens [n, L], int64."""
        rows = sorted((self.row(*random_texts(random, expanded)) for _ in range(count)), key=lambda row: len(row[0]))
        groups = [rows[start : start + -(-count // _BUCKETS)] for start in range(0, count, -(-count // _BUCKETS))]
        return [
            (padded([row[0] for row in group], PAD), padded([row[1] for row in group], IGNORED)) for group in groups
        ]

    def row(self, prompt: str | None, caption: str) -> tuple[list[int], list[int]]:
        """Input ids, and for each the id to predict."""
        head = [BOS] if prompt is None else [BOS, *self._ids(prompt), EXPAND]
        tail = [*self._ids(caption), EOS]
        return (head + tail)[:-1], [IGNORED] * (len(head) - 1) + tail

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids


def mean_loss(model: LanguageModel, batches: list[tuple[Tensor, Tensor]], *, backward: bool = False) -> float:
    """Cross-entropy in nats per learnt token over all groups; gradients are added where `backward`."""
    total, tokens = 0.0, sum(int((labels != IGNORED).sum()) for _, labels in batches)
    for ids, labels in batches:
        loss = (
            functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
            / tokens
        )
        if backward:
            loss.backward()
        total += loss.item()
    return total


def make_optimiser(model: LanguageModel, rate: float) -> torch.optim.AdamW:
    """AdamW over what is not frozen, with decay on the matrices of the blocks only."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in trained if p.dim() == 2 and name.startswith("blocks.")]
    others = [p for name, p in trained if p.dim() != 2 or not name.startswith("blocks.")]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))


def freeze_lower(model: LanguageModel) -> None:
    """Keep the embedding and the blocks whose states the denoiser reads as they are."""
    model.embedding.requires_grad_(False)
    model.blocks[:READ_LAYER].requires_grad_(False)


def train(arguments: argparse.Namespace) -> None:
    """Run both phases, resuming from the folder's checkpoint."""
    log, path = Log(arguments.run), arguments.run / "state.safetensors"
    sequences = Sequences(arguments.run / "tokenizer.json")
    model = LanguageModel(language_config(), attention=AttentionSelector(backends=(ReferenceAttention(),)))
    first, total = arguments.steps, arguments.steps + arguments.upper_steps
    optimiser, step, average = make_optimiser(model, arguments.rate), 0, 0.0
    if path.exists():
        state, step = load_state(path)
        if step > first:
            freeze_lower(model)
            optimiser = make_optimiser(model, arguments.rate)
        model.load_state_dict(state["model"])
        restore_optimiser(optimiser, state["optimiser"])
        average = state["average"]
    test = sequences.batches(np.random.default_rng((arguments.seed, 2**31)), arguments.test)
    while step < total:
        in_second = step >= first
        if step == first:
            freeze_lower(model)
            optimiser = make_optimiser(model, arguments.rate)
        local, length = (step - first, arguments.upper_steps) if in_second else (step, first)
        for group in optimiser.param_groups:
            group["lr"] = arguments.rate * learning_rate(local, total=length, warm_up=40, decay_share=0.6)
        random = np.random.default_rng((arguments.seed, step))
        batches = sequences.batches(
            random, arguments.batch, expanded=UPPER_EXPANDED_SHARE if in_second else EXPANDED_SHARE
        )
        loss = training_step(model, optimiser, batches)
        step += 1
        average = 0.98 * average + 0.02 * loss if average else loss
        if step % arguments.every == 0 or step in (first, total):
            with torch.no_grad():
                log.write(step=step, loss=round(average, 4), test=round(mean_loss(model, test), 4))
            state = {"model": model.state_dict(), "optimiser": optimiser_state(optimiser), "average": average}
            save_state(path, state, step=step)
            if step in (first, total):
                name = "language.safetensors" if step == total else "language-lower.safetensors"
                save_file({k: v.contiguous() for k, v in model.state_dict().items()}, arguments.run / name)


def training_step(
    model: LanguageModel, optimiser: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]
) -> float:
    """One step on one batch; its loss."""
    optimiser.zero_grad(set_to_none=True)
    loss = mean_loss(model, batches, backward=True)
    torch.nn.utils.clip_grad_norm_((p for p in model.parameters() if p.requires_grad), 1.0)
    optimiser.step()
    return loss


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--run",
        type=Path,
        required=True,
        help="folder with tokenizer.json, for the log, the checkpoint and the weights",
    )
    parser.add_argument("--steps", type=int, default=700, help="steps of the whole model")
    parser.add_argument("--upper-steps", type=int, default=1500, help="steps of the upper blocks alone, after it")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--test", type=int, default=256, help="sequences of the test loss")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    train(arguments)


if __name__ == "__main__":
    main()
