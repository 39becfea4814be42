"""Which checkpoints stay. Torch-free; one process calls it, after a save was committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mgpu_pipe.checkpoint import layout
from mgpu_pipe.checkpoint.ruined import ruined_steps
from mgpu_pipe.checkpoint.select import list_steps


def kept(
    steps: Sequence[int],
    keep_last: int,
    keep_every: int | None = None,
    best_steps: Sequence[int] = (),
    followed_before: int | None = None,
) -> Mapping[int, str]:
    """The steps that stay, each with why: ``last``, ``followed``, ``every N`` or ``best``.

    Weights can be finite and ruined all the same, which the next step shows. So the newest checkpoint that a finite
    step followed stays until a newer one was followed by one too.

    Args:
        steps: whole checkpoints, ascending. The newest always stays; ``keep_last=0`` keeps all.
        followed_before: a finite step followed each of ``steps`` below this one; None: each but the newest.
    """
    last = steps if keep_last == 0 else steps[-max(1, keep_last) :]
    reasons = dict.fromkeys(last, "last")
    for step in followed(steps, followed_before)[-1:]:
        reasons.setdefault(step, "followed")
    if keep_every:
        reasons.update(
            {step: f"every {keep_every}" for step in steps if step % keep_every == 0 and step not in reasons}
        )
    reasons.update({step: "best" for step in best_steps if step in steps and step not in reasons})
    return reasons


def followed(steps: Sequence[int], before: int | None = None) -> Sequence[int]:
    """Those of ``steps``, ascending, that a finite step followed; ``before`` as in :func:`kept`."""
    return steps[:-1] if before is None else [step for step in steps if step < before]


def best(metrics: Mapping[int, float | None], count: int, highest: bool = False) -> list[int]:
    """The ``count`` steps with the lowest metric (or the highest), the best first; of equals the earlier. Steps
    without it do not count.
    """
    sign = -1 if highest else 1
    ranked = sorted((sign * value, step) for step, value in metrics.items() if value is not None)
    return [step for _, step in ranked[:count]]


def prune(
    root: Path,
    keep_last: int,
    keep_every: int | None = None,
    best_steps: Sequence[int] = (),
    newest: int | None = None,
    followed_before: int | None = None,
) -> list[int]:
    """Delete the checkpoints that nothing asks to keep.

    Kept: the newest ``keep_last`` (0 keeps all), the multiples of ``keep_every``, the ``best_steps``, and always the
    newest and the newest that a finite step followed (see :func:`kept`). Only checkpoints that are whole and not
    known to be ruined count, and only those are deleted: others neither take a good one's place nor vanish before
    somebody looked at them. A deleted step is first renamed out of sight.

    Args:
        newest: the step that was just saved. Later ones belong to a past that the run did not continue: their content
            is damaged, which their sizes do not show. They stay, and do not count.

    Returns:
        The deleted steps, ascending.

    Raises:
        OSError: one cannot be deleted.
    """
    if keep_last == 0:
        return []
    steps = [info.step for info in list_steps(root, verify="size") if info.whole]
    ruined = ruined_steps(root)
    steps = [step for step in steps if (newest is None or step <= newest) and step not in ruined]
    staying = kept(steps, keep_last, keep_every, best_steps, followed_before)
    doomed = [step for step in steps if step not in staying]
    for step in doomed:
        layout.delete(root, step)
    return doomed
