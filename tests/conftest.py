"""A tiny tokenizer and language model."""

from pathlib import Path

import pytest
import torch

from calotype.language.model import LanguageModel, LanguageModelConfig
from calotype.language.tokenizer import Tokenizer, load_tokenizer
from calotype.plate.training.tokenizer import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of the bundled model's kind, made from few captions."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    make_tokenizer(captions_per_kind=20).save(str(path))
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    """The same, loaded."""
    return load_tokenizer(tokenizer_path)


@pytest.fixture
def language_model() -> LanguageModel:
    """Random weights large enough that layers matter: two query heads for each key/value head."""
    torch.manual_seed(0)
    config = LanguageModelConfig(
        vocab_size=1024,
        width=24,
        layers=3,
        heads=4,
        kv_heads=2,
        head_width=8,
        hidden=32,
        qk_norm=True,
        context_length=40,
    )
    model = LanguageModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape)) if parameter.dim() == 1 else parameter.mul_(8)
    return model
