"""Keys and metrics of text embeddings, the similarity of sentences, and rerankers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from mgpu_pipe.architectures.find import families_in_role, family_of
from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.text_keys import OneOutputConfig

Pooling = Literal["mean", "cls", "last_token"]
EmbeddingLoss = Literal["in_batch", "margin_mse", "kl"]
MOST_RANK = 10
"""Rank of the last text that a held-out query may find."""


@dataclass
class VectorConfig(ObjectiveConfig):
    """Keys of objectives whose models make vectors of texts."""

    pooling: Pooling = "mean"
    """Vector of a text: the mean over its tokens, that of its first token (cls), or that of its last token."""
    normalize: bool = True
    """Divide each vector by its length, so that scores are cosines; false compares by dot products."""
    scale: float = field(default=20.0, metadata={"above": 0})
    """Factor of the scores, the inverse of a temperature."""
    matryoshka_sizes: list[int] = field(default_factory=list)
    """Numbers of first entries of a vector that are trained alone too. Their losses add to that of the whole vectors
    (arXiv:2205.13147); empty: only whole vectors."""

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        if self.pooling == "cls" and family_of(fields["model_type"]).bidirectional and fields.get("is_causal", True):
            reason = "the first token of a causal model sees no other"
            return [ConfigError("objective.pooling", "cls", "use last_token, or model.bidirectional=true", reason)]
        width, sizes = vector_width(fields), self.matryoshka_sizes
        if len(set(sizes)) == len(sizes) and all(0 < size < width for size in sizes):
            return []
        reason = f"the model's vectors have {width} entries, which are always trained"
        fix = f"use different numbers from 1 to {width - 1}"
        return [ConfigError("objective.matryoshka_sizes", sizes, fix, reason)]

    def folder_files(self, data: DataConfig, width: int) -> Mapping[str, Any]:
        """Files that sentence-transformers needs to load the folder: pooling, prompts, longest text."""
        kinds = ("Transformer", "Pooling", *(["Normalize"] if self.normalize else []))
        modes = {"cls": "cls_token", "mean": "mean_tokens", "last_token": "lasttoken"}
        return {
            "modules.json": [
                {
                    "idx": index,
                    "name": str(index),
                    "path": f"{index}_{kind}" if index else "",
                    "type": f"sentence_transformers.models.{kind}",
                }
                for index, kind in enumerate(kinds)
            ],
            "1_Pooling/config.json": {
                "word_embedding_dimension": width,
                **{f"pooling_mode_{name}": mode == self.pooling for mode, name in modes.items()},
                "pooling_mode_max_tokens": False,
                "pooling_mode_mean_sqrt_len_tokens": False,
                "pooling_mode_weightedmean_tokens": False,
                "include_prompt": True,
            },
            "sentence_bert_config.json": {"max_seq_length": data.seq_len, "do_lower_case": False},
            "config_sentence_transformers.json": {
                # A plug-in's data may have no prompts.
                "prompts": {kind: getattr(data, f"{kind}_prompt", None) or "" for kind in ("query", "document")},
                "default_prompt_name": None,
                "similarity_fn_name": "cosine" if self.normalize else "dot",
            },
        }


@dataclass
class TextEmbeddingConfig(VectorConfig):
    name: str = "text_embedding"
    loss: EmbeddingLoss = "in_batch"
    """in_batch: each query finds its positive among all texts of the step. margin_mse: the positive's lead over each
    negative becomes the teacher's (mean squared error). kl: the distribution over a query's own documents becomes the
    teacher's (Kullback-Leibler divergence). The teacher's scores are data.scores_column."""
    teacher_scale: float = field(default=1.0, metadata={"above": 0})
    """Factor of the teacher's scores; with kl the inverse of its temperature, as scale is that of the model's."""
    symmetric: bool = False
    """Also find the query of each positive among all queries; the loss is the mean of both directions."""
    mask_equal: bool = True
    """Leave out negatives that are no negatives: texts equal to the positive, and the positives of equal queries."""
    mask_margin: float | None = None
    """Leave out negatives whose score is above that of the positive less this margin: 0 leaves out those that are
    nearer than the positive, 0.1 also those almost as near; null leaves none out by its score."""

    @property
    def is_taught(self) -> bool:
        """Whether the loss reads a teacher's scores."""
        return self.loss != "in_batch"

    def data_errors(self, data: DataConfig, model: ModelConfig) -> list[ConfigError]:
        column, key = getattr(data, "scores_column", None), "data.scores_column"
        if number := getattr(data, "random_negatives", 0):
            reason = "objective=text_embedding takes the other texts of the step as negatives"
            return [ConfigError("data.random_negatives", number, "leave it out, or use objective=reranker", reason)]
        if not self.is_taught:
            fix, reason = "leave it out, or use objective.loss=margin_mse or kl", "objective.loss=in_batch reads none"
            return [ConfigError(key, column, fix, reason)] if column is not None else []
        if column is None:
            fix = "use data=embedding_pairs data.scores_column=<a teacher's scores>, or objective.loss=in_batch"
            return [ConfigError("objective.loss", self.loss, fix, "the data has no teacher's scores")]
        unread = {"symmetric": self.symmetric, "mask_margin": self.mask_margin}
        reason = f"objective.loss={self.loss} compares a query with its own documents alone"
        return [
            ConfigError(f"objective.{name}", value, "leave it out", reason)
            for name, value in unread.items()
            if value not in (False, None)
        ]


