"""Pictures in files: written whole or not at all, with the manifest inside."""

import io
import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING

from ..core.whole_file import whole_file
from .checks import check_kind
from .frame_names import first_file
from .manifest import Manifest
from .streams import CONTAINERS, read_comment

if TYPE_CHECKING:
    from PIL.Image import Image

PNG_KEY = "calotype"
GIF_KEY = "comment"
EXIF_DESCRIPTION = 0x010E
LOSSY_WEBP_CHUNK = b"VP8 "
MAX_NAME_BYTES = 255
MAX_EXIF_BYTES = 65533
MAX_PIXELS = 2**26


def save_image(image: "Image", path: str | Path, manifest: Manifest | None = None) -> Path:
    """Writes one picture; the extension decides the format: .png and .webp lossless, .jpg and .jpeg at quality 95.

    The manifest goes into the PNG text "calotype", or into the EXIF image description. The file appears under its name
    only when it is complete: a full disk or an interruption leaves whatever was there before.

    Raises:
        ValueError: unknown extension, or a name that cannot be a file. FileNotFoundError: the folder does not exist.
        OSError: the folder cannot be written to, or the disk is full; its `filename` says where.
    """
    target = check_target(path)
    write = _WRITERS[target.suffix.lower()]
    try:
        with whole_file(target.resolve()) as part, part.open("xb") as file:
            write(image, file, None if manifest is None else manifest.to_json())
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(target)) from error
    return target


def check_target(path: str | Path) -> Path:
    """`path`, if a picture can be written there: to be asked before any compute. Same errors as `save_image`."""
    target = Path(check_kind("path", path, (str, Path), "the name of a file, such as 'fox.png'"))
    if target.suffix.lower() not in _WRITERS:
        raise ValueError(f"{target}: extension {target.suffix!r} is unknown; allowed are {', '.join(_WRITERS)}")
    return check_place(target)


def check_place(target: Path) -> Path:
    """`target`, if a file can be made there, whatever its extension. Same errors as `save_image`."""
    if len(os.fsencode(target.name)) > MAX_NAME_BYTES:
        raise ValueError(f"{target.name[:40]}...: the file name is longer than {MAX_NAME_BYTES} bytes")
    check_folder(target.parent)
    if target.exists() and not target.is_file():
        raise ValueError(f"{target}: exists and is not a file")
    check_folder(target.resolve().parent)
    return target


