"""The safe build of `_target_` leaves. Oracle: Python's own issubclass and signatures; a file that must not appear."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mgpu_pipe.checks.slots import CALLBACK_BASE, LOGGER_BASE, OPTIMIZER_BASE
from mgpu_pipe.config.targets.build_target import build, check_target, resolve_target
from mgpu_pipe.errors import ConfigErrors

DANGEROUS = [
    *("os.system", "builtins.eval", "builtins.exec", "logging.os.system", "subprocess.Popen", "subprocess.run", "os"),
    *("shutil.rmtree", "pathlib.Path.unlink", "torch.nn.Linear", "torch.optim", "nosuch.module.Class"),
    *("torch.optim.AdamWW", "", "..", "torch..AdamW"),
]


def words(node: object, base: str, key: str = "slot", provided: tuple[str, ...] = ()) -> list[str]:
    return [str(error) for error in check_target(node, base, key, provided)]


@pytest.mark.parametrize("target", DANGEROUS)
@pytest.mark.parametrize("base", [OPTIMIZER_BASE, LOGGER_BASE, CALLBACK_BASE])
def test_what_is_no_subclass_is_refused_without_being_called(target: str, base: str) -> None:
    (message,) = words({"_target_": target}, base)
    assert message.startswith(f"slot._target_={target}: ")


def test_a_module_that_is_not_there_is_not_suggested() -> None:
    (message,) = words({"_target_": "nope.Nope"}, OPTIMIZER_BASE)
    assert message == "slot._target_=nope.Nope: no module nope; correct the dotted path"


@pytest.mark.parametrize("target", DANGEROUS)
def test_building_refuses_it_too(target: str) -> None:
    with pytest.raises(ConfigErrors):
        build({"_target_": target}, OPTIMIZER_BASE, "slot")


@pytest.mark.parametrize(
    ("target", "base"),
    [
        ("torch.optim.AdamW", OPTIMIZER_BASE),
        ("torch.optim.SGD", OPTIMIZER_BASE),
        ("torch.optim.adamw.AdamW", OPTIMIZER_BASE),
        ("transformers.optimization.Adafactor", OPTIMIZER_BASE),
        ("pytorch_lightning.loggers.TensorBoardLogger", LOGGER_BASE),
        ("pytorch_lightning.loggers.WandbLogger", LOGGER_BASE),
        ("pytorch_lightning.callbacks.LearningRateMonitor", CALLBACK_BASE),
    ],
)
def test_known_classes_are_judged_without_importing_them(target: str, base: str) -> None:
    program = textwrap.dedent(f"""
        import sys
        from mgpu_pipe.config.targets.build_target import check_target
        print(check_target({{"_target_": {target!r}}}, {base!r}, "slot", ("params", "save_dir")))
        print(sorted({{"torch", "pytorch_lightning", "transformers"}} & set(sys.modules)))
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]"]


def test_every_torch_optimizer_is_judged_as_python_judges_it() -> None:
    import inspect

    import torch

    for name in dir(torch.optim):
        found = getattr(torch.optim, name)
        if isinstance(found, type):
            target, is_optimizer = f"torch.optim.{name}", issubclass(found, torch.optim.Optimizer)
            messages = words({"_target_": target}, OPTIMIZER_BASE, provided=("params", "defaults", "lr"))
            assert (messages == []) == is_optimizer, (target, messages)
        elif inspect.ismodule(found) or callable(found):
            assert words({"_target_": f"torch.optim.{name}"}, OPTIMIZER_BASE), name


def test_arguments_are_checked_against_the_signature() -> None:
    leaf = {"_target_": "pytorch_lightning.callbacks.EarlyStopping", "patiance": 3}
    assert words(leaf, CALLBACK_BASE) == [
        "slot.patiance=3: pytorch_lightning.callbacks.EarlyStopping takes no such argument; did you mean patience?",
        "slot.monitor=null: pytorch_lightning.callbacks.EarlyStopping needs it; give slot.monitor=...",
    ]


def test_text_arguments_are_not_shown_for_they_may_be_secrets() -> None:
    (message,) = words({"_target_": "torch.optim.SGD", "api_key": "s3cr3t"}, OPTIMIZER_BASE, provided=("params",))
    assert "s3cr3t" not in message


