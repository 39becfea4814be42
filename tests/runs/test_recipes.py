"""The recipes of real size: their configuration passes, and a small copy of each is the run of one process."""

from __future__ import annotations

import pytest

from mgpu_pipe.cli import main as cli
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.system.conf_folders import conf_dir
from tests.support.needs import need_speech
from tests.support.processes import run_processes
from tests.verify.support import small_run

EIGHT = ("trainer.num_nodes=1", "trainer.devices=8")
RECIPES = {
    "clip_vit_b32_ddp": ("trainer.devices=2",),
    "llama3_8b_lora_8gpu": ("trainer.devices=2",),
    "llama3_70b_qlora_8gpu": ("trainer.devices=2",),
    "llama3_70b_megatron": (*EIGHT, "strategy.tp=2", "strategy.pp=2"),
    "llava15_7b_stage2_fsdp": ("trainer.devices=2",),
    "qwen3_30b_a3b_sft_ep": ("trainer.num_nodes=1", "trainer.devices=4", "strategy.ep=2"),
    "qwen3_8b_sft_fsdp": ("trainer.devices=4",),
    "wav2vec2_base_finetune": ("trainer.devices=2",),
}
"""With fewer processes, on the same axes."""
STEPS = {"clip_vit_b32_ddp": 8, "wav2vec2_base_finetune": 8}
"""Else three. There luck decides the noise of CLIP's key biases, whose gradients are zero in exact arithmetic, and of
wav2vec 2.0's gradient norm: one bf16 process may hit that number by chance, and it sets the bound."""


@pytest.mark.slow
def test_every_recipe_is_here() -> None:
    """Those with ``strategy=auto`` are in tests/planner/test_recipes.py."""
    configs = {
        file.stem: compose([f"experiment={file.stem}"])[0] for file in (conf_dir() / "experiment").glob("*.yaml")
    }
    assert set(RECIPES) == {
        name for name, run in configs.items() if run.trainer.accelerator == "cuda" and run.strategy.name != "auto"
    }


@pytest.mark.parametrize("name", RECIPES)
def test_a_machine_without_gpus_checks_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name.startswith("wav2vec2"):
        need_speech("espeak-ng")
    assert cli.main(["check", f"experiment={name}", "trainer.accelerator=cuda"]) == 0
    assert "precision   bf16 (auto)" in capsys.readouterr().out


def verified(overrides: list[str], steps: int) -> list[tuple[str, bool]]:
    from mgpu_pipe.verify.certificate import worst_of
    from mgpu_pipe.verify.comparison import compare

    return [(one.quantity, one.passed) for one in worst_of(compare(small_run(*overrides, steps=steps)))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name.endswith("8b_lora_8gpu") else pytest.param(name, marks=pytest.mark.exhaustive) for name in RECIPES],
)
def test_a_small_copy_of_it_is_one_process(name: str) -> None:
    overrides = [f"experiment={name}", *RECIPES[name]]
    found = run_processes(compose(overrides)[0].trainer.devices, verified, overrides, STEPS.get(name, 3))[0]
    assert dict(found) == dict.fromkeys(["initial weights", "loss", "gradient norm", "gradient", "weights"], True)
