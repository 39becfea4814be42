"""Strategies of parts of a model: what is refused, what ``check`` and the planner say."""

from __future__ import annotations

import pytest

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.run_identity import mathematics_hash
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigErrors
from mgpu_pipe.planning.memory import memory_by_rank
from mgpu_pipe.report.overview import summary

GIVEN = ("objective=vision_language", "model=llava_tiny", "data=digit_questions", "trainer.accelerator=cpu")
TP = ("strategy=tp", "trainer.devices=2")
WHOLE, RECOMPUTED = "strategy.parts.vision=whole", "strategy.parts.activation_checkpointing=full"


def composed(*overrides: str) -> RunConfig:
    return compose([*GIVEN, *overrides])[0]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("strategy=fsdp", "trainer.devices=2", WHOLE),
            "parts.vision=whole: strategy.tp=1 cuts no tower; leave it out",
        ),
        (("strategy=zero2", "trainer.devices=2", WHOLE), "parts.vision=whole: strategy.tp=1 cuts no tower"),
        ((*TP, "strategy.parts.audio=whole"), "parts.audio=whole: the llava family has no audio tower"),
        ((*TP, WHOLE, "data.cache_features=true", "model.freeze=[vision]"), "runs the tower before the first step"),
        (
            (*TP, WHOLE, "objective=causal_lm", "model=llama_tiny", "data=stdlib_text"),
            "the llama family has no vision tower; these keep one whole: clip, gemma3, idefics3, internvl",
        ),
        (
            (*TP, RECOMPUTED, "objective=causal_lm", "model=llama_tiny", "data=stdlib_text"),
            "parts.activation_checkpointing=full: the llama family has no tower; use same",
        ),
        (("strategy=zero2", "trainer.devices=2", RECOMPUTED), "ZeRO recomputes all blocks alike; use same"),
        (
            (*TP, WHOLE, "objective=contrastive", "model=vit_bert_tiny", "data=captioned_digits"),
            "no vision tower of the vision-text-dual-encoder family was tried; these keep one whole:",
        ),
    ],
)
def test_what_has_no_effect_or_was_not_tried_is_refused(overrides: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ConfigErrors) as refused:
        preflight(composed(*overrides), elsewhere=True)
    assert expected in str(refused.value)


def test_check_says_that_pictures_are_dealt_and_the_run_is_the_same() -> None:
    whole, cut = composed(*TP, WHOLE), composed(*TP)
    preflight(whole)
    parts = dict(summary(whole))["parts"]
    assert parts.startswith("vision trained (whole on each of tp=2 ranks, its inputs dealt over them by cost), ")
    assert "whole" not in dict(summary(cut))["parts"]
    recomputed = dict(summary(composed(RECOMPUTED, *TP)))["parts"]
    assert recomputed.startswith("vision trained (its blocks recomputed), projector trained, language trained")
    assert mathematics_hash(composed(RECOMPUTED, *TP)) == mathematics_hash(whole) == mathematics_hash(cut)


def test_the_planner_counts_the_whole_tower() -> None:
    """Of LLaVA 1.5 7B every rank has all matrices of the tower's layers instead of a quarter of them.

    Its patches, positions and norms are whole either way.
    """
    given = ("model=llava15_7b", "data.seq_len=2048", "strategy=tp", "trainer.devices=4")
    plans = [memory_by_rank(composed(*given, *words)) for words in ((), (WHOLE,))]
    cut, whole = (plan.terms for plan in plans if plan is not None)
    layers = 24 * (4 * 1024**2 + 2 * 1024 * 4096 + 9 * 1024)  # matrices and biases
    assert whole["weights"] - cut["weights"] == pytest.approx(3 / 4 * 4 * layers, rel=1e-6)
    assert whole["optimizer"] - cut["optimizer"] == pytest.approx(3 / 4 * 8 * layers, rel=1e-6)
