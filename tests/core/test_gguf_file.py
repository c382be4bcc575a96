import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFWriter
from peak_memory import check_peak
from torch import nn

from calotype.core.gguf_file import GGUFFile, gguf_shards
from calotype.core.key_map import KeyMap, Layout, Part, Reshape, RowPermutation, Rows, Rule
from calotype.core.loading import build_on_meta, load_weights
from calotype.core.weight_source import WeightSource

METADATA: dict[str, Any] = {
    "text": "é" * 5,
    "flag": True,
    "small": 7,
    "negative": -3,
    "large": 2**40,
    "real": 0.1,
    "texts": ["a", "", "ü"],
    "numbers": [1, -2, 3],
    "reals": [0.5, 1.5],
}


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def write(
    path: Path,
    tensors: dict[str, tuple[np.ndarray, str]],
    originals: Mapping[str, Sequence[int]] = MappingProxyType({}),
    **options: Any,
) -> Path:
    """A file with the tensors quantised to the named types, `METADATA`, and shapes that tensors had before."""
    writer = GGUFWriter(path, "test", **options)
    writer.add_string("text", METADATA["text"])
    writer.add_bool("flag", True)
    writer.add_uint8("small", 7)
    writer.add_int32("negative", -3)
    writer.add_uint64("large", 2**40)
    writer.add_float64("real", 0.1)
    for name in ("texts", "numbers", "reals"):
        writer.add_array(name, METADATA[name])
    for name, shape in originals.items():
        writer.add_array(f"comfy.gguf.orig_shape.{name}", shape)
    for name, (array, kind) in tensors.items():
        code = GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(array, code), raw_dtype=None if kind in ("F32", "F16") else code)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {
        "a": (values(3, 64), "Q4_1"),
        "b": (values(5), "F32"),
        "c": (values(2, 3, 32), "Q8_0"),
        "d": (values(4, 2), "F16"),
        "e": (values(4, 8), "BF16"),
    }
    return write(tmp_path / "model.gguf", tensors)


def test_metadata_and_tensors_are_those_of_the_gguf_package(file: Path) -> None:
    ours, theirs = GGUFFile(file), GGUFReader(file)
    assert ours.metadata == {"general.architecture": "test", **METADATA}
    for tensor in theirs.tensors:
        stored = ours.tensors[tensor.name]
        assert stored.shape == tuple(reversed(tensor.shape.tolist()))
        assert (stored.start, stored.stop - stored.start) == (tensor.data_offset, tensor.n_bytes)
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).view(stored.shape)
        assert torch.equal(ours.read(tensor.name), expected)
    assert list(ours.tensors) == ["a", "b", "c", "d", "e"]
    assert [tensor.dtype.itemsize for tensor in ours.tensors.values()] == [4, 4, 4, 2, 2]


def test_some_rows_and_unknown_names(file: Path) -> None:
    ours = GGUFFile(file)
    assert torch.equal(ours.read("a", slice(1, 3)), ours.read("a")[1:3])
    assert torch.equal(ours.read("c", slice(1, 2)), ours.read("c")[1:2])
    assert torch.equal(ours.read("d", slice(0, 1)), ours.read("d")[:1])
    ours.read("b").zero_()
    assert ours.read("b").count_nonzero() == 5
    with pytest.raises(ValueError, match="no tensor 'x'; it has 5: a, b, c"):
        ours.read("x")


def test_other_alignments(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "test")
    writer.add_custom_alignment(64)
    for n in range(3):
        writer.add_tensor(f"t{n}", values(5, seed=n))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = GGUFFile(tmp_path / "x.gguf")
    assert [torch.equal(ours.read(f"t{n}"), torch.from_numpy(values(5, seed=n))) for n in range(3)] == [True] * 3


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content.encode())) + content.encode()


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def content(
    entries: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), data: int = 256, version: int = 3
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries + tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


