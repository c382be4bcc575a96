"""Clips in files: sizes, numbers of frames, colours, speed, manifests, and what goes wrong."""

import dataclasses
import os
import resource
from pathlib import Path

import numpy
import pytest
from fakes import fake_clip_pipeline, text_to_image_manifest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from calotype.pipelines.animation import changed, durations
from calotype.pipelines.clips import (
    EXTENSIONS,
    LOSSY_CLIPS,
    check_clip_target,
    contact_sheet,
    read_clip,
    save_clip,
    spread_frames,
)
from calotype.pipelines.files import read_manifest
from calotype.pipelines.manifest import digest_input
from calotype.pipelines.pictures import opened_clips, read_videos
from calotype.pipelines.replay import replay
from calotype.pipelines.streams import CONTAINERS

VIDEOS = tuple(CONTAINERS)


def smooth(num_frames: int, height: int, width: int) -> numpy.ndarray:
    """Waves of all colours that move."""
    f, y, x = numpy.mgrid[0:num_frames, 0:height, 0:width]
    waves = (numpy.sin(x / 17 + f / 5), numpy.cos(y / 13 - f / 7), numpy.sin((x + y) / 23 + f / 3))
    return numpy.round(127.5 + 127 * numpy.stack(waves, axis=3)).astype(numpy.uint8)


def error(a: numpy.ndarray, b: numpy.ndarray) -> float:
    """Mean absolute difference, in levels of 0..255."""
    return float(numpy.abs(a.astype(float) - b).mean())


@pytest.mark.parametrize("extension", EXTENSIONS)
@pytest.mark.parametrize("shape", [(5, 32, 48), (5, 33, 47), (1, 32, 48), (2, 1, 1)])
def test_exactly_these_frames_come_back(tmp_path: Path, extension: str, shape: tuple[int, int, int]):
    frames = smooth(*shape)
    path = tmp_path / f"clip{extension}"
    written = save_clip(frames, path, fps=20)
    clip = read_clip(path)
    assert clip.frames.shape == frames.shape and clip.frames.dtype == numpy.uint8
    assert clip.fps == 20
    if extension not in LOSSY_CLIPS:
        assert numpy.array_equal(clip.frames, frames)
    names = [f"clip-{n}.png" for n in range(1, 1 + shape[0])] if extension == ".png" and shape[0] > 1 else [path.name]
    assert [file.name for file in written] == names == sorted(os.listdir(tmp_path))


@pytest.mark.parametrize(("extension", "codec"), [(".mp4", "h264"), (".mp4", "vp9"), (".webm", "vp9")])
@pytest.mark.parametrize("size", [(32, 48), (33, 47)])
def test_colours(tmp_path: Path, extension: str, codec: str, size: tuple[int, int]):
    frames = smooth(5, *size)
    frames[2] = frames[1]
    save_clip(frames, tmp_path / f"a{extension}", fps=16, codec=codec)
    assert error(read_clip(tmp_path / f"a{extension}").frames, frames) < 2
    for colour in ((0, 0, 0), (255, 255, 255), (255, 0, 0), (0, 0, 255), (12, 200, 99)):
        plain = numpy.full((2, *size, 3), colour, dtype=numpy.uint8)
        save_clip(plain, tmp_path / f"b{extension}", fps=16, codec=codec)
        found = read_clip(tmp_path / f"b{extension}").frames
        assert numpy.abs(found.astype(int) - plain).max() <= 2


@pytest.mark.parametrize("extension", VIDEOS)
def test_streams_say_what_they_hold(tmp_path: Path, extension: str):
    import av

    for size, pixels in (((32, 48), "yuv420p"), ((33, 47), "yuv444p" if extension == ".mp4" else "yuv420p")):
        save_clip(smooth(3, *size), tmp_path / f"a{extension}", fps=23.976)
        with av.open(str(tmp_path / f"a{extension}")) as source:
            stream = source.streams.video[0]
            assert stream.codec_context.name == ("h264" if extension == ".mp4" else "vp9")
            assert stream.codec_context.pix_fmt == pixels
            assert float(stream.average_rate or 0) == pytest.approx(23.976, abs=1e-3)
            frame = next(source.decode(stream))
            bt709, limited = 1, 1
            assert (frame.colorspace, frame.color_primaries, frame.color_trc) == (bt709, bt709, bt709)
            assert frame.color_range == limited


