"""``strategy=auto``: the planner's choice stands in the run's configuration, and its prediction in the report."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mgpu_pipe.checks.plan_layouts import plan_layouts
from mgpu_pipe.checks.planned_keys import with_planned_strategy
from mgpu_pipe.config.hydra.compose import compose, compose_checked
from mgpu_pipe.config.run_identity import mathematics_hash
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.launch.composed import notices_of
from mgpu_pipe.planning.hardware_profile import profile_of_gpu
from tests.support.command import mgpu

LARGE = ["model=llama3_8b", "data.global_batch_size=64", "plan.hardware=[h100]", "trainer.accelerator=cuda"]


def test_the_planned_strategy_takes_autos_place() -> None:
    composition = compose_checked([*LARGE, "strategy=auto", "trainer.devices=8"])
    before = composition.config
    notices = notices_of(composition, elsewhere=True)
    plans, _ = plan_layouts(compose([*LARGE, "trainer.devices=8"])[0])
    best = next((plan for plan in plans if not plan.is_tight), plans[0])
    config = composition.config
    assert config.strategy == best.config.strategy and config.strategy.name != "auto"
    assert config.data.micro_batch_size == best.layout.micro_batch_size
    assert config.plan.predicted_seconds == best.seconds
    assert config.trainer == before.trainer and config.precision == before.precision
    assert mathematics_hash(config) == mathematics_hash(before)
    assert any(notice.key == "strategy" and "predicted: " in notice.text for notice in notices)


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^strategy=auto: no layout fits on 1 of rtx4090.*or choose a strategy"):
        words = ("model=llama3_70b", "plan.hardware=[rtx4090]", "strategy=auto", "trainer.devices=1")
        with_planned_strategy(compose([*LARGE, *words])[0])
    with pytest.raises(ConfigError, match=r"^strategy=auto: .*plan a language model.*or choose a strategy"):
        with_planned_strategy(compose(["model=vit_tiny", "strategy=auto"])[0])
    with pytest.raises(ConfigError, match=r"^plan\.hardware=h101: .*did you mean h100"):
        with_planned_strategy(compose([*LARGE[:2], "plan.hardware=[h101]", "strategy=auto"])[0])


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-80GB", "a100_80"),
        ("NVIDIA A100-SXM4-40GB", "a100_40"),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 80GB HBM3 MIG", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla T4", None),
    ],
)
def test_profiles_are_found_by_the_drivers_names(name: str, profile: str | None) -> None:
    assert profile_of_gpu(name) == profile


@pytest.mark.slow
def test_a_run_is_planned_trained_and_compared(cache: Path, tmp_path: Path) -> None:
    words = ["model=llama_tiny", "data.seq_len=32", "data.global_batch_size=8", "trainer.max_steps=3"]
    mgpu(cache, tmp_path, *words, "strategy=auto", "trainer.devices=2", "run.dir=run", "trainer.accelerator=cpu")
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["strategy"]["name"] != "auto" and config["plan"]["predicted_seconds"] > 0
    report = (tmp_path / "run" / "report.html").read_text()
    assert "predicted by strategy=auto" in report and "of tensors predicted" in report
