"""CLIP text encoders against transformers and against what diffusers' pipelines make of them."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import error
from safetensors.torch import load_file, save_file
from tiny_text_encoders import END, LONG, PROMPTS, clip_model, clip_tokenizer, save_clip_tokenizer, t5_tokenizer

from calotype.core.copies import moved
from calotype.encoders.clip import ClipEncoder, load_clip

BATCH = [PROMPTS[0], "", LONG]


@pytest.fixture(scope="module")
def first() -> ClipEncoder:
    """As SD 1.5 has it, and FLUX.1 with `pooled`."""
    model = clip_model(projection=False, hidden_act="quick_gelu")
    return ClipEncoder(model=model, tokenizer=clip_tokenizer(), layer=3, normed=True, pooled="pooler")


@pytest.fixture(scope="module")
def second() -> ClipEncoder:
    """As SDXL's second one: another width, pads "!", a projection."""
    model = clip_model(projection=True, hidden_size=40, intermediate_size=52, num_attention_heads=2)
    return ClipEncoder(model=model, tokenizer=clip_tokenizer("!"), layer=2, normed=False, pooled="projection")


@pytest.fixture(scope="module")
def folders(first: ClipEncoder, second: ClipEncoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both, saved."""
    folder = tmp_path_factory.mktemp("clip")
    first.model.save_pretrained(folder / "text_encoder")
    second.model.save_pretrained(folder / "text_encoder_2")
    save_clip_tokenizer(folder / "tokenizer")
    save_clip_tokenizer(folder / "tokenizer_2", "!")
    return folder


def parts(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names)


@pytest.fixture(scope="module")
def sd15(first: ClipEncoder) -> Any:
    from diffusers import StableDiffusionPipeline

    others = parts("vae", "unet", "scheduler", "safety_checker", "feature_extractor")
    return StableDiffusionPipeline(
        text_encoder=first.model, tokenizer=clip_tokenizer(), requires_safety_checker=False, **others
    )


@pytest.fixture(scope="module")
def sdxl(first: ClipEncoder, second: ClipEncoder) -> Any:
    from diffusers import StableDiffusionXLPipeline

    return StableDiffusionXLPipeline(
        text_encoder=first.model,
        text_encoder_2=second.model,
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer("!"),
        **parts("vae", "unet", "scheduler"),
    )


def test_stable_diffusion_15(sd15: Any, first: ClipEncoder) -> None:
    reference, negative = sd15.encode_prompt(BATCH, "cpu", 1, True, negative_prompt=["cat", LONG, ""])
    assert error(first(BATCH).states, reference) <= 1e-5
    assert error(first(["cat", LONG, ""]).states, negative) <= 1e-5
    assert first(BATCH).lengths.tolist() == [77, 77, 77]


def test_stable_diffusion_xl(sdxl: Any, first: ClipEncoder, second: ClipEncoder) -> None:
    ours = dataclasses.replace(first, layer=2, normed=False, pooled=None)
    states, negative, pooled, negative_pooled = sdxl.encode_prompt(
        BATCH, prompt_2=PROMPTS, device="cpu", negative_prompt="cat", negative_prompt_2="a dogs river"
    )
    found = second(PROMPTS)
    assert error(torch.cat((ours(BATCH).states, found.states), dim=-1), states) <= 1e-5
    assert found.pooled is not None and error(found.pooled, pooled) <= 1e-5
    unwanted = second(["a dogs river"] * 3)
    assert error(torch.cat((ours(["cat"] * 3).states, unwanted.states), dim=-1), negative) <= 1e-5
    assert unwanted.pooled is not None and error(unwanted.pooled, negative_pooled) <= 1e-5
    assert ours(BATCH).pooled is None


@pytest.mark.parametrize("clip_skip", [0, 1])
def test_clip_skip_counts_as_diffusers_does(sdxl: Any, first: ClipEncoder, second: ClipEncoder, clip_skip: int) -> None:
    ours = dataclasses.replace(first, layer=2, normed=False)
    states, *_ = sdxl.encode_prompt(
        PROMPTS, device="cpu", do_classifier_free_guidance=False, clip_skip=clip_skip or None
    )
    found = [encoder.with_clip_skip(clip_skip)(PROMPTS).states for encoder in (ours, second)]
    assert error(torch.cat(found, dim=-1), states) <= 1e-5


def test_clip_skip_beyond_the_first_layer_is_refused(first: ClipEncoder) -> None:
    assert first.with_clip_skip(3).layer == 0
    for clip_skip in (-1, 4):
        with pytest.raises(ValueError, match=f"clip_skip is {clip_skip}; this text encoder can skip 0 to 3"):
            first.with_clip_skip(clip_skip)


def test_layers_and_the_final_norm_are_four_different_things(second: ClipEncoder) -> None:
    """Found by walking the model's blocks here, whatever transformers means by the last of its hidden states."""
    text = second.model.text_model
    ids = torch.tensor(second.tokens(PROMPTS)[0])[:, 0]
    x = text.embeddings(input_ids=ids)
    mask = torch.full((77, 77), -torch.inf).triu(1)[None, None]
    walked = [x]
    for block in text.encoder.layers:
        walked.append(block(walked[-1], mask))
    read: list[torch.Tensor] = []
    for layer, state in enumerate(walked):
        for normed in (False, True):
            read.append(dataclasses.replace(second, layer=layer, normed=normed)(PROMPTS).states)
            assert error(read[-1], text.final_layer_norm(state) if normed else state) <= 1e-5
    assert min(error(a, b) for i, a in enumerate(read) for b in read[:i]) > 1e-2


def test_pooled_is_read_at_the_end_mark_after_all_blocks(second: ClipEncoder) -> None:
    last = dataclasses.replace(second, layer=3, normed=True)(PROMPTS).states
    ends = [second.tokens([prompt])[0][0][0].index(second.tokenizer.eos_token_id) for prompt in PROMPTS]
    assert ends == [11, 1, 2]
    expected = last[torch.arange(3), torch.tensor(ends)]
    pooler, projected = dataclasses.replace(second, pooled="pooler")(PROMPTS).pooled, second(PROMPTS).pooled
    assert pooler is not None and error(pooler, expected) <= 1e-5
    assert projected is not None and error(projected, second.model.text_projection(expected)) <= 1e-5


def test_pads_are_the_tokenizers_own(first: ClipEncoder, second: ClipEncoder) -> None:
    end = first.tokenizer.eos_token_id
    assert first.tokens(["cat"])[0][0][0][2:] == [end] * 75
    assert second.tokens(["cat"])[0][0][0][2:] == [end] + [0] * 74


@pytest.mark.parametrize("long_prompts", ["cut", "chunks"])
def test_a_row_is_that_prompt_alone(second: ClipEncoder, long_prompts: Any) -> None:
    encoder = dataclasses.replace(second, long_prompts=long_prompts)
    together = encoder([*BATCH, "cat"])
    assert not together.states.requires_grad and together.pooled is not None
    for row, prompt in enumerate([*BATCH, "cat"]):
        alone, length = encoder([prompt]), int(together.lengths[row])
        assert alone.states.shape[1] == length and alone.pooled is not None
        assert error(together.states[row, None, :length], alone.states) <= 1e-5
        assert error(together.pooled[row, None], alone.pooled) <= 1e-5


def test_words_left_out_are_named(first: ClipEncoder) -> None:
    words = LONG.split()
    encoded = first(["cat", LONG, LONG.upper(), LONG])
    assert encoded.lengths.tolist() == [77] * 4
    left_out = " ".join(words[75:])
    assert encoded.warnings == tuple(
        f"the prompt has 100 tokens and CLIP reads 75; left out: {text!r}" for text in (left_out, left_out.upper())
    )
    assert first([" ".join(words[:75])]).warnings == ()


def test_chunks_are_encoded_alone_and_joined(second: ClipEncoder) -> None:
    words = LONG.split()
    encoder = dataclasses.replace(second, long_prompts="chunks")
    encoded = encoder(["cat", LONG, " ".join(words[:75])])
    assert encoded.warnings == () and encoded.states.shape == (3, 154, 40)
    assert encoded.lengths.tolist() == [77, 154, 77]
    pieces = second([" ".join(words[:75]), " ".join(words[75:]), ""])
    assert pieces.warnings == () and pieces.pooled is not None and encoded.pooled is not None
    assert error(encoded.states[1, None], torch.cat((pieces.states[0], pieces.states[1]))[None]) <= 1e-5
    assert error(encoded.pooled[1, None], pieces.pooled[:1]) <= 1e-5
    for row in (0, 2):
        assert error(encoded.states[row, None, 77:], pieces.states[2:]) <= 1e-5
    assert torch.equal(encoder(PROMPTS).states, second(PROMPTS).states)


def test_places_follow_the_tokens(first: ClipEncoder) -> None:
    (places,) = first.places(["a Red fox"])
    assert places == [-1, 0, 4, 8] + [-1] * 73
    rows = dataclasses.replace(first, long_prompts="chunks").places([LONG, "cat"])
    assert [len(row) for row in rows] == [154, 77]
    assert rows[0][76:79] == [-1, -1, len(" ".join(LONG.split()[:76])) - 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer": 4}, "layer is 4; the text encoder has layers 0 to 3"),
        ({"layer": -2}, "layer is -2"),
        ({"pooled": "projection"}, "must be a CLIPTextModelWithProjection"),
        ({"pooled": "mean"}, "pooled is 'mean'; it must be"),
        ({"long_prompts": "all"}, "long_prompts is 'all'; it must be 'cut' or 'chunks'"),
    ],
)
def test_bad_settings_are_refused(first: ClipEncoder, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(first, **settings)


def test_another_models_tokenizer_is_refused(first: ClipEncoder) -> None:
    with pytest.raises(ValueError, match="the tokenizer has no bos token"):
        dataclasses.replace(first, tokenizer=t5_tokenizer())
    tokenizer = clip_tokenizer()
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match="they do not belong together"):
        dataclasses.replace(first, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompts"),
        ("a fox", "must be a list of strings"),
        ([3], "prompt is 3"),
        (["\ud800"], "whole characters"),
    ],
)
def test_bad_prompts_are_refused(first: ClipEncoder, prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        first(prompts)


def test_a_copy_in_another_dtype_leaves_the_original_alone(second: ClipEncoder) -> None:
    before = second(PROMPTS)
    copy = moved(second, torch.device("cpu"), torch.bfloat16)
    encoded = copy(PROMPTS)
    assert encoded.states.dtype is torch.bfloat16 and encoded.pooled is not None
    assert encoded.pooled.dtype is torch.bfloat16
    assert error(encoded.states.float(), before.states) < 0.1
    after = second(PROMPTS)
    assert after.states.dtype is torch.float32 and torch.equal(after.states, before.states)
    assert moved(second, torch.device("cpu"), torch.float32).tokenizer is second.tokenizer


def test_loading(folders: Path, first: ClipEncoder, second: ClipEncoder, capfd: pytest.CaptureFixture[str]) -> None:
    level = logging.getLogger("transformers").level
    loaded = load_clip(folders / "text_encoder", folders / "tokenizer", pooled="pooler")
    loaded_2 = load_clip(
        folders / "text_encoder_2", folders / "tokenizer_2", skipped=1, normed=False, pooled="projection"
    )
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("transformers").level == level
    assert not any(handler.filters for handler in logging.getLogger("transformers").handlers)
    for ours, theirs in ((loaded, first), (loaded_2, second)):
        assert not ours.model.training and not any(each.requires_grad for each in ours.model.parameters())
        found, expected = ours(BATCH), theirs(BATCH)
        assert torch.equal(found.states, expected.states) and found.warnings == expected.warnings
        assert found.pooled is not None and expected.pooled is not None and torch.equal(found.pooled, expected.pooled)
    half = load_clip(folders / "text_encoder", folders / "tokenizer", dtype=torch.bfloat16)
    assert half(PROMPTS).states.dtype is torch.bfloat16


def test_both_spellings_of_keys_load(folders: Path, first: ClipEncoder, tmp_path: Path) -> None:
    """The hub's files have a prefix, and positions that older versions stored."""
    shutil.copytree(folders / "text_encoder", tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    named = {"text_model." + name.removeprefix("text_model."): tensor for name, tensor in weights.items()}
    named["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    save_file(named, tmp_path / "m" / "model.fp16.safetensors")
    (tmp_path / "m" / "model.safetensors").unlink()
    loaded = load_clip(tmp_path / "m", folders / "tokenizer", variant="fp16")
    assert torch.equal(loaded(PROMPTS).states, first(PROMPTS).states)
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors in .*; it holds model\.fp16\."):
        load_clip(tmp_path / "m", folders / "tokenizer")


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "truncated"])
def test_weights_that_do_not_fit_are_refused(folders: Path, tmp_path: Path, change: str) -> None:
    shutil.copytree(folders / "text_encoder_2", tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    weights = load_file(file)
    if change == "missing":
        del weights["text_projection.weight"]
    elif change == "unexpected":
        weights["logit_scale"] = torch.ones(1)
    elif change == "shape":
        weights["text_projection.weight"] = torch.ones(3, 40)
    save_file(weights, file)
    if change == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    named = {"missing": "text_projection", "unexpected": "logit_scale", "shape": "text_projection"}
    with pytest.raises(ValueError, match=named.get(change, "model.safetensors")):
        load_clip(tmp_path / "m", folders / "tokenizer_2")


def test_other_folders_are_refused(folders: Path, tmp_path: Path) -> None:
    model, tokenizer = folders / "text_encoder", folders / "tokenizer"
    with pytest.raises(FileNotFoundError, match="no folder at"):
        load_clip(tmp_path / "nowhere", tokenizer)
    with pytest.raises(FileNotFoundError, match="no folder at"):
        load_clip(model, tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no tokenizer in"):
        load_clip(model, model)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_clip(tokenizer, tokenizer)
    with pytest.raises(ValueError, match="pooled is 'projection'"):
        load_clip(model, tokenizer, pooled="projection")
    with pytest.raises(ValueError, match=r"skipped is 4; .* has 3 layers"):
        load_clip(model, tokenizer, skipped=4)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"architectures": ["T5EncoderModel"]}, "names T5EncoderModel; needed is CLIPTextModel or"),
        ({"architectures": None}, "names no architecture"),
        ({"hidden_size": 33}, "config.json"),
        ({"hidden_act": "no such"}, "config.json"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, r"quantised \(bitsandbytes\)"),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    folders: Path, tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    shutil.copytree(folders / "text_encoder", tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    with pytest.raises(ValueError, match=message):
        load_clip(tmp_path / "m", folders / "tokenizer")


def test_pickles_and_broken_tokenizers_are_refused(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "text_encoder", tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only pickled weights \(pytorch_model.bin\)"):
        load_clip(tmp_path / "m", folders / "tokenizer")
    broken = save_clip_tokenizer(tmp_path / "t", END)
    (broken / "vocab.json").write_text("{")
    with pytest.raises(ValueError, match="holds no tokenizer that"):
        load_clip(folders / "text_encoder", broken)
