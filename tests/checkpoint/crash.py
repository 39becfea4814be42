"""Records the file operations of real code, and rebuilds what a crash could have left after each of them.

The recorder stands between the code and ``os``, so that nothing has to be believed about the code's own layers; that
it misses nothing is checked by replaying all of it and comparing the result with the folder there is.

The disk's model is the adversary of Pillai et al., "All File Systems Are Not Created Equal" (OSDI 2014): what was
written to a file and not flushed may be there, be missing, be torn or be zeros; of the changes of a folder's entries
that were not flushed any subset may have happened, in any order; only a rename within a folder is atomic.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

NOT_MODELLED = (
    *("truncate", "ftruncate", "link", "symlink", "pwrite", "pwritev", "writev", "sendfile", "fdatasync"),
    *("copy_file_range", "posix_fallocate", "sync"),
)

MOST_PENDING = 8
"""Changes of a folder that may be lost on their own; of more, the oldest are taken to have happened."""


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test sees it."""


@dataclass(frozen=True)
class Operation:
    """One change, or flush, of what lies under the watched folder.

    Attributes:
        kind: create, write, sync, sync_folder, mkdir, rename, remove (of a file or an empty folder).
        path: relative to the watched folder; of ``write`` and ``sync`` the name that the file was opened under.
        target: the new path of a rename.
        handle: names the open file of create, write and sync.
        at: the machine's monotonic clock in nanoseconds, one for all its processes.
        process: who did it.
        epoch: how many times the process had met the others before.
    """

    kind: str
    path: str
    target: str = ""
    data: bytes = b""
    handle: tuple[int, int] = (0, 0)
    at: int = 0
    process: int = 0
    epoch: int = 0


