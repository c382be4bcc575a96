"""Weights that stay in their files: read for each use, one block at a time, and let go again."""

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from calotype.core.attention.base import FULL
from calotype.core.attention.registry import attention_selector
from calotype.core.copies import moved
from calotype.core.key_map import KeyMap, Layout, Rule
from calotype.core.loading import build_on_meta
from calotype.core.offload import StoredBlocks, StoredWeights, filled, resident
from calotype.core.stream import BlockInputs, NoCache, Stream
from calotype.core.weight_source import WeightSource

WIDTH, COUNT = 6, 4
INPUTS = BlockInputs(rotary=None, mask=FULL, attention=attention_selector())
CPU = torch.device("cpu")


class Layer(nn.Module):
    """A block of one linear layer, and a table that no file holds."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(3, device="cpu"), persistent=False)

    def forward(self, stream, prepared, cache, i):
        return Stream(x=torch.tanh(self.linear(stream.x)) + i)


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """Layers with weights, the same on the meta device, and the source of their weights."""
    torch.manual_seed(0)
    full = nn.ModuleList(Layer() for _ in range(COUNT))
    file = tmp_path_factory.mktemp("offload") / "w.safetensors"
    save_file(full.state_dict(), file)
    bare = build_on_meta(lambda: nn.ModuleList(Layer() for _ in range(COUNT)))
    return full, bare, WeightSource.for_module(bare, file, _same(bare))


def _same(module):
    return KeyMap((Layout("same", tuple(Rule(name, name) for name in module.state_dict())),))


def runner(bare, source, **then):
    return StoredBlocks(source=source, names={block: f"{i}" for i, block in enumerate(bare)}, **then)


def walk(blocks, run=None):
    stream = Stream(x=torch.linspace(-1, 1, 2 * WIDTH).view(1, 2, WIDTH))
    if run is not None:
        return run([*blocks], stream, INPUTS, NoCache()).x
    for i, block in enumerate(blocks):
        stream = block(stream, INPUTS, NoCache(), i)
    return stream.x


@torch.no_grad()
def test_blocks_give_the_same_bits(layers):
    full, bare, source = layers
    assert torch.equal(walk(bare, runner(bare, source)), walk(full))
    assert all(parameter.is_meta for parameter in bare.parameters())
    mixed = [bare[0], full[1], lambda stream, prepared, cache, i: stream, bare[3]]
    expected = walk([full[0], full[1], mixed[2], full[3]])
    assert torch.equal(walk(mixed, runner(bare, source)), expected)


@torch.no_grad()
def test_runners_stand_around_it_and_inside_it(layers):
    """A runner inside may take blocks in any order, twice or never."""
    full, bare, source = layers

    def backwards(blocks, stream, prepared, cache):
        for i in (3, 1, 1, 2):
            stream = blocks[i](stream, prepared, cache, i)
        return stream

    assert torch.equal(walk(bare, runner(bare, source, then=backwards)), walk(full, backwards))


@torch.no_grad()
def test_one_block_at_a_time_is_in_memory(layers):
    _, _, source = layers
    alive, counts = weakref.WeakSet(), []

    class Watched(Layer):
        def forward(self, stream, prepared, cache, i):
            alive.add(self)
            counts.append(len(alive))
            return super().forward(stream, prepared, cache, i)

    blocks = build_on_meta(lambda: nn.ModuleList(Watched() for _ in range(COUNT)))
    gc.disable()  # reference counts alone must do it
    try:
        walk([*blocks, *blocks], runner(blocks, source))
        assert not alive
    finally:
        gc.enable()
    assert counts == [1] * (2 * COUNT)


@torch.no_grad()
def test_threads_share_blocks(layers):
    full, bare, source = layers
    run, found = runner(bare, source), []
    threads = [threading.Thread(target=lambda: found.append(walk(bare, run))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(each, walk(full)) for each in found)


def test_what_fails_is_raised_by_the_walk(layers, tmp_path):
    full, bare, _ = layers
    save_file(full.state_dict(), tmp_path / "w.safetensors")
    source = WeightSource.for_module(bare, tmp_path / "w.safetensors", _same(bare))
    source.close()
    with pytest.raises(ValueError, match="closed"):
        walk(bare, runner(bare, source))


def test_modules_stay_in_files_or_not(layers, tmp_path):
    full, _, _ = layers
    file = tmp_path / "w.safetensors"
    save_file(full[0].state_dict(), file)
    here, there = build_on_meta(Layer), build_on_meta(Layer)
    assert filled(here, file, _same(here), dtype=torch.bfloat16) is None
    stored = filled(there, file, _same(there), dtype=torch.bfloat16, device="meta")
    assert isinstance(stored, StoredWeights)
    assert {p.dtype for p in there.parameters()} == {torch.bfloat16}
    assert all(p.is_meta for p in there.parameters())
    read = stored.resident(there)
    for name, weight in here.state_dict().items():
        assert torch.equal(read.state_dict()[name], weight)
    assert not any(parameter.requires_grad for parameter in read.parameters())
    assert torch.equal(read.table, here.table)
    wide = stored.resident(moved(there, CPU, torch.float32))
    assert torch.equal(wide.linear.weight, full[0].linear.weight)
    assert moved(stored, torch.device("meta"), None).device.type == "meta"


def test_files_that_do_not_fit_are_refused(layers, tmp_path):
    save_file({"linear.weight": torch.ones(WIDTH, WIDTH)}, tmp_path / "w.safetensors")
    module = build_on_meta(Layer)
    with pytest.raises(ValueError, match="does not fit the model"):
        filled(module, tmp_path / "w.safetensors", _same(module), device="meta")


def test_shared_weights_are_read_once(tmp_path):
    module = build_on_meta(Tied)
    weight = torch.randn(WIDTH, WIDTH)
    save_file({"w": weight}, tmp_path / "w.safetensors")
    names = KeyMap((Layout("one", (Rule("w", "first.weight"),)),))
    with WeightSource.for_module(module, tmp_path / "w.safetensors", names) as source:
        read = resident(module, source, device=CPU)
    assert read.second.weight is read.first.weight
    assert torch.equal(read.first.weight, weight)


PEAK = """
import re, sys, threading
import torch
from torch import nn
from calotype.core.attention.base import FULL
from calotype.core.attention.registry import attention_selector
from calotype.core.key_map import identity_key_map
from calotype.core.loading import build_on_meta
from calotype.core.offload import StoredBlocks
from calotype.core.stream import BlockInputs, NoCache, Stream
from calotype.core.weight_source import WeightSource

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1024, 9216, bias=False)

    def forward(self, stream, prepared, cache, i):
        peaks.append(anonymous())
        return Stream(x=stream.x + self.linear(stream.x).mean(-1, keepdim=True))

def anonymous():
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\\s+(\\d+) kB", status.read())[1]) / 1024

peaks = []
blocks = build_on_meta(lambda: nn.ModuleList(Layer() for _ in range(5)))
source = WeightSource.for_module(blocks, sys.argv[1], identity_key_map(blocks))
run = StoredBlocks(source=source, names={block: str(i) for i, block in enumerate(blocks)})
inputs = BlockInputs(rotary=None, mask=FULL, attention=attention_selector())
stream = Stream(x=torch.zeros(1, 2, 1024))
with torch.no_grad():
    run([blocks[0]], stream, inputs, NoCache())
    before = anonymous()
    for _ in range(2):
        run([*blocks], stream, inputs, NoCache())
print(max(peaks) - before, anonymous() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory figures of Linux")
def test_anonymous_memory_is_that_of_one_block(tmp_path):
    """Five blocks of 36 MiB."""
    save_file({f"{i}.linear.weight": torch.rand(9216, 1024) for i in range(5)}, tmp_path / "w.safetensors")
    command = [sys.executable, "-c", PEAK, tmp_path / "w.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, after = (float(word) for word in done.stdout.split())
    assert 30 <= peak <= 36 + 8
    assert after <= 8
