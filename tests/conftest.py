"""A tiny tokenizer, a language model, and a whole tiny plate with random weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from calotype.core.attention.registry import attention_selector
from calotype.denoisers.plate import PlateDenoiser, PlateDenoiserConfig
from calotype.encoders.language import LanguageModelEncoder
from calotype.language.model import LanguageModel, LanguageModelConfig
from calotype.language.tokenizer import Tokenizer, load_tokenizer
from calotype.pipelines.base import Source
from calotype.pipelines.image import ImagePipeline
from calotype.pipelines.recipe import Recipe
from calotype.plate.training.tokenizer import make_tokenizer
from calotype.vae.plate import PlateVAE, PlateVAEConfig
from calotype.vae.preview import LatentPreview

CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


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


@pytest.fixture(scope="session")
def tiny_plate(tokenizer: Tokenizer) -> ImagePipeline:
    """A pipeline of the bundled model's kind; every weight is random, so that everything matters."""
    torch.manual_seed(0)
    attention = attention_selector("sdpa")
    language = LanguageModel(
        LanguageModelConfig(
            vocab_size=1024, width=16, layers=3, heads=2, kv_heads=2, head_width=8, hidden=24, context_length=64
        ),
        attention=attention,
    )
    denoiser = PlateDenoiser(
        PlateDenoiserConfig(
            width=32, heads=2, layers=2, text_layers=1, text_width=16, hidden=48, time_width=16, rotary_axes=(4, 6, 6)
        )
    )
    vae = PlateVAE(PlateVAEConfig(encoder_widths=(8, 8), decoder_widths=(8, 8, 8), decoder_blocks=(1, 1, 1)))
    for module in (denoiser, vae, language):
        randomise(module)
    encoder = LanguageModelEncoder(language_model=language, tokenizer=tokenizer, layer=2, normed=False, max_tokens=32)
    return ImagePipeline(
        source=Source(family="plate", name="tiny", weights={}),
        recipe=Recipe(width=32, height=32, num_inference_steps=3),
        denoiser=denoiser,
        encoders={"llm": encoder},
        vae=vae,
        attention=attention,
        preview_projection=LatentPreview(weight=torch.randn(3, 8), bias=torch.randn(3)),
    )


@pytest.fixture(scope="session")
def plate_folder(tiny_plate: ImagePipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, saved."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_plate.save(folder)
    return folder


@pytest.fixture(scope="session")
def llama_folder(tokenizer_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random chat model in transformers' layout, with the tokenizer above."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copy(tokenizer_path, folder / "tokenizer.json")
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def randomise(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
            parameter.copy_(scale * torch.randn(parameter.shape) + (parameter.ndim == 1))
    module.requires_grad_(False).eval()
