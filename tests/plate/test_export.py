"""The exported folder is what `calotype.load` reads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import calotype
from calotype.core.attention.registry import attention_selector
from calotype.core.checkpoint import file_digest, read_header
from calotype.denoisers.plate import PlateDenoiser, PlateDenoiserConfig
from calotype.language.model import LanguageModel, LanguageModelConfig
from calotype.pipelines.plate import FILES, WEIGHTS
from calotype.plate.training import export
from calotype.plate.training.language import language_config
from calotype.plate.training.tokenizer import make_tokenizer
from calotype.vae.plate import PlateClipVAE, PlateClipVAEConfig, PlateVAE, PlateVAEConfig

VAE = PlateVAEConfig(encoder_widths=(8, 8), decoder_widths=(8, 8, 8), decoder_blocks=(1, 1, 1))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    make_tokenizer(captions_per_kind=10).save(str(path))
    return path


@pytest.fixture(scope="module")
def parts(tokenizer: Path) -> export.Parts:
    """Tiny and untrained."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 1024, "layers": 3, "heads": 2, "kv_heads": 2, "context_length": 64}
    denoiser = PlateDenoiserConfig(
        width=32, heads=2, layers=2, text_layers=1, text_width=16, hidden=48, time_width=16, rotary_axes=(4, 6, 6)
    )
    language = LanguageModelConfig(width=16, head_width=8, hidden=24, **sizes)
    return export.Parts(
        denoiser=PlateDenoiser(denoiser),
        vae=PlateVAE(VAE),
        language=LanguageModel(language, attention=attention_selector("sdpa")),
        tokenizer=tokenizer,
    )


def test_the_folder_loads_and_draws(parts: export.Parts, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "assets"
    export.export(parts, folder, scenes=2)
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    pipe = calotype.load(folder)
    step = list(pipe.stream("a fox on a beach", width=32, height=32, num_inference_steps=1, seed=1))[-1]
    assert pipe.decode(step).pil()[0].size == (32, 32)
    assert pipe.preview(step)[0].size == (4, 4)
    assert pipe.encoders["llm"](["a fox"]).states.shape[2] == 16
    rounded = parts.denoiser.image_in.weight.bfloat16().float()
    assert torch.equal(pipe.denoiser.image_in.weight, rounded)
    calotype.load_language_model(folder).generate("a", max_tokens=1)


def test_the_files_say_what_they_are(parts: export.Parts, tmp_path: Path) -> None:
    export.export(parts, tmp_path, scenes=2)
    for name in WEIGHTS:
        header = read_header(tmp_path / name)
        assert header.metadata == {"family": "plate", "part": name.split(".")[0], "license": "Apache-2.0"}
        assert {tensor.dtype for tensor in header.tensors.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["sha256"] == {name: file_digest(tmp_path / name) for name in (*WEIGHTS, "tokenizer.json")}
    assert config["text"] == {"layer": 2, "normed": False, "max_tokens": 32}
    assert config["recipe"]["num_inference_steps"] == 10


def test_the_same_parts_give_the_same_bytes(parts: export.Parts, tmp_path: Path) -> None:
    for name in ("first", "second"):
        export.export(parts, tmp_path / name, scenes=2)
    assert all((tmp_path / "first" / n).read_bytes() == (tmp_path / "second" / n).read_bytes() for n in FILES)


def test_the_preview_is_the_mean_colour_where_latents_hold_it() -> None:
    class Means(PlateVAE):
        """Latents are a turned copy of the mean colours, and noise that says nothing."""

        def encode(self, pixels: torch.Tensor) -> torch.Tensor:
            means = torch.nn.functional.avg_pool3d(pixels, (1, 8, 8))
            mixed = torch.stack((means[:, 1], 2 * means[:, 0] + 0.5, means[:, 2] - means[:, 0]), dim=1)
            return torch.cat((mixed, torch.randn(1, 5, *means.shape[2:])), dim=1)

    preview = export.fit_preview(Means(VAE), scenes=3)
    assert torch.allclose(preview.bias, torch.tensor([-0.25, 0, -0.25]), atol=1e-5)
    assert torch.allclose(preview.weight[:, 3:], torch.zeros(3, 5), atol=1e-5)
    expected = torch.tensor([[0.0, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.5, 1.0]])
    assert torch.allclose(preview.weight[:, :3], expected, atol=1e-5)


def test_a_foreign_tokenizer_is_refused(parts: export.Parts, tmp_path: Path) -> None:
    small = LanguageModelConfig(
        vocab_size=512, width=16, layers=1, heads=2, kv_heads=2, head_width=8, hidden=24, context_length=64
    )
    language = LanguageModel(small, attention=attention_selector("sdpa"))
    wrong = export.Parts(denoiser=parts.denoiser, vae=parts.vae, language=language, tokenizer=parts.tokenizer)
    with pytest.raises(ValueError, match=r"tokens; the language model has 512"):
        export.export(wrong, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("clips", [False, True])
def test_the_command(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, clips: bool) -> None:
    modules = {
        "denoiser": PlateDenoiser(PlateDenoiserConfig(frames=5 if clips else 1)),
        "vae": PlateClipVAE(PlateClipVAEConfig()) if clips else PlateVAE(PlateVAEConfig()),
        "language": LanguageModel(language_config(), attention=attention_selector("sdpa")),
    }
    options = ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "assets"), "--scenes", "1"]
    for name, module in modules.items():
        save_file({key: value.contiguous() for key, value in module.state_dict().items()}, tmp_path / f"{name}.st")
        options += [f"--{name}", str(tmp_path / f"{name}.st")]
    monkeypatch.setattr("sys.argv", ["export", *options])
    export.main()
    total = float(capsys.readouterr().out.split()[-2])
    assert 15 < total < 30  # MB: what the package may hold
    recipe = calotype.load(tmp_path / "assets").recipe
    assert (recipe.width, recipe.max_frames) == (128, 17 if clips else None)
