"""Compressed text files: unpacked while they are read; the suffix names the codec."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from mgpu_pipe.data.fingerprint import Fingerprint, open_data
from mgpu_pipe.errors import MgpuError

HEAD = 512
"""Bytes at a file's beginning that identify its format."""
RENAME = "let its name end in .{}; it is then unpacked while it is read"
EXPORT = "write its text to a text, JSON Lines or Parquet file"
OTHER = "leave it out of the data's paths"
TAR = "a tar archive"
_FORMS: tuple[tuple[str, str, str], ...] = (
    (r"\x1f\x8b", "a gzip file", RENAME.format("gz")),
    (r"\x28\xb5\x2f\xfd", "a zstd file", RENAME.format("zst")),
    (r"\xfd7zXZ\0", "an xz file", RENAME.format("xz")),
    (r"BZh[1-9]", "a bzip2 file", RENAME.format("bz2")),
    (r"PK[\x03\x05][\x04\x06].{24}..(?:\[Content_Types\]|_rels/|word/|xl/|ppt/)", "an Office document", EXPORT),
    (r"PK[\x03\x05][\x04\x06].{26}mimetype", "an e-book or OpenDocument file", EXPORT),
    (r"PK[\x03\x05][\x04\x06]", "a zip file", RENAME.format("zip")),
    (r"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it"),
    (r"Rar!\x1a\x07", "a RAR archive", "unpack it"),
    (r"\x04\x22\x4d\x18", "an LZ4 file", "unpack it"),
    (r".{257}ustar", TAR, "unpack it"),
    (r"GGUF", "a GGUF file, which holds a model's weights", OTHER),
    (r".{6}\0\0\{\s*\"", "a safetensors file, which holds a model's weights", OTHER),
    (r"\x80[\x02-\x05]", "a pickle, which is never opened", EXPORT),
    (r"PAR1", "a Parquet file", "use data=parquet, or another source of rows"),
    (r"ARROW1|\xff\xff\xff\xff...\0", "an Arrow file", "use data=parquet, or another source of rows"),
    (r"ORC|Obj\x01", "an ORC or Avro file", "write it as Parquet"),
    (r"\x89HDF\r\n", "an HDF5 file", EXPORT),
    (r"\x93NUMPY", "a NumPy array", EXPORT),
    (r"SQLite format 3\0", "an SQLite database", EXPORT),
    (r"%PDF-", "a PDF document", EXPORT),
    (r"\{\\rtf", "a document in rich text format", EXPORT),
    (r"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document", EXPORT),
    (r"\x89PNG|\xff\xd8\xff|GIF8[79]a|II\*\0|MM\0\*|RIFF....WEBP|BM.{4}\0\0\0\0", "a picture", OTHER),
    (r"RIFF|RF64|OggS|fLaC|ID3|FORM....AIF|caff|\.snd", "a recording", OTHER),
    (r".{4}ftyp|\x1aE\xdf\xa3", "a video", OTHER),
    (r"\x7fELF|MZ.{58}|\xcf\xfa\xed\xfe|\xca\xfe\xba\xbe", "a program", OTHER),
    (r"\xff\xfe\0\0|\0\0\xfe\xff|(?:[^\0]\0\0\0){8}", "text in UTF-32", "convert it: iconv -f UTF-32 -t UTF-8"),
    (r"(?:\0.){8}|(?:.\0){8}|\xff\xfe|\xfe\xff", "text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
    (r"[^\0-\x08\x0e-\x1a]*[\0-\x08\x0e-\x1a]", "a binary file", OTHER),
)
_PATTERNS = [(re.compile(pattern.encode("latin-1"), re.DOTALL), form, fix) for pattern, form, fix in _FORMS]


def binary_form(head: bytes) -> tuple[str, str] | None:
    """Names the binary format of a file by its first :data:`HEAD` bytes, and the fix; None for others."""
    return next(((form, fix) for pattern, form, fix in _PATTERNS if pattern.match(head)), None)


CODECS = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bzip2", ".zip": "zip"}
_OF_OTHERS = ("__MACOSX/", ".DS_Store")
"""Folder of metadata that macOS adds to a zip file."""


def codec_of(path: Path) -> str | None:
    """Codec of a file by its suffix; None for an uncompressed file."""
    return CODECS.get(path.suffix.lower())


def identity_of(path: Path, content: Fingerprint) -> str:
    """Identity of the text that is read: equal bytes under another suffix are another text."""
    forms = [form for form in (codec_of(path), table_suffix(path), WET if is_wet(path) else "") if form]
    return ":".join([*forms, content.digest])


WET = ".wet"
"""Suffix of Common Crawl's files of texts, under that of their compression."""


def is_wet(path: Path) -> bool:
    name = Path(path.stem) if codec_of(path) else path
    return name.suffix.lower() == WET


def table_suffix(path: Path) -> str:
    """Suffix of a table (``.csv``, ``.tsv``) under that of its compression; else empty."""
    name = Path(path.stem) if codec_of(path) else path
    return name.suffix.lower() if name.suffix.lower() in (".csv", ".tsv") else ""


def open_text(path: Path, expected: Fingerprint | None = None, member: str | None = None) -> IO[bytes]:
    """Opens the text of a data file; :func:`~mgpu_pipe.data.fingerprint.open_data` opens its bytes.

    Args:
        member: of a zip file; None for all members, in order, each ending with a line break.

    Raises:
        DataError: see ``open_data``. Reading raises OSError for a truncated file, or one of another format.
    """
    stored, codec = open_data(path, expected), codec_of(path)
    return stored if codec is None else io.BufferedReader(_Unpacked(stored, codec, member), 1 << 20)


def zip_members(path: Path, expected: Fingerprint | None = None) -> list[str]:
    """Names of the files in a zip file, in order; OSError if it is none."""
    with open_data(path, expected) as stored:
        return _try_to(lambda: _member_names(zipfile.ZipFile(stored)))


def bytes_read(file: IO[bytes]) -> int | None:
    """Compressed bytes read so far; None for an uncompressed file."""
    raw = getattr(file, "raw", None)
    return raw.stored.tell() if isinstance(raw, _Unpacked) else None


def _member_names(archive: zipfile.ZipFile) -> list[str]:
    names = (entry.filename for entry in archive.infolist() if not entry.is_dir())
    return [name for name in names if not name.startswith(_OF_OTHERS[0]) and not name.endswith(_OF_OTHERS[1])]


def _try_to(work: Callable[[], Any]) -> Any:
    """Calls ``work``; raises OSError for the six kinds of errors of unpackers."""
    try:
        return work()
    except (OSError, MgpuError):
        raise
    except Exception as error:
        raise OSError(str(error) or type(error).__name__) from error


class _Unpacked(io.RawIOBase):
    def __init__(self, stored: IO[bytes], codec: str, member: str | None) -> None:
        self.stored, self._codec, self._member = stored, codec, member
        self._stream: Any = None

    def _open_codec(self) -> Any:
        if self._codec == "xz":
            import lzma

            return lzma.LZMAFile(self.stored)
        if self._codec == "zip":
            archive = zipfile.ZipFile(self.stored)
            return _Members(archive, _member_names(archive) if self._member is None else [self._member])
        import pyarrow

        name = "bz2" if self._codec == "bzip2" else self._codec
        return pyarrow.CompressedInputStream(pyarrow.PythonFile(self.stored, mode="r"), name)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]  # a writable buffer, which typing cannot say
        if self._stream is None:
            self._stream = _try_to(self._open_codec)
        part = _try_to(lambda: self._stream.read(len(buffer)))
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        if not self.closed:
            if self._stream is not None:
                self._stream.close()
            self.stored.close()
        super().close()


class _Members:
    """Concatenated files of a zip file; a missing line break at a file's end is added."""

    def __init__(self, archive: zipfile.ZipFile, names: list[str]) -> None:
        self._archive, self._names, self._last = archive, names[::-1], b"\n"
        self._open: IO[bytes] | None = None

    def read(self, size: int) -> bytes:
        while True:
            if self._open is None:
                if not self._names:
                    return b""
                self._open = self._archive.open(self._names.pop())
                if self._last != b"\n":
                    self._last = b"\n"
                    return b"\n"
            if part := self._open.read(size):
                self._last = part[-1:]
                return part
            self._open.close()
            self._open = None

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
        self._archive.close()
