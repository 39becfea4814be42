"""Which raw settings DeepSpeed has, read from its source. Neither torch nor DeepSpeed is imported.

DeepSpeed takes an unknown setting at the top level in silence, and refuses one below ``zero_optimization`` only once a
worker has imported it.
"""

from __future__ import annotations

import ast
import functools
from importlib.machinery import PathFinder
from pathlib import Path

from mgpu_pipe.config.suggest import choose_from

ZERO = "zero_optimization"
TOP_LEVEL = (
    ZERO,
    "aio",
    "comet",
    "comms_logger",
    "csv_monitor",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "flops_profiler",
    "log_level",
    "memory_breakdown",
    "steps_per_print",
    "tensorboard",
    "timers",
    "wall_clock_breakdown",
    "wandb",
)
"""Settings at the top that mean something here, besides those that this project owns or does not support."""
CLASSES = {
    "": ("runtime/zero/config.py", "DeepSpeedZeroConfig"),
    "offload_param": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"),
    "offload_optimizer": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig"),
}
"""Node below ``zero_optimization`` -> the file and class that has its fields (checked against DeepSpeed 0.19)."""


def unknown_setting(name: str) -> str | None:
    """What to use instead of the raw setting ``name`` (dotted); None where DeepSpeed has it, or it is not known."""
    top, _, below = name.partition(".")
    if top != ZERO:
        return None if top in TOP_LEVEL else choose_from(top, TOP_LEVEL)
    node, _, rest = below.partition(".")
    for section, word in (("", node), (node, rest)):
        fields = _fields(section) if word and section in CLASSES else frozenset()
        if fields and word not in fields:
            return choose_from(word, fields)
    return None


@functools.lru_cache(maxsize=None)
def _fields(section: str) -> frozenset[str]:
    """Names and aliases of a node's fields; none where DeepSpeed's source is not as expected."""
    spec = PathFinder.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    file, name = CLASSES[section]
    path = Path(spec.submodule_search_locations[0]) / file
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return frozenset()
    node = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name), None)
    names: set[str] = set()
    for entry in node.body if node is not None else []:
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            names.add(entry.target.id)
            for word in entry.value.keywords if isinstance(entry.value, ast.Call) else []:
                if word.arg == "alias" and isinstance(word.value, ast.Constant):
                    names.add(str(word.value.value))
    return frozenset(names)
