"""Folders in transformers' layout, what is wrong with some, and sources on the hub (which is played)."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from calotype.core.attention.registry import attention_selector
from calotype.language.checkpoints import (
    load_transformers_folder,
    load_transformers_model,
    read_entries,
    resolve_source,
)
from calotype.language.families import family_of
from calotype.language.model import LanguageModel

from ..fake_hub import Hub

ENTRIES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 30,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


def tensors(*, layers: int = 2) -> dict[str, Tensor]:
    """Random weights by their names in transformers."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (30, 8), "model.norm.weight": (8,)}
    for i in range(layers):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}input_layernorm.weight": (8,), f"{layer}post_attention_layernorm.weight": (8,)}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (rows, 8) for name, rows in (("q", 8), ("k", 4), ("v", 4))}
        shapes |= {f"{layer}self_attn.o_proj.weight": (8, 8), f"{layer}mlp.down_proj.weight": (8, 12)}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (12, 8) for name in ("gate", "up")}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder: Path, weights: dict[str, Tensor], **entries: Any) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(ENTRIES | entries))
    return folder


def write_shards(folder: Path, weights: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    write(folder, weights)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {f"model-0000{n + 1}-of-00003.safetensors": names[n::3] for n in range(3)}
    for shard, held in shards.items():
        save_file({name: weights[name] for name in held}, folder / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_tokenizer(folder: Path, size: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{n}": n for n in range(size)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "w0", "eos_token": "w1"}))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LanguageModel:
    return load_transformers_model(
        folder, device=torch.device("cpu"), dtype=dtype, attention=attention_selector("sdpa")
    )


def assert_same(a: LanguageModel, b: LanguageModel) -> None:
    assert a.state_dict().keys() == b.state_dict().keys()
    for name, weight in a.state_dict().items():
        assert torch.equal(weight, b.state_dict()[name])


def test_a_folder_is_a_model_ready_to_run(tmp_path: Path) -> None:
    weights = tensors()
    model = load(write(tmp_path, weights))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config == family_of(ENTRIES).config(ENTRIES)
    assert torch.equal(model.embedding.weight, weights["model.embed_tokens.weight"])
    parts = [weights[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(model.state_dict()["blocks.1.attention.qkv.weight"], torch.cat(parts))
    assert load(tmp_path, torch.bfloat16).embedding.weight.dtype == torch.bfloat16


def test_shards_are_joined_and_none_may_be_missing(tmp_path: Path) -> None:
    weights = tensors()
    whole, folder = load(write(tmp_path / "whole", weights)), write_shards(tmp_path / "shards", weights)
    assert_same(load(folder), whole)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00003\.safetensors that is missing"):
        load(folder)


def test_names_without_a_stem_and_old_tables_load(tmp_path: Path) -> None:
    weights = tensors()
    whole = load(write(tmp_path / "whole", weights))
    bare = {name.removeprefix("model."): weight for name, weight in weights.items()}
    assert_same(load(write(tmp_path / "bare", bare)), whole)
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(2)}
    assert_same(load(write(tmp_path / "tables", weights | tables)), whole)


def test_another_copy_of_the_weights_is_left_alone(tmp_path: Path) -> None:
    folder = write(tmp_path, tensors())
    (folder / "consolidated.safetensors").write_bytes(b"not read")
    load(folder)


def test_a_stored_head_equal_to_tied_embeddings_stays_tied(tmp_path: Path) -> None:
    weights = tensors()
    model = load(write(tmp_path, weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}))
    assert model.head is None
    assert model.config.tie_embeddings


def test_a_stored_head_that_differs_is_used(tmp_path: Path) -> None:
    weights = tensors()
    head = weights["model.embed_tokens.weight"].clone()
    head[29, 7] += 1
    model = load(write(tmp_path, weights | {"lm_head.weight": head}))
    assert model.head is not None
    assert torch.equal(model.head.weight, head)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"head\.weight from lm_head\.weight"):
        load(write(tmp_path, tensors(), tie_word_embeddings=False))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"vocab_size": 31}, r"the model has the shape \[31, 8\], the checkpoint gives model.embed_tokens.weight \[30"),
        ({"num_hidden_layers": 1}, "keys match nothing"),
        ({"num_hidden_layers": 3}, "parameters have no value"),
        ({"num_hidden_layers": 10**9}, "layers is 1000000000; it must be at most 2048"),
        ({"hidden_size": 10**18}, r"a matrix of \d+ x 10+ weights is larger than any memory"),
        ({"num_attention_heads": 1000, "head_dim": None}, "head_width is 0; it must be at least 1"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan; it must be a number over 0"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps is inf; it must be a number over 0"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta is 1000"),
        (
            {"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": [1]}, "rope_parameters": None},
            r"original_max_position_embeddings is \[1\]; it must be a number over 0",
        ),
        ({"architectures": ["RwkvForCausalLM"]}, r"config\.json: .*RwkvForCausalLM is not a known language model"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\), which cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, tensors(), **entries))


