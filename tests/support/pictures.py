"""Picture files for the tests, of every kind that a folder of somebody's may hold."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from mgpu_pipe.data.images.decode_image import pillow


def noise(seed: int, size: int = 12, mode: str = "RGB") -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)
    return Image.fromarray(values).convert(mode)


def stored(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    pillow()
    content = io.BytesIO()
    image.save(content, form, **options)
    return content.getvalue()


def folder_of_classes(root: Path, each: int = 8, classes: tuple[str, ...] = ("dark", "light", "stripes")) -> Path:
    """Pictures that a class's name tells of, each another one."""
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for index in range(each):
            values = np.random.default_rng(100 * number + index).integers(0, 60, (16, 16, 3))
            values += {"dark": 0, "light": 190}.get(name, 0)
            if name == "stripes":
                values[::2] += 190
            (root / name / f"{index}.png").write_bytes(stored(Image.fromarray(values.astype(np.uint8))))
    return root


def packed(tar: Path, members: Iterable[tuple[str, bytes]], kind: bytes = tarfile.REGTYPE) -> Path:
    """A tar file of these members, by name."""
    with tarfile.open(tar, "w") as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size, info.type, info.linkname = len(content), kind, "elsewhere"
            file.addfile(info, io.BytesIO(content))
    return tar


def samples_in(root: Path, ending: str = "cls", said: str = "{}") -> list[tuple[str, bytes]]:
    """Of each picture of :func:`folder_of_classes` two members: what is said of it, and the picture."""
    members = []
    for path in sorted(root.glob("*/*.png")):
        name = f"{path.parent.name}-{path.stem}"
        members += [(f"{name}.{ending}", said.format(path.parent.name).encode()), (f"{name}.png", path.read_bytes())]
    return members


def bomb() -> bytes:
    """Some kilobytes that unpack to 100 million pixels."""
    return stored(Image.new("1", (10_000, 10_000)))


def strange() -> dict[str, tuple[bytes, str]]:
    """Files that cannot be used, and what is said of each."""
    whole = stored(noise(1, 64), "JPEG")
    frames = io.BytesIO()
    noise(1).save(frames, "GIF", save_all=True, append_images=[noise(2), noise(3)])
    return {
        "pixel.png": (stored(noise(1, 1)), "has 1 x 1 pixels, fewer than 2 across"),
        "bomb.png": (bomb(), "has 10000 x 10000 pixels, more than 67,108,864"),
        "cut.jpg": (whole[: len(whole) // 2], "cannot be read (image file is truncated"),
        "text.png": (b"this is no picture\n", "is no picture of a known format"),
        "moving.gif": (frames.getvalue(), "has 3 frames; give a picture of a single frame"),
        "empty.png": (b"", "is empty"),
        "float.tiff": (stored(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "has values of no known range"),
    }


def said(question: object, answer: str = "a square") -> list[dict[str, object]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


SIZES = {"wide": (12, 40), "high": (33, 15), "small": (5, 6), "large": (70, 50)}
"""Height and width of the pictures of :func:`write_chats`."""


def write_chats(folder: Path) -> None:
    """Conversations with none, one or two pictures, of four sizes, in ``folder / "chats.jsonl"``; once."""
    if (folder / "chats.jsonl").exists():
        return
    folder.mkdir(exist_ok=True)
    for seed, (name, size) in enumerate(SIZES.items()):
        values = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
        (folder / f"{name}.png").write_bytes(stored(Image.fromarray(values)))
    rows = [
        *({"messages": said(f"<image> How is it, {name}?", name), "image": f"{name}.png"} for name in SIZES),
        {"messages": said("Compare <image> and <image>.", "wide"), "images": ["wide.png", "high.png"]},
        {"messages": said("Do you see me?", "No.")},
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


TO_XYZ = np.array([[0.4361, 0.3851, 0.1431], [0.2225, 0.7169, 0.0606], [0.0139, 0.0971, 0.7141]])
"""sRGB's linear colours as XYZ under D50 (ICC.1: Annex E; IEC 61966-2-1)."""


def colour_profile(gamma: float, to_xyz: np.ndarray | None = None) -> bytes:
    """An ICC profile (ICC.1:2001-04) of one exponent: of grey, or of colours whose XYZ under D50 are the columns of
    ``to_xyz``."""

    def point(values: Iterable[float]) -> bytes:
        return b"XYZ " + bytes(4) + struct.pack(">3i", *(round(value * 65536) for value in values))

    curve = b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256)) + bytes(2)
    parts = {b"wtpt": point((0.9642, 1, 0.8249))}
    if to_xyz is None:
        parts[b"kTRC"] = curve
    else:
        for name, column in zip("rgb", to_xyz.T, strict=True):
            parts |= {f"{name}XYZ".encode(): point(column), f"{name}TRC".encode(): curve}
    start = 128 + 4 + 12 * len(parts)
    head = struct.pack(">I", len(parts))
    for tag, content in parts.items():
        head += tag + struct.pack(">2I", start, len(content))
        start += len(content)
    kinds = b"mntr" + (b"GRAY" if to_xyz is None else b"RGB ") + b"XYZ "
    white = struct.pack(">3i", 63190, 65536, 54061)
    fields = struct.pack(">I4sI", start, bytes(4), 0x02400000) + kinds + bytes(12) + b"acsp" + bytes(28) + white
    return fields.ljust(128, b"\0") + head + b"".join(parts.values())