GOOD = tensor("a", (4, 8))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a GGUF file: it has 0 bytes"),
        (b"GGUF\x03", "not a GGUF file: it has 5 bytes"),
        (b"PK\x03\x04" + bytes(99), "not a GGUF file: it begins with the bytes 50 4b 03 04"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 0) + bytes(99), "big-endian GGUF file"),
        (content(tensors=(GOOD,), version=1), "GGUF version 1; supported are 2 and 3"),
        (content(tensors=(GOOD,), data=127), r"is truncated: it has \d+ of \d+ bytes"),
        (content(tensors=(GOOD,))[:50], "truncated or corrupted: its header ends beyond its 50 bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(99), "truncated or corrupted"),
        (content((text("k") + struct.pack("<IIQ", 9, 8, 2**50),), (GOOD,)), "truncated or corrupted"),
        (content((text("k") + struct.pack("<IQ", 8, 2**40),), (GOOD,)), "truncated or corrupted"),
        (content((struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1),), (GOOD,)), "not UTF-8"),
        (content((text("k") + struct.pack("<I", 77),), (GOOD,)), "the value of 'k' is of the unknown type 77"),
        (content((text("k") + struct.pack("<IIQ", 9, 9, 0),), (GOOD,)), "the value of 'k' is of the unknown type 9"),
        (content((text("k") + struct.pack("<IB", 0, 1),) * 2, (GOOD,)), "two values for 'k'"),
        (content((text("general.alignment") + struct.pack("<II", 4, 12),), (GOOD,)), "an alignment of 12"),
        (content(tensors=(GOOD, GOOD)), "two tensors 'a'"),
        (content(tensors=(GOOD, tensor("b", (4, 8), 0, 64))), "tensor 'b' overlaps another"),
        (content(tensors=(tensor("a", (4, 8), 0, 8),)), "tensor 'a' begins at 8, off the alignment"),
        (content(tensors=(tensor("a", (1,) * 9),)), "tensor 'a' has 9 axes"),
        (content(tensors=(tensor("a", (4, 0)),)), r"tensor 'a' \[4, 0\] cannot be stored as F32"),
        (content(tensors=(tensor("a", (4, 48), 2),)), r"tensor 'a' \[4, 48\] cannot be stored as Q4_0"),
        (
            content(tensors=(tensor("a", (4, 256), 16),)),
            "tensor 'a' is stored as IQ2_XXS; supported are F32, F16, BF",
        ),
        (content(tensors=(tensor("a", (4, 256), 39),)), "tensor 'a' is stored as MXFP4"),
        (content(tensors=(tensor("a", (4, 256), 99),)), "tensor 'a' is stored as the unknown type 99"),
        (content(), "holds no tensors"),
    ],
)
def test_what_is_not_whole_gguf_is_refused_before_anything_is_allocated(
    tmp_path: Path, data: bytes, reason: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    module = nn.Linear(8, 4, bias=False, device="meta")
    for read in (lambda: GGUFFile(path), lambda: load_weights(module, path)):
        with pytest.raises(ValueError, match=reason) as caught:
            read()
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert module.weight.is_meta


def test_big_endian_files_of_the_gguf_package_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", {"a": (values(3, 64), "F32")}, endianess=GGUFEndian.BIG)
    with pytest.raises(ValueError, match="big-endian"):
        GGUFFile(tmp_path / "x.gguf")
    with pytest.raises(FileNotFoundError, match="no weights file"):
        GGUFFile(tmp_path / "absent.gguf")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 24, bias=False)
        self.norm = nn.LayerNorm(8, bias=False)
        self.experts = nn.Linear(32, 12, bias=False)
        self.table = nn.Linear(4, 32, bias=False)
        self.flat = nn.LayerNorm(64, bias=False)