def test_a_gif_of_few_colours_is_near_and_still_parts_stay_still(tmp_path: Path):
    frames = numpy.full((4, 32, 48, 3), (40, 160, 90), dtype=numpy.uint8)
    for index, frame in enumerate(frames):
        frame[8:16, 4 + 8 * index : 12 + 8 * index] = (200, 30, 60)
    save_clip(frames, tmp_path / "a.gif", fps=10)
    found = read_clip(tmp_path / "a.gif").frames
    assert error(found, frames) < 2
    assert numpy.array_equal(found[:, 24:], found[:1, 24:].repeat(4, axis=0))
    with Image.open(tmp_path / "a.gif") as image:
        assert image.info["loop"] == 0


@pytest.mark.parametrize("extension", [".gif", ".webp"])
def test_frames_that_do_not_move_are_frames(tmp_path: Path, extension: str):
    still = smooth(1, 20, 30).repeat(6, axis=0)
    still[5, 7, 11] ^= 255
    save_clip(still, tmp_path / f"a{extension}", fps=25)
    with Image.open(tmp_path / f"a{extension}") as image:
        assert image.n_frames == 6  # what other programs see
    assert read_clip(tmp_path / f"a{extension}").frames.shape == still.shape


def test_changed_boxes_and_durations():
    frames = numpy.zeros((4, 5, 6, 3), dtype=numpy.uint8)
    frames[2:, 1, 2:4, 1] = 9
    frames[3, 4, 0, 2] = 1
    assert list(changed(frames)) == [(0, 0, 6, 5), (0, 0, 1, 1), (2, 1, 4, 2), (0, 4, 1, 5)]
    assert durations(4, 16, 100) == [6, 6, 7, 6] and sum(durations(160, 16, 1000)) == 10_000
    assert min(durations(500, 50, 100)) == 2


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_the_manifest_travels_inside(tmp_path: Path, extension: str):
    frames = smooth(3, 16, 16)
    manifest = text_to_image_manifest(["a fox; x=1 é"] * 40, range(40)).for_row(1)
    path = tmp_path / f"clip{extension}"
    for file in (*save_clip(frames, path, fps=8, manifest=manifest), path):
        assert read_manifest(file) == dataclasses.replace(manifest, frames=digest_input(frames))


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_no_manifest_and_a_foreign_comment(tmp_path: Path, extension: str):
    save_clip(smooth(2, 16, 16), tmp_path / f"a{extension}", fps=8)
    with pytest.raises(ValueError, match="holds no calotype manifest"):
        read_manifest(tmp_path / f"a{extension}")
    Image.new("RGB", (8, 8)).save(tmp_path / "b.gif", comment="made by hand")
    with pytest.raises(ValueError, match="holds no calotype manifest"):
        read_manifest(tmp_path / "b.gif")


