"""Text files that are compressed: unpacked as they are read, by their names' endings."""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO

from mgpu_pipe.data.fingerprint import Fingerprint, open_data

CODECS = {".gz": "gzip", ".zst": "zstd"}
"""pyarrow's names."""


def codec_of(path: Path) -> str | None:
    """How the file is compressed; None where its name does not say so."""
    return CODECS.get(path.suffix.lower())


def identity_of(path: Path, content: Fingerprint) -> str:
    """Of what is read: the same bytes under another ending are another text."""
    codec = codec_of(path)
    return content.digest if codec is None else f"{codec}:{content.digest}"


def open_text(path: Path, expected: Fingerprint | None = None) -> IO[bytes]:
    """Open a data file's text, as :func:`~mgpu_pipe.data.fingerprint.open_data` opens its bytes.

    Raises:
        DataError: as of ``open_data``. Reading raises OSError where the file is cut, or is not what its name says.
    """
    stored, codec = open_data(path, expected), codec_of(path)
    return stored if codec is None else io.BufferedReader(_Unpacked(stored, codec), 1 << 20)


def bytes_read(file: IO[bytes]) -> int | None:
    """How much of a compressed file has been read so far, as it is stored; None of another file."""
    raw = getattr(file, "raw", None)
    return raw.stored.tell() if isinstance(raw, _Unpacked) else None


class _Unpacked(io.RawIOBase):
    def __init__(self, stored: IO[bytes], codec: str) -> None:
        import pyarrow

        self.stored = stored
        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(stored, mode="r"), codec)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]  # a writable buffer, which typing cannot say
        part = self._stream.read(len(buffer))
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self.stored.close()
        super().close()
