"""``auto`` of ``strategy`` and ``checkpoint.every_n_steps``: the planner's choice stands in the run's configuration.

Oracles: the plans, other intervals between saves, and the report of a run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mgpu_pipe.checks.plan_layouts import plan_layouts
from mgpu_pipe.checks.planned_keys import plan_save_steps, with_planned_strategy
from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.hydra.compose import compose, compose_checked
from mgpu_pipe.config.run_identity import mathematics_hash
from mgpu_pipe.errors import ConfigError, ConfigErrors
from mgpu_pipe.launch.compositions import notices_of
from mgpu_pipe.planning.goodput import Failures, useful_share
from mgpu_pipe.planning.hardware_profile import profile_of_gpu
from mgpu_pipe.planning.run_hardware import hardware_here, predicted_seconds
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


def test_a_typed_schedule_is_kept() -> None:
    words = [*LARGE, "data.global_batch_size=32", "strategy=auto", "trainer.devices=7"]
    for word, schedule in (("seed=1", "zbv"), ("strategy.pipeline.schedule=1f1b", "1f1b")):
        composition = compose_checked([*words, word])
        notices_of(composition, elsewhere=True)
        chosen = composition.config.strategy
        assert (chosen.pp, chosen.pipeline.schedule) == (7, schedule)


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^strategy=auto: no layout fits on 1 of rtx4090.*num_nodes=\d+, .*or choose"
    ):
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
    assert config["plan"]["predicted_gib"] > 0.3, "the memory of a CPU process holds torch itself too"
    assert report.count("predicted by strategy=auto") == 2, "of memory and of a step's time"


SAVED = [
    *("model=llama3_8b", "data.global_batch_size=512", "strategy=fsdp", "strategy.activation_checkpointing=full"),
    *("trainer.accelerator=cuda", "trainer.devices=8", "trainer.num_nodes=2", "plan.hardware=[h100]"),
]
SAVES = [*SAVED, "checkpoint.every_n_steps=auto", "plan.failure_hours=1000"]


def test_the_number_has_the_largest_useful_share_and_changes_no_identity() -> None:
    composition = compose_checked(SAVES)
    before = composition.config
    notices = notices_of(composition, elsewhere=True)
    steps = composition.config.checkpoint.every_n_steps
    assert isinstance(steps, int)
    failures, seconds = Failures.from_gpus(1000, 16, 10.0, 600.0), predicted_seconds(before)[0]
    share = useful_share(steps * seconds, failures)
    assert all(useful_share(other * seconds, failures) <= share for other in (steps - 1, steps + 1, 2 * steps))
    assert mathematics_hash(composition.config) == mathematics_hash(before)
    assert any(f"auto is {steps}: " in notice.text for notice in notices if notice.key == "checkpoint.every_n_steps")


def test_more_failures_mean_more_saves() -> None:
    numbers = [
        plan_save_steps(compose([*SAVES, f"plan.failure_hours={hours}"])[0], None)[0] for hours in (10, 100, 1000)
    ]
    assert numbers == sorted(numbers) and len(set(numbers)) == 3


def test_a_run_has_the_time_that_its_layout_was_planned_with() -> None:
    plans, _ = plan_layouts(compose([*SAVED, "data.seq_len=4096", "plan.rows=6"])[0])
    for plan in plans:
        assert predicted_seconds(plan.config) == (pytest.approx(plan.seconds), "h100")


def test_a_resumed_run_keeps_its_number(tmp_path: Path) -> None:
    old = compose(SAVES)[0]
    freeze(replace(old, checkpoint=replace(old.checkpoint, every_n_steps=7)), tmp_path / "config.yaml")
    composition = compose_checked([*SAVES, f"run.dir={tmp_path}", "checkpoint.resume=auto", "trainer.num_nodes=1"])
    notices_of(composition, elsewhere=True)
    assert composition.config.checkpoint.every_n_steps == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan.failure_hours=null"], r"^checkpoint.every_n_steps=auto: .*give plan.failure_hours"),
        (["model=vit_tiny", "data=digits"], r"^checkpoint.every_n_steps=auto: the time of a step is not"),
        (["plan.hardware=[h101]"], r"^plan.hardware=h101: .*did you mean h100"),
        (["plan.failure_hours=-1"], r"^plan.failure_hours=-1.0: use a number above 0"),
        (["checkpoint.every_n_steps=atuo"], r"^checkpoint.every_n_steps=atuo: did you mean auto"),
        (["strategy.dp_replicate=3"], r"^trainer.devices=16: .*dp_replicate=3"),
    ],
)
def test_saves_that_cannot_be_planned_are_refused_in_one_line(words: list[str], message: str) -> None:
    with pytest.raises((ConfigError, ConfigErrors), match=message) as caught:
        notices_of(compose_checked([*SAVES, *words]), elsewhere=True)
    assert "\n" not in str(caught.value)


def test_a_job_is_not_planned_for_the_processors_of_the_login_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgpu_pipe.config.resolve.usable_gpus", lambda: 0)
    monkeypatch.setattr("mgpu_pipe.planning.run_hardware.gpu_name", lambda: None)

    def hardware(*words: str) -> str:
        config, _ = compose(["trainer.accelerator=auto", "trainer.devices=2", "plan.hardware=[]", *words])
        return hardware_here(config.trainer, config.launch)

    assert (hardware(), hardware("launch=slurm", "trainer.accelerator=cpu")) == ("cpu", "cpu")
    with pytest.raises(ConfigError, match=r"^plan.hardware=\[\]: the kind of GPU is not known; name it: "):
        hardware("launch=slurm")


@pytest.mark.slow
def test_the_number_of_steps_is_frozen_with_the_run(cache: Path, tmp_path: Path) -> None:
    words = ["model=llama_tiny", "data=synthetic", "data.seq_len=32", "data.global_batch_size=8", "run.dir=run"]
    more = ["trainer.max_steps=2", "trainer.accelerator=cpu", "data.validation_max_samples=8"]
    mgpu(cache, tmp_path, *words, *more, "checkpoint.every_n_steps=auto", "plan.failure_hours=10")
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["checkpoint"]["every_n_steps"] > 1
