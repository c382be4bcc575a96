"""Decoder language models as text encoders, against what diffusers' pipelines make of them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_decoders as tiny
import torch
from parity import error
from safetensors.torch import load_file, save_file
from tiny_decoders import LONG, PROMPTS

from calotype.core.attention.registry import attention_selector
from calotype.core.copies import moved
from calotype.encoders import templates
from calotype.encoders.base import LimitedEncoder
from calotype.encoders.decoder import DecoderEncoder, Layer, load_decoder_encoder
from calotype.language.checkpoints import load_transformers_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

BATCH = [*PROMPTS, LONG]
OTHERS = dict.fromkeys(("scheduler", "vae", "transformer"))
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen-image": {
        "template": templates.QWEN_IMAGE,
        "layers": (Layer(-1, True),),
        "max_tokens": 30,
        "drop": templates.QWEN_IMAGE_DROP,
    },
    "z-image": {"template": templates.Z_IMAGE, "layers": (Layer(-2, False),), "max_tokens": 40},
    "flux2": {
        "template": templates.FLUX2,
        "layers": (Layer(1, False), Layer(2, False), Layer(3, False)),
        "max_tokens": 70,
        "pad_to_max": True,
    },
    "flux2-klein": {
        "template": templates.FLUX2_KLEIN,
        "layers": (Layer(0, False), Layer(2, False), Layer(3, False)),
        "max_tokens": 36,
        "pad_to_max": True,
    },
}
NUM_BLOCKS = {"qwen-image": 4, "z-image": 3, "flux2": 3, "flux2-klein": 3}


@dataclass(frozen=True, kw_only=True)
class Use:
    """One family's use of a language model: transformers' and ours."""

    name: str
    model: Any
    tokenizer: Any
    folder: Path
    ours: DecoderEncoder

    def reference(self, prompts: list[str]) -> list[torch.Tensor]:
        """The states that diffusers' pipeline reads, row by row."""
        return _REFERENCES[self.name](self, prompts)


def _qwen_image(use: Use, prompts: list[str]) -> list[torch.Tensor]:
    from diffusers import QwenImagePipeline

    pipe = QwenImagePipeline(text_encoder=use.model, tokenizer=use.tokenizer, **OTHERS)
    states, mask = pipe.encode_prompt(prompts, device="cpu", max_sequence_length=use.ours.max_tokens)
    lengths = [states.shape[1]] * len(states) if mask is None else mask.sum(1).tolist()
    return [row[:length] for row, length in zip(states, lengths, strict=True)]


def _z_image(use: Use, prompts: list[str]) -> list[torch.Tensor]:
    from diffusers import ZImagePipeline

    pipe = ZImagePipeline(text_encoder=use.model, tokenizer=use.tokenizer, **OTHERS)
    return pipe._encode_prompt([*prompts], device="cpu", max_sequence_length=use.ours.max_tokens)


def _flux2(use: Use, prompts: list[str]) -> list[torch.Tensor]:
    from diffusers import Flux2Pipeline

    return Flux2Pipeline._get_mistral_3_small_prompt_embeds(
        use.model, use.tokenizer, prompts, max_sequence_length=70, hidden_states_layers=[1, 2, 3]
    )


def _klein(use: Use, prompts: list[str]) -> list[torch.Tensor]:
    from diffusers import Flux2KleinPipeline

    return Flux2KleinPipeline._get_qwen3_prompt_embeds(
        use.model, use.tokenizer, prompts, max_sequence_length=36, hidden_states_layers=[0, 2, 3]
    )


_REFERENCES: dict[str, Callable[[Use, list[str]], Any]] = {
    "qwen-image": _qwen_image,
    "z-image": _z_image,
    "flux2": _flux2,
    "flux2-klein": _klein,
}


