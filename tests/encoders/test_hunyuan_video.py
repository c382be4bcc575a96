"""The text encoders of HunyuanVideo 1.5 against diffusers', and SigLIP's vision tower against transformers'."""

import inspect
import json
from pathlib import Path

import numpy
import pytest
import tiny_hunyuan_video as tiny
import torch
from parity import error
from PIL import Image
from tiny_text_encoders import t5_model

from calotype.core.copies import moved
from calotype.encoders.decoder import Layer, load_decoder_encoder
from calotype.encoders.hunyuan_video import (
    GLYPH_TOKENS,
    HUNYUAN_VIDEO,
    HUNYUAN_VIDEO_DROP,
    SYSTEM,
    GlyphEncoder,
    glyph_text,
    load_glyph_encoder,
)
from calotype.encoders.origin import settings_of
from calotype.encoders.siglip_vision import load_siglip_vision
from calotype.encoders.t5 import T5Encoder

PROMPTS = [
    'a red fox with the sign "old dogs" and “two cäts”, "old dogs"',
    "two dogs on the grass",
    'an empty "" sign',
    "“a cat”",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All parts that read, each in its folder."""
    place, tokenizer = tmp_path_factory.mktemp("hunyuan"), tiny.tokenizer_of_prompts()
    tiny.hunyuan_video_llm(tokenizer).save_pretrained(place / "text_encoder")
    tokenizer.save_pretrained(place / "tokenizer")
    t5_model(vocab_size=384, d_model=20).save_pretrained(place / "text_encoder_2")
    tiny.glyph_tokenizer().save_pretrained(place / "tokenizer_2")
    tiny.picture_encoder().save_pretrained(place / "image_encoder")
    tiny.picture_processor().save_pretrained(place / "feature_extractor")
    return place


@pytest.fixture(scope="module")
def glyphs(folder: Path) -> GlyphEncoder:
    """Ours."""
    return load_glyph_encoder(folder / "text_encoder_2", folder / "tokenizer_2")


def test_what_is_read_is_what_diffusers_reads() -> None:
    from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5 as theirs

    for prompt in (*PROMPTS, "", 'one " alone', '"a" b “c" d” "e"'):
        assert glyph_text(prompt) == theirs.extract_glyph_texts(prompt)
        assert HUNYUAN_VIDEO.messages(prompt) == theirs.format_text_input([prompt], SYSTEM)[0]
    read = inspect.signature(theirs.HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
    assert read["system_message"].default == SYSTEM
    assert read["crop_start"].default == HUNYUAN_VIDEO_DROP


def test_the_language_model(folder: Path) -> None:
    from diffusers import HunyuanVideo15Pipeline

    ours = load_decoder_encoder(
        folder / "text_encoder",
        folder / "tokenizer",
        template=HUNYUAN_VIDEO,
        layers=(Layer(-3, normed=False),),
        max_tokens=1000,
        drop=HUNYUAN_VIDEO_DROP,
    )
    assert len(ours.language_model.blocks) == 2  # of four
    tokenizer = tiny.tokenizer_of_prompts()
    model, prompts, length = tiny.hunyuan_video_llm(tokenizer), [PROMPTS[0], ""], tiny.TEXT_TOKENS
    states, mask = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
        model, tokenizer, prompts, torch.device("cpu"), tokenizer_max_length=length
    )
    found = ours(prompts)
    assert found.states.shape[1] < length
    assert found.lengths.tolist() == mask.sum(dim=1).tolist()
    for row, length in enumerate(found.lengths):
        assert error(found.states[row : row + 1, :length], states[row : row + 1, :length]) < 1e-5


def test_glyphs(glyphs: GlyphEncoder) -> None:
    from diffusers import HunyuanVideo15Pipeline

    theirs, tokenizer = t5_model(vocab_size=384, d_model=20), tiny.glyph_tokenizer()
    states, mask = HunyuanVideo15Pipeline._get_byt5_prompt_embeds(tokenizer, theirs, PROMPTS, torch.device("cpu"))
    found = glyphs(PROMPTS)
    assert found.lengths.tolist() == mask.sum(dim=1).tolist()
    assert found.lengths[1] == 0 and found.lengths[0] == found.states.shape[1]
    for row, length in enumerate(found.lengths):
        if length:
            assert error(found.states[row : row + 1, :length], states[row : row + 1, :length]) < 1e-5
        assert not found.states[row, length:].any()
    nothing = glyphs(PROMPTS[1:2])
    assert nothing.states.shape == (1, 0, 20) and nothing.lengths.tolist() == [0]


def test_glyphs_that_do_not_fit_are_named(glyphs: GlyphEncoder) -> None:
    found = glyphs([f'a sign "{"ä" * 120} end of it"', PROMPTS[3]])
    assert found.lengths[0] == GLYPH_TOKENS
    assert found.warnings == ("the prompt has 259 tokens and T5 reads 255; left out: 't\".'",)
    with pytest.raises(ValueError, match="no prompts"):
        glyphs([])


def test_copies_and_what_is_saved(folder: Path, glyphs: GlyphEncoder) -> None:
    half = moved(glyphs, torch.device("cpu"), torch.bfloat16)
    assert half(PROMPTS[:1]).states.dtype is torch.bfloat16
    assert glyphs(PROMPTS[:1]).states.dtype is torch.float32
    lean = load_glyph_encoder(folder / "text_encoder_2", folder / "tokenizer_2", device="meta")
    assert all(weight.is_meta for weight in lean.t5.model.parameters())
    component = lean.component()
    assert component.tokenizer_class == "ByT5Tokenizer"
    assert settings_of(lean)["max_tokens"] == GLYPH_TOKENS
    assert isinstance(glyphs.t5, T5Encoder) and glyphs.origin is glyphs.t5.origin


@pytest.mark.parametrize("size", [(30, 19), (12, 12), (7, 40)])
def test_pictures(folder: Path, size: tuple[int, int]) -> None:
    levels = numpy.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8)
    pixels = tiny.picture_processor().preprocess(images=Image.fromarray(levels), return_tensors="pt")
    expected = tiny.picture_encoder()(**pixels).last_hidden_state
    ours = load_siglip_vision(folder / "image_encoder", folder / "feature_extractor")
    found = ours([torch.from_numpy(levels).permute(2, 0, 1).float() / 255])
    assert found.shape == (1, 9, 18)
    assert error(found, expected) < 1e-5
    assert ours.component().tokenizer_class == "SiglipImageProcessor"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"height": 12, "width": 10}}, "it must be a square"),
        ({"size": {"height": 16, "width": 16}}, "pictures become 16 pixels a side"),
        ({"do_normalize": False}, "do_normalize is false"),
        ({"resample": 2}, "otherwise than bicubic"),
        ({"image_mean": [0.5]}, "it must be three numbers"),
    ],
)
def test_processors_that_read_otherwise_are_refused(folder: Path, tmp_path: Path, changes, message) -> None:
    name = "preprocessor_config.json"
    entries = json.loads((folder / "feature_extractor" / name).read_text())
    (tmp_path / name).write_text(json.dumps({**entries, **changes}))
    with pytest.raises(ValueError, match=message):
        load_siglip_vision(folder / "image_encoder", tmp_path)