class Recorder:
    """While it is entered, records what this process does under ``watched``.

    Args:
        kill_before: raise :class:`Killed` in place of the operation of this number.
    """

    def __init__(self, watched: Path, process: int = 0, kill_before: int | None = None) -> None:
        self.watched, self._process, self.kill_before = watched, process, kill_before
        self.operations: list[Operation] = []
        self.epoch = 0
        self._names: dict[int, Path] = {}
        self._handles: dict[int, tuple[int, int]] = {}
        self._originals: dict[str, Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Recorder:
        for name in ("open", "write", "fsync", "close", "mkdir", "rename", "replace", "unlink", "remove", "rmdir"):
            self._originals[name] = getattr(os, name)
            setattr(os, name, getattr(self, f"_{name}"))
        for name in NOT_MODELLED:
            self._originals[name] = getattr(os, name)
            setattr(os, name, _refuse(name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, original in self._originals.items():
            setattr(os, name, original)

    def _add(self, kind: str, path: Path, **more: Any) -> None:
        with self._lock:
            if len(self.operations) == self.kill_before:
                self.kill_before = None
                raise Killed
            place = str(path.relative_to(self.watched))
            facts: Any = {"at": time.monotonic_ns(), "process": self._process, "epoch": self.epoch}
            self.operations.append(Operation(kind, place, **facts, **more))

    def _path(self, path: Any, dir_fd: int | None) -> Path | None:
        """The watched path that a call means; None if it is another."""
        if isinstance(path, int):
            return self._names.get(path)
        whole = Path(os.path.abspath(os.fsdecode(path))) if dir_fd is None else self._names.get(dir_fd)
        if dir_fd is not None:
            whole = whole / os.fsdecode(path) if whole is not None else None
        return whole if whole is not None and whole.is_relative_to(self.watched) else None

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        place = self._path(path, dir_fd)
        descriptor: int
        if place is None:
            return self._originals["open"](path, flags, mode, dir_fd=dir_fd)
        if flags & (os.O_WRONLY | os.O_RDWR):
            assert flags & os.O_CREAT and flags & os.O_EXCL, f"{place}: an existing file is written to"
            handle = (self._process, len(self.operations))
            self._add("create", place, handle=handle)
            descriptor = self._originals["open"](path, flags, mode, dir_fd=dir_fd)
            self._handles[descriptor] = handle
        else:
            descriptor = self._originals["open"](path, flags, mode, dir_fd=dir_fd)
        self._names[descriptor] = place
        return descriptor

    def _write(self, descriptor: int, data: Any) -> int:
        if descriptor not in self._handles:
            return self._originals["write"](descriptor, data)
        self._add("write", self._names[descriptor], data=bytes(data), handle=self._handles[descriptor])
        written: int = self._originals["write"](descriptor, data)
        assert written == memoryview(data).nbytes
        return written

    def _fsync(self, descriptor: int) -> None:
        place = self._names.get(descriptor)
        if place is not None and descriptor in self._handles:
            self._add("sync", place, handle=self._handles[descriptor])
        elif place is not None:
            self._add("sync_folder", place)
        self._originals["fsync"](descriptor)

    def _close(self, descriptor: int) -> None:
        self._names.pop(descriptor, None)
        self._handles.pop(descriptor, None)
        self._originals["close"](descriptor)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._change("mkdir", "mkdir", path, mode, dir_fd=dir_fd)

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._change("unlink", "remove", path, dir_fd=dir_fd)

    _remove = _unlink

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._change("rmdir", "remove", path, dir_fd=dir_fd)

    def _change(self, call: str, kind: str, path: Any, *arguments: Any, dir_fd: int | None) -> None:
        place = self._path(path, dir_fd)
        if place is not None:
            self._add(kind, place)
        self._originals[call](path, *arguments, dir_fd=dir_fd)

    def _rename(self, source: Any, target: Any) -> None:
        old, new = self._path(source, None), self._path(target, None)
        if old is not None and new is not None:
            assert old.parent == new.parent, "a rename across folders is not atomic in the model"
            self._add("rename", old, target=str(new.relative_to(self.watched)))
        self._originals["rename"](source, target)

    _replace = _rename


def _refuse(name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"os.{name} is not in the model of the disk: model it, or do without")

    return call


@dataclass
class _File:
    durable: bytes = b""
    pending: list[bytes] = field(default_factory=list)

    def contents(self) -> list[bytes]:
        """What may be found after a crash: all of it, then what was flushed, then the rest's lost and torn forms."""
        if not self.pending:
            return [self.durable]
        rest = b"".join(self.pending)
        forms = [rest, b"", rest[: len(rest) // 2], bytes(len(rest))]
        if len(self.pending) > 1:  # the last write arrived, those before it did not
            forms.append(bytes(len(rest) - len(self.pending[-1])) + self.pending[-1])
        return list(dict.fromkeys(self.durable + form for form in forms))


@dataclass
class _Folder:
    durable: dict[str, int] = field(default_factory=dict)
    current: dict[str, int] = field(default_factory=dict)
    pending: list[dict[str, int | None]] = field(default_factory=list)

    def change(self, update: dict[str, int | None]) -> None:
        self.pending.append(update)
        _apply(self.current, update)


def _apply(entries: dict[str, int], update: dict[str, int | None]) -> None:
    for name, inode in update.items():
        if inode is None:
            entries.pop(name, None)
        else:
            entries[name] = inode


State = tuple[tuple[str, bytes | None], ...]
"""A tree: relative path and content, None for a folder; sorted."""


class Disk:
    """The watched folder, as its processes see it and as it may be found after a crash."""

    def __init__(self, start: Path) -> None:
        """Everything under ``start`` is there and flushed."""
        self._nodes: dict[int, _File | _Folder] = {}
        self._handles: dict[tuple[int, int], int] = {}
        self.root = self._read(start)

    def _new(self, node: _File | _Folder) -> int:
        self._nodes[len(self._nodes)] = node
        return len(self._nodes) - 1

    def _read(self, path: Path) -> int:
        if path.is_file():
            return self._new(_File(path.read_bytes()))
        folder = _Folder()
        inode = self._new(folder)
        for entry in sorted(path.iterdir()):
            folder.durable[entry.name] = folder.current[entry.name] = self._read(entry)
        return inode

    def _folder(self, path: Path) -> _Folder:
        node = self._nodes[self.root]
        for part in path.parts:
            assert isinstance(node, _Folder)
            node = self._nodes[node.current[part]]
        assert isinstance(node, _Folder)
        return node

    def apply(self, operation: Operation) -> None:
        """What the operation does to what processes see, and to what a crash may leave."""
        path = Path(operation.path)
        if operation.kind in ("create", "mkdir"):
            inode = self._new(_File() if operation.kind == "create" else _Folder())
            self._handles[operation.handle] = inode
            self._folder(path.parent).change({path.name: inode})
        elif operation.kind == "rename":
            folder = self._folder(path.parent)
            folder.change({path.name: None, Path(operation.target).name: folder.current[path.name]})
        elif operation.kind == "remove":
            self._folder(path.parent).change({path.name: None})
        elif operation.kind == "sync_folder":
            folder = self._folder(path)
            folder.durable, folder.pending = dict(folder.current), []
        else:
            file = self._nodes[self._handles[operation.handle]]
            assert isinstance(file, _File)
            if operation.kind == "write":
                file.pending.append(operation.data)
            else:
                file.durable, file.pending = file.durable + b"".join(file.pending), []

    def crash_states(self, chance: random.Random, most: int) -> Iterator[State]:
        """Trees that a crash now may leave: all of them, or ``most`` of them with the extremes first."""
        choices: list[tuple[int, list[Any]]] = []
        for inode, node in self._nodes.items():
            if isinstance(node, _Folder):
                # From "all happened" over every subset to "none did".
                kept = itertools.product((True, False), repeat=min(len(node.pending), MOST_PENDING))
                choices.append((inode, [_after(node, flags) for flags in kept]))
            else:
                choices.append((inode, node.contents()))
        choices = [(inode, forms) for inode, forms in choices if len(forms) > 1]
        names, forms = [inode for inode, _ in choices], [options for _, options in choices]
        for picked in _combinations(forms, chance, most):
            yield self._tree(dict(zip(names, picked, strict=True)))

    def _tree(self, found: dict[int, Any]) -> State:
        return tuple(sorted(self._walk(self.root, "", found)))

    def _walk(self, inode: int, path: str, found: dict[int, Any]) -> Iterator[tuple[str, bytes | None]]:
        node = self._nodes[inode]
        content = found.get(inode, node.durable)
        if isinstance(node, _File):
            yield path, content
            return
        if path:
            yield path, None
        for name, inner in content.items():
            yield from self._walk(inner, f"{path}/{name}" if path else name, found)

    def seen_by_processes(self) -> State:
        """The tree without a crash."""
        found: dict[int, Any] = {}
        for inode, node in self._nodes.items():
            found[inode] = node.contents()[0] if isinstance(node, _File) else node.current
        return self._tree(found)


def _after(folder: _Folder, kept: Sequence[bool]) -> dict[str, int]:
    entries = dict(folder.durable)
    oldest = len(folder.pending) - len(kept)  # of very many pending changes the oldest have happened
    for update, flag in zip(folder.pending, (*(True,) * oldest, *kept), strict=True):
        if flag:
            _apply(entries, update)
    return entries


def _combinations(forms: list[list[Any]], chance: random.Random, most: int) -> Iterator[tuple[Any, ...]]:
    count = 1
    for options in forms:
        count *= len(options)
    if count <= most:
        yield from itertools.product(*forms)
        return
    first, last = tuple(o[0] for o in forms), tuple(o[-1] for o in forms)
    yield from (first, last)
    for index in range(len(forms)):  # one thing lost, one thing kept
        for extreme, other in ((first, last), (last, first)):
            yield (*extreme[:index], other[index], *extreme[index + 1 :])
    for _ in range(most):
        yield tuple(chance.choice(options) for options in forms)


def digest(state: State) -> bytes:
    found = hashlib.sha256()
    for path, content in state:
        found.update(repr((path, None if content is None else len(content))).encode() + (content or b""))
    return found.digest()


def build(state: State, folder: Path) -> None:
    """Make the tree, in a folder that is empty."""
    for path, content in state:  # sorted: a folder comes before what is in it
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def tree_of(folder: Path) -> State:
    """The tree that is there."""
    paths = sorted(folder.rglob("*"), key=lambda path: str(path.relative_to(folder)))
    return tuple((str(path.relative_to(folder)), None if path.is_dir() else path.read_bytes()) for path in paths)


def interleavings(operations: Sequence[Operation], chance: random.Random, count: int) -> Iterator[list[Operation]]:
    """Orders in which the processes could have done this too: each keeps its own order, and their meetings."""
    for _ in range(count):
        found: list[Operation] = []
        for epoch in sorted({operation.epoch for operation in operations}):
            queues: dict[int, list[Operation]] = {}
            for operation in operations:
                if operation.epoch == epoch:
                    queues.setdefault(operation.process, []).append(operation)
            while queues:
                process = chance.choice(sorted(queues))
                found.append(queues[process].pop(0))
                if not queues[process]:
                    del queues[process]
        yield found
