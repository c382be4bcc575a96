"""How much memory loading takes, in a process of its own."""

from pathlib import Path

import pytest
import torch
from peak_memory import check_peak
from safetensors.torch import save_file


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory figures of Linux")
def test_anonymous_memory_at_the_peak_is_the_weights(tmp_path: Path) -> None:
    save_file(
        {f"{i}.{part}.weight": torch.rand(1024, 1024) for i in range(6) for part in "qkv"}, tmp_path / "w.safetensors"
    )
    check_peak(tmp_path / "w.safetensors")
