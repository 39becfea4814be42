"""Mixup and CutMix: training pictures mixed with another one each, whose label gets a share of the loss.

The loss is the cross-entropy of the soft target ``share * label + (1 - share) * other label``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.data.samples import ChangedSamples, random_of
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.objectives.image_classification_keys import ImageClassificationConfig

MIX_SEED = 0x4D1C
"""Seed of these draws, apart from other changes of a picture."""
Box = tuple[int, int, int, int]
"""Left, top, right, bottom."""


@dataclass(frozen=True)
class Mix:
    """Draws of one sample.

    Attributes:
        share: share of the sample's own picture and label.
        partner: index of the other sample, of all.
        box: part that comes from the other picture (CutMix); None mixes all values (mixup).
    """

    share: float
    partner: int
    box: Box | None = None


@dataclass(frozen=True)
class MixedSamples(ChangedSamples):
    """Training pictures mixed with another one each, drawn by seed and sample from all samples, so no cut of a batch
    changes it. Both pictures get the same random changes. Held-out pictures stay as they are.

    Attributes:
        keys: of the objective.
        seed: of the run.
    """

    keys: ImageClassificationConfig
    seed: int

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        read = self.read.batch(indices, numbers)
        if not len(numbers) or numbers[0] < 0:  # held out
            others = torch.full_like(read["labels"], IGNORE_INDEX)
            return {**read, "other_labels": others, "shares": torch.ones(len(indices))}
        pictures = read["pixel_values"]
        height, width = pictures.shape[2:]
        mixes = [self.draw(number, width, height) for number in numbers.tolist()]
        shares = torch.tensor([mix.share for mix in mixes], dtype=torch.float32)
        other = self.read.batch(np.array([mix.partner for mix in mixes]), numbers)
        weights = torch.tensor([1.0 if mix.box else mix.share for mix in mixes], dtype=torch.float32)
        mixed = torch.lerp(other["pixel_values"], pictures, weights[:, None, None, None])
        for row, mix in enumerate(mixes):
            if mix.box:
                left, top, right, bottom = mix.box
                mixed[row, :, top:bottom, left:right] = other["pixel_values"][row, :, top:bottom, left:right]
        return {**read, "pixel_values": mixed, "other_labels": other["labels"], "shares": shares}

    def draw(self, number: int, width: int, height: int) -> Mix:
        """Draws how the sample with this number is mixed."""
        keys, random = self.keys, random_of(self.seed ^ MIX_SEED, number)
        if keys.mix_probability < 1 and random.random() >= keys.mix_probability:
            return Mix(1.0, int(random.integers(len(self.read))))
        cuts = keys.cutmix > 0 and (not keys.mixup or random.random() < keys.cutmix_probability)
        strength = keys.cutmix if cuts else keys.mixup
        share, partner = float(random.beta(strength, strength)), int(random.integers(len(self.read)))
        if not cuts:
            return Mix(share, partner)
        across, down = int(random.integers(width)), int(random.integers(height))
        box = cut_box(width, height, share, (across, down))
        left, top, right, bottom = box
        return Mix(1 - (right - left) * (bottom - top) / (width * height), partner, box)


def cut_box(width: int, height: int, share: float, centre: tuple[int, int]) -> Box:
    """The inner part of a box around ``centre`` with ``1 - share`` of the area (Yun et al. 2019, section 3.1)."""
    (across, down), half = centre, 0.5 * (1 - share) ** 0.5
    half_width, half_height = int(half * width), int(half * height)
    left, top = max(0, across - half_width), max(0, down - half_height)
    return left, top, min(width, across + half_width), min(height, down + half_height)
