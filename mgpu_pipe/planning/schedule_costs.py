"""Costs of pipeline schedules: micro-batches whose activations a rank keeps, and seconds in which it waits.

They are closed forms of the streams of :mod:`mgpu_pipe.parallel.pipeline.work_order`: a search needs no simulation.
"""

from __future__ import annotations

from mgpu_pipe.planning.work import Numbers, choose, maximum, minimum


def passes_in_flight(schedule: str, rank: Numbers, pp: Numbers, stages: Numbers, micro_batches: Numbers) -> Numbers:
    """The most micro-batches of all its layers whose activations a pipeline rank keeps.

    A split backward pass keeps them until the gradients of weights are there.

    Args:
        schedule: name of the schedule.
        stages: stages of each rank; a fraction of a micro-batch is in some of them.
    """
    left = pp - 1 - rank
    most = {
        "gpipe": micro_batches * stages,
        "1f1b": left + 1,
        "interleaved_1f1b": (stages - 1) * pp + 2 * left + 1,
        "interleaved_zero_bubble": stages * pp,
        "zbv": 2 * pp,
        "dualpipev": 2 * pp + 1,
    }[schedule]
    return minimum(most, micro_batches * stages) / stages


GRADIENT_SHARE = 0.5
"""Bytes of gradients that wait for those of weights, over the activations that they wait with; about, in a trace."""


def waiting_passes(schedule: str, rank: Numbers, pp: Numbers) -> Numbers:
    """Passes of a stage at a rank's peak that have gradients of inputs and none of weights.

    ZB-V's rank peaks late, where it keeps fewer passes and all of them wait; they count here as if it kept all.
    DualPipeV's wait after the peak.
    """
    if schedule == "interleaved_zero_bubble":
        return rank + 1.0
    if schedule == "zbv":
        late = 2 * rank + 1
        return maximum(1.0, late - (2 * pp - late) / GRADIENT_SHARE)
    return 0.0 * rank


def bubble(
    schedule: str, pp: Numbers, micro_batches: Numbers, forward: Numbers, inputs: Numbers, weights: Numbers
) -> Numbers:
    """Seconds that a pipeline rank waits in a step, over ``pp - 1``.

    Those of 1F1B are in section 2.2 of arXiv:2104.04473 and those of ZB-H1 in table 2 of arXiv:2401.10241. Those of
    ZB-V and DualPipeV are exact where ``weights <= forward <= inputs``.

    Args:
        schedule: name of the schedule.
        forward: seconds of a stage's forward pass.
        inputs: seconds of the gradients of its inputs.
        weights: seconds of the gradients of its weights.
    """
    if schedule == "interleaved_zero_bubble":
        return maximum(forward + inputs - weights, inputs)
    if schedule == "zbv":
        return choose(micro_batches < 2 * pp - 1, 2 * inputs, maximum(inputs, 2 * (inputs - weights)))
    if schedule == "dualpipev":
        late = 2 * inputs - weights - forward / maximum(1, pp - 1)
        return maximum(maximum(forward + inputs - weights, inputs), late)
    return forward + inputs + weights
