"""Settings and task files of an evaluation by lm-eval; imports neither torch nor lm-eval."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

import yaml

from mgpu_pipe.errors import BadInputError

INSTALL = "pip install 'mgpu_pipe[harness]'"


@dataclass(frozen=True)
class HarnessSettings:
    """Settings of an evaluation.

    Attributes:
        model: folder of the step or the model.
        tasks: names of tasks or groups.
        paths: folders of task files.
        runs_code: whether task files may name Python code.
        limit: most samples of a task; None for all.
        few_shot: examples before a question; None for the task's own number.
        average: whether the weights are the average (``--weights ema``).
    """

    model: Path
    tasks: list[str]
    paths: list[str] = field(default_factory=list)
    runs_code: bool = False
    batch_size: int = 8
    limit: int | None = None
    few_shot: int | None = None
    average: bool = False
    frozen_weights: Path | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> HarnessSettings:
        values = json.loads(text)
        frozen = values["frozen_weights"]
        paths = {"model": Path(values["model"]), "frozen_weights": None if frozen is None else Path(frozen)}
        return cls(**{**values, **paths})


def require_harness() -> None:
    """Raise BadInputError where lm-eval is not installed."""
    if find_spec("lm_eval") is None:
        raise BadInputError(f"--harness: needs the package lm-eval; install it: {INSTALL}")


def stay_offline() -> None:
    """Keep libraries from downloading, unless the user's environment allows it; before they are imported."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")


CODE = "!function"


def check_task_files(folders: list[Path]) -> None:
    """Refuse task files that name Python code, or include such a file; BadInputError names file and line."""
    for folder in folders:
        if not folder.is_dir():
            raise BadInputError(f"--harness-path={folder}: no such folder; give a folder of task files (.yaml)")
        read: set[Path] = set()
        for file in sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
            _check(file.resolve(), read)


def _check(file: Path, read: set[Path]) -> None:
    if file in read:
        return
    read.add(file)
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInputError(f"{file}: cannot be read as YAML ({' '.join(str(error).split())}); correct it") from error
    for node in _nodes(root):
        if node.tag.startswith(CODE):
            raise BadInputError(
                f"{file}:{node.start_mark.line + 1}: names code ({node.tag} {node.value}), which would run as you; "
                "read it, then add --harness-code"
            )
    for name in _list_included(root):
        _check((file.parent / name).resolve(), read)


def _nodes(root: yaml.Node | None) -> Iterator[yaml.Node]:
    """Every node below ``root``; a node that YAML aliases share comes once."""
    waiting, seen = [root] if root is not None else [], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.MappingNode):
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def _list_included(root: yaml.Node | None) -> list[str]:
    """The files that a task file includes."""
    if not isinstance(root, yaml.MappingNode):
        return []
    values = [value for key, value in root.value if key.value == "include"]
    return [str(node.value) for value in values for node in _nodes(value) if isinstance(node, yaml.ScalarNode)]
