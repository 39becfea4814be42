"""Which checkpoints stay. Torch-free; one process calls it, after a save was committed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mgpu_pipe.checkpoint import layout
from mgpu_pipe.checkpoint.select import list_steps


def prune(root: Path, keep_last: int, keep_every: int | None = None, best_steps: Sequence[int] = ()) -> list[int]:
    """Delete the checkpoints that nothing asks to keep.

    Kept: the newest ``keep_last`` (0 keeps all), the multiples of ``keep_every``, the ``best_steps``, and always the
    newest. Only checkpoints that are whole count and only those are deleted: a damaged one neither takes a good
    one's place nor vanishes before somebody looked at it. A deleted step is first renamed out of sight.

    Returns:
        The deleted steps, ascending.

    Raises:
        OSError: one cannot be deleted.
    """
    if keep_last == 0:
        return []
    steps = [info.step for info in list_steps(root, verify="size") if info.valid]
    kept = {*steps[-max(1, keep_last) :], *best_steps}
    if keep_every:
        kept.update(step for step in steps if step % keep_every == 0)
    doomed = [step for step in steps if step not in kept]
    for step in doomed:
        layout.delete(root, step)
    return doomed
