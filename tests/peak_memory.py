"""How much memory something takes: loading, in a process of its own, or operations, by the tensors that they make."""

import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PEAK = """
import re, sys, threading
import torch
from torch import nn
from calotype.core.key_map import KeyMap, Layout, RowPermutation, Rule
from calotype.core.loading import build_on_meta, load_weights
from calotype.core.norms import RMSNorm

def anonymous():
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\\s+(\\d+) kB", status.read())[1]) / 1024

def peak(dtype, operations):
    def watch():
        while not done.is_set():
            peaks.append(anonymous())
            done.wait(0.0005)

    module = nn.ModuleList(nn.Linear(1024, 3072, bias=False, device="meta") for _ in range(6))
    sources = tuple(f"{{i}}.{part}.weight" for part in "qkv")
    key_map = KeyMap((Layout("l", (Rule(sources, "{i}.weight", operations),)),))
    done, peaks, before = threading.Event(), [], anonymous()
    watcher = threading.Thread(target=watch)
    watcher.start()
    load_weights(module, sys.argv[1], key_map, dtype=dtype)
    done.set()
    watcher.join()
    print(max(*peaks, anonymous()) - before, sum(p.nbytes for p in module.parameters()) / 2**20, len(peaks))

build_on_meta(lambda: nn.ModuleList((nn.Embedding(2, 3), RMSNorm(4, offset=1.0))))
assert "sympy" not in sys.modules
torch.zeros(8).bfloat16().float()
peak(torch.bfloat16, (RowPermutation((-1, 32, 2), (0, 2, 1)),))
peak(torch.float32, ())
"""


def check_peak(path: Path) -> None:
    """Load `path`, six times three matrices of 1024x1024, and compare the peak with the weights' size."""
    run = subprocess.run([sys.executable, "-c", PEAK, path], capture_output=True, text=True, check=True)
    for line, expected in zip(run.stdout.splitlines(), (36, 72), strict=True):
        peak, weights, samples = (float(word) for word in line.split())
        assert samples > 5 and weights == expected
        assert weights * 0.9 <= peak <= weights + weights / 6 + 8  # MiB; the promise allows 100, another copy takes 36


class Alive(TorchDispatchMode):
    """Inside it, `peak` is the most bytes that tensors made there have held at once after any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._held: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        taken = {tensor.untyped_storage().data_ptr() for tensor in given}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in taken:
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self._now)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self._held or size == 0:
            return
        self._now += size
        self._held[place] = weakref.finalize(storage, self._freed, place, size)

    def _freed(self, place: int, size: int) -> None:
        self._now -= size
        del self._held[place]
