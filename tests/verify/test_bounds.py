"""Oracle: the bounds of mgpu_pipe.verify.certificate, by hand."""

from __future__ import annotations

import pytest

from mgpu_pipe.verify.certificate import QUANTITIES, Certificate, Measurement, Worst, failures, holds, worst_of


def test_the_worst_is_the_one_nearest_to_or_farthest_beyond_its_bound() -> None:
    found = worst_of(
        [
            Measurement("gradient", "a", 1, 1e-6, 1e-5),
            Measurement("gradient", "b", 2, 5e-7, 1e-7),  # smaller, but five times its bound
            Measurement("loss", "rank 0", 1, 2e-6, 1e-5),
            Measurement("initial weights", "a", 0, 0.0, 0.0),
        ]
    )
    assert [(one.quantity, one.where, one.passed) for one in found] == [
        ("initial weights", "a", True),
        ("loss", "rank 0", True),
        ("gradient", "b", False),
    ]


def test_an_exact_bound_is_broken_by_anything() -> None:
    (found,) = worst_of(
        [Measurement("initial weights", "a", 0, 0.0, 0.0), Measurement("initial weights", "b", 0, 1e-30, 0.0)]
    )
    assert found.where == "b"
    assert not found.passed


def test_what_is_not_finite_fails_and_survives_json() -> None:
    (found,) = worst_of([Measurement("weights", "a", 3, float("nan"), 1e-5)])
    assert not found.passed
    assert found.as_dict()["error"] is None
    assert not Worst.from_dict(found.as_dict()).passed


def test_bf16_may_be_one_and_a_half_times_as_far_off_as_one_process() -> None:
    def of(error: float) -> Worst:
        # In the first step the one process happens to be exact; the steps count together.
        steps = ((1, 0.0), (2, 2e-3))
        (found,) = worst_of([Measurement("loss", "rank 0", step, error, 1e-5, alone) for step, alone in steps])
        return found

    single = 2e-3 / 2**0.5
    assert of(1.49 * single).passed
    assert not of(1.52 * single).passed
    assert of(1.49 * single).bound == pytest.approx(1.5 * single + 1e-5)


def test_a_quantity_that_was_not_compared_is_no_pass() -> None:
    worst = [Worst(quantity, 0.0, 1e-5, 1, "a") for quantity in QUANTITIES]
    assert holds(worst)
    assert not holds([])
    assert not holds(worst[:-1])
    assert failures(Certificate(worst[:-1], {})) == ["weights: was not compared"]
