"""Somebody else's experiments: each file tries to run, read or write something outside. Oracle: the kernel's record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.hostile.support import attempt, cases, code, outside

HYDRA = "# @package _global_\nhydra:\n  mode: MULTIRUN\n"
GLOBAL = "# @package _global_\n"
MARK = "OUT/EXECUTED"
REFUSED = {
    "callback_popen": HYDRA + "  callbacks: {x: {_target_: subprocess.Popen, args: [touch, OUT/EXECUTED]}}",
    "callback_system": HYDRA + "  callbacks: {x: {_target_: os.system, command: touch OUT/EXECUTED}}",
    "callback_open": HYDRA + "  callbacks: {x: {_target_: builtins.open, file: OUT/secret.txt}}",
    "callback_path": HYDRA + "  callbacks: {x: {_target_: pathlib.Path.touch, self: OUT/EXECUTED}}",
    "callback_here": HYDRA + "  callbacks: {x: {_target_: own_code.Mine}}",
    "callback_module": HYDRA + "  callbacks: {x: {_target_: own_code}}",
    "callback_nested": HYDRA + "  callbacks: {x: {_target_: hydra.experimental.callbacks.LogJobReturnCallback,"
    " y: {_target_: os.system, command: touch OUT/EXECUTED}}}",
    "callback_list": HYDRA + "  callbacks: {x: {_target_: hydra.experimental.callbacks.LogJobReturnCallback,"
    " y: [{_target_: os.system, command: touch OUT/EXECUTED}]}}",
    "callback_made": HYDRA + "  callbacks: {x: {_target_: hydra.experimental.callbacks.LogJobReturnCallback,"
    " y: '${oc.create:{_target_: os.system, command: touch OUT/EXECUTED}}'}}",
    "callback_interpolated": HYDRA + "  callbacks: {x: {_target_: '${run.name}'}}\nrun: {name: os.system}",
    "callback_section": HYDRA + "  callbacks: {x: '${callbacks.x}'}\ncallbacks: {x: {_target_: os.system}}",
    "callbacks_whole": HYDRA + "  callbacks: ${callbacks}\ncallbacks: {x: {_target_: os.system}}",
    "callback_partial": HYDRA + "  callbacks: {x: {_target_: functools.partial, _args_: [os.system]}}",
    "callback_hydra_call": HYDRA + "  callbacks: {x: {_target_: hydra.utils.instantiate, config: {_target_: os.x}}}",
    "callback_lightning": HYDRA + "  callbacks: {x: {_target_: pytorch_lightning.Callback}}",
    "callback_number": HYDRA + "  callbacks: {x: 5}",
    "callback_nothing": HYDRA + "  callbacks: {x: {command: touch}}",
    "sweeper": HYDRA + "  sweeper: {_target_: os.system, command: touch OUT/EXECUTED}",
    "sweeper_null": HYDRA + "  sweeper: null",
    "sweeper_callback": HYDRA + "  sweeper: {_target_: hydra.experimental.callbacks.LogJobReturnCallback}",
    "sweeper_params": HYDRA + "  sweeper: {params: {'+hydra.callbacks.x._target_': os.system}}",
    "sweeper_logging": HYDRA + "  sweeper: {params: {'+hydra.job_logging.root.level': DEBUG}}",
    "launcher": HYDRA + "  launcher: {_target_: os.system, command: touch OUT/EXECUTED}",
    "launcher_here": HYDRA + "  launcher: {_target_: own_code.Mine}",
    "job_logging": HYDRA + "  job_logging: {version: 1, root: {handlers: [f]}, handlers: {f: {class:"
    " logging.FileHandler, filename: OUT/EXECUTED}}}",
    "hydra_logging": HYDRA + "  hydra_logging: {version: 1, root: {handlers: [f]}, handlers: {f: {class:"
    " logging.FileHandler, filename: OUT/secret.txt, mode: w}}}",
    "logging_factory": HYDRA + "  job_logging: {version: 1, root: {}, formatters: {f: {(): own_code.Mine}}}",
    "logging_ext": HYDRA + "  job_logging: {version: 1, root: {handlers: [h]}, handlers: {h: {class:"
    " logging.StreamHandler, stream: ext://own_code.Mine}}}",
    "environment": HYDRA + "  job: {env_set: {LD_PRELOAD: OUT/evil.so}}",
    "environment_copy": HYDRA + "  job: {env_copy: [SECRET_NAME]}",
    "environment_copy_missing": HYDRA + "  job: {env_copy: [NO_SUCH_VARIABLE]}",
    "chdir": HYDRA + "  job: {chdir: true}",
    "job_name": HYDRA + "  job: {name: ../../x}",
    "output_subdir": HYDRA + "  output_subdir: ../../../../OUT",
    "slot_system": GLOBAL + "callbacks: {x: {_target_: os.system, command: touch OUT/EXECUTED}}",
    "slot_nested": GLOBAL + "callbacks: {x: {_target_: pytorch_lightning.callbacks.EarlyStopping, monitor:"
    " {_target_: os.system}}}",
    "optimizer": GLOBAL + "optimizer: {_target_: os.system}",
    "no_slot": GLOBAL + "model: {_target_: os.system}",
    "layers": GLOBAL + "model: {config: {num_hidden_layers: 100000000}}",
    "vocabulary": GLOBAL + "model: {config: {vocab_size: 100000000000}}",
    "aliases": GLOBAL
    + "model:\n  config:\n    a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"    {chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)),
    "nested": GLOBAL + "model: {config: {x: " + "[" * 900 + "]" * 900 + "}}",
    "other_environment": GLOBAL + "trainer: {max_steps: '${oc.env:SECRET_NAME}'}",
    "environment_in_a_path": GLOBAL + "data: {source: text_files, paths: ['${oc.env:SECRET_NAME}/*.txt']}",
    "escapes": GLOBAL + 'trainer: {"\\e[31mdevcies": 2}',
}


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, Path]:
    """A working folder with the experiments and a module of theirs, and what they must not reach."""
    forbidden, work = outside(tmp_path / "outside"), tmp_path / "work"
    (work / "exp" / "experiment").mkdir(parents=True)
    (work / "own_code.py").write_text(code(forbidden) + "class Mine:\n    def __init__(self, **_): pass\n")
    return work, forbidden


@pytest.mark.parametrize(
    "trick",
    cases(
        REFUSED,
        """
    callback_open callback_path callback_module callback_list callback_partial callback_hydra_call callback_lightning
    callback_number callback_nothing callback_system sweeper_callback sweeper_logging launcher environment_copy chdir
    slot_nested optimizer hydra_logging""",
    ),
)
def test_an_experiment_is_refused(trick: str, place: tuple[Path, Path]) -> None:
    work, forbidden = place
    (work / "exp" / "experiment" / "x.yaml").write_text(REFUSED[trick].replace("OUT", str(forbidden)))
    ended, said = attempt(["check", "--config-dir", "exp", "experiment=x"], work, work / "cache", forbidden)
    assert ended == 2, said


@pytest.mark.parametrize("entry", ["pkg://own_package", "structured://own_package"])
def test_a_primary_configuration_imports_nothing(entry: str, place: tuple[Path, Path]) -> None:
    work, forbidden = place
    (work / "own_package").mkdir()
    (work / "own_package" / "__init__.py").write_text(code(forbidden))
    (work / "exp" / "mine.yaml").write_text(f"defaults: [config]\nhydra: {{searchpath: ['{entry}']}}\n")
    for verb in (["check"], ["--cfg", "job"]):
        line = [*verb, "--config-dir", "exp", "--config-name", "mine"]
        ended, said = attempt(line, work, work / "cache", forbidden)
        assert ended == 2 and "hydra.searchpath" in said, said


@pytest.mark.parametrize("verb", [["check"], ["--cfg", "job"]])
def test_plug_ins_in_the_working_folder_are_not_run(verb: list[str], place: tuple[Path, Path]) -> None:
    work, forbidden = place
    (work / "hydra_plugins").mkdir()
    (work / "hydra_plugins" / "evil.py").write_text(code(forbidden))
    attempt(verb, work, work / "cache", forbidden)


@pytest.mark.parametrize("typed", ["+hydra.callbacks.x._target_=own.Mine", "+hydra.callbacks={x:{_target_:own.Mine}}"])
def test_a_class_that_was_typed_is_used(typed: str, place: tuple[Path, Path]) -> None:
    work, forbidden = place
    (work / "own.py").write_text(
        "from hydra.experimental.callback import Callback\n"
        "class Mine(Callback):\n    def on_multirun_start(self, **_): print('called')\n"
    )
    ended, said = attempt(["check", "-m", typed], work, work / "cache", forbidden)
    assert ended == 0 and "called" in said, said


@pytest.mark.parametrize(
    "typed",
    [
        *("hydra.sweeper._target_=os.system", "hydra.launcher._target_=os.system"),
        *("+hydra.callbacks.x._target_=os.system", "hydra.launcher._target_=hydra.plugins.sweeper.Sweeper"),
        *("hydra.launcher=null", "+hydra.callbacks.x=5", "hydra.sweeper._target_=no.such.Class"),
        "+hydra.job.env_copy=[NO_SUCH_VARIABLE]",
    ],
)
def test_what_was_typed_fits_its_slot(typed: str, place: tuple[Path, Path]) -> None:
    work, forbidden = place
    ended, said = attempt(["check", "-m", typed], work, work / "cache", forbidden)
    assert ended == 2 and said.count("error: ") == 1, said


@pytest.mark.parametrize("trick", ["link", "above", "pipe", "folder_link"])
def test_a_configuration_file_lies_in_its_folder(trick: str, place: tuple[Path, Path]) -> None:
    work, forbidden = place
    file = work / "exp" / "experiment" / "x.yaml"
    if trick == "link":
        file.symlink_to(forbidden / "secret.yaml")
    elif trick == "above":
        file.write_text("# @package _global_\ndefaults: [../../../outside/secret]\n")
    elif trick == "pipe":
        os.mkfifo(file)
    else:
        file.parent.rmdir()
        file.parent.symlink_to(forbidden)
    name = "secret" if trick == "folder_link" else "x"
    ended, said = attempt(["check", "--config-dir", "exp", f"experiment={name}"], work, work / "cache", forbidden)
    assert ended == 2, said
