"""Bytes of a picture file to pixels, whatever mode they are stored in. Needs Pillow; no torch."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Pillow's other formats start programs, or are no pictures."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
MOST_PIXELS = 1 << 26
"""A small file may unpack to gigabytes."""
LEAST_SIDE = 2
MODES = {1: "L", 3: "RGB"}
"""Pillow's, by the number of channels."""


class BadImageError(Exception):
    """A picture that cannot be used, and why."""


def pillow() -> Any:
    """Pillow's modules.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        fix = "install it: pip install 'mgpu_pipe[image]'"
        raise ConfigError("data.source", "pictures", fix, "Pillow is not installed") from error
    return Image, ImageOps


def decode(raw: bytes, channels: int) -> Image:
    """The picture in a file's bytes, upright, of 8 bits a channel.

    CMYK becomes RGB, a palette its colours, 16 bits 8; what is transparent lies on white.

    Args:
        channels: 1 (grey) or 3 (RGB).

    Raises:
        BadImageError: it cannot be read whole, is larger than 67 million pixels or narrower than two, has several
            frames, or values of no known range.
    """
    image_module, operations = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = image_module.open(io.BytesIO(raw), formats=FORMATS)
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise BadImageError(f"has {width} x {height} pixels, more than {MOST_PIXELS:,}")
            if min(width, height) < LEAST_SIDE:
                raise BadImageError(f"has {width} x {height} pixels: there is nothing on it")
            if getattr(image, "n_frames", 1) > 1:
                raise BadImageError(f"has {image.n_frames} frames; give a picture of one")
            image.load()
            operations.exif_transpose(image, in_place=True)
            return _plain(image, channels, image_module)
    except BadImageError:
        raise
    except image_module.UnidentifiedImageError as error:
        raise BadImageError("is no picture of a known format") from error
    except (OSError, ValueError, SyntaxError, EOFError, image_module.DecompressionBombError, MemoryError) as error:
        raise BadImageError(f"cannot be read ({' '.join(str(error).split())[:100]})") from error


def _plain(image: Any, channels: int, image_module: Any) -> Image:
    import numpy as np

    if image.mode.startswith("I;16") or image.mode == "I":
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise BadImageError("has values of more than 16 bits")
        image = image_module.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    elif image.mode == "F":
        raise BadImageError("has values of no known range (floating point)")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = image_module.new("RGBA", image.size, "white")
        image = image_module.alpha_composite(white, image)
    plain: Image = image if image.mode == MODES[channels] else image.convert(MODES[channels])
    return plain