@pytest.mark.parametrize(
    ("name", "fps", "codec", "message"),
    [
        ("a.avi", 16, None, r"a\.avi: extension '\.avi' is unknown; allowed are \.mp4, \.webm, \.gif, \.webp, \.png"),
        ("a", 16, None, "extension '' is unknown"),
        ("a.mp4", 16, "mpeg2", "codec 'mpeg2' is unknown for mp4; allowed are h264, vp9"),
        ("a.webm", 16, "h264", "codec 'h264' is unknown for webm; allowed are vp9"),
        ("a.gif", 16, "h264", r"codec 'h264': a \.gif has no choice of codecs"),
        ("a.mp4", 0, None, r"fps is 0; for \.mp4 it must be from 0\.1 to 240"),
        ("a.mp4", float("nan"), None, "fps is nan"),
        ("a.gif", 60, None, r"fps is 60; for \.gif it must be from 0\.1 to 50"),
        ("none/a.mp4", 16, None, "none: no such folder to write to"),
        ("folder.mp4", 16, None, "exists and is not a file"),
        ("a" * 300 + ".mp4", 16, None, "longer than 255 bytes"),
    ],
)
def test_impossible_targets(tmp_path: Path, name: str, fps: float, codec: str | None, message: str):
    (tmp_path / "folder.mp4").mkdir()
    for ask in (
        lambda: check_clip_target(tmp_path / name, fps=fps, codec=codec),
        lambda: save_clip(smooth(2, 16, 16), tmp_path / name, fps=fps, codec=codec),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            ask()
    assert os.listdir(tmp_path) == ["folder.mp4"]


def test_codecs_that_this_build_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("av.codecs_available", {"mpeg4"})
    with pytest.raises(ValueError, match="has no encoder libx264"):
        check_clip_target(tmp_path / "a.mp4")


@pytest.mark.parametrize(
    "frames",
    [
        numpy.zeros((2, 4, 4, 3), dtype=numpy.float32),
        numpy.zeros((2, 4, 4, 4), dtype=numpy.uint8),
        numpy.zeros((4, 4, 3), dtype=numpy.uint8),
        numpy.zeros((0, 4, 4, 3), dtype=numpy.uint8),
    ],
)
def test_what_is_no_clip(tmp_path: Path, frames: numpy.ndarray):
    with pytest.raises(ValueError, match=r"expected uint8 \[F, H, W, 3\]"):
        save_clip(frames, tmp_path / "a.mp4", fps=16)
    with pytest.raises(ValueError, match="frames are"):
        contact_sheet(frames)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, extension: str):
    """Real writes that fail after 500 bytes."""
    path = tmp_path / f"a{extension}"
    path.write_bytes(b"old")
    noise = numpy.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), dtype=numpy.uint8)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            save_clip(noise, path, fps=16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(path)
    assert os.listdir(tmp_path) == [path.name] and path.read_bytes() == b"old"


def test_files_are_replaced(tmp_path: Path):
    for frames in (smooth(3, 16, 16), smooth(2, 16, 32)):
        for extension in EXTENSIONS:
            save_clip(frames, tmp_path / f"a{extension}", fps=16)
            assert read_clip(tmp_path / f"a{extension}").frames.shape == frames.shape  # no frame of the longer one


def test_sequences_of_pictures(tmp_path: Path):
    frames = smooth(12, 8, 16)
    files = save_clip(frames, tmp_path / "a.png", fps=7.5)
    assert [file.name for file in (files[0], files[-1])] == ["a-01.png", "a-12.png"]
    clip = read_clip(tmp_path / "a.png")
    assert numpy.array_equal(clip.frames, frames) and clip.fps == 7.5
    assert numpy.array_equal(read_clip(files[3]).frames, frames[3:4])
    files[5].unlink()
    with pytest.raises(FileNotFoundError, match=r"a-06\.png: no such file"):
        read_clip(tmp_path / "a.png")
    for n, frame in enumerate(frames[:3], start=1):  # another program's
        Image.fromarray(frame).save(tmp_path / f"b-{n}.png")
    assert numpy.array_equal(read_clip(tmp_path / "b.png").frames, frames[:3])
    Image.new("RGB", (4, 4)).save(tmp_path / "b-4.png")
    with pytest.raises(ValueError, match="several sizes: 16x8, 4x4"):
        read_clip(tmp_path / "b.png")


def test_what_cannot_be_read(tmp_path: Path):
    for extension in EXTENSIONS:
        path = tmp_path / f"a{extension}"
        with pytest.raises(FileNotFoundError, match="no such file"):
            read_clip(path)
        with pytest.raises(FileNotFoundError, match="no such file"):
            read_manifest(path)
        path.write_bytes(b"not a clip at all, whatever its name is")
        with pytest.raises(ValueError, match=r"cannot be read as a video|not a picture in a known format"):
            read_clip(path)


def test_pictures_upside_down_as_phones_store_them(tmp_path: Path):
    """A display matrix that turns by 90 degrees clockwise."""
    frames = smooth(2, 32, 48)
    save_clip(frames, tmp_path / "a.mp4", fps=16)
    stored = (tmp_path / "a.mp4").read_bytes()
    one, zero, minus = (value.to_bytes(4, "big") for value in (0x10000, 0, 0xFFFF0000))
    plain, turned = one + 3 * zero + one, zero + one + zero + minus + zero
    track = stored.index(b"tkhd")
    at = stored.index(plain, track)
    (tmp_path / "b.mp4").write_bytes(stored[:at] + turned + stored[at + len(plain) :])
    assert error(read_clip(tmp_path / "b.mp4").frames, numpy.rot90(frames, -1, axes=(1, 2))) < 2


def test_contact_sheet():
    frames = smooth(21, 8, 16)
    shown = [numpy.asarray(each) for each in spread_frames(frames, 5)]
    assert all(numpy.array_equal(a, b) for a, b in zip(shown, frames[::5], strict=True))
    sheet = contact_sheet(frames, number=5, columns=3)
    assert sheet.size == (16 * 3 + 8, 8 * 2 + 4)
    assert numpy.array_equal(numpy.asarray(sheet)[:8, 40:56], frames[10])
    assert contact_sheet(frames[:2]).size == (36, 8)
    with pytest.raises(ValueError, match="number is 0"):
        contact_sheet(frames, number=0)


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_results_are_saved_and_replayed(tmp_path: Path, extension: str):
    pipe = fake_clip_pipeline()
    result = pipe(["a fox", "two cats"], num_frames=5, seed=[3, 4])
    files = result.save(tmp_path / f"a{extension}")
    assert len(files) == (10 if extension == ".png" else 2)
    again = replay(tmp_path / f"a-2{extension}", pipeline=pipe)
    assert again.bit_equal and again.manifest.prompt == "two cats"
    assert again.clip is not None and numpy.array_equal(again.clip.frames, result.clips()[1])
    lossy = extension in LOSSY_CLIPS
    assert (again.largest_difference == 0) is not lossy
    assert again.remarks == ((f"{extension} is lossy: frames in the file differ from those that were made",) * lossy)
    again.save(tmp_path / f"b{extension}")
    assert read_manifest(tmp_path / f"b{extension}") == read_manifest(tmp_path / f"a-2{extension}")
    assert read_clip(tmp_path / f"b{extension}").fps == 8


def test_changed_clips_are_told(tmp_path: Path):
    pipe = fake_clip_pipeline()
    result = pipe("a fox", seed=3)
    manifest = result.manifest
    assert manifest is not None
    frames = result.clips()[0].copy()
    frames[1, 2, 3] ^= 64
    for extension in (".webp", ".mp4"):
        save_clip(frames, tmp_path / f"a{extension}", fps=8, manifest=manifest.for_row(0))
        assert not replay(tmp_path / f"a{extension}", pipeline=pipe).bit_equal
    save_clip(frames[:2], tmp_path / "a.mp4", fps=8, manifest=manifest.for_row(0))
    with pytest.raises(ValueError, match="holds 2 frames of 32x32, its manifest says 3 frames of 32x32"):
        replay(tmp_path / "a.mp4", pipeline=pipe)


def test_saving_clips_and_pictures(tmp_path: Path):
    clips = fake_clip_pipeline()("a fox", seed=3)
    with pytest.raises(ValueError, match=r"extension '\.jpg' is unknown; allowed are \.mp4"):
        clips.save(tmp_path / "a.jpg")
    clips.save(tmp_path / "a.webm", fps=12)
    assert read_clip(tmp_path / "a.webm").fps == 12
    with pytest.raises(ValueError, match="fps is not known"):
        dataclasses.replace(clips, fps=None).save(tmp_path / "b.mp4")
    assert clips.grid().size == (68, 68)
    clips.save_grid(tmp_path / "sheet.png")
    with pytest.raises(ValueError, match="is a sheet of frames, which cannot be replayed"):
        replay(tmp_path / "sheet.png", pipeline=fake_clip_pipeline())
    from fakes import fake_pipeline

    with pytest.raises(ValueError, match="fps and codec are for clips"):
        fake_pipeline()("a fox", seed=3).save(tmp_path / "a.png", fps=3)


@pytest.mark.parametrize("name", ["fox: a.mp4", "12:30.webm", "file:x.mp4"])
def test_colons_in_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    save_clip(smooth(2, 16, 16), name, fps=8, manifest=text_to_image_manifest(["a fox"], [1]))
    assert read_clip(name).frames.shape[0] == 2 and read_manifest(name).prompt == "a fox"


@pytest.mark.parametrize("part", [0.3, 0.6, 0.85])
@pytest.mark.parametrize("extension", VIDEOS)
def test_a_cut_file_is_not_a_shorter_clip(tmp_path: Path, extension: str, part: float):
    path = tmp_path / f"a{extension}"
    noise = numpy.random.default_rng(0).integers(0, 256, (24, 32, 48, 3)).astype(numpy.uint8)
    save_clip(noise, path, fps=12)
    whole = path.read_bytes()
    path.write_bytes(whole[: round(part * len(whole))])
    with pytest.raises(ValueError, match=r"is damaged or cut|cannot be read as a video"):
        read_clip(path)


def test_foreign_tags_need_not_be_text(tmp_path: Path):
    path = tmp_path / "a.mp4"
    save_clip(smooth(2, 16, 16), path, fps=8, manifest=text_to_image_manifest(["EEEE"], [1]))
    data = path.read_bytes()
    assert data.count(b"EEEE") == 1
    path.write_bytes(data.replace(b"EEEE", b"\xe9\xe9\xe9\xe9"))
    assert read_clip(path).frames.shape[0] == 2


@pytest.mark.parametrize("extension", [".png", ".webp"])
def test_transparent_frames_are_over_white(tmp_path: Path, extension: str):
    path = tmp_path / f"a{extension}"
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(path)
    assert (read_clip(path).frames == 255).all()


def test_frames_of_more_bits_are_refused(tmp_path: Path):
    Image.fromarray(numpy.full((4, 4), 30000, numpy.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(ValueError, match=r"deep\.png has more than 8 bits a channel"):
        read_clip(tmp_path / "deep.png")


def test_a_sequence_takes_the_place_of_a_picture(tmp_path: Path):
    path = tmp_path / "a.png"
    save_clip(smooth(1, 16, 16), path, fps=8)
    frames = smooth(3, 16, 16)
    save_clip(frames, path, fps=8)
    assert numpy.array_equal(read_clip(path).frames, frames) and not path.exists()


def test_the_place_of_a_frame_is_taken(tmp_path: Path):
    (tmp_path / "a-2.png").mkdir()
    with pytest.raises(ValueError, match=r"a-2\.png: exists and is not a file"):
        check_clip_target(tmp_path / "a.png", fps=8, num_frames=3)


@pytest.mark.parametrize("fps", ["16", True, float("nan")])
def test_fps_is_a_number(tmp_path: Path, fps: object):
    with pytest.raises(ValueError, match=r"fps is .*; for \.mp4 it must be from 0\.1 to 240"):
        save_clip(smooth(1, 16, 16), tmp_path / "a.mp4", fps=fps)  # type: ignore[arg-type]


@pytest.mark.parametrize("told", ["[Infinity, 16]", "[0, 16]", "5"])
def test_wrong_counts_of_frames(tmp_path: Path, told: str):
    notes = PngInfo()
    notes.add_text("calotype clip", told)
    Image.new("RGB", (4, 4)).save(tmp_path / "a-1.png", pnginfo=notes)
    with pytest.raises(ValueError, match="its number of frames is"):
        read_clip(tmp_path / "a.png")


def test_files_of_clips_in_a_list(tmp_path: Path):
    """A clip each, also where there is only one; pictures are the frames of one clip."""
    clips = [smooth(3, 16, 16), smooth(3, 16, 16)[::-1]]
    for extension in (".webm", ".webp"):
        files = [tmp_path / f"{n}{extension}" for n in range(2)]
        for clip, file in zip(clips, files, strict=True):
            save_clip(clip, file, fps=8)
        assert [each.shape for each in opened_clips(files)] == [(3, 16, 16, 3)] * 2
        assert read_videos(opened_clips(files[:1])).shape == (1, 3, 3, 16, 16)
    stills = [tmp_path / f"{n}-still.webp" for n in range(2)]
    for file in stills:
        save_clip(smooth(1, 16, 16), file, fps=8)
    assert read_videos(opened_clips(stills)).shape == (1, 3, 2, 16, 16)