@pytest.mark.parametrize("word", ["_partial_", "_args_", "_recursive_", "_convert_"])
def test_hydras_other_words_are_refused(word: str) -> None:
    messages = words({"_target_": "torch.optim.SGD", word: True}, OPTIMIZER_BASE, provided=("params",))
    assert messages == [f"slot.{word}=...: a leaf takes a _target_ and its arguments only; remove it"]


@pytest.mark.parametrize("where", [{"x": {"_target_": "os.system"}}, {"x": [{"y": {"_target_": "os.system"}}]}])
def test_a_nested_target_is_refused(where: dict) -> None:
    leaf = {"_target_": "pytorch_lightning.loggers.TensorBoardLogger", **where}
    (message,) = words(leaf, LOGGER_BASE, provided=("save_dir",))
    assert "_target_ stands in declared slots only" in message


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's package: importing its top writes a file, so that an import that nobody needs is seen."""
    folder = tmp_path / "users_package"
    folder.mkdir()
    (folder / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n")
    (folder / "parts.py").write_text(
        textwrap.dedent("""
        import torch as t
        from torch.optim import SGD as Plain
        from os import system
        def make(*args): raise RuntimeError("called")
        class Mine(t.optim.Optimizer):
            def __init__(self, params, lr, strength=1.0):
                super().__init__(params, {"lr": lr})
        class Child(Plain):
            class Inner(Plain): ...
        class Alone:
            def __init__(self): raise RuntimeError("called")
        Alias = Mine
        made = type("Made", (Plain,), {})
        instance = make
    """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["Mine", "Child", "Alias", "Child.Inner"])
def test_a_users_class_is_judged_from_its_source(package: Path, name: str) -> None:
    assert words({"_target_": f"users_package.parts.{name}"}, OPTIMIZER_BASE, provided=("params", "lr")) == []
    assert not (package / "imported").exists()


@pytest.mark.parametrize("name", ["make", "Alone", "system", "Plain2", "t.optim.SGD", "t"])
def test_a_users_other_names_are_refused_without_import(package: Path, name: str) -> None:
    assert len(words({"_target_": f"users_package.parts.{name}"}, OPTIMIZER_BASE, provided=("params",))) == 1
    if name != "system":  # its source is compiled: the module that names it is imported, nothing is called
        assert not (package / "imported").exists()


def test_a_class_made_at_run_time_is_imported_and_judged(package: Path) -> None:
    assert words({"_target_": "users_package.parts.made"}, OPTIMIZER_BASE, provided=("params",)) == []
    (message,) = words({"_target_": "users_package.parts.instance"}, OPTIMIZER_BASE)
    assert "a function, not a class" in message
    sys.modules.pop("users_package.parts", None)
    sys.modules.pop("users_package", None)


def test_build_gives_the_object_with_the_frameworks_arguments_and_its_own_first() -> None:
    import torch

    parameter = torch.nn.Parameter(torch.zeros(2))
    leaf = {"_target_": "torch.optim.SGD", "momentum": 0.5, "lr": 0.25}
    made = build(leaf, OPTIMIZER_BASE, "optimizer", params=[parameter], lr=1.0, unknown_extra=3)
    assert type(made) is torch.optim.SGD
    assert (made.defaults["lr"], made.defaults["momentum"]) == (0.25, 0.5)


def test_resolve_takes_the_base_as_a_class() -> None:
    import torch

    found, arguments = resolve_target({"_target_": "torch.optim.SGD", "lr": 1.0}, torch.optim.Optimizer, "optimizer")
    assert (found, arguments) == (torch.optim.SGD, {"lr": 1.0})
    with pytest.raises(ConfigErrors, match="did you mean momentum"):
        resolve_target({"_target_": "torch.optim.SGD", "momentun": 1.0}, torch.optim.Optimizer, "optimizer")


def test_a_constructors_own_refusal_is_one_line() -> None:
    import torch

    parameter = torch.nn.Parameter(torch.zeros(2))
    leaf = {"_target_": "torch.optim.SGD", "momentum": -1.0}
    with pytest.raises(ConfigErrors, match="Invalid momentum value"):
        build(leaf, OPTIMIZER_BASE, "optimizer", params=[parameter], lr=1.0)
