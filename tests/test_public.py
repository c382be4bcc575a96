import subprocess
import sys

import pytest

import calotype

HEAVY = ("diffusers", "transformers", "triton", "PIL", "imageio", "tokenizers", "tqdm", "huggingface_hub")


def test_every_public_name_is_there():
    for name in calotype.__all__:
        assert getattr(calotype, name) is not None
    assert dir(calotype) == sorted(calotype.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        calotype.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_import_is_light():
    code = f"""
import sys
sys.path[:0] = {[path for path in sys.path if path]!r}
import torch, time
before, start = set(sys.modules), time.process_time()
import calotype
seconds = time.process_time() - start
calotype.load, calotype.Request
new = set(sys.modules) - before
print(seconds, *[name for name in {HEAVY!r} if name in new])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    seconds, *heavy = done.stdout.split()
    assert heavy == []
    assert float(seconds) < 0.3
