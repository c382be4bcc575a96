"""`calotype diff`."""

from pathlib import Path

import pytest
import torch

from calotype.pipelines import compare

from ..tiny_flux import flux_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

OPTIONS = ("--size", "40x24", "--steps", "2", "--seed", "3", "--prompt", "a", "red", "fox")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny schnell."""
    path = tmp_path_factory.mktemp("diff") / "model"
    flux_pipeline(False, path)
    return path


def test_the_same(run, folder: Path):
    code, out, _ = run("diff", folder, *OPTIONS)
    assert code == 0
    assert [line[:22].strip() for line in out[:-1]] == [
        *("token ids: clip", "token ids: t5", "embeddings: states", "embeddings: pooled", "sigmas"),
        *("step 0", "step 1", "pixels"),
    ]
    assert out[-1] == "the same as diffusers within 0.0001 at every stage"


def test_a_divergence_is_named(run, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """diffusers is given other weights than those that are in the file."""
    load_theirs = compare.load_theirs

    def altered(path):
        pipe = load_theirs(path)
        with torch.no_grad():
            pipe.transformer.transformer_blocks[1].attn.to_q.weight.mul_(1.5)
        return pipe

    monkeypatch.setattr(compare, "load_theirs", altered)
    code, out, _ = run("diff", folder, *OPTIONS)
    assert (code, out[-1]) == (1, "first divergence: step 0")
    assert [line.endswith("too far") for line in out[:6]] == [False] * 5 + [True]


def test_mistakes(fails, folder: Path):
    assert "--tolerance is -1.0; it must be 0 or more" in fails("diff", folder, "--tolerance", "-1")
    assert "nowhere: not a folder in diffusers' layout" in fails("diff", "nowhere")
    message = "fox.png: this pipeline of flux makes pictures of prompts alone"
    assert message in fails("diff", folder, "--image", "fox.png", *OPTIONS)
