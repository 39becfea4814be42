"""Picture and video files as phones, scanners and old recorders write them, and spoiled ones, which never end a run."""

from __future__ import annotations

import io
import struct
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mgpu_pipe.data.bad_samples import BadSampleError
from mgpu_pipe.data.images.decode_image import ORIENTATION, SUFFIXES, decode, size_of
from mgpu_pipe.data.images.videos import ClipFacts, frames_of, look
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.inference.visual_prompts import decode_file
from tests.data.image.test_pictures import configured
from tests.objectives.test_videos import chats
from tests.support.fuzzing import changed
from tests.support.needs import need_pyav
from tests.support.pictures import TO_XYZ, colour_profile, noise, said, stored
from tests.support.videos import frames_of as drawn

TIFFS = ("raw", "tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")
CODECS = {
    "a.mp4": ("mpeg4", "yuv420p"),
    "b.avi": ("mjpeg", "yuvj420p"),
    "c.mkv": ("ffv1", "bgr0"),
    "d.mov": ("libx264", "yuv420p"),
    "e.ts": ("libx264", "yuv420p"),
    "f.webm": ("libvpx", "yuv420p"),
    "g.gif": ("gif", "rgb8"),
}


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def film(path: Path, codec: str, form: str, title: str = "") -> bytes:
    """Five small frames in a file of this program's libraries."""
    import av

    with av.open(str(path), "w") as container:
        container.metadata["title"] = title
        stream: Any = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 24, 20, form
        for frame in drawn(5):
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return path.read_bytes()


@pytest.mark.parametrize("tag", [256, 257, 258, 262, 273])
def test_a_tiff_without_its_sizes_is_a_bad_sample(tag: int, capfd: pytest.CaptureFixture[str]) -> None:
    for packed in TIFFS:
        raw = bytearray(stored(noise(1), "TIFF", compression=packed))
        at = raw.index(tag.to_bytes(2, "little"), int.from_bytes(raw[4:8], "little"))
        raw[at : at + 2] = (tag + 1000).to_bytes(2, "little")
        try:
            decode(bytes(raw), 3)
        except BadSampleError as error:
            assert str(error).startswith(("cannot be read (", "is no picture of a known format")), packed
        else:
            assert tag in (258, 262), packed
    assert capfd.readouterr().err == ""


def test_grey_of_a_scanner_keeps_its_range_and_its_black() -> None:
    """Twelve bits a value, and values whose zero is white. Oracle: the same picture of eight bits."""
    grey = (np.arange(8 * 4).reshape(4, 8) * 8).astype(np.uint8)
    wide = grey.astype(np.uint16) * 257
    inverted = stored(Image.fromarray(65535 - wide), "TIFF", tiffinfo={262: 0})
    first, second = (wide >> 4)[:, 0::2], (wide >> 4)[:, 1::2]
    packed = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], 2).astype(np.uint8)
    twelve = stored(Image.fromarray(packed.reshape(4, 12)), "TIFF")
    for tag, value in ((256, 8), (258, 12)):
        at = twelve.index(tag.to_bytes(2, "little"), 8) + 8
        twelve = twelve[:at] + value.to_bytes(2, "little") + twelve[at + 2 :]
    for raw in (inverted, twelve):
        assert np.abs(pixels(decode(raw, 1)) - grey).max() <= 1


