import gc
import hashlib
import json
import pickle
import resource
import struct
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from calotype.core.checkpoint import read_checkpoint, read_header, resolve_files
from calotype.core.key_map import KeyMap, Layout, Reshape, RowPermutation, Rule, identity_key_map
from calotype.core.loading import build_on_meta, file_digest, load_weights, save_weights
from calotype.core.weight_source import WeightSource


class Model(nn.Module):
    steps: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 6)
        self.patch = nn.Linear(12, 4, bias=False)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("mean", torch.randn(3))


MAP = KeyMap(
    (
        Layout(
            "parts",
            (
                Rule(("q.{leaf}", "k.{leaf}", "v.{leaf}"), "qkv.{leaf}"),
                Rule("patch.weight", "patch.weight", (Reshape((0, -1)),)),
                Rule("mean", "mean"),
                Rule("steps", "steps"),
            ),
        ),
    )
)


def on_meta() -> Model:
    return build_on_meta(Model)


def parts() -> dict[str, Tensor]:
    torch.manual_seed(0)
    tensors = {f"{part}.weight": torch.randn(2, 4) for part in "qkv"} | {
        f"{part}.bias": torch.randn(2) for part in "qkv"
    }
    return tensors | {"patch.weight": torch.randn(4, 3, 2, 2), "mean": torch.randn(3), "steps": torch.tensor(9)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(parts(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def shard(folder: Path, *, index: bool = True) -> tuple[Path, ...]:
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    tensors = list(parts().items())
    for n, name in enumerate(names):
        save_file(dict(tensors[n::3]), folder / name)
    if index:
        weight_map = {key: names[place % 3] for place, (key, _) in enumerate(tensors)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tuple(folder / name for name in names)


def check(module: Model, dtype: torch.dtype = torch.float32) -> None:
    stored = parts()
    assert torch.equal(module.qkv.weight, torch.cat([stored[f"{part}.weight"] for part in "qkv"]).to(dtype))
    assert torch.equal(module.qkv.bias, torch.cat([stored[f"{part}.bias"] for part in "qkv"]).to(dtype))
    assert torch.equal(module.patch.weight, stored["patch.weight"].flatten(1).to(dtype))
    assert torch.equal(module.mean, stored["mean"].to(dtype))
    assert module.steps.dtype == torch.int64 and module.steps.item() == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_parts_are_joined_cast_and_placed(file: Path, dtype: torch.dtype) -> None:
    module = on_meta()
    load_weights(module, file, MAP, dtype=dtype, device="cpu")
    check(module, dtype)
    assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.is_contiguous() for p in module.parameters())
    assert set(dict(module.named_buffers())) == {"steps", "mean"}


def test_building_on_meta_runs_no_initialiser() -> None:
    def build() -> nn.Module:
        module = nn.ModuleList([nn.Embedding(5, 3), nn.Linear(3, 5), nn.Conv2d(2, 2, 1), nn.LayerNorm(3)])
        nn.init.trunc_normal_(tensor=module[1].weight, std=0.02)
        module[2].weight.detach().normal_()
        return module

    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    module = build_on_meta(build)
    assert all(weight.is_meta for weight in module.parameters()) and len(list(module.parameters())) == 7
    assert torch.equal(torch.rand(3), expected)


def test_index_folder_and_several_files(tmp_path: Path) -> None:
    files = shard(tmp_path)
    for source in (tmp_path, tmp_path / "model.safetensors.index.json", files, str(tmp_path)):
        module = on_meta()
        load_weights(module, source, MAP)
        check(module)


def test_missing_files_and_shards_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no weights file .*absent.safetensors"):
        load_weights(on_meta(), tmp_path / "absent.safetensors", MAP)
    with pytest.raises(FileNotFoundError, match=r"no weights index .*absent.json"):
        load_weights(on_meta(), tmp_path / "absent.json", MAP)
    with pytest.raises(FileNotFoundError, match="no safetensors file or index in the folder"):
        load_weights(on_meta(), tmp_path, MAP)
    with pytest.raises(FileNotFoundError, match="no weights file"):
        read_header(tmp_path / "absent.safetensors")
    files = shard(tmp_path)
    files[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"names a shard model-00002-of-00003.safetensors that is missing"):
        load_weights(on_meta(), tmp_path, MAP)
    with pytest.raises(FileNotFoundError, match=r"one of 00003 shards; .*model-00002-of-00003.safetensors is missing"):
        load_weights(on_meta(), (files[0], files[2]), MAP)
    with pytest.raises(ValueError, match="no weights files were given"):
        load_weights(on_meta(), (), MAP)


def test_a_header_is_parsed_once_as_long_as_it_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(2)}, file)
    first = read_header(file)
    assert read_header(file) is first
    save_file({"b": torch.zeros(2)}, file)
    assert list(read_header(file).tensors) == ["b"]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is truncated"):
        read_header(file)


def test_a_folder_with_a_single_file_and_one_with_a_choice(tmp_path: Path, file: Path) -> None:
    assert resolve_files(tmp_path) == (file,)
    save_file(parts(), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"2 candidates \(model.safetensors, other.safetensors\)"):
        resolve_files(tmp_path)
    with pytest.raises(ValueError, match="both hold a tensor"):
        read_checkpoint((file, tmp_path / "other.safetensors"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "no table 'weight_map'"),
        ("nonsense", "no table 'weight_map'"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "outside its own folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "outside its own folder"),
        ('{"weight_map": {"gone.weight": "model.safetensors"}}', "1 tensors that no shard holds: gone.weight"),
    ],
)
def test_a_wrong_index_is_refused(file: Path, text: str, reason: str) -> None:
    index = file.with_name("model.safetensors.index.json")
    index.write_text(text)
    with pytest.raises(ValueError, match=reason):
        load_weights(on_meta(), index, MAP)


def header(entries: object, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode() if not isinstance(entries, bytes) else entries
    return struct.pack("<Q", len(text)) + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"short", "is text"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git-lfs pointer"),
        (pickle.dumps({"a": 1}), "Python pickle"),
        (b"PK\x03\x04" + bytes(99), "zip archive, as torch.save writes"),
        (b"GGUF\x03" + bytes(99), "GGUF"),
        (b"\n<!DOCTYPE html><html>404</html>", "web page"),
        (b'{"error": "not found"}', "JSON"),
        (b"\x89HDF\r\n\x1a\n" + bytes(99), "HDF5"),
        (bytes(99), "begins with the bytes 00 00"),
        (b"\xff" * 8 + b"{" + bytes(99), "begins with the bytes ff ff"),
        (header({"a": ENTRY}, bytes(8))[:20], "truncated: its header alone takes"),
        (header({"a": ENTRY}, bytes(7)), "truncated: it holds 7 of the 8 bytes"),
        (header({"a": ENTRY}, bytes(9)), "1 bytes after its last tensor"),
        (header(b'{"a": {"dtype"'), "header is corrupted"),
        (header(b'{"' + b"\xff" * 30), "header is corrupted"),
        (header(b'{"a":' * 100_000), "header is corrupted"),
        (header({"a": 3}), "makes no sense"),
        (header({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "makes no sense"),
        (header({"a": {**ENTRY, "shape": [3]}}, bytes(8)), r"\[3\] F32 cannot take 8 bytes"),
        (header({"a": {**ENTRY, "shape": [-2]}}, bytes(8)), "cannot take 8 bytes"),
        (header({"a": {**ENTRY, "data_offsets": [4, 12]}}, bytes(12)), "begins at 4, not 0"),
        (header({"a": ENTRY, "b": ENTRY}, bytes(8)), "begins at 0, not 8"),
        (header({"a": {**ENTRY, "dtype": "F4"}}, bytes(8)), "stored as F4; supported are F64"),
        (header({"__metadata__": {"format": "pt"}}), "holds no tensors"),
    ],
)
def test_what_is_not_whole_safetensors_is_refused_before_anything_is_allocated(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    module = on_meta()
    with pytest.raises(ValueError, match=reason) as caught:
        load_weights(module, path, MAP)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert all(weight.is_meta for weight in module.state_dict().values())


def test_one_bad_shard_stops_everything(tmp_path: Path) -> None:
    files = shard(tmp_path)
    files[2].write_bytes(files[2].read_bytes()[:-3])
    module = on_meta()
    with pytest.raises(ValueError, match=r"00003-of-00003.safetensors is truncated"):
        load_weights(module, tmp_path, MAP)
    assert all(weight.is_meta for weight in module.state_dict().values())


def test_misfits_name_the_file_and_leave_the_module_alone(file: Path) -> None:
    save_file(parts() | {"extra": torch.zeros(1)}, file)
    module = on_meta()
    with pytest.raises(
        ValueError, match=r"model.safetensors does not fit the model: 1 of 10 keys match nothing \(extra\)"
    ):
        load_weights(module, file, MAP)
    save_file(parts() | {"v.weight": torch.zeros(2, 5)}, file)
    with pytest.raises(ValueError, match=r"shape \[6, 4\], the checkpoint gives .* v.weight \[2, 5\]"):
        load_weights(module, file, MAP)
    save_file(parts() | {"steps": torch.tensor(9.0)}, file)
    with pytest.raises(ValueError, match=r"steps is torch.int64 in the model, but steps is stored as torch.float32"):
        load_weights(module, file, MAP)
    save_file(parts() | {"q.weight": torch.ones(2, 4, dtype=torch.int32)}, file)
    with pytest.raises(
        ValueError, match=r"qkv.weight is torch.float32 in the model, but q.weight is stored as torch.int32"
    ):
        load_weights(module, file, MAP)
    assert all(weight.is_meta for weight in module.state_dict().values())


@pytest.mark.parametrize(
    "stored", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]
)
def test_every_floating_format_is_read_also_in_permuted_rows(tmp_path: Path, stored: torch.dtype) -> None:
    x = torch.randn(8, 3).to(stored)
    save_file({"w": x}, tmp_path / "w.safetensors")
    module = nn.Linear(3, 8, bias=False, device="meta")
    operations = (RowPermutation((2, 2, 2), (0, 2, 1)),)
    load_weights(module, tmp_path, KeyMap((Layout("l", (Rule("w", "weight", operations),)),)), dtype=torch.float32)
    assert torch.equal(module.weight, x.float()[[0, 2, 1, 3, 4, 6, 5, 7]])


def test_shared_weights_stay_shared_and_the_rest_keeps_its_flags(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        module = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        module["head"].weight = module["embedding"].weight
        return module.requires_grad_(False)

    original = tied()
    save_weights(original, tmp_path / "w.safetensors")
    assert list(load_file(tmp_path / "w.safetensors")) == ["embedding.weight"]
    module = build_on_meta(tied)
    load_weights(module, tmp_path / "w.safetensors")
    assert module["head"].weight is module["embedding"].weight
    assert torch.equal(module["head"].weight, original["head"].weight) and not module["head"].weight.requires_grad


def test_buffers_outside_the_checkpoint(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    save_weights(module, tmp_path / "w.safetensors")
    module.register_buffer("table", torch.ones(2), persistent=False)
    load_weights(module, tmp_path, dtype=torch.bfloat16)
    assert module.weight.dtype == torch.bfloat16 and torch.equal(module.get_buffer("table"), torch.ones(2))
    module.register_buffer("table", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(ValueError, match="buffer table is on the meta device"):
        load_weights(module, tmp_path)


def test_hoisted_weights_are_not_resident_but_can_be_read(file: Path) -> None:
    module = on_meta()
    load_weights(module, file, MAP, hoisted=lambda name: name.startswith("qkv.") or name == "mean")
    assert module.qkv.weight.is_meta and module.qkv.bias.is_meta and module.mean.is_meta
    assert not module.patch.weight.is_meta
    source = WeightSource.for_module(module, file, MAP)
    weight = source.read("qkv.weight", dtype=torch.bfloat16)
    assert torch.equal(weight, torch.cat([parts()[f"{part}.weight"] for part in "qkv"]).bfloat16())


def test_weight_source_reads_by_name_on_demand(file: Path) -> None:
    with WeightSource.for_module(on_meta(), file, MAP) as source:
        assert "qkv.weight" in source and "q.weight" not in source
        assert sorted(source) == ["mean", "patch.weight", "qkv.bias", "qkv.weight", "steps"]
        assert source.shape("patch.weight") == (4, 12) and source.stored_dtype("steps") == torch.int64
        first = source.read("patch.weight")
        first.zero_()
        assert torch.equal(source.read("patch.weight"), parts()["patch.weight"].flatten(1))
        with pytest.raises(ValueError, match="no weight 'nope'; known are 5"):
            source.read("nope")
    with pytest.raises(ValueError, match="closed"):
        source.read("mean")


def test_what_was_read_outlives_the_file_and_the_source(file: Path) -> None:
    module = on_meta()
    load_weights(module, file, MAP)
    file.write_bytes(bytes(file.stat().st_size))
    gc.collect()
    check(module)


def test_threads_share_a_source(file: Path) -> None:
    source, wrong = WeightSource.for_module(on_meta(), file, MAP), []
    expected = {name: source.read(name) for name in source}

    def read() -> None:
        wrong.extend(name for _ in range(50) for name in source if not torch.equal(source.read(name), expected[name]))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_saved_weights_load_again_bit_equal_and_always_give_the_same_bytes(tmp_path: Path) -> None:
    module = Model()
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    notes = {str(i): "é" * i for i in range(9)}
    save_weights(module, first, metadata=notes)
    save_weights(module, second, metadata=dict(reversed(notes.items())))
    assert first.read_bytes() == second.read_bytes()
    assert file_digest(first) == hashlib.sha256(first.read_bytes()).hexdigest()
    assert read_header(first).metadata == notes
    loaded = on_meta()
    load_weights(loaded, first, identity_key_map(loaded))
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]) and torch.equal(weight, load_file(first)[name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_saving_casts_floating_weights_only_and_handles_odd_ones(tmp_path: Path) -> None:
    module = nn.Module()
    module.transposed = nn.Parameter(torch.randn(3, 5).T)
    module.register_buffer("flags", torch.tensor([True, False, True]))
    module.register_buffer("counts", torch.arange(3))
    module.register_buffer("empty", torch.zeros(0, 2))
    module.register_buffer("scalar", torch.tensor(2.5))
    save_weights(module, tmp_path / "w.safetensors", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "w.safetensors")
    assert torch.equal(stored["transposed"], module.transposed.bfloat16()) and stored["scalar"].item() == 2.5
    assert torch.equal(stored["flags"], module.flags) and torch.equal(stored["counts"], module.counts)
    assert stored["empty"].shape == (0, 2)


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no folder .*gone to write w.safetensors to"):
        save_weights(Model(), tmp_path / "gone" / "w.safetensors")
    with pytest.raises(ValueError, match="meta device"):
        save_weights(on_meta(), tmp_path / "w.safetensors")
    module = nn.Module()
    module.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"no format for torch.complex64"):
        save_weights(module, tmp_path / "w.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="cannot write"):
        save_weights(Model(), tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(FileNotFoundError):
        file_digest(tmp_path / "gone")


def test_a_full_disk_leaves_the_old_file_and_no_part(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ValueError, match=f"cannot write {path}: "):
            save_weights(nn.Linear(300, 300), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"] and path.read_bytes() == b"old"
