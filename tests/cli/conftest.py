"""A tiny model with random weights in a folder, and the command line run in this process."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from calotype.cli import main
from calotype.core.attention.registry import attention_selector
from calotype.denoisers.plate import PlateDenoiser, PlateDenoiserConfig
from calotype.encoders.language import LanguageModelEncoder
from calotype.language.model import LanguageModel, LanguageModelConfig
from calotype.language.tokenizer import Tokenizer
from calotype.pipelines.base import Source
from calotype.pipelines.image import ImagePipeline
from calotype.pipelines.recipe import Recipe
from calotype.vae.plate import PlateVAE, PlateVAEConfig

Run = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny plate model."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    language = LanguageModel(
        LanguageModelConfig(
            vocab_size=1024, width=16, layers=2, heads=2, kv_heads=2, head_width=8, hidden=16, context_length=64
        )
    )
    denoiser = PlateDenoiser(
        PlateDenoiserConfig(
            width=16, heads=1, layers=1, text_layers=1, text_width=16, hidden=16, time_width=16, rotary_axes=(4, 6, 6)
        )
    )
    vae = PlateVAE(
        PlateVAEConfig(encoder_widths=(8, 8), encoder_blocks=(1, 1), decoder_widths=(8, 8, 8), decoder_blocks=(1, 1, 1))
    )
    for parameter in (*denoiser.parameters(), *vae.parameters()):
        torch.nn.init.normal_(parameter, std=0.3)
    encoder = LanguageModelEncoder(
        language_model=language,
        tokenizer=tokenizer,
        layer=1,
        normed=False,
        max_tokens=32,
    )
    ImagePipeline(
        source=Source(family="plate", name="tiny", weights={}),
        recipe=Recipe(width=32, height=32, num_inference_steps=2),
        denoiser=denoiser,
        encoders={"llm": encoder},
        vae=vae,
        attention=attention_selector(),
    ).save(folder)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line in an empty folder: exit code, lines on stdout, lines on stderr."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def call(*arguments: object) -> tuple[int, list[str], list[str]]:
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return call


@pytest.fixture
def fails(run: Run) -> Callable[..., str]:
    """Runs a command line that must fail as a user's mistake, and leave no file; returns what the line says."""

    def call(*arguments: object) -> str:
        before = sorted(os.listdir())
        code, out, err = run(*arguments)
        assert (code, out, len(err)) == (2, [], 1), err
        assert sorted(os.listdir()) == before
        assert err[0].startswith("calotype: error: ")
        return err[0].removeprefix("calotype: error: ")

    return call
