"""The manifest: everything needed to make a picture again, as plain data that travels inside the picture's file."""

import dataclasses
import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from numbers import Real
from pathlib import Path as FilePath
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor
from torch import device as Device
from torch import dtype as Dtype

from ..schedulers.base import Path, Point, Schedule

Task = Literal[
    "text-to-image", "image-to-image", "inpaint", "edit", "text-to-video", "image-to-video", "video-to-video"
]
Plain = str | int | float | bool | None | list["Plain"] | dict[str, "Plain"]
FORMAT = 1
_NONE = type(None)
_TORCH_ALONE = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)  # numpy has no such numbers
_LATER = ("unexpanded", "num_images_per_prompt", "extra", "frames", "chunks")  # that the first release did not write
_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("prompts", "seeds", "sigmas", "times"), (list,)),
    **dict.fromkeys(("weights", "sampler", "guidance", "inputs"), (dict,)),
    **dict.fromkeys(("width", "height", "num_inference_steps", "threads"), (int,)),
    **dict.fromkeys(("negative_prompts", "unexpanded"), (list, _NONE)),
    **dict.fromkeys(("extra", "chunks"), (dict, _NONE)),
    "frames": (str, _NONE),
    "num_images_per_prompt": (int, _NONE),
    "strength": (float, int, _NONE),
    "row": (int, _NONE),
}
_ELEMENTS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("prompts", "negative_prompts", "unexpanded"), (str,)),
    **dict.fromkeys(("sigmas", "times"), (float, int)),
    "seeds": (int,),
}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What made a batch of pictures, and which of them this is. No timings: they differ on every run.

    `prompts`, `negative_prompts` and `seeds` hold one entry per picture of the batch, in the order of the result; `row`
    is this picture's place in it (None: all of them). `unexpanded` are the prompts as they were before a language model
    rewrote them. The whole batch is kept because only the same batch is bit-equal when run again. Sizes are pixels.

    `weights` maps each file to its sha256 (files of gigabytes: that of their size, header and samples); `sampler` and
    `guidance` are objects as `describe` puts them; `path`, `sigmas` and `times` are the whole schedule with its end;
    `inputs` maps every argument that is neither text nor a number ("image", "mask_image", "latents", "conditioning",
    "generator") to its `digest_input`. `num_images_per_prompt` counts the pictures of each prompt; `extra` are the
    arguments of the model's family alone, by their names. `frames`, in the file of a clip, is the digest of its frames
    as they were made, uint8 [F, H, W, 3]: they can be told from others even where the file is lossy. `chunks` are those
    that clips are made by, where they are, as `describe` puts them.
    """

    calotype: str
    torch: str
    python: str
    family: str
    model: str
    weights: Mapping[str, str]
    task: Task
    prompts: tuple[str, ...]
    negative_prompts: tuple[str, ...] | None
    seeds: tuple[int, ...]
    width: int
    height: int
    num_inference_steps: int
    path: Path
    sigmas: tuple[float, ...]
    times: tuple[float, ...]
    sampler: Mapping[str, Plain]
    guidance: Mapping[str, Plain]
    strength: float | None
    inputs: Mapping[str, str]
    dtype: str
    device: str
    attention: str
    threads: int
    row: int | None = None
    unexpanded: tuple[str, ...] | None = None
    num_images_per_prompt: int | None = None
    extra: Mapping[str, Plain] | None = None
    frames: str | None = None
    chunks: Mapping[str, Plain] | None = None

    @classmethod
    def build(
        cls,
        *,
        family: str,
        model: str,
        weights: Mapping[str, str],
        task: Task,
        prompts: Sequence[str],
        negative_prompts: Sequence[str] | None,
        seeds: Sequence[int],
        width: int,
        height: int,
        schedule: Schedule,
        sampler: object,
        guidance: object,
        strength: float | None,
        inputs: Mapping[str, str],
        dtype: Dtype,
        device: Device,
        attention: str,
        unexpanded: Sequence[str] | None = None,
        num_images_per_prompt: int = 1,
        extra: Mapping[str, Any] | None = None,
        chunks: object = None,
    ) -> Self:
        """A manifest of this process: versions and threads are filled in, `sampler`, `guidance` and `chunks` described.

        `schedule` is the whole one, before `strength` shortens it.
        """
        return cls(
            calotype=calotype_version(),
            torch=torch.__version__,
            python=platform.python_version(),
            family=family,
            model=model,
            weights=dict(weights),
            task=task,
            prompts=tuple(prompts),
            negative_prompts=None if negative_prompts is None else tuple(negative_prompts),
            seeds=tuple(seeds),
            width=width,
            height=height,
            num_inference_steps=schedule.num_steps,
            path=schedule.path,
            sigmas=schedule.sigmas,
            times=tuple(point.time for point in schedule.points),
            sampler=describe(sampler),
            guidance=describe(guidance),
            strength=strength,
            inputs=dict(inputs),
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            attention=attention,
            threads=torch.get_num_threads(),
            unexpanded=None if unexpanded is None else tuple(unexpanded),
            num_images_per_prompt=num_images_per_prompt,
            extra=dict(extra) if extra else None,
            chunks=None if chunks is None else describe(chunks),
        )

    def for_row(self, row: int) -> Self:
        """The same manifest for picture `row` of the batch."""
        if not 0 <= row < len(self.seeds):
            raise ValueError(f"row {row}: the batch has {len(self.seeds)} pictures")
        return dataclasses.replace(self, row=row)

    @property
    def seed(self) -> int:
        """This picture's own seed (the first one's where the manifest stands for a whole batch)."""
        return self.seeds[self.row or 0]

    @property
    def prompt(self) -> str:
        """This picture's own prompt (the first one's where the manifest stands for a whole batch)."""
        return self.prompts[self.row or 0]

    @property
    def schedule(self) -> Schedule:
        """The whole schedule, as it was."""
        on_flow = self.path == "flow"
        pairs = zip(self.sigmas, self.times, strict=True)
        points = (
            Point(index=i, sigma=sigma, alpha=1.0 - sigma if on_flow else 1.0, time=time)
            for i, (sigma, time) in enumerate(pairs)
        )
        return Schedule(points=tuple(points), path=self.path)

    def to_json(self) -> str:
        """One line of ASCII JSON; `seed` and `prompt` are written too, for people who read it."""
        own: dict[str, Any] = {} if self.row is None else {"prompt": self.prompt, "seed": self.seed}
        return json.dumps({"format": FORMAT, **own, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The manifest that `to_json` wrote.

        Raises:
            ValueError: not such JSON, written by a later format, or with missing or unknown entries.
        """
        entries = dict.fromkeys(_LATER) | _entries(text)
        names = {field.name for field in dataclasses.fields(cls)}
        missing, unknown = sorted(names - set(entries)), sorted(set(entries) - names - {"prompt", "seed"})
        if missing or unknown:
            raise ValueError(f"not a complete manifest: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}")
        for name in names:
            kind = _KINDS.get(name, (str,))
            if not isinstance(entries[name], kind):
                expected = " or ".join(each.__name__ for each in kind)
                raise ValueError(f"not a manifest: {name} is {entries[name]!r}, expected {expected}")
        _check_lists(entries)
        values: dict[str, Any] = {name: entries[name] for name in names}
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        manifest = cls(**values)
        if manifest.row is not None:
            manifest.for_row(manifest.row)
        return manifest


