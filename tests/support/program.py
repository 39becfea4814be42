"""Whole runs of the program without waiting for imports: launcher and workers are forked from the preloaded server.

They are processes of their own with the program's own ``main``: launched, supervised, signalled and reaped as ever.
Left out is the interpreter's start (4 seconds of processor time a worker), and a worker computes in one thread. Tests
of starting, and those that look at processes' command lines, start the real program (tests/support/command.py,
tests/launch).
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from mgpu_pipe import import_path
from mgpu_pipe.launch.signals import STOP_SIGNALS
from tests.support.processes import preloaded


class ForkedWorker:
    """In the place of the launcher's subprocess.Popen: a module of the package without a new interpreter."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        start_new_session: bool,
    ) -> None:
        module = module_in(argv)
        assert stdin == subprocess.DEVNULL and stdout is stderr
        sys.stdout.flush()
        sys.stderr.flush()
        in_its_session, until_then = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if start_new_session:
                    os.setsid()
                os.close(until_then)
                signal.set_wakeup_fd(-1)
                for number in (*STOP_SIGNALS, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_DFL)
                _take_over(stdout.fileno(), stdout.fileno(), env)
                _give_up_descriptors(pass_fds)
                sys.argv = list(argv[module:])
                runpy.run_module(argv[module], run_name="__main__", alter_sys=True)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(1)  # the program leaves by itself
        os.close(until_then)
        os.read(in_its_session, 1)  # as Popen: whoever gets to know of a process finds it in its own group
        os.close(in_its_session)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def module_in(command: Sequence[str]) -> int:
    """Where a command names the module that it runs; the words after it are the module's."""
    assert sys.executable in command
    return list(command).index(import_path.FILE) + 1


def _take_over(out: int, error: int, environment: Mapping[str, str]) -> None:
    """Give this process the streams and the environment that a new program would have."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(error, 2)
    os.environ.clear()
    os.environ.update(environment)
    for folder in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))
    if "huggingface_hub.constants" in sys.modules:  # it reads the environment once, when it is imported
        importlib.reload(sys.modules["huggingface_hub.constants"])
    if fetching := sys.modules.get("huggingface_hub.file_download"):
        fetching.time = types.SimpleNamespace(sleep=lambda _: None)  # type: ignore[attr-defined]  # before further tries


def _give_up_descriptors(kept: Sequence[int]) -> None:
    """What a new program would not inherit. Replaced, not closed: objects of this process may still close them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in kept:
            os.dup2(nothing, fd)


def forked_engine(argv: Sequence[str], **options: Any) -> Any:
    """In the place of a server's subprocess.Popen: the package's own server without a new interpreter."""
    if import_path.FILE not in argv:  # the program of another engine
        return subprocess.Popen(argv, **options)
    ours, theirs = os.pipe()
    with open(theirs, "wb") as out:
        engine: Any = ForkedWorker(argv, **{**options, "stdout": out, "stderr": out})
    engine.stdout = os.fdopen(ours, "rb")
    return engine


def forked_module(
    command: Sequence[str],
    *,
    input: str | bytes = b"",
    env: Mapping[str, str] = os.environ,
    text: bool = False,
    **kept: Any,
) -> Any:
    """In the place of subprocess.run: a module of the package, such as an export's check, without a new interpreter."""
    module = module_in(command)
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as told:
        given.write(input.encode() if isinstance(input, str) else input)
        given.seek(0)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _take_over(out.fileno(), told.fileno(), env)
                os.dup2(given.fileno(), 0)
                sys.stdin = os.fdopen(0, closefd=False)
                sys.argv = list(command[module:])
                runpy.run_module(command[module], run_name="__main__", alter_sys=True)
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for stream in (out, told):
            stream.seek(0)
        written = [stream.read() for stream in (out, told)]
        return subprocess.CompletedProcess(command, code, *([each.decode() for each in written] if text else written))


def check_from_server(command: Sequence[str], *, input: bytes, env: Mapping[str, str], **kept: Any) -> Any:
    """In the place of the export's subprocess.run: its check in a process forked from the preloaded server, which knows
    nothing of the test's own process."""
    with tempfile.TemporaryDirectory() as folder:
        given, told = Path(folder) / "given", Path(folder) / "told"
        given.write_bytes(input)
        process = preloaded().Process(target=_check, args=(list(command), dict(env), str(given), str(told)))
        process.start()
        process.join()
        return subprocess.CompletedProcess(command, process.exitcode, b"", told.read_bytes())


