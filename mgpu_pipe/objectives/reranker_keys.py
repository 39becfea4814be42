"""Keys and metrics of rerankers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.text_config import OneOutputConfig
from mgpu_pipe.objectives.text_embedding_keys import MOST_RANK

Loss = Literal["binary", "listwise", "margin"]
ACTIVATIONS: Mapping[Loss, str] = {
    "binary": "torch.nn.modules.activation.Sigmoid",
    "listwise": "torch.nn.modules.linear.Identity",
    "margin": "torch.nn.modules.linear.Identity",
}
"""By what sentence-transformers makes a score of the model's output."""


@dataclass
class RerankerConfig(OneOutputConfig):
    name: str = "reranker"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""
    loss: Loss = "binary"
    """binary: is each document right or wrong (cross-entropy, a mean over documents)? listwise: which of a query's
    documents is right (softmax over them, a mean over queries)? margin: is the positive above each negative (logistic
    loss of the difference, a mean over negatives)?"""

    def untrained(self, sizes: Mapping[str, int]) -> list[str]:
        """The bias of the one output: it adds the same to all scores, on whose differences alone two losses depend."""
        return [name for name, size in sizes.items() if name.endswith("bias") and size == 1] * (self.loss != "binary")

    def run_errors(self, config: RunConfig) -> list[ConfigError]:
        fix = "write the prompt into the texts, or use objective=text_embedding"
        reason = "no program that loads the exported folder has a prompt for a side of a pair"
        prompts = {
            f"data.{kind}_prompt": getattr(config.data, f"{kind}_prompt", None) for kind in ("query", "document")
        }
        errors = [ConfigError(key, prompt, fix, reason) for key, prompt in prompts.items() if prompt]
        column = getattr(config.data, "scores_column", None)
        if column is not None:
            fix = "leave it out, or use objective=text_embedding objective.loss=margin_mse"
            errors.append(ConfigError("data.scores_column", column, fix, "objective=reranker reads no scores"))
        return errors

    def folder_files(self, config: RunConfig, width: int) -> Mapping[str, Any]:
        """By which sentence-transformers' ``CrossEncoder`` gives the same scores: activation and longest row."""
        return {
            "config.json": {"sentence_transformers": {"activation_fn": ACTIVATIONS[self.loss]}},
            "tokenizer_config.json": {"model_max_length": config.data.seq_len},
        }


METRICS = {
    "accuracy": "positive ranked first",
    f"mrr@{MOST_RANK}": f"mean reciprocal rank@{MOST_RANK}",
    f"ndcg@{MOST_RANK}": f"NDCG@{MOST_RANK}",
}
"""Titles of the metrics of a query's ranking, by name."""


def measured(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, queries with negatives and :data:`METRICS`, and the number of terms."""
    loss, queries, *totals, terms = sums
    metrics = {f"val/{name}": value / (queries or 1) for name, value in zip(METRICS, totals, strict=True)}
    return {"val/loss": loss / terms, **metrics}


DESCRIPTION = Description(
    name="reranker",
    keys=RerankerConfig,
    metrics=(
        Metric("val/loss", "held-out loss", "nats"),
        *(
            Metric(
                f"val/{name}",
                title,
                percent=name == "accuracy",
                higher_is_better=True,
                headline=name.startswith("ndcg"),
            )
            for name, title in METRICS.items()
        ),
    ),
    measured=measured,
    counts="terms",
    model_class="AutoModelForSequenceClassification",
    attention="own",
    samples="embedding_pairs",
    joins_texts=True,
    refused_axes=("pp", "cp"),
    other_names=("cross_encoder",),
)
