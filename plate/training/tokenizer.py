"""Make the bundled model's tokenizer: byte-level BPE of 1,024 entries over captions, lower-cased.

python -m calotype.plate.training.tokenizer --output runs/language/tokenizer.json
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .captions import KINDS, random_sample
from .objects import object_names, with_article

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_SIZE = 1024
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<expand>")
PAD, BOS, EOS, EXPAND = range(len(SPECIAL_TOKENS))
_CAPTIONS_PER_KIND = 1200
_REPEATS = 150


def make_tokenizer(*, captions_per_kind: int = _CAPTIONS_PER_KIND, seed: int = 0) -> "Tokenizer":
    """A tokenizer trained on random captions of every kind, and on every word for every object `_REPEATS` times so that
    rare ones stay whole.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(captions_per_kind, seed), trainer)
    return tokenizer


def _corpus(captions_per_kind: int, seed: int) -> Iterator[str]:
    random = np.random.default_rng(seed)
    for kind in KINDS:
        for _ in range(captions_per_kind):
            yield random_sample(kind, random).caption
    for entry in object_names():
        for words in (with_article(entry.name), entry.plural, *entry.synonyms):
            for _ in range(_REPEATS):
                yield words


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the tokenizer.json to write")
    parser.add_argument("--captions-per-kind", type=int, default=_CAPTIONS_PER_KIND)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    make_tokenizer(captions_per_kind=arguments.captions_per_kind, seed=arguments.seed).save(str(arguments.output))


if __name__ == "__main__":
    main()
