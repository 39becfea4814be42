"""Distillation from a teacher's scores. Oracle: sentence-transformers' MarginMSELoss and DistillKLDivLoss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.errors import ConfigErrors
from tests.objectives.test_text_embedding import (
    SAMPLES,
    SEQ_LEN,
    batch_of,
    bert,
    cut,
    mean_loss,
    objective_of,
    published,
)

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
    mask = (torch.arange(SEQ_LEN) < batch["lengths"].unsqueeze(-1)).long()
    columns = [{"input_ids": batch["input_ids"][:, at], "attention_mask": mask[:, at]} for at in range(texts)]
    expected = oracle(columns, batch["scores"].to(dtype))
    expected.backward()
    keys: dict[str, Any] = {"scale": 2.0, "teacher_scale": 4.0} if loss == "kl" else {"normalize": False}
    found = mean_loss(objective_of(model, loss=loss, **keys), cut(batch, 1, 2, 3))
    bound = 1e-6 if dtype == torch.float32 else 1e-10
    assert abs(float(found) - float(expected.detach())) <= bound * float(expected.detach())
    named = {name.rpartition("model.")[2]: parameter.grad for name, parameter in whole.named_parameters()}
    total = torch.cat([gradient.flatten() for gradient in named.values() if gradient is not None]).norm()
    for name, parameter in model.named_parameters():
        if not name.startswith("pooler."):
            assert parameter.grad is not None
            # Slopes of a query's documents cancel: what is left of a bias is rounded as the sum of all gradients is.
            size = float(named[name].norm()) + float(total) / 10
            assert float((parameter.grad - named[name]).norm()) <= bound * size, name


TAUGHT = "objective=text_embedding model=bert_tiny data=embedding_pairs data.scores_column=scores"


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("", "data.scores_column=scores: objective.loss=in_batch reads none; leave it out, or use objective.loss="),
        (
            "objective.loss=kl data.scores_column=null",
            "objective.loss=kl: the data has no teacher's scores; use data=embedding_pairs data.scores_column=",
        ),
        ("objective.loss=kl objective.symmetric=true", "objective.symmetric=true: objective.loss=kl compares a query"),
        ("objective.loss=margin_mse objective.mask_margin=0.1", "objective.mask_margin=0.1: objective.loss=margin_mse"),
        ("objective=reranker", "data.scores_column=scores: objective=reranker reads no scores"),
    ],
)
def test_what_a_teacher_does_not_fit_is_refused_before_a_launch(words: str, refused: str) -> None:
    given = TAUGHT.split() if not words.startswith("objective=") else TAUGHT.split()[1:]
    with pytest.raises(ConfigErrors) as error:
        preflight(compose([*given, *words.split(), "trainer.accelerator=cpu"])[0])
    assert refused in str(error.value)
