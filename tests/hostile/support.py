"""A hostile folder is given to the program, forked, and what it touched is watched by the kernel (inotify).

Everything that a trick may want lies in ``outside``: files to read, the place where a payload leaves its mark. No file
there may be opened, made or changed, by whatever part of the program, its libraries or its children.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import REPOSITORY
from tests.support.program import ForkedProgram

OPENED, MADE_OR_CHANGED = 0x20, 0x2 | 0x4 | 0x40 | 0x80 | 0x100 | 0x200
WATCHDOG_S, PROCESSOR_S = 120, 20
SECRET = "canary-of-the-environment"
LINES = ("error: ", "note: ", "damaged: ", "run ", "checkpoint of step ")
OPENERS = (("generate", "--prompt", "x"), ("eval",), ("chat",), ("export", "--out", "new"))
"""Verbs that open a run or a model, and what they need."""
_libc = ctypes.CDLL(None, use_errno=True)


class Watch:
    """What happens in a folder and those below it from now on."""

    def __init__(self, root: Path) -> None:
        self._fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._folders = {
            _libc.inotify_add_watch(self._fd, os.fsencode(folder), OPENED | MADE_OR_CHANGED): folder
            for folder in [root, *(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())]
        }

    def events(self) -> list[str]:
        found = []
        try:
            data = os.read(self._fd, 1 << 20)
        except BlockingIOError:
            data = b""
        while data:
            number, mask, _, length = struct.unpack_from("iIII", data)
            name = data[16 : 16 + length].rstrip(b"\0").decode()
            found.append(f"{self._folders[number] / name} ({mask:#x})")
            data = data[16 + length :]
        os.close(self._fd)
        return found


def outside(folder: Path) -> Path:
    """What no trick may reach."""
    (folder / "sub").mkdir(parents=True)
    for name in ("secret.txt", "secret.json", "secret.yaml", "sub/secret.txt"):
        (folder / name).write_text('{"secret": "do not read"}\n')
    return folder


def code(target: Path) -> str:
    """Python that leaves a mark outside when it is run."""
    return f"open({str(target / 'EXECUTED')!r}, 'w').write('x')\n"


def cases(tricks: Iterable[str], further: str) -> list[Any]:
    """Every trick as a parameter; those named in ``further`` are siblings that `make test-all` alone tries."""
    extra = set(further.split())
    assert extra <= set(tricks), extra - set(tricks)
    return [pytest.param(name, marks=pytest.mark.exhaustive) if name in extra else name for name in tricks]


def sparse(path: Path, size: int) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def replaced_by_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def replaced_by_link(path: Path, target: Path | str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def attempt(arguments: Sequence[str], cwd: Path, cache: Path, forbidden: Path) -> tuple[int, str]:
    """Run the program; it must end, as a line or harmlessly, having touched nothing outside.

    Returns:
        Its exit code, and all it said.
    """
    home = cwd / "home"
    home.mkdir(exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "MGPU_PIPE_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
        "SECRET_NAME": SECRET,
        "HF_HUB_OFFLINE": "1",
    }
    watch = Watch(forbidden)
    program = ForkedProgram(arguments, cwd, environment)
    resource.prlimit(program.pid, resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S))
    out, err = program.communicate(WATCHDOG_S)
    said = out + err
    assert watch.events() == [], said
    assert "Traceback" not in said, said
    assert program.returncode in (0, 1, 2), f"exit code {program.returncode}\n{said}"
    assert "\x1b" not in said and SECRET not in said, said
    if program.returncode == 2:
        lines = err.strip().splitlines()
        assert lines and all(line.startswith(LINES) for line in lines), said
        assert len(lines) <= 45 and max(map(len, lines)) < 3000, said
    return program.returncode, said


def refused_early(
    tricks: Mapping[str, tuple[Callable[[Path, Path], object], Sequence[str], int | None]],
    late: Collection[str],
    made: Path,
    place: Path,
    cache: Path,
) -> None:
    """Every trick that a verb refuses which opens a folder, but ``late`` ones, is refused before anything slow is
    imported; the verbs that need the model take turns."""
    turns, commands = cycle(OPENERS), {}
    for name, (change, (verb, *_), ended) in tricks.items():
        if verb not in [opener for opener, *_ in OPENERS] or ended != 2 or name in late:
            continue
        folder, forbidden = Path(shutil.copytree(made, place / name)), outside(place / f"outside-{name}")
        change(folder, forbidden)
        verb, *words = (verb,) if verb == "eval" else next(turns)
        commands[name] = [verb, str(folder), *words]
    assert set(late) <= set(tricks)
    found = slow_imports(list(commands.values()), place, cache)
    wrong = {name: told for name, told in zip(commands, found, strict=True) if told != (2, [])}
    assert not wrong, wrong


def slow_imports(commands: Sequence[Sequence[str]], cwd: Path, cache: Path) -> list[tuple[int, list[str]]]:
    """Give each command to a process forked from one new interpreter; its exit code, and what it imported that takes
    seconds."""
    program = textwrap.dedent(f"""
        import io, json, os, sys
        from mgpu_pipe.cli.main import main
        from mgpu_pipe.config.hydra.compose import compose
        compose()  # what most of them import, once for all
        for words in {[list(words) for words in commands]!r}:
            pid = os.fork()
            if pid:
                os.waitpid(pid, 0)
                continue
            sys.stdout, out = io.StringIO(), sys.stdout
            code = main(words)
            slow = sorted({{"torch", "transformers", "pytorch_lightning"}} & set(sys.modules))
            print(json.dumps([code, slow]), file=out, flush=True)
            os._exit(0)
    """)
    known = {"PATH": os.environ["PATH"], "HOME": str(cwd), "MGPU_PIPE_CACHE": str(cache), "PYTHONPATH": str(REPOSITORY)}
    told = subprocess.run([sys.executable, "-c", program], cwd=cwd, env=known, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    return [(code, modules) for code, modules in map(json.loads, told.stdout.splitlines())]