SWAP = RowPermutation((-1, 4, 2), (0, 2, 1))
EXPERTS = tuple(
    Part(f"{name}.weight", (Rows(n, n + 1), Reshape((-1, 32)))) for n in range(2) for name in ("gate", "up")
)
MAP = KeyMap(
    (
        Layout(
            "parts",
            (
                Rule((Part("q.weight", (SWAP,)), "k.weight", Part("v.weight", (Rows(0, 8),))), "qkv.weight"),
                Rule("n.weight", "norm.weight"),
                Rule(EXPERTS, "experts.weight"),
                Rule("t.weight", "table.weight", (Reshape((-1, 4)), RowPermutation((2, 16), (1, 0)))),
                Rule("f.weight", "flat.weight", (RowPermutation((2, 32), (1, 0)),)),
            ),
            drops=("unused.{any*}",),
        ),
    )
)


def parts(first: str = "Q8_0") -> dict[str, tuple[np.ndarray, str]]:
    return {
        "unused.freqs": (values(4), "F32"),
        "q.weight": (values(8, 64, seed=1), first),
        "k.weight": (values(8, 64, seed=2), "Q4_1"),
        "v.weight": (values(8, 64, seed=3), "F16"),
        "n.weight": (values(8, seed=4), "F32"),
        "gate.weight": (values(2, 3, 32, seed=5), "Q5_0"),
        "up.weight": (values(2, 3, 32, seed=6), "Q4_0"),
        "t.weight": (values(4, 32, seed=7), "Q8_0"),
        "f.weight": (values(64, seed=8), "Q8_0"),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_key_map_streams_quantised_tensors_into_a_module(tmp_path: Path, dtype: torch.dtype) -> None:
    path = write(tmp_path / "model.gguf", parts())
    read = GGUFFile(path).read
    module = build_on_meta(Model)
    load_weights(module, path, MAP, dtype=dtype)
    swapped = read("q.weight")[[0, 2, 4, 6, 1, 3, 5, 7]]
    assert torch.equal(module.qkv.weight, torch.cat((swapped, read("k.weight"), read("v.weight"))).to(dtype))
    assert torch.equal(module.norm.weight, read("n.weight").to(dtype))
    experts = torch.stack((read("gate.weight"), read("up.weight")), dim=1).reshape(12, 32)
    assert torch.equal(module.experts.weight, experts.to(dtype))
    table = read("t.weight").reshape(2, 16, 4).transpose(0, 1).reshape(32, 4)
    assert torch.equal(module.table.weight, table.to(dtype))
    assert torch.equal(module.flat.weight, read("f.weight").view(2, 32).T.flatten().to(dtype))


def test_tensors_that_are_stored_in_another_shape(tmp_path: Path) -> None:
    """As ComfyUI-GGUF does it where rows are not whole blocks: whole, reordered, and some rows of them."""
    shapes = {"conv": (16, 4, 3, 4), "wide": (8, 4, 2, 4), "line": (64, 12), "even": (3, 32)}
    kinds = {"conv": "Q4_0", "wide": "F16", "line": "Q8_0", "even": "Q8_0"}
    arrays = {name: values(*shape, seed=len(name)) for name, shape in shapes.items()}
    stored = {name: (array.reshape(-1, 32 if name == "even" else 256), kinds[name]) for name, array in arrays.items()}
    path = write(tmp_path / "x.gguf", stored, {name: [*shape] for name, shape in shapes.items() if name != "even"})
    plain = GGUFFile(write(tmp_path / "plain.gguf", stored))
    expected = {name: plain.read(name).view(shape) for name, shape in shapes.items()}
    file = GGUFFile(path)
    assert {name: file.tensors[name].shape for name in shapes} == shapes
    for name in shapes:
        assert torch.equal(file.read(name), expected[name])
        assert torch.equal(file.read(name, slice(1, 3)), expected[name][1:3])
    rules = (
        Rule("conv", "conv.weight"),
        Rule("wide", "wide.weight"),
        Rule((Part("line", (Rows(32, 64),)), Part("line", (Rows(0, 32), SWAP))), "line.weight"),
        Rule("even", "even.weight"),
    )
    module = nn.ModuleDict(
        {
            "conv": nn.Conv2d(4, 16, (3, 4), bias=False),
            "wide": nn.Conv2d(4, 8, (2, 4), bias=False),
            "line": nn.Linear(12, 64, bias=False),
            "even": nn.Linear(32, 3, bias=False),
        }
    )
    load_weights(module, path, KeyMap((Layout("x", rules),)), dtype=torch.bfloat16)
    first = expected["line"][:32].view(4, 4, 2, 12).transpose(1, 2).reshape(32, 12)
    expected["line"] = torch.cat((expected["line"][32:], first))
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, expected[name.removesuffix(".weight")].to(torch.bfloat16))


