"""Steps that are whole on the disk and that no finite step followed: their weights were ruined already. Torch-free.

``ruined.json`` beside the steps names them with their manifests' root hashes, so that a step that is saved again, with
other content, is not taken for the one before it. A run does not go on from such a step while there is another.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mgpu_pipe.checkpoint import files, layout
from mgpu_pipe.checkpoint.manifest import read_manifest
from mgpu_pipe.checkpoint.strict_json import as_object, as_text, canonical, parse
from mgpu_pipe.config.replace_file import replace_file
from mgpu_pipe.errors import CheckpointError

RUINED = "ruined.json"
MAX_BYTES = 1 << 20


def ruined_steps(root: Path) -> set[int]:
    """The committed steps of a ``checkpoints`` folder whose next step was not finite."""
    return set(_marked(root))


def mark_ruined(root: Path, steps: Iterable[int]) -> None:
    """Remember that the step after each of ``steps`` was not finite. For the process that owns the run.

    Raises:
        OSError: it cannot be written.
    """
    marked = _marked(root)
    for step in steps:
        with suppress(CheckpointError):  # a step that cannot be read is taken by nothing anyway
            marked[step] = read_manifest(layout.committed(root)[step]).root
    replace_file(root / RUINED, canonical({str(step): digest for step, digest in marked.items()}), flush=True)


def _marked(root: Path) -> dict[int, str]:
    """Root hash by step, of the steps that still are what was marked."""
    path = root / RUINED
    if not path.exists():
        return {}
    roots: dict[int, str] = {}
    committed = layout.committed(root)
    with suppress(CheckpointError, ValueError):  # a file that is damaged marks nothing
        for name, digest in as_object(parse(files.read_file(path, MAX_BYTES), str(path)), str(path)).items():
            step = int(name)
            if step in committed and read_manifest(committed[step]).root == as_text(digest, str(path)):
                roots[step] = digest
    return roots