def check_folder(folder: Path) -> None:
    """Makes sure that a file can be made in the folder, by making an empty one and removing it."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder to write to")
    probe = folder / f".calotype-{secrets.token_hex(6)}.part"
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise OSError(error.errno, f"cannot write to this folder: {error.strerror}", str(folder)) from error


def open_image(path: str | Path) -> "Image":
    """A picture from a file, fully read.

    Raises:
        FileNotFoundError: no such file. ValueError: a folder, not a picture that can be read, or a damaged one.
    """
    from PIL import Image, UnidentifiedImageError

    source = Path(path)
    if source.is_dir():
        raise ValueError(f"{source}: a folder; a picture is given as a file")
    if not source.is_file():
        hint = "; addresses on the web are not read" if "://" in str(path) else ""
        raise FileNotFoundError(f"{path}: no such file{hint}")
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(source) as image:
            _check_pixels(image, source)
            image.load()
            return image
    except UnidentifiedImageError:
        raise ValueError(f"{source}: not a picture in a known format") from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{source}: cannot be read as a picture: {error}") from None


def as_shown(image: "Image", name: str, *, grey: bool = False) -> "Image":
    """A picture in 8 bits, upright, transparent pixels over white.

    Raises:
        ValueError: it has more bits, `name` says which one.
    """
    from PIL import Image, ImageOps

    if image.mode.startswith(("I", "F")):  # Pillow would cut off everything over 255
        raise ValueError(f"{name} has more than 8 bits a channel (mode {image.mode}); convert it to 8 bits first")
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        layers = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(layers, image.convert("RGBA"))
    return image.convert("L" if grey else "RGB")


def as_jpeg(image: "Image") -> "Image":
    """What is left of a picture in a JPEG that `save_image` writes."""
    from PIL import Image

    file = io.BytesIO()
    _write_jpeg(image, file, None)
    with Image.open(file) as stored:
        stored.load()
        return stored


def is_lossy_webp(path: str | Path) -> bool:
    """Whether a file is a WebP of one picture whose pixels are not kept as they were; `save_image` writes none."""
    data = Path(path).read_bytes()
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return False
    place = 12
    while place + 8 <= len(data) and data[place : place + 4] != LOSSY_WEBP_CHUNK:
        size = int.from_bytes(data[place + 4 : place + 8], "little")
        place += 8 + size + size % 2
    return data[place : place + 4] == LOSSY_WEBP_CHUNK


def read_manifest(path: str | Path) -> Manifest:
    """The manifest inside a picture that `save_image` wrote, or a clip that `save_clip` wrote.

    Raises:
        FileNotFoundError: no such file. ValueError: not a picture or clip, or one without a (complete) manifest.
    """
    source = Path(path)
    file = first_file(source)
    if file.suffix.lower() in CONTAINERS and file.is_file():
        return _parsed(_manifest_in(read_comment(file)), path)
    manifest = manifest_of(open_image(file), path)
    if file != source and manifest.frames is None:  # a picture of several, not a frame of a clip
        raise FileNotFoundError(f"{source}: no such file")
    return manifest


def manifest_of(image: "Image", path: str | Path) -> Manifest:
    """The manifest inside an open picture; `path` is for the error message only."""
    info: Mapping[str | tuple[int, int], object] = image.info
    comment = info.get(GIF_KEY) if image.format == "GIF" else None
    said = _manifest_in(comment.decode("utf-8", "replace")) if isinstance(comment, bytes) else None
    return _parsed(info.get(PNG_KEY) or image.getexif().get(EXIF_DESCRIPTION) or said, path)


def _manifest_in(comment: str | None) -> str | None:
    """What a comment says, if it is more than a word of another program."""
    return comment if comment is not None and comment.startswith("{") else None


def _parsed(text: object, path: str | Path) -> Manifest:
    if not isinstance(text, str):
        raise ValueError(f"{path}: holds no calotype manifest (was it made, or saved again, by another program?)")
    try:
        return Manifest.from_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def _check_pixels(image: "Image", path: Path) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"{path}: is {width}x{height}, more than the {MAX_PIXELS} pixels that are read")


def write_png(
    image: "Image", file: IO[bytes], manifest: str | None, texts: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Writes a PNG; `texts` by their keys stand beside the manifest."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for key, text in {**texts, **({} if manifest is None else {PNG_KEY: manifest})}.items():
        info.add_text(key, text)
    image.save(file, "PNG", pnginfo=info)


def _write_jpeg(image: "Image", file: IO[bytes], manifest: str | None) -> None:
    exif = exif_block(manifest)
    if len(exif) > MAX_EXIF_BYTES:
        raise ValueError(f"the manifest takes {len(exif)} bytes, a JPEG has room for {MAX_EXIF_BYTES}: write a .png")
    image.save(file, "JPEG", quality=95, subsampling=0, exif=exif)


def _write_webp(image: "Image", file: IO[bytes], manifest: str | None) -> None:
    image.save(file, "WEBP", lossless=True, exif=exif_block(manifest))


def exif_block(manifest: str | None) -> bytes:
    """EXIF whose image description is the manifest."""
    from PIL.Image import Exif

    exif = Exif()
    if manifest is not None:
        exif[EXIF_DESCRIPTION] = manifest
    return exif.tobytes()


_WRITERS: Mapping[str, Callable[["Image", IO[bytes], str | None], None]] = {
    ".png": write_png,
    ".jpg": _write_jpeg,
    ".jpeg": _write_jpeg,
    ".webp": _write_webp,
}
