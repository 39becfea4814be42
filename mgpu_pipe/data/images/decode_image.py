"""Decodes picture files of any mode to pixels. Needs Pillow."""

from __future__ import annotations

import io
import logging
import warnings
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.plugins import import_package
from mgpu_pipe.data.bad_samples import BadSampleError, decoding
from mgpu_pipe.data.containers import brands_of, is_cut_short
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.system.standard_streams import library_output

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000")
"""Formats that are decoded. Pillow's others start programs or are not pictures."""
SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".dib", ".gif", ".tif", ".tiff", ".ppm", ".pgm"),
    *(".pbm", ".pnm", ".jp2", ".j2k", ".jpf", ".jpx", ".heic", ".heif", ".hif", ".avif"),
)
HEAD = 64
"""First bytes of a file, which tell its format."""
HEIF, AVIF = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), (b"avif", b"avis")
"""Brands of files of boxes (ISO/IEC 23008-12, annex B; AV1 Image File Format, section 6)."""
MOST_PIXELS = 1 << 26
"""Largest picture: a small file may unpack to gigabytes."""
LEAST_SIDE = 2
ORIENTATION = 0x0112
"""EXIF's tag of the orientation."""
TURNED = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Pillow's transposition that makes each EXIF orientation upright (EXIF 2.3, section 4.6.4)."""
SIDEWAYS = ("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
_SIDES, _BITS, _MEANING, _WHITE_IS_ZERO = (256, 257), 258, 262, 0
"""TIFF's tags of width and height, bits of a value and their meaning (TIFF 6.0, section 8)."""
_SUBFILE, _OLD_SUBFILE, _DNG_VERSION = 254, 255, 50706
"""TIFF's tags of what a page is (TIFF 6.0, section 8), and of the version of a DNG file."""
_CR2 = b"CR"
"""Bytes 8 and 9 of a Canon camera's raw file, which is a TIFF file otherwise."""
_RAW = "is a camera's raw file, or has a thumbnail first; develop it to JPEG, PNG or TIFF"
_NO_NAME = "tempfile.tif: "
"""libtiff's name for a file without a name."""
MODES = {1: "L", 3: "RGB"}
"""Pillow's modes by the number of channels."""
_ALPHA = ("RGBA", "LA", "PA", "La", "RGBa")
_OF_PROFILE = {
    "RGB": ("RGB", ("RGB", "RGBA", "RGBa", "P", "PA")),
    "GRAY": ("L", ("L", "LA", "La")),
    "CMYK": ("CMYK", ("CMYK",)),
    "Lab": ("LAB", ("LAB",)),
}
"""Pillow's mode of the colours that an ICC profile of this space converts, and modes of pictures that may have it."""
_SRGB_TOLERANCE = 2
"""Largest difference of a channel by which a profile counts as sRGB."""


def pillow() -> Any:
    """Imports Pillow's module of images; ConfigError if it is not installed."""
    images = import_package("PIL.Image", "Pillow", "image", "data.source", "pictures")
    # Pillow also raises what it logs, and that error names the sample.
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    return images


def known_formats(head: bytes) -> tuple[str, ...]:
    """Pillow's formats by a file's first :data:`HEAD` bytes; ConfigError for HEIC or AVIF without their package."""
    brands = brands_of(head)
    form = "AVIF" if {*AVIF} & {*brands} else "HEIF" if brands[:1] and brands[0] in HEIF else None
    if form == "HEIF":
        heif = import_package("pillow_heif", "pillow-heif", "image", "data.source", "HEIC pictures")
        heif.register_heif_opener()
    elif form == "AVIF":
        from PIL import features

        if not features.check("avif"):
            raise ConfigError("data.source", "AVIF pictures", "install pillow>=11.3", "this Pillow reads none")
    return FORMATS if form is None else (form,)


def decode(raw: bytes, channels: int) -> Image:
    """Decodes a picture: upright, 8 bits a channel.

    It converts CMYK to RGB, a palette to its colours, 16 bits to 8 and colours with an ICC profile to sRGB. It puts
    transparent pixels on white.

    Args:
        channels: 1 (grey) or 3 (RGB).

    Raises:
        BadSampleError: it cannot be read whole, is larger than 67 million pixels or narrower than two, has several
            frames, is a camera's raw file, or has values of no known range.
    """
    image_module = pillow()
    if brands_of(raw[:12]) and is_cut_short(io.BytesIO(raw)):
        raise BadSampleError("is cut short")
    with decoding("cannot be read"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = image_module.open(io.BytesIO(raw), formats=known_formats(raw[:HEAD]))
        except image_module.UnidentifiedImageError as error:
            raise BadSampleError("is no picture of a known format; convert it to PNG or JPEG") from error
        except image_module.DecompressionBombError as error:
            raise BadSampleError(f"has more than {MOST_PIXELS:,} pixels; scale it down") from error
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise BadSampleError(f"has {width} x {height} pixels, more than {MOST_PIXELS:,}; scale it down")
        if min(width, height) < LEAST_SIDE:
            raise BadSampleError(f"has {width} x {height} pixels, fewer than {LEAST_SIDE} across")
        if image.format == "TIFF" and (raw[8:10] == _CR2 or _DNG_VERSION in image.tag_v2 or _is_part(image)):
            raise BadSampleError(_RAW)
        frames = _frames_in(image)
        if frames > 1:
            raise BadSampleError(f"has {frames} frames; give a picture of a single frame")
        _load(image)
        turned = turned_by(image)
        upright = image if turned is None else image.transpose(image_module.Transpose[turned])
        return _in_8_bits(upright, channels, image_module)


def _frames_in(image: Any) -> int:
    """Number of pictures in a file. A TIFF file's smaller copies and masks are none."""
    # The second frame of a phone's JPEG is a preview or a depth map, that of its HEIC another shot.
    frames = 1 if image.format in ("MPO", "HEIF") else int(getattr(image, "n_frames", 1))
    if image.format != "TIFF" or frames == 1:
        return frames
    parts = 0
    for number in range(1, frames):
        image.seek(number)
        parts += _is_part(image)
    image.seek(0)
    return frames - parts


def _is_part(image: Any) -> bool:
    """Whether the page of a TIFF file is a smaller copy or a mask of another."""
    kind = image.tag_v2.get(_SUBFILE, 0)
    return bool(isinstance(kind, int) and kind & 0b101) or image.tag_v2.get(_OLD_SUBFILE) == 2


def _load(image: Any) -> None:
    """Reads the pixels. libtiff prints errors to standard error; here they become the exception."""
    if image.format != "TIFF":
        image.load()
        return
    failed: Exception | None = None
    with library_output() as lines:
        try:
            image.load()
        except Exception as error:
            failed = error
    if failed is not None:
        raise OSError(lines[-1].removeprefix(_NO_NAME)) if lines else failed


def turned_by(image: Image) -> str | None:
    """Pillow's transposition that makes a picture upright; None where its EXIF has no orientation or is unreadable, as
    in viewers."""
    if image.format == "AVIF":
        image.info.pop("xmp", None)  # only boxes turn it (AV1 Image File Format, section 4), and Pillow reads XMP too
    try:
        return TURNED.get(image.getexif().get(ORIENTATION, 0))
    except Exception:  # any error: cameras and editors write anything
        return None


def _read_as_tiff_states(image: Any, values: Any) -> tuple[Any, int]:
    """Grey values with black at 0, and their largest one. Pillow keeps a TIFF file's 12 bits and inverted values."""
    if image.format != "TIFF":
        return values, 0xFFFF
    bits, meaning = image.tag_v2.get(_BITS, (16,))[0], image.tag_v2.get(_MEANING)
    most = (1 << min(bits, 16)) - 1
    return most - values if meaning == _WHITE_IS_ZERO else values, most


def _in_8_bits(image: Any, channels: int, image_module: Any) -> Image:
    """The picture in sRGB with 8 bits in each of ``channels``, on white where it is transparent.

    Raises:
        BadSampleError: its values have more than 16 bits or no known range.
    """
    import numpy as np

    profile, key = image.info.get("icc_profile"), image.info.get("transparency")
    if image.mode.startswith("I;16") or image.mode == "I":
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise BadSampleError("has values of more than 16 bits")
        clear = None if key is None else values == key
        values, most = _read_as_tiff_states(image, values)
        image = image_module.fromarray(((values * 255 + most // 2) // most).astype(np.uint8))
        if clear is not None:
            image.putalpha(image_module.fromarray(np.where(clear, 0, 255).astype(np.uint8)))
    elif image.mode == "F":
        raise BadSampleError("has values of no known range (floating point)")
    elif isinstance(key, tuple) and max(key) > 0xFF:  # of 16 bits, like the channels before Pillow read them
        image.info["transparency"] = tuple(value >> 8 for value in key)
    if image.format == "BMP" and image.mode == "RGBA" and image.getextrema()[3] == (0, 0):
        image = image.convert("RGB")  # many programs leave a bitmap's fourth byte 0, and viewers show the colours
    alpha = None
    if image.mode in _ALPHA or "transparency" in image.info:
        alpha = image.convert("RGBA").getchannel("A")
    image = _in_srgb(image, profile)
    if alpha is not None:
        image = image.convert("RGB") if image.mode != "RGB" else image.copy()
        image.putalpha(alpha)
        white = image_module.new("RGBA", image.size, "white")
        image = image_module.alpha_composite(white, image)
    plain: Image = image if image.mode == MODES[channels] else image.convert(MODES[channels])
    return plain


def _in_srgb(image: Any, profile: bytes | None) -> Any:
    """Converts colours with an ICC profile to sRGB; with none, or a damaged one, they stay, as in viewers."""
    transform = _transform_to_srgb(profile, image.mode) if profile else None
    if transform is None:
        return image
    return transform.apply(image if image.mode == transform.input_mode else image.convert(transform.input_mode))


@lru_cache(maxsize=32)
def _transform_to_srgb(profile: bytes, mode: str) -> Any:
    """Pillow's transform from a profile to sRGB; None where it changes nothing, or does not fit the mode."""
    from PIL import Image, ImageCms

    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        colours, modes = _OF_PROFILE.get(source.profile.xcolor_space.strip(), ("", ()))
        if mode not in modes:
            return None
        # Without NOOPTIMIZE lcms interpolates 33 levels of grey.
        flags = ImageCms.Flags.NOOPTIMIZE if colours == "L" else ImageCms.Flags.NONE
        srgb = ImageCms.createProfile("sRGB")
        transform = ImageCms.buildTransform(source, srgb, colours, "RGB", flags=flags)
    except (ImageCms.PyCMSError, OSError):
        return None
    if colours not in MODES.values():
        return transform
    levels = Image.linear_gradient("L")
    turns = (levels, levels.transpose(Image.Transpose.ROTATE_90), levels.transpose(Image.Transpose.FLIP_TOP_BOTTOM))
    probe = levels if colours == "L" else Image.merge("RGB", turns)
    differences = zip(transform.apply(probe).tobytes(), probe.convert("RGB").tobytes(), strict=True)
    return transform if max(abs(new - old) for new, old in differences) > _SRGB_TOLERANCE else None


def size_of(path: Path) -> tuple[int, int]:
    """Upright height and width of a picture that was decoded before."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    with pillow().open(path, formats=known_formats(head)) as image:
        # Some versions of Pillow turn a TIFF file's size before it is loaded.
        width, height = (image.tag_v2[tag] for tag in _SIDES) if image.format == "TIFF" else image.size
        sideways = turned_by(image) in SIDEWAYS
    return (width, height) if sideways else (height, width)
