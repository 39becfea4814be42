"""Mixup and CutMix. Oracle: the cross-entropy of soft targets in float64, and the definitions of the draws."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.samples import SampleSet, random_of
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.class_keys import ImageClassificationConfig
from mgpu_pipe.objectives.image_classification import MIX_SEED, ImageClassificationObjective, MixedSamples, cut_box

CLASSES, SIDE = 3, 16


class Numbered:
    """Pictures of one value, their index."""

    def __len__(self) -> int:
        return 30

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        values = torch.from_numpy(indices).float()[:, None, None, None].expand(-1, 1, SIDE, SIDE)
        return {"pixel_values": values.clone(), "labels": torch.from_numpy(indices % CLASSES)}


def mixed(numbers: NDArray[np.int64], **keys: float) -> dict[str, torch.Tensor]:
    samples = MixedSamples(cast(SampleSet, Numbered()), ImageClassificationConfig(**keys), 3)  # type: ignore[arg-type]
    return samples.batch(numbers % 30, numbers)


def test_cutmix_takes_a_rectangle_and_its_share_of_the_label() -> None:
    numbers = np.arange(2000)
    batch = mixed(numbers, cutmix=1.0)
    pictures, shares, own = batch["pixel_values"], batch["shares"], torch.from_numpy(numbers % 30)
    foreign = pictures != own[:, None, None, None]
    # The partner may be the sample itself, or one of its value; everywhere else the share is that of the pixels.
    partner = torch.where(foreign.flatten(1).any(1), pictures.flatten(1).sub(own[:, None]).sum(1), 0)
    cut = foreign.flatten(1).any(1)
    assert torch.allclose(1 - shares[cut], foreign.flatten(1).float().mean(1)[cut], atol=1e-6)
    others = (partner[cut] / foreign.flatten(1).sum(1)[cut]).round().long() + own[cut]
    assert torch.equal(batch["other_labels"][cut], others % CLASSES)
    for picture in foreign[cut][:50, 0]:
        rows, columns = picture.nonzero().T
        assert len(rows) == (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1), "one rectangle"
    again = mixed(numbers[7:9], cutmix=1.0)
    assert all(torch.equal(batch[name][7:9], value) for name, value in again.items()), "however the batch is cut"


def test_the_draws_are_those_of_their_distributions() -> None:
    numbers = np.arange(4000)
    both = mixed(numbers, cutmix=1.0, mixup=0.2, mix_probability=0.8, cutmix_probability=0.25)
    spread = both["pixel_values"].flatten(1)
    values = torch.tensor([len(row.unique()) for row in spread])
    own = spread[:, 0] == torch.from_numpy(numbers % 30)
    assert abs(float(((values == 1) & own & (both["shares"] == 1)).float().mean()) - 0.2) < 0.05, "mix_probability"
    # A box of even area, part of which may lie outside: two values, but for those without a pixel.
    assert abs(float((values == 2).float().mean()) - 0.8 * 0.25) < 0.05, "cutmix_probability"
    only = mixed(numbers, mixup=0.4)
    for number in (0, 7, 99):  # the draws of runs before there was CutMix
        draw = random_of(3 ^ MIX_SEED, number)
        share, partner = float(draw.beta(0.4, 0.4)), int(draw.integers(30))
        assert float(only["shares"][number]) == pytest.approx(share, abs=1e-7)
        shown = share * (number % 30) + (1 - share) * partner
        assert float(only["pixel_values"][number, 0, 0, 0]) == pytest.approx(shown, abs=1e-4)
    held = mixed(-1 - numbers[:3], cutmix=1.0)
    assert bool((held["shares"] == 1).all()) and bool((held["other_labels"] == -100).all())


def test_a_box_is_cut_off_at_the_border() -> None:
    assert cut_box(16, 8, 0.75, (8, 4)) == (4, 2, 12, 6)  # half of each side
    assert cut_box(16, 8, 0.75, (0, 7)) == (0, 5, 4, 8)
    assert cut_box(16, 8, 1.0, (3, 3)) == (3, 3, 3, 3), "nothing"


def test_the_loss_is_the_cross_entropy_of_soft_targets() -> None:
    fields = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"image_size": SIDE, "patch_size": 8, "num_channels": 1}
    names = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    model = build_meta(ModelConfig(type="vit", config={**fields, **sizes, **names}), "AutoModelForImageClassification")
    whole = materialise(model, 1, "cpu").eval()
    objective = ImageClassificationObjective(whole, None, lambda step: 1.0, label_smoothing=0.1, mixed=True)
    batch = mixed(np.arange(6), cutmix=1.0)
    logs = whole(pixel_values=batch["pixel_values"]).logits.double().log_softmax(-1)
    own, other = (torch.eye(CLASSES, dtype=torch.float64)[batch[name]] for name in ("labels", "other_labels"))
    shares = batch["shares"].double()[:, None]
    targets = 0.9 * (shares * own + (1 - shares) * other) + 0.1 / CLASSES
    assert float(objective.micro_batch_loss(batch).detach()) == pytest.approx(
        float(-(targets * logs.detach()).sum()), rel=1e-6
    )
