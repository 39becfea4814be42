"""The one way in which files are replaced."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: str | bytes, flush: bool = False) -> None:
    """Write a file whole or not at all: whoever reads it sees the old or the new one.

    A link that somebody put there is replaced, never written through. Processes may write at once; what a killed one
    left is removed by the next that writes here.

    Args:
        flush: return when the file is on the disk under its name.

    Raises:
        OSError: it cannot be written.
    """
    prefix = f".{path.name}.{socket.gethostname()}-"
    temporary = path.with_name(f"{prefix}{os.getpid()}.partial")
    _remove_abandoned(path.parent, prefix)
    try:
        with open(temporary, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if flush:
        flush_folder(path.parent)


def _remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove what processes of this host left that are gone, and an earlier one of this process's id."""
    for name in os.listdir(folder):
        writer = name.removeprefix(prefix).removesuffix(".partial")
        if name == f"{prefix}{writer}.partial" and writer.isdigit() and not _is_another(int(writer)):
            with suppress(FileNotFoundError):
                (folder / name).unlink()


def _is_another(process: int) -> bool:
    """Whether another process of that id is alive."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def flush_folder(folder: Path) -> None:
    """Return when the names in ``folder`` are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
