"""Reads and writes local files; reads only plain files of a bounded size inside their folder.

The folder of a run or a model may come from anywhere. A pipe in it would block, a device would never end, a symbolic
link could lead elsewhere, and a file may exceed the memory. None of these is read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from mgpu_pipe.errors import BadInputError

MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4095
"""Linux's limits in bytes: of a file name, and of a path."""
SHOWN = 80
"""Characters of a longer path in an error."""
FIXES = {
    errno.ENAMETOOLONG: "shorten the path",
    errno.ELOOP: "remove the link that leads to itself",
    errno.EACCES: "change its permissions, or choose another place",
    errno.EPERM: "change its permissions, or choose another place",
    errno.EROFS: "choose a place that can be written",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "give a file",
    errno.ENOSPC: "make room on the disk",
    errno.EDQUOT: "make room in your quota",
    errno.EFBIG: "raise the limit of the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close some programs",
    errno.EIO: "the disk failed; look at the system's log",
    errno.ESTALE: "mount the network file system again",
}
"""Fixes of the machine's errors by errno. Any other OSError keeps its traceback."""


def expand_home(path: str | os.PathLike[str]) -> Path:
    """The path with ``~`` and ``~name`` as home folders; as it is where there is no such user."""
    return Path(os.path.expanduser(path))


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether a file or folder exists, following links."""
    return os.path.exists(path)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a plain file exists, following links."""
    return os.path.isfile(path)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder exists, following links."""
    return os.path.isdir(path)


def is_text(text: str) -> bool:
    """Whether a string can be encoded as UTF-8, without surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def name_problem(path: str | os.PathLike[str]) -> str:
    """Reason why no file or folder can have this path; empty if one can."""
    text = os.fspath(path)
    if not is_text(text):
        return "the name is not valid UTF-8"
    if "\0" in text:
        return "the name holds a zero byte"
    size, longest = len(text.encode()), max(len(part.encode()) for part in text.split("/"))
    if longest > MAX_NAME_BYTES:
        return f"a name of {longest:,} bytes is too long ({MAX_NAME_BYTES} at most)"
    return f"a path of {size:,} bytes is too long ({MAX_PATH_BYTES:,} at most)" if size > MAX_PATH_BYTES else ""


def shorten(path: str | Path) -> str:
    """A path for an error message, cut if it is very long."""
    text = str(path)
    return text if len(text) <= MAX_NAME_BYTES else f"{text[:SHOWN]}..."


def replace_file(path: Path, content: str | bytes, flush: bool = False) -> None:
    """Write a file atomically: readers see the old or the new file.

    A link at ``path`` is replaced, never written through. Concurrent writers are safe; the next writer removes the
    leftovers of a killed one.

    Args:
        flush: whether the file is on disk under its name on return.

    Raises:
        OSError: the file cannot be written.
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
    """Remove the leftovers of dead processes of this host, and of an earlier process with this PID."""
    for name in os.listdir(folder):
        writer = name.removeprefix(prefix).removesuffix(".partial")
        if name == f"{prefix}{writer}.partial" and writer.isdigit() and not _is_alive_elsewhere(int(writer)):
            with suppress(FileNotFoundError):
                (folder / name).unlink()


def _is_alive_elsewhere(process: int) -> bool:
    """Whether another process with this PID is alive."""
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
    """Flush the names in ``folder`` to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