def describe(part: object) -> dict[str, Plain]:
    """A sampler or guidance as plain data: its class under "type", and each field of a dataclass."""
    described: dict[str, Plain] = {"type": type(part).__name__}
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        described |= cast(dict[str, Plain], json.loads(json.dumps(fields, default=_plain)))
    return described


def _plain(value: object) -> Plain:
    """What JSON has no form for: numbers of other libraries, dataclasses; of anything else its class alone."""
    return float(value) if isinstance(value, Real) else describe(value)


def digest_input(value: object) -> str:
    """sha256 of a picture (or a file with one), array or tensor: dtype, shape and values; or of several of them.

    One alone in a list has the digest that it has outside; lists in a list count as lists. Pictures with a palette are
    digested as the colours that are seen.
    """
    from .files import open_image

    digest = hashlib.sha256()
    if isinstance(value, list | tuple):
        items = cast(Sequence[object], value)
        if len(items) == 1:
            return digest_input(items[0])
        for item in items:
            inner = digest_input(item)
            digest.update((f"[{inner}]" if isinstance(item, list | tuple) else inner).encode())
        return digest.hexdigest()
    import numpy

    if isinstance(value, str | FilePath):
        value = open_image(value)
    if isinstance(value, Tensor):
        stored = value.detach().cpu().contiguous()
        array = stored.view(torch.uint8).numpy() if stored.dtype in _TORCH_ALONE else stored.numpy()
    else:
        array = numpy.ascontiguousarray(numpy.asarray(_seen(value)))
    digest.update(f"{array.dtype.str} {array.shape} ".encode())
    digest.update(array.tobytes())
    return digest.hexdigest()


def _seen(value: object) -> object:
    """A picture with a palette as its colours, with transparency where it has it; anything else as it is."""
    from PIL.Image import Image

    if not isinstance(value, Image) or value.mode not in ("P", "PA"):
        return value
    return value.convert("RGBA" if value.has_transparency_data else "RGB")


def calotype_version() -> str:
    """The installed version, or "0+unknown" where the sources are imported without being installed."""
    try:
        return metadata.version("calotype")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def _check_lists(entries: Mapping[str, Any]) -> None:
    for name, kind in _ELEMENTS.items():
        for item in entries[name] or ():
            if not isinstance(item, kind):
                raise ValueError(f"not a manifest: {name} holds {item!r}, expected {kind[0].__name__}")
    for name in ("inputs", "weights"):
        for key, item in entries[name].items():
            if not isinstance(item, str):
                raise ValueError(f"not a manifest: {name} holds {item!r} for {key}, expected a str")
    if len(entries["sigmas"]) != len(entries["times"]):
        raise ValueError(f"not a manifest: {len(entries['sigmas'])} sigmas for {len(entries['times'])} times")
    if not 0 < len(entries["seeds"]) == len(entries["prompts"]):
        raise ValueError(f"not a manifest: {len(entries['prompts'])} prompts for {len(entries['seeds'])} seeds")
    each = entries["num_images_per_prompt"]
    if each is not None and (each < 1 or len(entries["prompts"]) % each):
        raise ValueError(f"not a manifest: {each} pictures of each prompt, {len(entries['prompts'])} in all")
    if entries["threads"] < 1:
        raise ValueError(f"not a manifest: threads is {entries['threads']}, expected at least 1")


def _entries(text: str) -> dict[str, Any]:
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a manifest: {error}") from None
    if not isinstance(entries, dict):
        raise ValueError(f"not a manifest: JSON of type {type(entries).__name__}, expected an object")
    found = cast(dict[str, Any], entries)
    written = found.pop("format", None)
    if written != FORMAT:
        raise ValueError(f"manifest format {written}: this version reads format {FORMAT}")
    return found
