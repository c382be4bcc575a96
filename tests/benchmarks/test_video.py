"""The benchmark of video runs on tiny models, and tells what it promises."""

import contextlib
import importlib
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
APPROXIMATE = ("--attention", "sliding_tile", "blocked_bfloat16", "--tile", "1", "1", "1", "--window", "1", "1", "1")
TINY = ("--tiny", "--cells", "4", "--repeats", "1", "--fresh", "1", "--dtypes", "float32")

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory figures of Linux")


@pytest.fixture
def video(monkeypatch):
    """The benchmark, whose fresh processes are this one."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("video")

    def run(command, **options):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            (module if command[1].endswith("video.py") else module.denoise).main(command[2:])
        return SimpleNamespace(returncode=0, stdout=out.getvalue())

    monkeypatch.setattr(module.subprocess, "run", run)
    return module


def test_wan_against_diffusers(video, tmp_path, capsys):
    clips = ("--decoders", "wan", "--frames", "5", "9", "--pixels", "16")
    files = ("--folder", str(tmp_path / "models"), "--json", str(tmp_path / "v.json"))
    video.main(["--against", "diffusers", "--families", "wan", *TINY, *clips, *files, *APPROXIMATE])
    report = json.loads((tmp_path / "v.json").read_text())
    (step,) = report["steps"]
    assert 0 < step["difference"] < 1e-5
    assert 0 < step["floor s"] < step["step s"]["ours"]
    tiles, blocks = (step["approximations"][each] for each in ("sliding_tile", "blocked_bfloat16"))
    assert min(tiles["ratio"], blocks["ratio"]) > 0
    assert tiles["error"] > 1e-4 and tiles["taken"] == 0.5  # of the clip, not of the text
    assert blocks["error"] < 1e-6 and blocks["taken"] == 0  # which takes bfloat16 only
    (decoding,) = report["decoding"]
    assert set(decoding["clips"]) == {"5", "9"}
    for clip in decoding["clips"].values():
        assert all(row.keys() == {"ours", "diffusers"} for row in clip.values())
        assert min(clip["seconds"].values()) > 0
    printed = capsys.readouterr().out
    assert "wan, float32, 36 tokens" in printed
    assert "9 frames, memory MB" in printed


def test_the_decoder_of_hunyuan_video(video, tmp_path):
    clips = ("--decoders", "hunyuan-1.5", "--frames", "5", "9", "--pixels", "32")
    files = ("--folder", str(tmp_path / "models"), "--json", str(tmp_path / "v.json"))
    video.main(["--against", "diffusers", "--families", *TINY, *clips, *files])
    (decoding,) = json.loads((tmp_path / "v.json").read_text())["decoding"]
    assert decoding["decoder"] == "hunyuan-1.5" and set(decoding["clips"]) == {"5", "9"}
    assert all(row.keys() == {"ours", "diffusers"} for clip in decoding["clips"].values() for row in clip.values())