def test_files_that_are_not_there_or_not_a_config(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        load(tmp_path)
    for text in ("[1]", "{"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match="not a config file"):
            read_entries(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(ENTRIES))
    with pytest.raises(FileNotFoundError, match="no safetensors file"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        load(tmp_path)


def load_both(folder: Path) -> tuple[LanguageModel, Any]:
    return load_transformers_folder(
        folder, device=torch.device("cpu"), dtype=torch.float32, attention=attention_selector("sdpa")
    )


def test_the_tokenizer_comes_along_and_may_be_smaller(tmp_path: Path) -> None:
    write_tokenizer(write(tmp_path, tensors()), 25)
    model, tokenizer = load_both(tmp_path)
    assert (model.config.vocab_size, tokenizer.vocab_size) == (30, 25)


def test_a_vocabulary_with_gaps_must_fit_too(tmp_path: Path) -> None:
    write_tokenizer(write(tmp_path, tensors()), 25)
    file = tmp_path / "tokenizer.json"
    entries = json.loads(file.read_text())
    vocab = entries["model"]["vocab"]
    vocab[max(vocab, key=vocab.get)] = 30
    file.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match="the tokenizer has 31 ids, but the model has embeddings for 30 only"):
        load_both(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    write_tokenizer(write(tmp_path, tensors()), 31)
    with pytest.raises(ValueError, match="the tokenizer has 31 ids, but the model has embeddings for 30 only"):
        load_both(tmp_path)


def test_sources_that_are_here(tmp_path: Path) -> None:
    assert resolve_source(str(tmp_path)) == tmp_path
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_source(file) == file
    other = tmp_path / "model.txt"
    other.write_bytes(b"")
    with pytest.raises(ValueError, match=r"a folder, a \.gguf file or a hub id"):
        resolve_source(other)
    with pytest.raises(ValueError, match="the source is ''; it must be a folder"):
        resolve_source("")
    for absent in ("~no-such-user-here/model", "x" * 300):
        with pytest.raises(FileNotFoundError, match=r"no folder or \.gguf file"):
            resolve_source(absent)


@pytest.mark.parametrize(
    "source", ["./owner/name", "/no/such", "a/b/c", "name", "owner/model.gguf", Path("owner/name")]
)
def test_what_looks_local_is_never_downloaded(source: str | Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a hub id such as 'owner/name'"):
        resolve_source(source)


FILES = {
    "config.json": 500,
    "tokenizer.json": 1000,
    "model-00001-of-00002.safetensors": 1_500_000_000,
    "model-00002-of-00002.safetensors": 500_000_000,
    "model.safetensors.index.json": 100,
    "consolidated.safetensors": 2_000_000_000,
    "onnx/model.safetensors": 7,
    "pytorch_model.bin": 2_000_000_000,
    "README.md": 5,
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    return Hub(monkeypatch, tmp_path, dict(FILES))


def test_a_hub_id_is_downloaded_and_the_size_is_told(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resolve_source("owner/name", revision="main", token="secret") == tmp_path
    assert capsys.readouterr().err == "downloading owner/name: 5 files, 2.00 GB\n"
    (asked,) = hub.asked
    assert asked["revision"] == "c0ffee"
    assert asked["token"] == "secret"
    assert set(asked["allow_patterns"]) == set(list(FILES)[:5])


def test_nothing_is_told_where_all_is_here(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.cached = set(FILES)
    resolve_source("owner/name")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("absent", "message"), [("config.json", "it holds no config.json"), (".safetensors", "it holds no safetensors")]
)
def test_repositories_without_a_model_are_refused(hub: Hub, absent: str, message: str) -> None:
    hub.files = {name: size for name, size in FILES.items() if not name.endswith(absent)}
    with pytest.raises(ValueError, match=message):
        resolve_source("owner/name")
    assert hub.asked == []


def test_without_a_network_the_local_copy_is_taken(hub: Hub, tmp_path: Path) -> None:
    hub.error = ConnectionError("no route")
    with pytest.raises(
        FileNotFoundError, match=r"not downloaded yet, and the hub cannot be reached \(ConnectionError\)"
    ):
        resolve_source("owner/name")
    with pytest.raises(FileNotFoundError, match="not downloaded yet, and local_files_only is set"):
        resolve_source("owner/name", local_files_only=True)
    hub.cached = set(FILES)
    assert resolve_source("owner/name") == tmp_path
    assert resolve_source("owner/name", local_files_only=True) == tmp_path
    assert all(asked["local_files_only"] for asked in hub.asked)


def test_a_repository_that_is_not_there(hub: Hub) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    class MissingError(HfHubHTTPError):
        def __init__(self) -> None:
            Exception.__init__(self, "404 Client Error.\nMore.")

    hub.error = MissingError()
    with pytest.raises(ValueError, match=r"cannot load 'owner/name' from the Hugging Face Hub: 404 Client Error"):
        resolve_source("owner/name")
