"""Which models and sizes context parallelism can take. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.families.config_source import ConfigClass, config_class
from mgpu_pipe.families.find import axes_of, families_with, family_of

DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def context_parallel_errors(
    fields: Mapping[str, Any], model_type: str, cp: int, method: str, seq_len: int, tp: int = 1
) -> list[ConfigError]:
    """Everything for which ``cp`` ranks cannot share sequences of ``seq_len`` tokens of this model.

    Args:
        fields: of the model's configuration, standard names beside its own; see ``models.fields.resolved_fields``.
        method: ``ring`` or ``ulysses``.
        tp: ranks of tensor parallelism, which have shared the heads already.
    """
    if cp == 1:
        return []
    if not family_of(model_type).context:
        return [
            ConfigError(
                "strategy.cp",
                cp,
                f"use strategy.cp=1 (the axes for it are {axes_of(model_type)}), or a model of "
                f"{', '.join(families_with(lambda family: family.context))}",
                f"attention of the {model_type} family cannot run over several ranks",
            )
        ]
    own_names = (config_class(model_type) or ConfigClass()).attribute_map
    return [
        *_length_errors(seq_len, cp, method),
        *_head_errors(fields, cp, method, tp),
        *_attention_errors(fields, own_names, seq_len),
    ]


def _length_errors(seq_len: int, cp: int, method: str) -> Iterator[ConfigError]:
    parts, named = (2 * cp, "2 * strategy.cp") if method == "ring" else (cp, "strategy.cp")
    if seq_len % parts:
        below = seq_len // parts * parts
        nearest = " or ".join(str(length) for length in (below, below + parts) if length)
        yield ConfigError("data.seq_len", seq_len, f"use {nearest}", f"not a multiple of {named} = {parts}")


def _head_errors(fields: Mapping[str, Any], cp: int, method: str, tp: int) -> Iterator[ConfigError]:
    heads = fields.get("num_attention_heads")
    # Heads that tensor parallelism does not divide are its own error.
    if method != "ulysses" or not isinstance(heads, int) or heads % tp:
        return
    local = heads // tp
    if local % cp:
        fits = [size for size in range(1, local + 1) if local % size == 0]
        shared = f" / strategy.tp={tp}" if tp > 1 else ""
        reason = f"ulysses shares heads, and {heads} heads{shared} are not divisible by it"
        yield ConfigError("strategy.cp", cp, f"use one of {fits}, or strategy.context.method=ring", reason)


def _attention_errors(fields: Mapping[str, Any], own_names: Mapping[str, str], seq_len: int) -> Iterator[ConfigError]:
    def error(name: str, fix: str, reason: str) -> ConfigError:
        return ConfigError(f"model.config.{own_names.get(name, name)}", fields[name], fix, reason)

    window = _window(fields)
    if window is not None and window < seq_len:
        fix = f"use at least data.seq_len={seq_len}, or strategy.cp=1"
        yield error("sliding_window", fix, "context parallelism knows no window shorter than the sequence")
    if fields.get("attn_logit_softcapping") is not None:
        fix = "set it to null, or use strategy.cp=1"
        yield error("attn_logit_softcapping", fix, "context parallelism does not cap attention scores")
    if fields.get("use_bidirectional_attention") not in (None, False):
        yield error("use_bidirectional_attention", "set it to false", "context parallelism is causal")
    for name in DROPOUTS:
        if fields.get(name):
            yield error(name, "set it to 0, or use strategy.cp=1", "context parallelism drops no attention out")


def _window(fields: Mapping[str, Any]) -> int | None:
    """The sliding window of some layer, None where there is none."""
    window, layers = fields.get("sliding_window"), fields.get("layer_types")
    used = fields.get("use_sliding_window", True) and (not layers or "sliding_attention" in layers)
    return window if used and isinstance(window, int) and window > 0 else None
