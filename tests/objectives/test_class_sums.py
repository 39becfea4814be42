"""Figures of classes and calibration. Oracle: the definitions, sample by sample in numpy; torchmetrics' calibration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torchmetrics.functional.classification import multiclass_calibration_error

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.objectives.class_sums import BINS, ClassSums
from mgpu_pipe.report.held_out_figures import class_lines, class_values


@pytest.mark.parametrize("classes", [4, 60])
def test_the_figures_are_those_of_each_sample_however_the_batch_is_cut(classes: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(200, classes, generator=generator)
    labels = torch.where(torch.rand(200, generator=generator) < 0.5, logits.argmax(1), 0)
    labels[-1] = IGNORE_INDEX
    counted = ClassSums(classes)

    def summed(rows: slice) -> torch.Tensor:
        loss = F.cross_entropy(logits[rows], labels[rows], reduction="sum", ignore_index=IGNORE_INDEX)
        return counted.sums(loss, logits[rows], labels[rows])

    sums = summed(slice(0, 70)) + summed(slice(70, 200))
    assert sums.shape == (counted.num_sums,) and sums.dtype == torch.float64
    found = counted.findings([*sums.tolist(), 199.0])
    truth, shares = labels[:-1].numpy(), logits[:-1].double().softmax(1).numpy()
    chosen, sure = shares.argmax(1), shares.max(1)
    assert sums[1] == (chosen == truth).sum()
    assert sums[2] == (np.argsort(-shares, 1)[:, :5] == truth[:, None]).any(1).sum()
    for number in range(classes):
        assert found["classes"]["samples"][number] == (truth == number).sum()
        assert found["classes"]["right"][number] == ((truth == number) & (chosen == number)).sum()
        assert found["classes"]["predicted"][number] == (chosen == number).sum()
    assert ("confusion" in found) == (classes == 4)
    if classes == 4:
        assert found["confusion"] == [[int(((truth == a) & (chosen == b)).sum()) for b in range(4)] for a in range(4)]
    error = 0.0
    for low in np.arange(BINS) / BINS:  # Guo et al. 2017, equation 3
        inside = (sure > low) & (sure <= low + 1 / BINS)
        if inside.any():
            error += inside.mean() * abs((chosen == truth)[inside].mean() - sure[inside].mean())
    assert found["calibration"]["expected_error"] == pytest.approx(error, abs=1e-12)
    theirs = multiclass_calibration_error(torch.from_numpy(shares), labels[:-1], classes, n_bins=BINS, norm="l1")
    assert found["calibration"]["expected_error"] == pytest.approx(float(theirs), abs=1e-6)
    assert sum(each["samples"] for each in found["calibration"]["bins"]) == 199


def test_samples_without_a_label_count_nothing() -> None:
    counted, none = ClassSums(3), torch.full((2,), IGNORE_INDEX)
    found = counted.findings([*counted.sums(torch.zeros(()), torch.zeros(2, 3), none).tolist(), 0.0])
    assert found["calibration"] == {"expected_error": 0.0, "bins": []} and found["confusion"] == [[0] * 3] * 3


def test_the_table_tells_what_a_class_is_taken_for() -> None:
    calibration = {"expected_error": 0.0321, "bins": [{"samples": 6, "confidence": 0.9, "accuracy": 0.8}]}
    confusion = [[3, 1, 0], [0, 0, 2], [0, 0, 0]]
    classes = {"samples": [4, 2, 0], "right": [3, 0, 0], "predicted": [3, 1, 2]}
    found = {"confusion": confusion, "classes": classes, "calibration": calibration}
    assert class_lines(found, ["cat", "dog", "owl"], 12) == [
        "calibration 3.21% expected error, 1 of 15 bins of confidence have samples",
        "class         samples   accuracy  precision  most often taken for",
        "cat                 4     75.00%    100.00%  dog",
        "dog                 2      0.00%      0.00%  owl",
        "owl                 0          -      0.00%",
    ]
    first = class_values(found, ["cat", "dog", "owl"])["classes"][0]
    assert first == {
        **{"name": "cat", "samples": 4, "right": 3, "predicted": 3},
        **{"accuracy": 0.75, "precision": 1.0, "taken_for": "dog"},
    }
    many = {"samples": [2] * 60, "right": [2] * 59 + [1], "predicted": [2] * 60}
    lines = class_lines({"classes": many, "calibration": calibration}, [f"c{n}" for n in range(60)], 12)
    assert len(lines) == 23 and lines[3].startswith("c59 ") and "60, of which the 20 least accurate" in lines[1]
