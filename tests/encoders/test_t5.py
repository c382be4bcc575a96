"""T5 and UMT5 text encoders against transformers and against what diffusers' pipelines make of them."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import error
from safetensors.torch import load_file, save_file
from tiny_text_encoders import LONG, PROMPTS, clip_model, clip_tokenizer, t5_model, t5_tokenizer

from calotype.core.copies import moved
from calotype.encoders.clip import ClipEncoder
from calotype.encoders.t5 import T5Encoder, load_t5

BATCH = [PROMPTS[0], "", LONG]


@pytest.fixture(scope="module")
def encoder() -> T5Encoder:
    """As FLUX.1 and SD3 have it: pads are attended."""
    return T5Encoder(model=t5_model(), tokenizer=t5_tokenizer(), max_tokens=24, pad_to_max=True, masked=False)


@pytest.fixture(scope="module")
def masked() -> T5Encoder:
    """As Wan has it: UMT5, pads are hidden."""
    model = t5_model(umt5=True, num_layers=2, feed_forward_proj="gated-silu")
    return T5Encoder(model=model, tokenizer=t5_tokenizer(), max_tokens=20, pad_to_max=True, masked=True)


@pytest.fixture(scope="module")
def folders(encoder: T5Encoder, masked: T5Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both, saved."""
    folder = tmp_path_factory.mktemp("t5")
    encoder.model.save_pretrained(folder / "t5")
    masked.model.save_pretrained(folder / "umt5")
    encoder.tokenizer.save_pretrained(folder / "tokenizer")
    return folder


def test_flux(encoder: T5Encoder) -> None:
    from diffusers import FluxPipeline

    clip = ClipEncoder(
        model=clip_model(projection=False), tokenizer=clip_tokenizer(), layer=3, normed=True, pooled="pooler"
    )
    others = dict.fromkeys(("scheduler", "vae", "transformer"))
    pipe = FluxPipeline(
        text_encoder=clip.model,
        tokenizer=clip_tokenizer(),
        text_encoder_2=encoder.model,
        tokenizer_2=t5_tokenizer(),
        **others,
    )
    prompts_2 = [LONG, "two dogs", ""]
    states, pooled, _ = pipe.encode_prompt(BATCH, prompts_2, device="cpu", max_sequence_length=24)
    found, vectors = encoder(prompts_2), clip(BATCH).pooled
    assert error(found.states, states) <= 1e-5
    assert vectors is not None and error(vectors, pooled) <= 1e-5
    assert found.lengths.tolist() == [24, 24, 24] and found.pooled is None


def test_ltx_leaves_the_pads_out_after_they_were_attended(encoder: T5Encoder) -> None:
    from diffusers import LTXPipeline

    pipe = LTXPipeline(
        text_encoder=encoder.model,
        tokenizer=t5_tokenizer(),
        **dict.fromkeys(("scheduler", "vae", "transformer")),
    )
    states, mask, _, _ = pipe.encode_prompt(
        BATCH, do_classifier_free_guidance=False, max_sequence_length=24, device="cpu"
    )
    found = dataclasses.replace(encoder, keeps_pads=False)(BATCH)
    assert found.lengths.tolist() == mask.sum(dim=1).tolist() == [14, 1, 24]
    assert error(found.states, states * mask[..., None]) <= 1e-5
    assert not found.states[1, 1:].any()


def test_wan(masked: T5Encoder) -> None:
    from diffusers import WanPipeline

    pipe = WanPipeline(
        text_encoder=masked.model,
        tokenizer=t5_tokenizer(),
        **dict.fromkeys(("scheduler", "vae", "transformer")),
    )
    states, negative = pipe.encode_prompt(BATCH, [LONG, "cat", ""], max_sequence_length=20, device="cpu")
    assert error(masked(BATCH).states, states) <= 1e-5
    assert error(masked([LONG, "cat", ""]).states, negative) <= 1e-5


@pytest.mark.parametrize("pad_to_max", [True, False])
def test_hidden_pads_change_nothing(masked: T5Encoder, pad_to_max: bool) -> None:
    prompts = [PROMPTS[0], "", "cat on a boat"]
    found = dataclasses.replace(masked, pad_to_max=pad_to_max)(prompts)
    assert found.lengths.tolist() == [14, 1, 5]
    assert found.states.shape == (3, 20 if pad_to_max else 14, 32)
    for row, prompt in enumerate(prompts):
        ids = t5_tokenizer()(prompt, return_tensors="pt").input_ids
        reference = masked.model(ids).last_hidden_state
        assert error(found.states[row, None, : ids.shape[1]], reference) <= 1e-5
        assert not found.states[row, ids.shape[1] :].any()


def test_kept_pads_that_were_hidden_are_transformers_own(masked: T5Encoder) -> None:
    batch = t5_tokenizer()(PROMPTS, padding="max_length", max_length=20, return_tensors="pt")
    found = dataclasses.replace(masked, keeps_pads=True)(PROMPTS)
    assert error(found.states, masked.model(**batch).last_hidden_state) <= 1e-5
    assert found.lengths.tolist() == [20, 20, 20]


@pytest.mark.parametrize("keeps_pads", [True, False])
def test_a_row_is_that_prompt_alone(encoder: T5Encoder, keeps_pads: bool) -> None:
    each = dataclasses.replace(encoder, keeps_pads=keeps_pads)
    together = each(BATCH)
    assert not together.states.requires_grad
    for row, prompt in enumerate(BATCH):
        alone = each([prompt])
        assert error(together.states[row, None], alone.states) <= 1e-5
        assert together.lengths[row] == alone.lengths[0]


