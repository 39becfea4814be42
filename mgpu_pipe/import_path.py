"""Keeps the working folder off the module search path until a configuration names a class in it.

``python -m`` and ``python -c`` search the working folder first, so anyone who writes into a shared folder runs code as
its users. Searched last, it would still provide modules that are not installed. This file is also the program that
starts every process of this package: ``python import_path.py MODULE ARGUMENTS ...`` runs MODULE of the package that
holds this file. It imports only modules that the interpreter has already loaded.
"""

import os
import sys

SAFE_PATH = ["-P"] if sys.version_info >= (3, 11) else []
"""Option that keeps child processes by ``-m`` or ``-c`` from the working folder too; Python 3.10 lacks it."""
AS_TEXT = 'import sys; "" in sys.path[:1] and sys.path.append(sys.path.pop(0)); from {} import run_module; run_module()'
"""Program text for another interpreter, which may find this package elsewhere."""


FILE = os.path.abspath(__file__)
_dropped = _own_classes = False


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a ``module`` with this process's interpreter and this very package."""
    return [sys.executable, *SAFE_PATH, FILE, module, *arguments]


def other_python_module(python: str, module: str) -> list[str]:
    """The command that runs a ``module`` with another interpreter, which has this package."""
    return [python, "-c", AS_TEXT.format("mgpu_pipe.import_path"), module]


def drop_first_folder() -> None:
    """Drop the folder that the interpreter put first: the working folder under ``-m``, or a script's own folder."""
    global _dropped
    if not (_dropped or getattr(sys.flags, "safe_path", bool(sys.flags.isolated))):
        del sys.path[0]
    _dropped = True


def allow_own_classes() -> None:
    """Allow the classes that a configuration names to be in the working folder; other modules there stay hidden."""
    global _own_classes
    _own_classes = True


def own_folders() -> list[str]:
    """Folders of users' own classes in addition to ``sys.path``: the working folder, where that is allowed."""
    try:
        return [os.getcwd()] if _own_classes else []
    except FileNotFoundError:  # it was deleted
        return []


def append_own_folders() -> None:
    """Search users' own folders too, after all others; called when one of their classes is imported."""
    sys.path += [folder for folder in own_folders() if folder not in sys.path]


def run_module() -> None:
    """Run the module that ``sys.argv`` names, with the words after it."""
    from runpy import run_module

    del sys.argv[0]
    if "" in sys.path[-1:]:
        del sys.path[-1]
    run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _import_package() -> None:
    """Import the package of this file, wherever it lies, without looking for other modules there."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    folder, name = os.path.split(os.path.dirname(FILE))
    spec = PathFinder.find_spec(name, [folder])
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    sys.modules[f"{name}.import_path"] = sys.modules[__name__]


if __name__ == "__main__":
    drop_first_folder()
    _import_package()
    run_module()
