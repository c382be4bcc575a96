"""Clips as video streams in containers, through PyAV: H.264 and VP9, in bt709 colours.

Legend: F frames, H and W pixels; frames are uint8 [F, H, W, 3].
"""

import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

COMMENT = "comment"  # the tag that holds the manifest
_BT709, _LIMITED_RANGE = 1, 1  # FFmpeg's AVCOL_SPC_BT709, AVCOL_PRI_BT709 and AVCOL_TRC_BT709; AVCOL_RANGE_MPEG
_EXACT = 0x4 | 0x2000 | 0x4000 | 0x40000  # SWS_BICUBIC, _FULL_CHR_H_INT, _FULL_CHR_H_INP, _ACCURATE_RND
_LARGEST_DENOMINATOR = 1001
MOST_MISSING = 0.05  # of a video's length, at its end
_H264 = {"crf": "14", "x264-params": "chromaloc=1"}  # colour samples lie between the pixels that share them
_VP9 = {"crf": "14", "b": "0", "row-mt": "1", "cpu-used": "3"}


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How FFmpeg is asked for a codec. `whole_cells`: with 4:2:0 colours both sides must be even."""

    encoder: str
    options: Mapping[str, str]
    whole_cells: bool

    def pixels(self, width: int, height: int) -> str:
        """4:2:0 colours, which all players know; for odd sides where they must be even 4:4:4, at the exact size."""
        return "yuv444p" if self.whole_cells and (width % 2 or height % 2) else "yuv420p"


@dataclass(frozen=True, kw_only=True)
class Container:
    """A container: its name in FFmpeg, and the codecs it is written with by their names; the first is the default."""

    name: str
    codecs: Mapping[str, Codec]

    def codec(self, name: str | None) -> Codec:
        """The codec of that name, or the default.

        Raises:
            ValueError: not one of this container's, or this build of PyAV cannot write it.
        """
        import av

        chosen = next(iter(self.codecs)) if name is None else name
        if chosen not in self.codecs:
            raise ValueError(f"codec {name!r} is unknown for {self.name}; allowed are {', '.join(self.codecs)}")
        codec = self.codecs[chosen]
        if codec.encoder not in av.codecs_available:
            raise ValueError(f"codec {chosen}: this build of PyAV {av.__version__} has no encoder {codec.encoder}")
        return codec


H264 = Codec(encoder="libx264", options=_H264, whole_cells=True)
VP9 = Codec(encoder="libvpx-vp9", options=_VP9, whole_cells=False)
CONTAINERS: Mapping[str, Container] = {
    ".mp4": Container(name="mp4", codecs={"h264": H264, "vp9": VP9}),
    ".webm": Container(name="webm", codecs={"vp9": VP9}),
}


def stream_bytes(frames: numpy.ndarray, fps: float, text: str | None, container: Container, codec: str | None) -> bytes:
    """A file with one video stream; `text` is its comment.

    Raises:
        ValueError: an unknown codec, or frames that the encoder refuses.
    """
    import av
    from av.error import FFmpegError

    chosen = container.codec(codec)
    file = io.BytesIO()
    height, width = frames.shape[1:3]
    try:
        with av.open(file, "w", format=container.name) as output:
            if text is not None:
                output.metadata[COMMENT] = text
            rate = Fraction(fps).limit_denominator(_LARGEST_DENOMINATOR)
            stream = cast("VideoStream", output.add_stream(chosen.encoder, rate=rate, options=dict(chosen.options)))
            stream.width, stream.height, stream.pix_fmt = width, height, chosen.pixels(width, height)
            _tag(stream)
            for frame in _converted(frames, stream.pix_fmt):
                output.mux(stream.encode(frame))
            output.mux(stream.encode())
    except FFmpegError as error:
        raise ValueError(f"{chosen.encoder} refuses {len(frames)} frames of {width}x{height}: {error}") from None
    return file.getvalue()


def read_stream(path: Path, most_pixels: int) -> tuple[list[numpy.ndarray], float | None]:
    """The frames of the first video stream of a file, as they are shown, and how many come in a second.

    Raises:
        ValueError: not a video that can be read, a damaged one, or more than `most_pixels` in all.
    """
    from av.error import FFmpegError

    try:
        with _opened(path) as source:
            if not source.streams.video:
                raise ValueError(f"{path}: holds no video stream")
            rate = source.streams.video[0].average_rate
            frames: list[numpy.ndarray] = []
            ends = [0.0]
            for frame, end in _decoded(source):
                frames.append(frame)
                ends.append(end)
                if len(frames) * frame.shape[0] * frame.shape[1] > most_pixels:
                    raise ValueError(f"{path}: holds more than the {most_pixels} pixels that are read: cut it shorter")
            end, length = max(ends), _length(source)
    except FFmpegError as error:
        raise ValueError(f"{path}: cannot be read as a video: {error.strerror}") from None
    if not frames:
        raise ValueError(f"{path}: holds no frames")
    if length - end > MOST_MISSING * length + 1.5 / float(rate or 1):
        raise ValueError(f"{path}: is damaged or cut: its frames end after {end:.2f} s of {length:.2f}")
    return frames, None if rate is None else float(rate)


def _length(source: "InputContainer") -> float:
    """How many seconds of video a file says that it has; 0 where it does not tell."""
    return 0.0 if source.duration is None or len(source.streams) > 1 else source.duration / 10**6


def read_comment(path: Path) -> str | None:
    """The comment of a container.

    Raises:
        ValueError: not a video that can be read.
    """
    from av.error import FFmpegError

    try:
        with _opened(path) as source:
            tags = {name.lower(): value for name, value in source.metadata.items()}
    except FFmpegError as error:
        raise ValueError(f"{path}: cannot be read as a video: {error.strerror}") from None
    return tags.get(COMMENT)


def _opened(path: Path) -> "InputContainer":
    """A file, whatever its name: FFmpeg takes what is before a colon for a protocol."""
    import av

    return av.open(os.path.abspath(path), metadata_errors="replace")


def _tag(stream: "VideoStream") -> None:
    """Says in the stream which colours it holds: players guess by size otherwise."""
    context = stream.codec_context
    context.colorspace = context.color_primaries = context.color_trc = _BT709
    context.color_range = _LIMITED_RANGE


def _converted(frames: numpy.ndarray, pixels: str) -> Iterator["VideoFrame"]:
    from av import VideoFrame
    from av.video.reformatter import ColorRange, Colorspace, VideoReformatter

    reformatter = VideoReformatter()
    for index, frame in enumerate(frames):
        picture = VideoFrame.from_ndarray(numpy.ascontiguousarray(frame), format="rgb24")
        picture = reformatter.reformat(
            picture,
            format=pixels,
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
            interpolation=_EXACT,
        )
        picture.pts = index
        yield picture


def _decoded(source: "InputContainer") -> Iterator[tuple[numpy.ndarray, float]]:
    """Frames, and when each ends, in seconds from the beginning."""
    from av.video.reformatter import ColorRange, VideoReformatter

    reformatter, stream = VideoReformatter(), source.streams.video[0]
    begin, unit = (source.start_time or 0) / 10**6, float(stream.time_base or 0)
    for frame in source.decode(stream):
        picture = reformatter.reformat(
            frame, format="rgb24", dst_color_range=ColorRange.JPEG, interpolation=_EXACT
        ).to_ndarray()
        end = ((frame.pts or 0) + (frame.duration or 0)) * unit - begin
        yield numpy.rot90(picture, round(frame.rotation / 90)), end  # as phones store what they film upright