@pytest.mark.parametrize("shape", [[16, 4, 3, 5], [768, 0], [-16, -48]])
def test_shapes_that_tensors_cannot_have_had(tmp_path: Path, shape: list[int]) -> None:
    path = write(tmp_path / "x.gguf", {"a": (values(3, 256), "Q8_0")}, {"a": shape})
    with pytest.raises(ValueError, match=r"is corrupted: .* is no shape for tensor 'a' of \[3, 256\]"):
        GGUFFile(path)


def test_misfits_are_refused_in_both_directions(tmp_path: Path) -> None:
    module = build_on_meta(Model)
    extra = write(tmp_path / "extra.gguf", parts() | {"more": (values(2), "F32")})
    with pytest.raises(ValueError, match=r"extra.gguf does not fit the model: 1 of 10 keys match nothing \(more\)"):
        load_weights(module, extra, MAP)
    short = write(tmp_path / "short.gguf", {name: each for name, each in parts().items() if name != "n.weight"})
    with pytest.raises(ValueError, match=r"norm.weight"):
        load_weights(module, short, MAP)
    assert all(weight.is_meta for weight in module.parameters())


def test_weight_sources_read_gguf(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", parts())
    with WeightSource.for_module(build_on_meta(Model), path, MAP) as source:
        assert next(iter(source)) == "qkv.weight" and source.stored_dtype("qkv.weight") == torch.float32
        assert source.read("norm.weight", dtype=torch.float64).dtype == torch.float64
    with pytest.raises(ValueError, match="closed"):
        source.read("norm.weight")


def test_shards(tmp_path: Path) -> None:
    tensors = parts()
    names = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    for n, name in enumerate(names):
        write(name, dict([*tensors.items()][n::2]))
    assert gguf_shards(names[1]) == tuple(names)
    module, whole = build_on_meta(Model), build_on_meta(Model)
    load_weights(module, gguf_shards(names[0]), MAP)
    load_weights(whole, write(tmp_path / "whole.gguf", tensors), MAP)
    assert all(torch.equal(weight, whole.state_dict()[name]) for name, weight in module.state_dict().items())
    with pytest.raises(FileNotFoundError, match=r"one of 00002 shards; .*m-00002-of-00002.gguf is missing"):
        load_weights(build_on_meta(Model), names[0], MAP)
    names[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"no weights file .*m-00002-of-00002.gguf"):
        gguf_shards(names[0])
    assert gguf_shards(tmp_path / "whole.gguf") == (tmp_path / "whole.gguf",)
    odd = (tmp_path / "whole.gguf").rename(tmp_path / "whole-00001-of-00000.GGUF")
    load_weights(module, gguf_shards(odd), MAP)
    odd = odd.rename(tmp_path / "whole-00001-of-00000.gguf")
    assert gguf_shards(odd) == (odd,)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory figures of Linux")
def test_anonymous_memory_at_the_peak_is_the_weights(tmp_path: Path) -> None:
    array = values(1024, 1024)
    path = write(tmp_path / "w.gguf", {f"{i}.{part}.weight": (array, "Q8_0") for i in range(6) for part in "qkv"})
    check_peak(path)
