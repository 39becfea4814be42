"""Distillation from a teacher's scores. Oracle: sentence-transformers' MarginMSELoss and DistillKLDivLoss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.objectives.harness import check_gradients, cut, gradients_of
from tests.objectives.test_text_embedding import SAMPLES, batch_of, bert, columns_of, mean_loss, objective_of, published

__all__ = ["published"]


@pytest.mark.parametrize(
    ("loss", "texts", "dtype"),
    [
        ("margin_mse", 3, torch.float32),
        ("margin_mse", 4, torch.float64),
        ("kl", 3, torch.float64),
        ("kl", 4, torch.float32),
    ],
)
def test_loss_and_gradients_are_those_of_sentence_transformers(
    published: Any, loss: str, texts: int, dtype: torch.dtype
) -> None:
    from sentence_transformers import util
    from sentence_transformers.sentence_transformer import losses

    model, batch = bert(dtype=dtype), batch_of(texts)
    batch["scores"] = torch.randn(SAMPLES, texts - 1, generator=torch.Generator().manual_seed(5))
    whole = published(model, "mean", dtype)
    if loss == "kl":
        oracle: Any = losses.DistillKLDivLoss(
            whole, similarity_fct=util.pairwise_cos_sim, student_temperature=0.5, teacher_temperature=0.25
        )
    else:
        oracle = losses.MarginMSELoss(whole)
    expected = oracle(columns_of(batch), batch["scores"].to(dtype))
    expected.backward()
    keys: dict[str, Any] = {"scale": 2.0, "teacher_scale": 4.0} if loss == "kl" else {"normalize": False}
    found = mean_loss(objective_of(model, loss=loss, **keys), cut(batch, 1, 2, 3))
    bound = 1e-6 if dtype == torch.float32 else 1e-10
    assert abs(float(found) - float(expected.detach())) <= bound * float(expected.detach())
    wanted = {name: gradient for name, gradient in gradients_of(whole).items() if not name.startswith("pooler.")}
    # Slopes of a query's documents cancel: what is left of a bias is rounded as the sum of all gradients is.
    check_gradients(model, wanted, each=bound, whole=bound / 10)
