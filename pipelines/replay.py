"""Making a picture or a clip again from the manifest in its file, and saying how close the two are."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy

from ..denoisers.causal import Chunks
from ..denoisers.experts import PerExpert
from ..denoisers.first_frames import FirstFramesKept
from ..denoisers.guidance import ClassifierFree, Distilled, Guidance, NormLimit, TokenNorm, Unguided
from ..denoisers.skip_layers import SkipLayers
from ..schedulers import Sampler, sampler_classes
from .causal import causal
from .chunked import chunks_of
from .clips import LOSSY_CLIPS, Clip, read_clip, save_clip
from .conditions import Condition, conditions_again
from .family import COMMON
from .files import as_jpeg, is_lossy_webp, open_image, read_manifest, save_image
from .load import load
from .manifest import Manifest, Plain, digest_input
from .pictures import opened, opened_clips
from .result import GRID_GAP, Result, grid
from .texts import OTHER_NEGATIVES, OTHERS

if TYPE_CHECKING:
    from PIL.Image import Image

    from .arguments import Clips, PictureLists, Pictures
    from .image import ImagePipeline

JPEG, LOSSY_WEBP = "JPEG", "this WebP, which another program has saved again,"
PIXELS_DIFFER = "pixels in the file differ from those that were made"
GUIDANCES = (Unguided, ClassifierFree, Distilled, NormLimit, TokenNorm, SkipLayers, PerExpert, FirstFramesKept)
COMPARED = ("calotype", "torch", "python", "weights", "device", "dtype", "attention", "threads", "sigmas", "chunks")


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """A picture or a clip made again. `manifest` is the one in the file, `again` that of the new one.

    `image` is the new picture, of a clip its first frame; `clip` the new clip, if it is one; `result` the whole batch
    it came from. `bit_equal`: every pixel is the same; of a file that is `lossy`, what was made is: a JPEG of the new
    picture has the same pixels, the clip the digest in the manifest. `largest_difference` to the file is in levels of
    0..255; `remarks` say, a line each, what was not the same in the two runs, or in the file.
    """

    manifest: Manifest
    again: Manifest
    result: Result
    image: "Image"
    largest_difference: int
    bit_equal: bool
    remarks: tuple[str, ...]
    clip: Clip | None = None
    lossy: bool = False

    def save(self, path: str | Path) -> tuple[Path, ...]:
        """Writes the new picture or clip, manifest included; returns the files written. Errors as for
        `files.save_image` and `clips.save_clip`; ValueError: nobody knows how fast the clip is shown."""
        if self.clip is None:
            return (save_image(self.image, path, self.again),)
        fps = self.result.fps if self.clip.fps is None else self.clip.fps
        if fps is None:
            raise ValueError(f"{path}: the file that is replayed does not say how many frames are shown in a second")
        return save_clip(self.clip.frames, path, fps=fps, manifest=self.again)


def replay(
    path: str | Path,
    *,
    image: "Pictures | PictureLists | None" = None,
    mask_image: "Pictures | None" = None,
    last_image: "Pictures | None" = None,
    video: "Clips | None" = None,
    conditions: "Sequence[Pictures | Clips] | None" = None,
    pipeline: "ImagePipeline | None" = None,
    progress: bool = False,
) -> Replay:
    """Runs the manifest of a picture or a clip again and compares the pixels.

    `image`, `mask_image`, `last_image` and `video`: the inputs of a run that was given some, the very same, one or
    several in their order (digests are checked); `conditions`: the pictures and clips of its conditions.
    `pipeline`: run on this one; default is to load the model that the manifest names, with the chunks that its clip was
    made by. `progress`: a bar on stderr.

    Raises:
        FileNotFoundError, ValueError: no such file, no manifest, an input missing or not the same one, a pipeline with
        other chunks, or a run that cannot be repeated from a file (precomputed latents or conditioning, a sampler or
        guidance of the user's own).
    """
    manifest = read_manifest(path)
    kind = _StoredPicture if manifest.frames is None else _StoredClip
    stored = kind.read(manifest, Path(path))
    image, mask_image, last_image = opened(image), opened(mask_image), opened(last_image)
    arguments = Arguments.of(
        manifest, image=image, mask_image=mask_image, last_image=last_image, video=video, conditions=conditions
    )
    return stored.compared(arguments.run(_with_chunks(pipeline, manifest), progress=progress))


@dataclass(frozen=True, kw_only=True, eq=False)
class _StoredPicture:
    """A picture in a file, or a grid of several in `columns`. `lossy` is what the file is called, if it is that."""

    manifest: Manifest
    picture: "Image"
    columns: int
    lossy: str | None

    @classmethod
    def read(cls, manifest: Manifest, path: Path) -> "_StoredPicture":
        if manifest.task.endswith("-to-video"):
            raise ValueError(f"{path}: is a sheet of frames, which cannot be replayed; the clip itself can")
        picture = open_image(path)
        columns = _columns(manifest, picture.size, path)
        return cls(manifest=manifest, picture=picture, columns=columns, lossy=_lossy(picture, path))

    def compared(self, result: Result) -> Replay:
        assert result.manifest is not None
        row, images = self.manifest.row, result.pil()
        new = grid(images, self.columns) if row is None else images[row]
        difference = largest_difference(new, self.picture)
        as_stored = largest_difference(as_jpeg(new), self.picture) if self.lossy == JPEG else difference
        remarks = [] if self.lossy is None else [f"{self.lossy} is lossy: {PIXELS_DIFFER}"]
        return Replay(
            manifest=self.manifest,
            again=result.manifest if row is None else result.manifest.for_row(row),
            result=result,
            image=new,
            largest_difference=difference,
            bit_equal=as_stored == 0,
            remarks=(*remarks, *changes(self.manifest, result.manifest)),
            lossy=self.lossy is not None,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _StoredClip:
    """A clip in a file with `suffix`."""

    manifest: Manifest
    clip: Clip
    suffix: str

    @classmethod
    def read(cls, manifest: Manifest, path: Path) -> "_StoredClip":
        clip = read_clip(path)
        frames, height, width = clip.frames.shape[:3]
        found = f"{frames} frames of {width}x{height}"
        made = f"{(manifest.extra or {}).get('num_frames', frames)} frames of {manifest.width}x{manifest.height}"
        if found != made:
            raise ValueError(f"{path}: holds {found}, its manifest says {made}: it was changed, or is a part of it")
        return cls(manifest=manifest, clip=clip, suffix=path.suffix.lower())

    def compared(self, result: Result) -> Replay:
        from PIL import Image

        assert result.manifest is not None
        row, lossy = self.manifest.row or 0, self.suffix in LOSSY_CLIPS
        frames = result.clips()[row]
        remarks = [f"{self.suffix} is lossy: frames in the file differ from those that were made"] if lossy else []
        digest, difference = digest_input(frames), int(numpy.abs(frames.astype(numpy.int16) - self.clip.frames).max())
        return Replay(
            manifest=self.manifest,
            again=dataclasses.replace(result.manifest.for_row(row), frames=digest),
            result=result,
            image=Image.fromarray(frames[0]),
            largest_difference=difference,
            bit_equal=self.manifest.frames == digest if lossy else difference == 0,
            remarks=(*remarks, *changes(self.manifest, result.manifest)),
            clip=dataclasses.replace(self.clip, frames=frames),
            lossy=lossy,
        )


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A manifest turned back into what a pipeline is called with."""

    manifest: Manifest
    sampler: Sampler
    guidance: Guidance
    inputs: "Mapping[str, Pictures | PictureLists | Clips | Sequence[Condition]]"

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        *,
        image: "Pictures | PictureLists | None",
        mask_image: "Pictures | None",
        last_image: "Pictures | None" = None,
        video: "Clips | None" = None,
        conditions: "Sequence[Pictures | Clips] | None" = None,
    ) -> "Arguments":
        """Checks that everything is there, before anything is loaded."""
        shown = None if conditions is None else conditions_again(manifest.extra, conditions)
        given = {"image": image, "mask_image": mask_image, "last_image": last_image, "video": opened_clips(video)}
        _check_inputs(manifest, {**given, "conditions": None if shown is None else [each.shown for each in shown]})
        given = {**given, "conditions": shown}
        return cls(
            manifest=manifest,
            sampler=cast(Sampler, rebuild(manifest.sampler, sampler_classes())),
            guidance=cast(Guidance, rebuild(manifest.guidance, GUIDANCES)),
            inputs={name: value for name, value in given.items() if value is not None},
        )

    def run(self, pipeline: "ImagePipeline", *, progress: bool) -> Result:
        """The whole batch, again."""
        manifest = self.manifest
        each = manifest.num_images_per_prompt or 1
        negative = manifest.negative_prompts
        strength = {} if manifest.strength is None else {"strength": manifest.strength}
        return pipeline(
            list(manifest.prompts[::each]),
            negative_prompt=None if negative is None else list(negative[::each]),
            num_images_per_prompt=each,
            width=manifest.width,
            height=manifest.height,
            schedule=manifest.schedule,
            sampler=self.sampler,
            guidance=self.guidance,
            seed=list(manifest.seeds),
            progress=progress,
            **cast(Any, {**self.inputs, **strength, **_extra(manifest, pipeline.family.arguments, each)}),
        )


