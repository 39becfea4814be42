"""Lock of a run's folder: one launcher at a time, on this host and on others.

On one host ``flock`` decides: workers inherit the descriptor, so the lock lives as long as any of them. If a network
file system limits flock to a host or lacks it, a *lease* in the same file decides: the holder rewrites a beat in it
every few seconds. A contender watches whether the lease changes, by its monotonic clock. Clocks of hosts are never
compared, so a wrong clock cannot mislead.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from mgpu_pipe.errors import RunFolderError, print_line
from mgpu_pipe.system.local_files import NotPlainError, check_plain, fix_of_writing, read_bytes

BEAT_S = 4.0
MISSED_BEATS = 5
"""The holder of a lease without change for this many beats is dead."""
WAIT_S = 30.0
"""Seconds that a launcher waits for the workers of a dead launcher, or for a stopping one."""
POLL_S = 0.1
RECORD_BYTES = 512
MAX_LOCK_BYTES = 1 << 16
"""Limit of bytes of a valid lock file."""
NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

Record = dict[str, object]


class RunLock:
    """Holds ``path`` while open; a context manager.

    Args:
        path: lock file in the run's folder.
        beat_s: seconds between two beats of the lease.
        wait_s: longest wait in seconds for a dying or stopping holder.
        tell: prints a line for the user while waiting.

    Raises:
        RunFolderError: on entering, if a living launcher holds the folder; names its host and process.
    """

    def __init__(
        self, path: Path, *, beat_s: float = BEAT_S, wait_s: float = WAIT_S, tell: Callable[[str], None] | None = None
    ) -> None:
        self.path, self._beat_s, self._wait_s = path, beat_s, wait_s
        self._tell = tell or (lambda line: print_line(line, file=sys.stderr))
        self._record: Record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "start": _start_time(os.getpid()),
            "boot": boot_id(),
            "token": uuid.uuid4().hex,
            "state": "preparing",
            "beat": 0,
        }
        self._announced = False
        self._lost = ""
        self._write_lock = threading.Lock()
        self._released = threading.Event()
        self.fd = self._folder_fd = -1

    def __enter__(self) -> RunLock:
        try:
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise self._not_writable(error) from error
        try:
            self._acquire()
        except OSError as error:
            os.close(self.fd)
            raise self._not_writable(error) from error
        except BaseException:
            os.close(self.fd)
            raise
        self._folder_fd = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        threading.Thread(target=self._keep_beating, name="lease", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        with self._write_lock:
            if not self._lost:
                os.ftruncate(self.fd, 0)
            os.close(self.fd)
            os.close(self._folder_fd)

    def training(self) -> None:
        """Record in the lease that the workers train."""
        self._record["state"] = "training"
        self._beat()

    def stopping(self) -> None:
        """Record in the lease that this run is saving before its exit: another launcher may wait for it."""
        self._record["state"] = "stopping"
        self._beat()

    def loss_reason(self) -> str:
        """Reason why this run lost its folder; empty while it holds it."""
        return self._lost or self._moved_reason()

    def _moved_reason(self) -> str:
        """Reason if the folder is no longer at its path, where the workers would create another; else empty."""
        folder = os.fstat(self._folder_fd)
        try:
            there = os.stat(self.path.parent)
        except FileNotFoundError:
            there = None
        except OSError:  # an unreachable server may come back
            return ""
        if there is not None and (there.st_dev, there.st_ino) == (folder.st_dev, folder.st_ino):
            return ""
        what = "deleted" if folder.st_nlink == 0 else f"moved to {os.readlink(f'/proc/self/fd/{self._folder_fd}')}"
        self._lost = f"{self.path.parent}: this run ends: its folder was {what}"
        return self._lost

    def _acquire(self) -> None:
        deadline = time.monotonic() + self._wait_s
        self._wait_for_flock(deadline)
        lease = _read(self.path)
        if lease and lease.get("boot") != self._record["boot"]:
            self._await_lease_end(lease)
            self._write()
            time.sleep(self._beat_s / 2)  # of two simultaneous takeovers, the later writer wins
            now = _read(self.path)
            if now.get("token") != self._record["token"]:
                raise self._refusal(now)
        self._write()

    def _wait_for_flock(self, deadline: float) -> None:
        while not self._try_flock():
            lease = _read(self.path)
            if lease.get("boot") == self._record["boot"]:
                if _launcher_lives(lease) and lease.get("state") != "stopping":
                    raise self._refusal(lease)
            elif lease and lease.get("state") != "stopping":
                self._await_lease_end(lease)
            if time.monotonic() >= deadline:
                raise self._refusal(lease)
            self._announce(f"{self.path.parent}: waiting for the workers of {_who(lease)} to end")
            time.sleep(POLL_S)

    def _try_flock(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            lease = _read(self.path)  # no flock on this file system: the lease decides on this host too
            return not (lease.get("boot") == self._record["boot"] and _launcher_lives(lease))
        return True

    def _await_lease_end(self, lease: Record) -> None:
        """Wait until the lease of another host is proved dead or released."""
        dead_at = time.monotonic() + MISSED_BEATS * self._beat_s
        while time.monotonic() < dead_at:
            self._announce(f"{self.path.parent}: watching whether {_who(lease)} is still alive")
            time.sleep(min(POLL_S, self._beat_s / 4))
            now = _read(self.path)
            if not now:
                return
            if "raw" in now:
                continue
            if now != lease and now.get("state") != "stopping":
                raise self._refusal(now)
            if now != lease:
                lease, dead_at = now, time.monotonic() + MISSED_BEATS * self._beat_s

    def _refusal(self, lease: Record) -> RunFolderError:
        return RunFolderError(
            f"{self.path.parent}: another launch is {lease.get('state', 'training')} in this folder ({_who(lease)}); "
            "wait for that run, stop it, or choose another run.dir"
        )

    def _not_writable(self, error: OSError) -> RunFolderError:
        fix = fix_of_writing(str(error), "set run.dir or run.root to a folder that can be written and has room")
        return RunFolderError(f"{self.path.parent}: its lock file cannot be written ({error.strerror}); {fix}")

    def _announce(self, line: str) -> None:
        if not self._announced:
            self._announced = True
            self._tell(line)

    def _keep_beating(self) -> None:
        while not self._released.wait(self._beat_s):
            self._beat()

    def _beat(self) -> None:
        with self._write_lock:
            if self._released.is_set() or self._lost:
                return
            try:
                lease = _read(self.path)
                if lease.get("token") == self._record["token"]:
                    self._record["beat"] = int(str(self._record["beat"])) + 1
                    self._write()
                else:
                    taken = f"{_who(lease)} took its folder over" if lease else "its lock file was removed"
                    self._lost = f"{self.path.parent}: this run ends: {taken}"
            except OSError as error:  # a full disk or an unreachable server: the next beat may succeed
                print_line(f"{self.path}: cannot renew the lock's lease: {error}", file=sys.stderr)

    def _write(self) -> None:
        text = json.dumps(self._record)
        os.pwrite(self.fd, text.ljust(RECORD_BYTES).encode(), 0)  # in place: a rename hides from NFS caches
        os.fsync(self.fd)


def is_held(path: Path) -> bool:
    """Whether a local process or another host's lease has this lock, without waiting; :class:`RunLock` decides."""
    try:
        check_plain(path)  # the folder may be another user's
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, NotPlainError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    lease = _read(path)
    return bool(lease) and lease.get("boot") != boot_id()


def boot_id() -> str:
    """ID of this boot of this machine, which a host name does not identify."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def process_identity(pid: int) -> str:
    """Unique identity of a process: PIDs are reused, and repeat between machines."""
    return f"{boot_id()}:{pid}:{_start_time(pid)}"


def _read(path: Path) -> Record:
    """The present lease, from a newly opened file, because NFS refreshes on open; empty if nobody holds it."""
    try:
        text = read_bytes(path, MAX_LOCK_BYTES).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return {}
    if not text:
        return {}
    try:
        record = json.loads(text)
    except ValueError:
        return {"host": "another host", "raw": text}  # read between two writes; the next read is whole
    return record if isinstance(record, dict) else {}


def _who(lease: Record) -> str:
    return f"process {lease.get('pid', '?')} on {lease.get('host', 'another host')}"


def _launcher_lives(lease: Record) -> bool:
    start = _start_time(int(str(lease.get("pid", 0))))
    return start != "" and start == lease.get("start")


def _start_time(pid: int) -> str:
    """Start of process ``pid`` in clock ticks since boot; empty if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]