def vector_width(fields: Mapping[str, Any]) -> int:
    """Numbers of a vector of the model with these ``fields``."""
    return int(fields.get("hidden_size") or fields["dim"])


SEARCH_METRICS = {
    "recall@1": "recall@1",
    f"recall@{MOST_RANK}": f"recall@{MOST_RANK}",
    f"mrr@{MOST_RANK}": f"mean reciprocal rank@{MOST_RANK}",
    f"ndcg@{MOST_RANK}": f"NDCG@{MOST_RANK}",
}
"""Titles of the metrics of finding, by name."""


def measure_ranks(sums: Sequence[float], names: Iterable[str]) -> dict[str, float]:
    """Metrics from the sums of losses, queries and the metrics ``names``, and the loss denominator."""
    loss, queries, *totals, denominator = sums
    metrics = {f"val/{name}": value / (queries or 1) for name, value in zip(names, totals, strict=True)}
    return {"val/loss": loss / denominator, **metrics}


TEXT_EMBEDDING = Description(
    name="text_embedding",
    keys=TextEmbeddingConfig,
    metrics=(
        Metric("val/loss", "held-out loss", "nats a sample"),
        *(
            Metric(f"val/{name}", title, percent="recall" in name, higher_is_better=True, headline=name == "recall@10")
            for name, title in SEARCH_METRICS.items()
        ),
    ),
    measured=partial(measure_ranks, names=tuple(SEARCH_METRICS)),
    counts="samples",
    model_class="AutoModel",
    attention="own",
    samples="embedding_pairs",
    families=families_in_role("text_vectors"),
    refused_axes=("pp", "cp", "ep"),
    other_names=("embedding", "sentence_transformer"),
)


@dataclass
class TextSimilarityConfig(VectorConfig):
    name: str = "text_similarity"
    loss: Literal["cosent", "cosine"] = "cosent"
    """cosent brings the pairs of the step into the order of their scores, of any range; cosine makes each pair's cosine
    its score, from -1 to 1, by the mean squared error."""

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        errors = super().model_errors(fields)
        if self.loss == "cosine" and not self.normalize:
            errors.append(ConfigError("objective.normalize", False, "use true, or objective.loss=cosent", "no cosines"))
        return errors


def measure_similarity(sums: Sequence[float]) -> dict[str, float]:
    loss, spearman, pearson, samples = sums
    return {"val/loss": loss / samples, "val/spearman": spearman, "val/pearson": pearson}


TEXT_SIMILARITY = Description(
    name="text_similarity",
    keys=TextSimilarityConfig,
    metrics=(
        Metric("val/loss", "held-out loss"),
        Metric("val/spearman", "Spearman correlation", higher_is_better=True, headline=True),
        Metric("val/pearson", "Pearson correlation", higher_is_better=True),
    ),
    measured=measure_similarity,
    counts="samples",
    model_class="AutoModel",
    attention="own",
    samples="scored_pairs",
    families=families_in_role("text_vectors"),
    refused_axes=("pp", "cp", "ep"),
    other_names=("cosent", "sts"),
)