def test_a_bitmap_whose_alpha_is_zero_keeps_its_colours() -> None:
    """A bitmap with masks of four channels (BITMAPV4HEADER), whose programs fill in three."""
    picture = noise(1)
    masks = (0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    head = struct.pack("<IiiHHIIiiII4I", 108, 12, -12, 1, 32, 3, 576, 0, 0, 0, 0, *masks).ljust(108, b"\0")
    for alpha in (0, 255):
        values = np.dstack([pixels(picture)[..., ::-1], np.full((12, 12), alpha)]).astype(np.uint8)
        raw = b"BM" + struct.pack("<IHHI", 122 + 576, 0, 0, 122) + head + values.tobytes()
        assert (pixels(decode(raw, 3)) == pixels(picture)).all()


WIDE = np.array([[0.5151, 0.2920, 0.1571], [0.2412, 0.6922, 0.0666], [-0.0011, 0.0419, 0.7841]])
"""Display P3's linear colours as XYZ under D50."""


def in_srgb(linear: np.ndarray) -> np.ndarray:
    """IEC 61966-2-1 of values from 0 to 1, as 8 bits."""
    linear = linear.clip(0, 1)
    return np.round(255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_colours_of_a_profile_are_those_of_srgb(form: str) -> None:
    """A phone's wide colours, a linear grey, a profile that is as good as sRGB's, and a damaged one. Oracle: numpy."""
    smooth = Image.merge("RGB", [Image.linear_gradient("L").rotate(90 * turn).resize((32, 32)) for turn in range(3)])
    options: dict[str, Any] = {"quality": 100, "lossless": True, "subsampling": 0}
    plain = pixels(decode(stored(smooth, form, **options), 3))
    wide = decode(stored(smooth, form, icc_profile=colour_profile(2.2, WIDE), **options), 3)
    expected = in_srgb((plain / 255) ** 2.2 @ WIDE.T @ np.linalg.inv(TO_XYZ).T)
    assert np.abs(pixels(wide) - expected).max() < 6 and np.abs(plain - expected).max() > 20
    grey = Image.linear_gradient("L").resize((32, 32))
    if form != "WEBP":  # which stores grey as colours
        linear = decode(stored(grey, form, icc_profile=colour_profile(1.0), **options), 1)
        assert np.abs(pixels(linear) - in_srgb(pixels(decode(stored(grey, form, **options), 1)) / 255)).max() <= 2
    for unused in (colour_profile(2.2, WIDE)[:-40], b"no profile", colour_profile(1.0)):
        assert (pixels(decode(stored(smooth, form, icc_profile=unused, **options), 3)) == plain).all()


def test_a_profile_leaves_what_is_transparent() -> None:
    clear = noise(1, 8, "RGBA")
    clear.putalpha(Image.linear_gradient("L").resize((8, 8)))
    for picture, profile in ((clear, colour_profile(2.2, WIDE)), (clear.convert("LA"), colour_profile(1.0))):
        seen = pixels(decode(stored(picture, icc_profile=profile), 3))
        opaque = picture.convert(picture.mode[:-1])
        colours, alpha = (
            pixels(decode(stored(opaque, icc_profile=profile), 3)),
            pixels(clear.getchannel("A"))[..., None],
        )
        assert np.abs(seen - (colours * alpha + 255 * (255 - alpha)) / 255).max() <= 1


@pytest.mark.parametrize("colours", [1, 3])
def test_a_clear_colour_of_16_bits_is_clear(colours: int) -> None:
    """PNG's chunk tRNS (ISO/IEC 15948, 11.3.2.1), which names a colour in the file's bits."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    values = np.full((4, 4, colours), 0x1234, ">u2")
    values[0, 0] = 0x8001
    lines = b"".join(b"\0" + line.tobytes() for line in values)
    head = chunk(b"IHDR", struct.pack(">2I5B", 4, 4, 16, colours - 1, 0, 0, 0))
    clear, end = chunk(b"tRNS", values[0, 0].tobytes()), chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    seen = pixels(decode(b"\x89PNG\r\n\x1a\n" + head + clear + end, 3))
    assert (seen[0, 0] == 255).all() and (seen[1:] == 18).all()


def test_smaller_copies_in_a_tiff_are_no_frames_and_a_thumbnail_is_no_picture() -> None:
    """Scanners add smaller copies, which tag 254 names; cameras' raw files (DNG, NEF, ARW) begin with one."""

    def pages(*kinds: int) -> bytes:
        content = io.BytesIO()
        images = [noise(number, 12) for number, _ in enumerate(kinds)]
        for image, kind in zip(images, kinds, strict=True):
            image.encoderinfo = {"tiffinfo": {254: kind}}  # type: ignore[attr-defined]
        images[0].save(content, "TIFF", save_all=True, append_images=images[1:], tiffinfo={254: kinds[0]})
        return content.getvalue()

    assert (pixels(decode(pages(0, 1, 4), 3)) == pixels(noise(0, 12))).all()
    with pytest.raises(BadSampleError, match="has 2 frames"):
        decode(pages(0, 1, 2), 3)
    for raw in (pages(1, 0), stored(noise(1), "TIFF", tiffinfo={50706: b"\1\4\0\0"})):
        with pytest.raises(
            BadSampleError, match="is a camera's raw file, or has a thumbnail first; develop it to JPEG"
        ):
            decode(raw, 3)


def test_only_boxes_turn_an_avif(tmp_path: Path) -> None:
    """Pillow also reads the orientation that an editor left in XMP; viewers do not (AV1 Image File Format)."""
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="6"/></x:xmpmeta>'
    raw = stored(Image.linear_gradient("L").resize((96, 64)).convert("RGB"), "AVIF", xmp=xmp)
    (tmp_path / "a.avif").write_bytes(raw)
    assert size_of(tmp_path / "a.avif") == (64, 96) and decode(raw, 3).size == (96, 64)


def test_a_turned_tiff_is_as_large_as_its_pixels(tmp_path: Path) -> None:
    exif = Image.Exif()
    for turn in range(1, 9):
        exif[ORIENTATION] = turn
        raw = stored(noise(1).resize((12, 20)), "TIFF", exif=exif)
        (tmp_path / "a.tiff").write_bytes(raw)
        assert size_of(tmp_path / "a.tiff") == decode(raw, 3).size[::-1] == ((20, 12) if turn < 5 else (12, 20))


@pytest.mark.parametrize(("mode", "suffix"), [("RGB", ".jp2"), ("RGBA", ".j2k"), ("I;16", ".jpx")])
def test_a_jpeg_2000_is_read_whole_or_not(mode: str, suffix: str) -> None:
    """Oracle: the same picture as a PNG."""
    grey = Image.fromarray((np.arange(576, dtype=np.uint16) * 99).reshape(24, 24))
    picture = grey if mode == "I;16" else noise(1, 24, mode)
    raw = stored(picture, "JPEG2000", irreversible=False)
    assert suffix in SUFFIXES and (pixels(decode(raw, 3)) == pixels(decode(stored(picture), 3))).all()
    with pytest.raises(BadSampleError):
        decode(raw[: len(raw) * 9 // 10], 3)


def test_any_error_of_pillow_is_a_bad_sample() -> None:
    """Pillow also raises other errors than OSError: for a number that is none, and a size that would fill memory."""
    number = stored(noise(1), "PPM").replace(b"255", b"\x805\x80", 1)
    size = bytearray(stored(noise(1), "PNG"))
    size[16:24] = b"\x7f\xff\xff\xff" * 2
    size[29:33] = zlib.crc32(size[12:29]).to_bytes(4, "big")
    for raw, error in ((number, ValueError), (bytes(size), Image.DecompressionBombError)):
        with pytest.raises(error) as raised:
            Image.open(io.BytesIO(raw)).load()
        assert not isinstance(raised.value, OSError)
        with pytest.raises(
            BadSampleError, match=r"^cannot be read \(.|^has more than 67,108,864 pixels; scale it down$"
        ):
            decode(raw, 3)


def test_what_libtiff_says_is_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    raw = bytearray(stored(noise(1, 24), "TIFF", compression="tiff_adobe_deflate"))
    raw[8:80] = bytes(72)
    with pytest.raises(BadSampleError, match=r"cannot be read \(ZIPDecode: "):
        decode(bytes(raw), 3)
    raw = bytearray(stored(noise(1), "TIFF"))
    at = raw.index(b"\x15\x01\x03\0", int.from_bytes(raw[4:8], "little"))  # samples a pixel
    raw[at + 8] = 24
    with pytest.raises(BadSampleError):
        decode(bytes(raw), 3)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0",
        b"Exif\0\0garbage",
        b"Exif\0\0II*\0",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x02ab\0\0\0\0\0\0",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x05\0\x01\0\0\0\0\0\0\0\0\0\0\0",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x02\0\0\0\x06\0\x03\0\0\0\0\0",
    ],
)
def test_odd_exif_leaves_the_picture_as_it_lies(exif: bytes, tmp_path: Path) -> None:
    """In training, and as a picture of a prompt."""
    wide = noise(1).resize((12, 6))
    for form in ("JPEG", "PNG", "WEBP"):
        raw = stored(wide, form, exif=exif)
        assert {decode(raw, 3).size} <= {(12, 6), (6, 12)}
        (tmp_path / "odd").write_bytes(raw)
        assert (pixels(decode_file("odd", tmp_path / "odd", 3)) == pixels(decode(raw, 3))).all()


def test_the_first_frame_of_a_phones_jpeg_is_the_picture() -> None:
    content = io.BytesIO()
    noise(1).save(content, "MPO", save_all=True, append_images=[noise(2, 4)])
    with Image.open(io.BytesIO(content.getvalue())) as image:
        assert (image.format, image.n_frames) == ("MPO", 2)  # type: ignore[attr-defined]
    assert (pixels(decode(content.getvalue(), 3)) == pixels(decode(stored(noise(1), "JPEG"), 3))).all()


@pytest.mark.parametrize("form", ["HEIF", "AVIF"])
def test_a_phones_picture_in_boxes_is_read_upright_and_refused_where_it_is_cut(form: str, tmp_path: Path) -> None:
    """Oracle: the same picture as a PNG; both codecs lose a little."""
    pillow_heif = pytest.importorskip("pillow_heif", reason="pip install pillow-heif")
    pillow_heif.register_heif_opener()
    wide = Image.linear_gradient("L").resize((96, 64)).convert("RGB")
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    raw, plain = (stored(wide, to, exif=turned.tobytes(), quality=100) for to in (form, "PNG"))
    assert decode(raw, 3).size == decode(plain, 3).size == (64, 96)
    assert np.abs(pixels(decode(raw, 3)) - pixels(decode(plain, 3))).max() < 12
    (tmp_path / "a.heic").write_bytes(raw)
    assert size_of(tmp_path / "a.heic") == (96, 64)
    for size in (len(raw) // 2, len(raw) - 5):
        with pytest.raises(BadSampleError, match="is cut short"):
            decode(raw[:size], 3)
    for number in range(40):
        with suppress(BadSampleError):
            decode(changed([raw], number), 3)


def test_without_its_package_a_phones_picture_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(ConfigError, match=r"HEIC pictures: pillow-heif is not installed; .*'mgpu_pipe\[image\]'"):
        decode(b"\0\0\0\x18ftypheic" + bytes(12), 3)


def test_a_recorders_latin_title_is_no_fault(tmp_path: Path) -> None:
    need_pyav()
    raw = film(tmp_path / "plain.avi", "mjpeg", "yuvj420p", "Cafe in Muenchen")
    assert raw.count(b"Cafe in Mue") == 1
    (tmp_path / "latin.avi").write_bytes(raw.replace(b"Cafe in Mue", b"Caf\xe9 in M\xfce"))
    facts = look(tmp_path / "latin.avi")
    assert facts == look(tmp_path / "plain.avi") and isinstance(facts, ClipFacts) and facts.frames == 5
    assert len(frames_of(tmp_path / "latin.avi", None, [0, 4], 3)) == 2


@pytest.mark.parametrize("name", ["b.avi", "c.mkv", "d.mov", "f.webm"])
def test_a_video_that_is_cut_short_is_no_shorter_video(name: str, tmp_path: Path) -> None:
    """Their frames decode to the cut. A stream of a browser states no size, and is read to its end."""
    need_pyav()
    raw = film(tmp_path / name, *CODECS[name])
    whole = look(tmp_path / name)
    assert isinstance(whole, ClipFacts) and whole.frames == 5
    (tmp_path / name).write_bytes(raw[: 4 * len(raw) // 5])
    assert look(tmp_path / name) == "is cut short"
    if name == "f.webm":
        at = raw.index(b"\x18\x53\x80\x67") + 4
        (tmp_path / name).write_bytes(raw[:at] + b"\x01" + b"\xff" * 7 + raw[at + 8 :])
        assert look(tmp_path / name) == whole


def test_a_video_of_an_unknown_codec_is_named(tmp_path: Path) -> None:
    need_pyav()
    raw = film(tmp_path / "plain.avi", "mjpeg", "yuvj420p")
    (tmp_path / "odd.avi").write_bytes(raw.replace(b"MJPG", b"ZzQ9"))
    assert look(tmp_path / "odd.avi") == "has a codec that cannot be decoded here"


def spoiled_pictures(folder: Path, number: int) -> Any:
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [stored(noise(1, 24), form) for form in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM")]
    files += [stored(noise(1, 24), "TIFF", compression=packed) for packed in TIFFS]
    files += [stored(noise(2, 24), "JPEG", exif=exif), stored(noise(3, 24), "JPEG", progressive=True)]
    (folder / "whole.png").write_bytes(stored(noise(1)))
    for index in range(number):
        (folder / f"{index}").write_bytes(changed(files, index))
    (folder / "list.csv").write_text("image,label\nwhole.png,a\n" + "".join(f"{n},b\n" for n in range(number)))
    skip = ("data.on_bad_sample=skip", "data.validation_fraction=0", "data.num_workers=0")
    config = configured(folder, f"data.paths=[{folder}/list.csv]", *skip, source="image_list")
    found: Any = prepare(config)
    every = np.arange(found.train_samples)
    for part in np.array_split(every, -(-len(every) // 256)):
        assert len(found.open(config, "train").batch(part, part)["pixel_values"]) == len(part)
    return found


def test_spoiled_pictures_never_end_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = spoiled_pictures(tmp_path, 250)
    assert 90 < found.bad_samples < 220 and found.train_samples + found.bad_samples == 251
    assert capfd.readouterr().err == ""


@pytest.mark.exhaustive
def test_ten_thousand_spoiled_pictures_never_end_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = spoiled_pictures(tmp_path, 10_000)
    assert found.train_samples + found.bad_samples == 10_001
    assert capfd.readouterr().err == ""


def spoiled_videos(folder: Path, number: int) -> Any:
    need_pyav()
    files = [film(folder / name, *codec) for name, codec in CODECS.items()]
    names = [f"{index}" for index in range(number)]
    for index, name in enumerate(names):
        (folder / name).write_bytes(changed(files, index))
    rows = [{"messages": said("<video>?"), "video": name} for name in (*CODECS, *names)]
    skip = ("data.on_bad_sample=skip", "data.max_frames=4", "data.tokenize_workers=1")
    config = chats(folder, *skip, rows=rows)
    found: Any = prepare(config)
    every = np.arange(found.train_samples)
    for part in np.array_split(every, -(-len(every) // 64)):
        found.open(config, "train").batch(part, part)
    assert found.train_samples + found.bad_samples + found.too_long_samples == number + len(CODECS)
    return found


@pytest.mark.slow
def test_spoiled_videos_never_end_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = spoiled_videos(tmp_path, 40)
    assert 5 < found.bad_samples < 36
    assert capfd.readouterr().err == ""


@pytest.mark.exhaustive
def test_ten_thousand_spoiled_videos_never_end_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spoiled_videos(tmp_path, 10_000)
    assert capfd.readouterr().err == ""
