"""The shipped recipes of real language models take the planner's layout on the hardware that is named."""

from __future__ import annotations

import pytest

from mgpu_pipe.config.hydra.compose import compose, compose_checked
from mgpu_pipe.config.sections import list_groups
from mgpu_pipe.launch.compositions import notices_of
from tests.support.sampling import one_in

RECIPES = [
    option.name
    for option in list_groups()["experiment"]
    if option.name.endswith(("_sft", "_lora", "_qlora", "_dpo")) and option.name[0] != "_"
]
LARGE = ("gpt_oss_20b_lora", "gpt_oss_20b_qlora")
"""Adapters whose model does not fit on a card of 24 GB without its host."""
OF_FIXED_LAYOUT = (
    "llama3_8b_lora_8gpu",
    "llama3_70b_qlora_8gpu",
    "qwen3_8b_sft_fsdp",
    "qwen3_30b_a3b_sft_ep",
    "llava15_7b_stage2_fsdp",
)
"""They take strategy=auto if it is typed."""


def planned(name: str, hardware: str, *words: str) -> str:
    """The strategy that the recipe is given; it passes every check."""
    composition = compose_checked([f"experiment={name}", f"plan.hardware=[{hardware}]", *words])
    assert composition.errors == []
    assert any(notice.text.startswith("auto is ") for notice in notices_of(composition, elsewhere=True))
    return composition.config.strategy.name


@pytest.mark.parametrize("name", one_in(3, RECIPES))
def test_a_recipe_fits_eight_h100(name: str) -> None:
    assert compose([f"experiment={name}"])[0].strategy.name == "auto"
    assert planned(name, "h100", "trainer.devices=8") != "auto"


@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith("lora") and name not in LARGE])
def test_adapters_fit_a_card_of_24_gb(name: str) -> None:
    assert planned(name, "rtx4090", "trainer.devices=1") == "single"


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FIXED_LAYOUT)
def test_recipes_of_a_fixed_layout_take_another(name: str) -> None:
    assert planned(name, "h100", "strategy=auto", "trainer.devices=8") != "auto"
