"""Oracle: what transformers' models draw in their forward passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgpu_pipe.parallel.random_streams import uses_dropout


class Configured(torch.nn.Module):
    def __init__(self, **fields: Any) -> None:
        super().__init__()

        class Config:
            def to_dict(self) -> dict[str, Any]:
                return fields

        self.config = Config()


@pytest.mark.parametrize(
    ("fields", "draws"),
    [
        ({"attention_dropout": 0.1}, True),
        ({"attention_dropout": 0.0, "summary_first_dropout": 0.1}, False),  # a classification head's
        ({"router_jitter_noise": 0.1}, True),
        ({"text_config": {"attention_dropout": 0.1}}, True),
        ({"text_config": {"attention_dropout": 0.0}, "classifier_dropout": 0.1}, False),
    ],
)
def test_what_is_random_is_seen(fields: dict[str, Any], draws: bool) -> None:
    assert uses_dropout(Configured(**fields)) is draws
