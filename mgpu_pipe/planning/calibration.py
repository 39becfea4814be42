"""A hardware profile from measurements of a machine: figures by the best of them, constants by a fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from mgpu_pipe.planning.hardware_profile import GIB, GIGA, TERA, HardwareProfile
from mgpu_pipe.planning.matrix_products import product_seconds
from mgpu_pipe.planning.step_time import all_reduce_seconds, step_time
from mgpu_pipe.planning.work import Constants, Work, spread

FREE = (
    *("gemm", "short", "attention", "attention_backward", "memory", "logit_bytes", "optimizer_bytes"),
    *("launch", "micro_batch", "step"),
)
"""Constants that one process decides."""
SOURCE = "mgpu-pipe calibrate on this machine"
"""``source`` of the profiles that are written here."""
LINKS = ("link", "link_latency")
"""Constants that several processes decide."""
SMALLEST_BANDWIDTH_BYTES = 1 << 20
"""Bytes of a message from which its bandwidth counts."""


@dataclass(frozen=True)
class Measurements:
    """Seconds on one machine, the mean of its processes, which all computed at once.

    Attributes:
        processes: processes that measured.
        products: rows, columns and inner dimension of matrix products, and their seconds.
        bandwidth: bytes a second that a copy reads and writes.
        reductions: bytes and ranks of all-reduces, and their seconds.
        steps: fields of :class:`mgpu_pipe.planning.work.Work` of training steps of one process, and their seconds.
        block: seconds of one block's ``forward``, ``backward`` and, with a single token, ``launch``.
        device: its ``name``, ``type`` (cpu or cuda), ``memory`` in bytes, ``multiprocessors`` and a node's
            ``host_memory``.
    """

    processes: int
    products: Sequence[tuple[int, int, int, float]]
    bandwidth: float
    reductions: Sequence[tuple[int, int, float]]
    steps: Sequence[tuple[Mapping[str, float], float]]
    block: Mapping[str, float]
    device: Mapping[str, Any]

    @property
    def peak(self) -> float:
        """FLOPs a second of the fastest product."""
        return max(2.0 * rows * columns * inner / seconds for rows, columns, inner, seconds in self.products)

    @property
    def link(self) -> float:
        """Bytes a second that a process sends in the fastest all-reduce; 0 if none was measured."""
        rates = (
            2 * size * (ranks - 1) / ranks / seconds
            for size, ranks, seconds in self.reductions
            if size >= SMALLEST_BANDWIDTH_BYTES
        )
        return max(rates, default=0.0)


def uncalibrated_profile(measured: Measurements) -> dict[str, Any]:
    """Figures of the profile; constants are the priors."""
    on_cpu = measured.device["type"] == "cpu"
    tflops = _round(measured.peak / TERA)
    return {
        "description": f"{measured.processes} processes of {measured.device['name']}, measured at once",
        "source": SOURCE,
        "accelerator": str(measured.device["type"]),
        "memory_gib": _round(measured.device["memory"] / GIB),
        "bf16_tflops": tflops,
        **({"fp32_tflops": tflops} if on_cpu else {}),
        "memory_gb_s": _round(measured.bandwidth / GIGA),
        "multiprocessors": int(measured.device["multiprocessors"]),
        "link_gb_s": _round((measured.link or ASSUMED_LINK) / GIGA),
        "network": "ethernet_1x25",
        "gpus_per_node": measured.processes,
        "host_memory_gib": _round(measured.device["host_memory"] / GIB),
    }


ASSUMED_LINK = 2 * GIGA
"""Bytes a second of a link that one process cannot measure."""


def fit_constants(measured: Measurements) -> Constants:
    """Constants that predict the measured seconds, around their priors."""
    hardware = HardwareProfile(name="", **uncalibrated_profile(measured)).hardware
    products = np.array([row[:3] for row in measured.products], dtype=np.float64).T
    reductions = np.array([row[:2] for row in measured.reductions], dtype=np.float64).reshape(-1, 2).T
    steps = Work(**{name: np.array([row[0][name] for row in measured.steps]) for name in measured.steps[0][0]})
    rows: tuple[Sequence[tuple[Any, ...]], ...] = (measured.products, measured.reductions, measured.steps)
    seconds = np.array([row[-1] for table in rows for row in table])
    entry = float(np.asarray(steps.activation_bytes)[0])

    def predict(constants: Constants) -> Array:
        rows, columns, inner = products
        parts = [product_seconds(rows, columns, inner, entry, hardware, constants)]
        if reductions.size:
            parts.append(np.asarray(all_reduce_seconds(reductions[0], reductions[1], hardware, constants)))
        return np.concatenate([*parts, np.asarray(step_time(steps, hardware, constants).total)])

    start = replace(Constants(), launch=measured.block["launch"], **_assume(measured))
    return fit(predict, seconds, (*FREE, *LINKS) if measured.reductions else FREE, start)


def _assume(measured: Measurements) -> dict[str, float]:
    """Constants that are not measured: cores that compute also send, so that a CPU hides no communication."""
    return {"overlap_loss": 1.0, "reduction": 1.0} if measured.device["type"] == "cpu" else {}


def profile_text(measured: Measurements) -> str:
    """The profile as YAML; each line says whether it is calibrated or assumed."""
    figures, constants = uncalibrated_profile(measured), fit_constants(measured)
    assumed = {"network", *(() if measured.link else ("link_gb_s",))}
    texts = ("description", "source", "accelerator")
    lines = []
    for name, value in figures.items():
        mark = "" if name in texts else "  # assumed" if name in assumed else "  # calibrated"
        lines.append(_line(name, value) + mark)
    names = (*FREE, *LINKS) if measured.reductions else FREE
    lines += ["constants:", *(f"  {_line(name, _round(getattr(constants, name)))}  # calibrated" for name in names)]
    lines += [f"  {_line(name, value)}  # assumed" for name, value in _assume(measured).items()]
    return "\n".join([*lines, ""])


def _line(name: str, value: object) -> str:
    """YAML of an entry; ``repr`` of a float such as 2e-05 would be a text."""
    return yaml.safe_dump({name: value}, width=1000, allow_unicode=True).strip()


def _round(value: float) -> float:
    return float(f"{value:.4g}")


Array = NDArray[np.float64]
NOISE = 0.05
"""Usual relative error of a measured time; larger errors count by their size, not by its square."""


def fit(
    predict: Callable[[Constants], Array],
    seconds: Array,
    free: Sequence[str],
    start: Constants | None = None,
    width: float | None = None,
    rounds: int = 40,
) -> Constants:
    """Constants that predict ``seconds``, in logarithms around ``start``, by damped Gauss-Newton steps.

    Args:
        predict: predicted seconds of every row.
        free: names of the constants that are fitted.
        width: standard deviation of a constant's logarithm around ``start``; each constant's own where None.
    """
    start = start or Constants()
    centre = np.log([getattr(start, name) for name in free])
    prior = np.array([width or spread(name) for name in free])

    def constants(point: Array) -> Constants:
        return replace(start, **dict(zip(free, np.exp(point).tolist(), strict=True)))

    def residuals(point: Array) -> Array:
        errors: Array = np.log(predict(constants(point)) / seconds)
        return errors

    problem = _Problem(residuals, centre, prior)
    point, damping = centre.copy(), 1e-2
    for _ in range(rounds):
        step = problem.improve(point, damping)
        if step is None:
            break
        point, damping, gain = step
        if gain < 1e-5:
            break
    return constants(point)


@dataclass(frozen=True)
class _Problem:
    """Least squares of the ``residuals`` at a point, logarithms with a Gaussian prior around ``centre``."""

    residuals: Callable[[Array], Array]
    centre: Array
    prior: Array

    def loss(self, errors: Array, point: Array) -> float:
        """Errors count by their squares up to :data:`NOISE`, beyond it by their size."""
        penalty = 0.5 * np.sum(((point - self.centre) / self.prior) ** 2)
        return float(np.sum(np.sqrt((errors / NOISE) ** 2 + 0.05)) + penalty)

    def improve(self, point: Array, damping: float) -> tuple[Array, float, float] | None:
        """The next point, its damping, and by how much its loss is lower; None where no step lowers it."""
        errors = self.residuals(point)
        steps = 1e-4 * np.eye(len(point))
        jacobian = np.stack([(self.residuals(point + step) - errors) / 1e-4 for step in steps], 1)
        weight = 1 / np.sqrt((errors / NOISE) ** 2 + 0.05) / NOISE**2
        hessian = (jacobian.T * weight) @ jacobian + np.diag(1 / self.prior**2)
        slope = jacobian.T @ (weight * errors) + (point - self.centre) / self.prior**2
        before = self.loss(errors, point)
        for _ in range(12):
            move = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), slope)
            trial = point - np.clip(move, -0.5, 0.5)
            gain = before - self.loss(self.residuals(trial), trial)
            if gain > 0:
                return trial, max(1e-6, damping / 4), gain
            damping *= 4
        return None