@pytest.fixture(scope="module", params=list(SETTINGS))
def use(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Use:
    folder, name = tmp_path_factory.mktemp(request.param), request.param
    tokenizer = tiny.mistral_tokenizer() if name == "flux2" else tiny.qwen_tokenizer()
    build = {"qwen-image": tiny.qwen_vl, "flux2": tiny.mistral3}.get(name, tiny.qwen3)
    model = build(tokenizer)
    model.save_pretrained(folder / "text_encoder", max_shard_size="30KB" if name == "z-image" else "1GB")
    tokenizer.save_pretrained(folder / "tokenizer")
    ours = load_decoder_encoder(folder / "text_encoder", folder / "tokenizer", **SETTINGS[name])
    return Use(name=name, model=model, tokenizer=tokenizer, folder=folder, ours=ours)


def test_states_are_those_of_the_reference(use: Use) -> None:
    found, expected = use.ours(BATCH), use.reference(BATCH)
    assert len(found.states) == len(expected) == len(BATCH)
    for row, states in enumerate(expected):
        length = int(found.lengths[row])
        assert error(found.states[row : row + 1, :length], states[None]) <= 1e-5
        assert not found.states[row, length:].any()
    if use.ours.pad_to_max:
        assert found.states.shape[1] == use.ours.max_tokens == int(found.lengths.min())


def test_rows_do_not_see_each_other(use: Use) -> None:
    together = use.ours(BATCH)
    for row, prompt in enumerate(BATCH):
        alone, length = use.ours([prompt]), int(together.lengths[row])
        assert alone.lengths.tolist() == [length]
        assert error(alone.states, together.states[row : row + 1, :length]) <= 1e-5


def test_a_prompt_that_is_cut_is_told_with_its_words(use: Use) -> None:
    assert use.ours(["a cat", ""]).warnings == ()
    (told,) = use.ours([LONG, "a cat", LONG]).warnings
    words = told.partition("left out: '")[2].removesuffix("'")
    assert LONG.endswith(words) and len(words.split()) > 2
    assert f"{use.ours.max_tokens} are read" in told
    template = use.ours.with_max_tokens(len(use.ours.tokens([""])[0][0]) - use.ours.drop - 1)
    (told,) = template([""]).warnings
    assert "left out: ''" not in told and "left out: '" in told


def test_only_what_is_read_is_loaded(use: Use) -> None:
    model = use.ours.language_model
    assert len(model.blocks) == NUM_BLOCKS[use.name] <= use.model.config.get_text_config().num_hidden_layers
    weights = sum(weight.numel() for weight in model.parameters())
    text = use.model.model if use.name in ("z-image", "flux2-klein") else use.model.model.language_model
    own = sum(weight.numel() for name, weight in text.named_parameters() if not name.startswith("layers.3."))
    last = sum(weight.numel() for name, weight in text.named_parameters() if name.startswith("layers.3."))
    assert weights == own + (last if NUM_BLOCKS[use.name] == 4 else 0)
    with pytest.raises(ValueError, match="no head"):
        model.logits(torch.zeros(1, 3, dtype=torch.int64))


def test_the_whole_language_model_writes(use: Use) -> None:
    ours = load_transformers_model(
        use.folder / "text_encoder", device=torch.device("cpu"), dtype=torch.float32, attention=attention_selector()
    )
    ids = torch.arange(3, 20)[None]
    assert error(ours.logits(ids), use.model(input_ids=ids).logits) <= 1e-5


def test_copies_and_limits(use: Use) -> None:
    assert isinstance(use.ours, LimitedEncoder)
    half = moved(use.ours, torch.device("cpu"), torch.bfloat16)
    assert half(PROMPTS).states.dtype is torch.bfloat16
    assert use.ours.language_model.embedding.weight.dtype is torch.float32


def test_files_with_the_names_of_older_versions(use: Use, tmp_path: Path) -> None:
    if use.name not in ("qwen-image", "flux2"):
        pytest.skip("one spelling")
    weights = load_file(use.folder / "text_encoder" / "model.safetensors")
    older = {_other_name(use.name, name): weight for name, weight in weights.items()}
    assert older.keys() != weights.keys()
    save_file(older, tmp_path / "model.safetensors")
    entries = json.loads((use.folder / "text_encoder" / "config.json").read_text())
    if use.name == "qwen-image":  # the oldest have all in one, and name the rotary embedding otherwise
        text = entries.pop("text_config")
        rotary = text.pop("rope_parameters")
        text |= {"rope_theta": rotary["rope_theta"], "architectures": entries["architectures"]}
        entries |= text | {"rope_scaling": {"type": "mrope", "mrope_section": rotary["mrope_section"]}}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    ours = load_decoder_encoder(tmp_path, use.folder / "tokenizer", **SETTINGS[use.name])
    assert torch.equal(ours(PROMPTS).states, use.ours(PROMPTS).states)


def _other_name(use: str, name: str) -> str:
    if use == "qwen-image":
        pairs = (("model.language_model.", "model."), ("model.visual.", "visual."))
        back = (("visual.", "model.visual."), ("model.", "model.language_model."))
    else:
        pairs = (
            ("model.language_model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
            ("model.vision_tower.", "vision_tower."),
            ("model.multi_modal_projector.", "multi_modal_projector."),
        )
        back = tuple((new, old) for old, new in pairs)
    return next((new + name.removeprefix(old) for old, new in (*pairs, *back) if name.startswith(old)), name)


def test_what_cannot_be(use: Use, tmp_path: Path) -> None:
    settings, folders = SETTINGS[use.name], (use.folder / "text_encoder", use.folder / "tokenizer")
    with pytest.raises(ValueError, match="layer 5 is to be read; this model has layers 0 to 4"):
        load_decoder_encoder(*folders, **settings | {"layers": (Layer(5, False),)})
    with pytest.raises(ValueError, match="layers are"):
        load_decoder_encoder(*folders, **settings | {"layers": ()})
    with pytest.raises(ValueError, match="max_tokens is 0"):
        use.ours.with_max_tokens(0)
    with pytest.raises(ValueError, match="drop is -1"):
        load_decoder_encoder(*folders, **settings | {"drop": -1})
    with pytest.raises(ValueError, match="of which the first 500 are dropped"):
        load_decoder_encoder(*folders, **settings | {"drop": 500})(["a"])
    with pytest.raises(ValueError, match="no prompts"):
        use.ours([])
    with pytest.raises(ValueError, match="whole characters"):
        use.ours(["\ud800"])
    with pytest.raises(FileNotFoundError):
        load_decoder_encoder(tmp_path, folders[1], **settings)
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        load_decoder_encoder(folders[0], tmp_path, **settings)


def test_a_key_that_matches_nothing_is_refused(use: Use, tmp_path: Path) -> None:
    if use.name == "z-image":
        pytest.skip("in shards")
    weights = load_file(use.folder / "text_encoder" / "model.safetensors")
    (tmp_path / "config.json").write_text((use.folder / "text_encoder" / "config.json").read_text())
    stem = next(name for name in weights if ".layers.0." in name).partition("layers.0.")[0]
    save_file(weights | {f"{stem}layers.0.self_attn.extra.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="match nothing"):
        load_decoder_encoder(tmp_path, use.folder / "tokenizer", **SETTINGS[use.name])


def test_templates() -> None:
    tokenizer = tiny.qwen_tokenizer()
    for template, drop in (
        (templates.QWEN_IMAGE, templates.QWEN_IMAGE_DROP),
        (templates.QWEN_IMAGE_EDIT, templates.QWEN_IMAGE_EDIT_DROP),
    ):
        ids = tokenizer(template("a fox", tokenizer)).input_ids
        assert tokenizer.decode(ids[drop:]) == "a fox<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ValueError, match=r"must have one \{\}"):
        templates.FormatTemplate("no place")
    braces = templates.FormatTemplate("<{}>")("{} and {0}", tokenizer)
    assert braces == "<{} and {0}>"
    (system, user) = templates.flux2_messages("a [IMG]fox")
    assert user["content"] == [{"type": "text", "text": "a fox"}]
    assert system["role"] == "system"
