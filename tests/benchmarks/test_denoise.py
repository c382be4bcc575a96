"""The benchmark of denoisers runs on tiny models, and tells what it promises."""

import contextlib
import importlib.util
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
TINY = ("--tiny", "--cells", "8", "--repeats", "1", "--fresh", "1", "--dtypes", "float32")

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory figures of Linux")


@pytest.fixture
def denoise(monkeypatch):
    """The benchmark, whose fresh processes are this one."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("benchmark_denoise", FOLDER / "denoise.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)

    def run(command, **options):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            module.main(command[2:])
        return SimpleNamespace(returncode=0, stdout=out.getvalue())

    monkeypatch.setattr(module.subprocess, "run", run)
    return module


def test_a_family_against_diffusers(denoise, tmp_path, capsys):
    files = ("--folder", str(tmp_path / "models"), "--json", str(tmp_path / "d.json"))
    denoise.main(["--against", "diffusers", "--families", "flux", *TINY, *files])
    report = json.loads((tmp_path / "d.json").read_text())
    (row,) = report["rows"]
    assert (row["family"], row["dtype"]) == ("flux", "float32")
    assert 0 < row["difference"] < 1e-5
    assert 0 < row["floor s"] < row["step s"]["ours"]
    for key in ("step s", "step of a run of 28 s", "cold start s", "memory in the loop MB", "of it the denoiser MB"):
        assert set(row[key]) == {"ours", "diffusers"}
        assert min(row[key].values()) > 0
    denoiser = row["of it the denoiser MB"]
    assert denoiser["ours"] < 0.85 * denoiser["diffusers"]  # modulations stay in the file
    assert all(row["memory in the loop MB"][side] >= denoiser[side] for side in denoiser)
    printed = capsys.readouterr().out
    assert "flux, float32, 16 tokens" in printed
    assert "step, ours / floor" in printed
    assert printed.count("ratio") == 6


def test_the_floor_is_made_of_the_steps_own_calls(denoise, tmp_path):
    options = denoise.parse([*TINY])
    case = denoise.CASES["sd3"]
    folder = denoise.checkpoint(case, tmp_path / "sd3", "float32", tiny=True)
    ours = denoise.Ours(case, "sd3", folder, denoise.torch.float32)
    with denoise.torch.no_grad():
        ours.prepare(denoise.inputs_of(options, case, folder, denoise.torch.float32), 2)
        floor = denoise.Floor(ours)
        names = [func._schema.name for func, _, _ in floor.calls]
        floor.run()
    products = [name for name in names if name in denoise.PRODUCTS]
    assert len(names) - len(products) == 2  # one attention a block, for both sides of the guidance
    assert len(products) == 1 + 8 + 5 + 1  # tokens in, a joint block, the last one, which leaves the text, tokens out