RerankerLoss = Literal["binary", "listwise", "margin"]
ACTIVATIONS: Mapping[RerankerLoss, str] = {
    "binary": "torch.nn.modules.activation.Sigmoid",
    "listwise": "torch.nn.modules.linear.Identity",
    "margin": "torch.nn.modules.linear.Identity",
}
"""By what sentence-transformers makes a score of the model's output."""
MATCHING_FAMILIES = families_in_role("token_matcher")
"""Families of ``objective.match_tokens``."""


@dataclass
class RerankerConfig(OneOutputConfig):
    name: str = "reranker"
    loss: RerankerLoss = "binary"
    """binary: is each document right or wrong (cross-entropy, a mean over documents)? listwise: which of a query's
    documents is right (softmax over them, a mean over queries)? margin: is the positive above each negative (logistic
    loss of the difference, a mean over negatives)?"""
    match_tokens: bool = False
    """Start attention on equal tokens, for BERT and ELECTRA from nothing: keys get the first weights of queries, and
    positions and text types small embeddings. Such a model compares two texts from the first step (mimetic
    initialisation, arXiv:2305.09828)."""

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        errors = super().model_errors(fields)
        if self.match_tokens and fields["model_type"] not in MATCHING_FAMILIES:
            fix = f"leave it out, or use a model of {' or '.join(MATCHING_FAMILIES)}"
            reason = f"the attention of {fields['model_type']} has no such start"
            errors.append(ConfigError("objective.match_tokens", True, fix, reason))
        return errors

    def untrained(self, sizes: Mapping[str, int]) -> list[str]:
        """The bias of the one output: it adds the same to all scores, on whose differences alone two losses depend."""
        return [name for name, size in sizes.items() if name.endswith("bias") and size == 1] * (self.loss != "binary")

    def data_errors(self, data: DataConfig, model: ModelConfig) -> list[ConfigError]:
        fix = "write the prompt into the texts, or use objective=text_embedding"
        reason = "no program that loads the exported folder has a prompt for a side of a pair"
        prompts = {f"data.{kind}_prompt": getattr(data, f"{kind}_prompt", None) for kind in ("query", "document")}
        errors = [ConfigError(key, prompt, fix, reason) for key, prompt in prompts.items() if prompt]
        column = getattr(data, "scores_column", None)
        if column is not None:
            fix = "leave it out, or use objective=text_embedding objective.loss=margin_mse"
            errors.append(ConfigError("data.scores_column", column, fix, "objective=reranker reads no scores"))
        if self.match_tokens and model.path is not None:
            fix, reason = "leave it out, or model.path", "the weights of a folder are not drawn"
            errors.append(ConfigError("objective.match_tokens", True, fix, reason))
        return errors

    def folder_files(self, data: DataConfig, width: int) -> Mapping[str, Any]:
        """By which sentence-transformers' ``CrossEncoder`` gives the same scores: activation and longest row."""
        return {
            "config.json": {"sentence_transformers": {"activation_fn": ACTIVATIONS[self.loss]}},
            "tokenizer_config.json": {"model_max_length": data.seq_len},
        }


RANKING_METRICS = {
    "accuracy": "positive ranked first",
    f"mrr@{MOST_RANK}": f"mean reciprocal rank@{MOST_RANK}",
    f"ndcg@{MOST_RANK}": f"NDCG@{MOST_RANK}",
}
"""Titles of the metrics of a query's ranking, by name."""


RERANKER = Description(
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
            for name, title in RANKING_METRICS.items()
        ),
    ),
    measured=partial(measure_ranks, names=tuple(RANKING_METRICS)),
    counts="terms",
    model_class="AutoModelForSequenceClassification",
    attention="own",
    samples="embedding_pairs",
    joins_texts=True,
    refused_axes=("pp", "cp"),
    other_names=("cross_encoder",),
)