def _extra(manifest: Manifest, used: Collection[str], each: int) -> dict[str, Plain]:
    """The arguments of the family alone, but for what is given again; texts have an entry per picture.

    Raises:
        ValueError: one that the family does not use.
    """
    found = {name: value for name, value in (manifest.extra or {}).items() if name != "conditions"}
    for name, value in found.items():
        if name in COMMON or name not in used:
            raise ValueError(f"not a manifest of this family: extra holds {name!r}")
        found[name] = value[::each] if name in (*OTHERS, *OTHER_NEGATIVES) and isinstance(value, list) else value
    return found


def rebuild(description: Mapping[str, Plain], known: tuple[type, ...]) -> object:
    """The object that `manifest.describe` described, if its class is one of `known`.

    Raises:
        ValueError: another class, or fields that it does not take.
    """
    classes = {each.__name__: each for each in known}
    name = description.get("type")
    if not isinstance(name, str) or name not in classes:
        raise ValueError(f"cannot replay a run with {name!r}: only {', '.join(classes)} can be made from a file")
    fields = {key: _rebuilt(value, known) for key, value in description.items()}
    try:
        return classes[name](**{key: value for key, value in fields.items() if key != "type"})
    except TypeError as error:
        raise ValueError(f"cannot replay {name}: {error}") from None