def _check(command: list[str], environment: dict[str, str], given: str, told: str) -> None:
    out = os.open(told, os.O_WRONLY | os.O_CREAT)
    _take_over(out, out, environment)
    os.dup2(os.open(given, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0, closefd=False)
    module = module_in(command)
    sys.argv = command[module:]
    runpy.run_module(command[module], run_name="__main__", alter_sys=True)


def forked_verb(command: Sequence[str], *, check: bool, stdout: IO[str]) -> None:
    """In the place of the subprocess.run that exports what a run starts from."""
    pid = os.fork()
    if pid == 0:
        os.dup2(stdout.fileno(), 1)
        sys.argv = ["mgpu-pipe", *command[module_in(command) + 1 :]]
        importlib.import_module("mgpu_pipe.__main__").program()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if check and code:
        raise subprocess.CalledProcessError(code, list(command))


def _entry(
    program: Callable[[list[str]], None],
    arguments: list[str],
    cwd: str,
    environment: dict[str, str],
    out: str,
    error: str,
) -> None:
    os.chdir(cwd)
    streams = [os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) for path in (out, error)]
    _take_over(streams[0], streams[1], environment)
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # tells where a program hangs
    from mgpu_pipe.checks import optimizer
    from mgpu_pipe.inference import export_folder as export
    from mgpu_pipe.inference import export_gguf
    from mgpu_pipe.launch import base_run, fork_server, workers
    from mgpu_pipe.serving import engine_process, prepare
    from mgpu_pipe.system import hardware

    substitute: Any = types.SimpleNamespace(Popen=ForkedWorker, DEVNULL=subprocess.DEVNULL)
    workers.subprocess = fork_server.subprocess = substitute
    hardware.cpu_cores = lambda: 1  # two threads on cores that others use wait more than they compute
    base_run.subprocess = types.SimpleNamespace(run=forked_verb)  # type: ignore[assignment]
    modules: Any = types.SimpleNamespace(run=forked_module, TimeoutExpired=subprocess.TimeoutExpired)
    export.subprocess = export_gguf.subprocess = optimizer.subprocess = prepare.subprocess = modules
    engines: Any = types.SimpleNamespace(**{**vars(subprocess), "Popen": forked_engine})
    engine_process.subprocess = engines
    program(arguments)


def command_line(arguments: list[str]) -> None:
    """``mgpu-pipe <arguments>``."""
    from mgpu_pipe import __main__

    sys.argv = ["mgpu-pipe", *arguments]
    __main__.program()


def python(arguments: list[str]) -> None:
    """``python <arguments>``: ``-m`` and a module, or a file, and their words."""
    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(arguments[0])))
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


class ForkedProgram:
    """``mgpu-pipe <arguments>`` under way, in ``cwd`` and with exactly this ``environment``; much of what Popen has."""

    def __init__(
        self,
        arguments: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        program: Callable[[list[str]], None] = command_line,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [str(Path(self._folder.name) / name) for name in ("out", "err")]
        for path in self._streams:
            Path(path).touch()  # it may be killed before it opens them
        self._process = preloaded().Process(
            target=_entry, args=(program, list(arguments), str(cwd), dict(environment), *self._streams)
        )
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self._process.join()

    def wait(self, timeout: float) -> int | None:
        self._process.join(timeout)
        return self.returncode

    def first_lines(self, count: int) -> list[str]:
        """The first lines that it writes to stdout, waited for; fewer where it ends."""
        while True:
            ended = self.returncode is not None
            lines = Path(self._streams[0]).read_text(errors="replace").splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            if ended or len(whole) >= count:
                return whole[:count]
            time.sleep(0.05)

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait for the end; what it wrote to stdout and stderr."""
        self._process.join(timeout)
        ended = self.returncode is not None
        if not ended:
            self.send_signal(signal.SIGUSR2)
            time.sleep(1.0)
        self.kill()
        out, err = (Path(path).read_text(errors="replace") for path in self._streams)
        assert ended, f"still running after {timeout} s\n{out[-3000:]}\n{err[-3000:]}"
        return out, err


def run_program(
    arguments: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    timeout: float,
    program: Callable[[list[str]], None] = command_line,
) -> subprocess.CompletedProcess[str]:
    """Run ``mgpu-pipe <arguments>`` to its end, in ``cwd`` and with exactly this ``environment``."""
    process = ForkedProgram(arguments, cwd, environment, program)
    out, err = process.communicate(timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess(list(arguments), process.returncode, out, err)