def test_words_left_out_are_named(encoder: T5Encoder) -> None:
    encoded = encoder(["cat", LONG, LONG])
    left_out = " ".join(LONG.split()[23:])
    assert encoded.warnings == (f"the prompt has 100 tokens and T5 reads 23; left out: {left_out[:200] + '...'!r}",)
    assert dataclasses.replace(encoder, max_tokens=101)([LONG]).warnings == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 1}, "max_tokens is 1; it must be at least 2"),
        ({"pad_to_max": False}, "a row would depend on its neighbours"),
        ({"pad_to_max": False, "masked": True, "keeps_pads": True}, "a row would depend on its neighbours"),
    ],
)
def test_bad_settings_are_refused(encoder: T5Encoder, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(encoder, **settings)


def test_bad_prompts_and_tokenizers_are_refused(encoder: T5Encoder) -> None:
    for prompts, message in (([], "no prompts"), ("a fox", "list of strings"), ([None], "prompt is None")):
        with pytest.raises(ValueError, match=message):
            encoder(prompts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="they do not belong together"):
        dataclasses.replace(encoder, tokenizer=clip_tokenizer())


def test_a_copy_in_another_dtype_leaves_the_original_alone(encoder: T5Encoder) -> None:
    before = encoder(PROMPTS).states
    copy = moved(encoder, torch.device("cpu"), torch.bfloat16)
    states = copy(PROMPTS).states
    assert states.dtype is torch.bfloat16 and error(states.float(), before) < 0.1
    assert copy.model.shared.weight is copy.model.encoder.embed_tokens.weight
    assert torch.equal(encoder(PROMPTS).states, before)


def test_loading(folders: Path, encoder: T5Encoder, masked: T5Encoder, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load_t5(folders / "t5", folders / "tokenizer", max_tokens=24, pad_to_max=True, masked=False)
    other = load_t5(folders / "umt5", folders / "tokenizer", max_tokens=20, pad_to_max=True, masked=True)
    assert capfd.readouterr() == ("", "")
    for ours, theirs in ((loaded, encoder), (other, masked)):
        model = ours.model
        assert not model.training and not any(each.requires_grad for each in model.parameters())
        assert model.shared.weight is model.encoder.embed_tokens.weight
        found, expected = ours(BATCH), theirs(BATCH)
        assert torch.equal(found.states, expected.states) and found.warnings == expected.warnings


@pytest.mark.parametrize("names", ["both", "other"])
def test_the_embedding_has_two_names(folders: Path, encoder: T5Encoder, tmp_path: Path, names: str) -> None:
    shutil.copytree(folders / "t5", tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    weights = load_file(file)
    weights["encoder.embed_tokens.weight"] = weights["shared.weight"].clone()
    if names == "other":
        del weights["shared.weight"]
    save_file(weights, file)
    loaded = load_t5(tmp_path / "m", folders / "tokenizer", max_tokens=24, pad_to_max=True, masked=False)
    assert torch.equal(loaded(PROMPTS).states, encoder(PROMPTS).states)


def test_float16_keeps_the_outputs_of_feed_forwards_wide(folders: Path, encoder: T5Encoder) -> None:
    loaded = load_t5(
        folders / "t5", folders / "tokenizer", max_tokens=24, pad_to_max=True, masked=False, dtype=torch.float16
    )
    wide = {name for name, each in loaded.model.named_parameters() if each.dtype is torch.float32}
    assert len(wide) == 3 and all(name.endswith("DenseReluDense.wo.weight") for name in wide)
    states = loaded(PROMPTS).states
    assert states.dtype is torch.float16 and error(states.float(), encoder(PROMPTS).states) < 2e-2


def test_folders_that_do_not_fit_are_refused(folders: Path, tmp_path: Path) -> None:
    def load(model: Path, tokenizer: Path = folders / "tokenizer") -> T5Encoder:
        return load_t5(model, tokenizer, max_tokens=24, pad_to_max=True, masked=False)

    with pytest.raises(FileNotFoundError, match="no folder at"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer in .*tokenizer.json or spiece.model"):
        load(folders / "t5", folders / "t5")
    shutil.copytree(folders / "t5", tmp_path / "m")
    path, file = tmp_path / "m" / "config.json", tmp_path / "m" / "model.safetensors"
    entries, weights = json.loads(path.read_text()), load_file(file)
    path.write_text(json.dumps(entries | {"architectures": ["T5ForConditionalGeneration"]}))
    with pytest.raises(ValueError, match="names T5ForConditionalGeneration; needed is T5EncoderModel or UMT5"):
        load(tmp_path / "m")
    path.write_text(json.dumps(entries | {"num_layers": 2}))
    with pytest.raises(ValueError, match=r"block\.2"):
        load(tmp_path / "m")
    path.write_text(json.dumps(entries))
    del weights["encoder.final_layer_norm.weight"]
    save_file(weights, file)
    with pytest.raises(ValueError, match="final_layer_norm"):
        load(tmp_path / "m")
    file.unlink()
    with pytest.raises(FileNotFoundError, match="it holds no weights"):
        load(tmp_path / "m")