def _rebuilt(value: Plain, known: tuple[type, ...]) -> object:
    if isinstance(value, dict) and "type" in value:
        return rebuild(value, known)
    return tuple(value) if isinstance(value, list) else value


def largest_difference(a: "Image", b: "Image") -> int:
    """The largest difference of any pixel's channel, in levels of 0..255; the pictures have one size."""
    first, second = (numpy.asarray(each.convert("RGB"), dtype=numpy.int16) for each in (a, b))
    return int(numpy.abs(first - second).max())


def _lossy(picture: "Image", path: Path) -> str | None:
    """What a picture's file is called, where it does not keep every pixel."""
    if picture.format == JPEG:
        return JPEG
    return LOSSY_WEBP if is_lossy_webp(path) else None


def changes(then: Manifest, now: Manifest) -> tuple[str, ...]:
    """What was not the same in two runs, a line each."""
    before, after = vars(then), vars(now)
    names = [name for name in COMPARED if before[name] != after[name]]
    return tuple(
        f"{name} differ" if name in ("weights", "sigmas") else f"{name} was {before[name]}, is now {after[name]}"
        for name in names
    )


def _with_chunks(pipeline: "ImagePipeline | None", manifest: Manifest) -> "ImagePipeline":
    """The pipeline, or the manifest's model, which makes clips by the same chunks. ValueError where it does not."""
    chunks = None if manifest.chunks is None else cast(Chunks, rebuild(manifest.chunks, (Chunks,)))
    if pipeline is None:
        pipe = _load(manifest)
        return pipe if chunks in (None, chunks_of(pipe.denoiser)) else causal(pipe, chunks)
    found = chunks_of(pipeline.denoiser)
    if chunks not in (None, found):
        has = "whole clips" if found is None else found
        raise ValueError(f"this clip was made by {chunks}, the pipeline makes {has}; calotype.causal(...) changes that")
    return pipeline


def _load(manifest: Manifest) -> "ImagePipeline":
    """The model of a manifest, where and as it ran; a choice among attention backends is made again."""
    attention = None if "," in manifest.attention else manifest.attention
    return load(manifest.model, device=manifest.device, dtype=manifest.dtype, attention=attention)


def _check_inputs(manifest: Manifest, given: Mapping[str, object]) -> None:
    for name in manifest.inputs:
        if name not in given:
            raise ValueError(f"cannot replay a run that was given {name}: the file holds only its digest")
    for name, image in given.items():
        wanted = manifest.inputs.get(name)
        if wanted is None and image is not None:
            raise ValueError(f"{name} was given, but this {manifest.task} run had none")
        if wanted is not None and image is None:
            raise ValueError(f"this {manifest.task} run needs its {name} (sha256 of the pixels: {wanted[:12]}...)")
        if wanted is not None and digest_input(image) != wanted:
            raise ValueError(f"this is not the {name} of that run (sha256 of the pixels: expected {wanted[:12]}...)")


def _columns(manifest: Manifest, size: tuple[int, int], path: str | Path) -> int:
    """How many pictures the file holds side by side: 1, or more for a grid."""
    if min(manifest.width, manifest.height) < 1:
        raise ValueError(f"{path}: its manifest says {manifest.width}x{manifest.height}, which is no size")
    step_x, step_y = manifest.width + GRID_GAP, manifest.height + GRID_GAP
    across, down = (size[0] + GRID_GAP) // step_x, (size[1] + GRID_GAP) // step_y
    whole = (across * step_x - GRID_GAP, down * step_y - GRID_GAP) == size
    count = 1 if manifest.row is not None else len(manifest.seeds)
    if not whole or not (down - 1) * across < count <= down * across:
        made = f"{count} of {manifest.width}x{manifest.height}"
        raise ValueError(f"{path}: is {size[0]}x{size[1]}, its manifest says {made}: it was changed after it was made")
    return across