MAX_CONFIG_BYTES = 4 << 20
"""Limit of a YAML configuration; real ones have some kilobytes, or a long list of files."""
MAX_JSON_BYTES = 64 << 20
"""Limit of JSON files of a run or a model; the largest real ones are tokenizers of about 35 MB."""
MAX_TABLE_BYTES = 512 << 20
"""Limit of ``metrics.csv``: some millions of rows."""
MAX_YAML_EVENTS, MAX_YAML_DEPTH = 400_000, 64
"""Limits of values and brackets in a YAML file, and of their nesting."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class NotPlainError(BadInputError):
    """A file that is never read: a link out of its folder, a pipe, a device, or too large."""


def read_bytes(path: Path, limit: int, inside: Path | None = None) -> bytes:
    """Content of a plain file.

    Args:
        limit: largest plausible size in bytes.
        inside: folder that must contain the file after following links; default: the file's folder.

    Raises:
        NotPlainError: the file is not plain, is outside ``inside``, or is larger than ``limit``.
        OSError: the file is missing or unreadable.
    """
    with _open(path, inside) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise NotPlainError(f"{path}: has {size:,} bytes, more than the {limit:,} that can be right")
        return file.read(min(limit, size + 1))  # reading the limit would allocate it each time


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_end(path: Path, most: int) -> bytes:
    """Last whole lines of a plain file in its folder, at most ``most`` bytes; errors: see :func:`read_bytes`."""
    with _open(path, None) as file:
        start = max(0, os.fstat(file.fileno()).st_size - most)
        file.seek(start)
        content = file.read(most)
    return content.partition(b"\n")[2] if start else content


def _open(path: Path, inside: Path | None) -> BinaryIO:
    check_plain(path, inside)
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _no_plain_file(path)
    return file


def check_plain(path: Path, inside: Path | None = None) -> None:
    """Raise NotPlainError for a pipe, socket, device, folder, or a link out of ``inside``; not if missing."""
    try:
        status = os.lstat(path)
    except OSError:
        return
    if stat.S_ISLNK(status.st_mode):
        root, target = Path(os.path.realpath(inside or path.parent)), Path(os.path.realpath(path))
        if not any(target.is_relative_to(place) for place in (root, *_hub_blobs(root))):
            raise NotPlainError(f"{path}: is a symbolic link out of its folder; put a copy of the file there")
        try:
            status = os.stat(path)
        except OSError:
            return
    if not stat.S_ISREG(status.st_mode):
        raise _no_plain_file(path)


def check_folder(folder: Path, largest_json: int = MAX_JSON_BYTES, depth: int = 2, inside: Path | None = None) -> None:
    """Raise NotPlainError for the first entry of a folder that is no plain file, before a library reads it.

    Args:
        inside: folder that must contain the files after following links; default: ``folder``.
    """
    inside = inside or folder
    for entry in sorted(os.scandir(folder), key=lambda item: item.name):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            if depth:
                check_folder(path, largest_json, depth - 1, inside)
            continue
        check_plain(path, inside)
        if path.suffix in (".json", ".jinja", ".txt") and exists(path) and path.stat().st_size > largest_json:
            raise NotPlainError(
                f"{path}: has {path.stat().st_size:,} bytes, more than the {largest_json:,} that can be right"
            )


def parse_json(data: bytes | str, where: Path | str) -> Any:
    """Value of a JSON text; ValueError if it is none, not UTF-8, or nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None


def parse_yaml(data: bytes | str) -> Any:
    """Value of a YAML text, which is checked before anything is built.

    Raises:
        yaml.YAMLError: the text is not YAML, has aliases, or is too large or nested too deeply.
        UnicodeDecodeError: the text is not UTF-8.
    """
    text = data.decode("utf-8") if isinstance(data, bytes) else data
    check_yaml(text, aliases=False)
    try:
        return yaml.load(text, _Loader)
    except (ValueError, OverflowError) as error:  # a date that does not exist, a number of too many digits
        raise yaml.YAMLError(str(error)) from error


def check_yaml(text: str, aliases: bool) -> None:
    """Check a YAML text without building its values.

    Args:
        aliases: whether it may have aliases, whose parts count each time.

    Raises:
        yaml.YAMLError: the text is not YAML, has forbidden aliases, or is too large or nested too deeply.
    """
    entries = 0
    open_collections: list[tuple[str | None, int]] = []
    sizes: dict[str | None, int] = {}
    events: Iterator[Any] = yaml.parse(text, _Loader)
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            if not aliases:
                raise yaml.YAMLError("it repeats parts of itself by aliases (*name)")
            entries += sizes.get(event.anchor, 0)
        elif isinstance(event, yaml.CollectionStartEvent):
            open_collections.append((event.anchor, entries))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_collections.pop()
            sizes[anchor] = entries - before
        entries += 1
        if len(open_collections) > MAX_YAML_DEPTH or entries > MAX_YAML_EVENTS:
            raise yaml.YAMLError(
                "it is nested too deeply" if len(open_collections) > MAX_YAML_DEPTH else "it has far too many entries"
            )


def _hub_blobs(root: Path) -> list[Path]:
    """Target folder of links in the Hugging Face cache: ``models--x/blobs`` for ``models--x/snapshots/y``."""
    return [root.parents[1] / "blobs"] if root.parent.name == "snapshots" else []


def _no_plain_file(path: Path) -> NotPlainError:
    return NotPlainError(f"{path}: is not a plain file; a run or a model holds plain files only")


def fix_of_writing(why: str, otherwise: str) -> str:
    """Fix for a file that ``why`` keeps from being written; ``otherwise`` helps against all but the limit of sizes."""
    return FIXES[errno.EFBIG] if os.strerror(errno.EFBIG) in why else otherwise


def creation_problem(folder: Path) -> str:
    """Why no folder can be made in a folder that is there, by a try (for ``/proc``, a quota, a full disk), or ""."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".", dir=folder))
    except OSError as error:
        return f"no folder can be made in {folder} ({error.strerror})"
    return ""
