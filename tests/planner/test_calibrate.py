"""``mgpu-pipe calibrate``. Oracle: seconds that known constants predict, and a profile that the planner reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mgpu_pipe.checks.plan_layouts import plan_layouts
from mgpu_pipe.cli.verbs.calibrate import calibrate
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.errors import ConfigError, ConfigErrors
from mgpu_pipe.planning.calibration import Measurements, fit_constants, profile_text, uncalibrated_profile
from mgpu_pipe.planning.hardware_profile import HardwareProfile, load_profile
from mgpu_pipe.planning.matrix_products import product_seconds
from mgpu_pipe.planning.step_time import all_reduce_seconds, step_time
from mgpu_pipe.planning.work import Constants, Work
from mgpu_pipe.training.profiling import measure_hardware
from tests.support.command import environment, mgpu
from tests.support.program import command_line, run_program

TRUE = Constants(gemm=0.6, memory=0.5, attention=0.2, launch=4e-4, step=3e-3, link=0.8, link_latency=8e-5)
FIELDS = ("layers", "width", "inner", "heads", "vocabulary", "sequence", "rows", "micro_batches")
DECODERS = [(2, 64, 192, 8, 1024, 128, 4, 1), (6, 64, 192, 8, 1024, 128, 4, 1), (2, 256, 768, 8, 1024, 512, 1, 2)]
PRODUCTS = [(512, 512, 64), (512, 256, 256), (512, 512, 512), (2048, 2048, 2048)]


def work_of(sizes: tuple[int, ...]) -> dict[str, float]:
    work = dict(zip(FIELDS, map(float, sizes), strict=True))
    heads = {"key_value_heads": work["heads"], "head_dim": work["width"] / work["heads"]}
    return {**work, **heads, "gated": 1.0, "context": work["sequence"], "activation_bytes": 4.0}


def measured(with_links: bool = True) -> Measurements:
    """What a machine of 0.1 TFLOP/s, 5 GB/s of memory and 2 GB/s of link takes by ``TRUE``."""
    figures = {"memory_gib": 8.0, "bf16_tflops": 0.1, "memory_gb_s": 5.0, "multiprocessors": 1, "link_gb_s": 2.0}
    figures |= {"gpus_per_node": 4, "host_memory_gib": 16.0, "network_gb_s": 1.0}
    hardware = HardwareProfile(name="", description="", source="", network="", **figures).hardware  # type: ignore[arg-type]
    works = [work_of(sizes) for sizes in DECODERS]
    reductions = [(size, ranks) for ranks in (2, 4) for size in (4, 1 << 16, 1 << 24)] if with_links else []
    return Measurements(
        processes=4 if with_links else 1,
        products=[(*sizes, float(product_seconds(*sizes, 4.0, hardware, TRUE))) for sizes in PRODUCTS],
        bandwidth=5e9,
        reductions=[(*sizes, float(np.asarray(all_reduce_seconds(*sizes, hardware, TRUE)))) for sizes in reductions],
        steps=[(work, float(step_time(Work(**work), hardware, TRUE).total)) for work in works],
        block={"forward": 0.1, "backward": 0.2, "launch": 0.001},
        device={"type": "cpu", "name": "a CPU", "memory": 8 << 30, "multiprocessors": 1, "host_memory": 16 << 30},
    )


def test_the_fitted_profile_predicts_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(profile_text(measured()))
    profile = load_profile(str(file))
    for work, seconds in measured().steps:
        predicted = step_time(Work(**work), profile.hardware, profile.all_constants).total
        assert float(predicted) == pytest.approx(seconds, rel=0.05)
    for size, ranks, seconds in measured().reductions:
        assert float(
            np.asarray(all_reduce_seconds(size, ranks, profile.hardware, profile.all_constants))
        ) == pytest.approx(seconds, rel=0.05)


def test_every_figure_says_whether_it_is_calibrated_or_assumed() -> None:
    for with_links in (True, False):
        lines = profile_text(measured(with_links)).splitlines()
        texts = ("description:", "source:", "accelerator:", "constants:")
        assert all(line.endswith(("# calibrated", "# assumed")) for line in lines if not line.startswith(texts))
        link = next(line for line in lines if line.startswith("link_gb_s"))
        assert link.endswith("# calibrated" if with_links else "# assumed")
        assert any("link_latency" in line for line in lines) == with_links
    assert fit_constants(measured(False)).link == Constants().link


def test_a_calibrated_cpu_is_planned_for_as_processes(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(profile_text(measured()))
    plans, _ = plan_layouts(
        compose(["model=llama_tiny", f"plan.hardware=[{file}]", "trainer.devices=4", "data.global_batch_size=8"])[0]
    )
    assert plans[0].config.trainer.accelerator == "cpu" and plans[0].profile.accelerator == "cpu"


def test_fp32_moves_twice_the_bytes() -> None:
    slow = HardwareProfile(
        name="", **{**uncalibrated_profile(measured()), "memory_gb_s": 1e-3}
    ).hardware  # memory alone counts
    work = Work(**work_of(DECODERS[0]))
    times = [
        float(step_time(replace(work, activation_bytes=size, vocabulary=1.0), slow, replace(TRUE, step=1e-9)).compute)
        for size in (2.0, 4.0)
    ]
    assert times[1] == pytest.approx(2 * times[0], rel=0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "mine.txt"], r"^--out=mine.txt: a profile is a YAML file; name it like calibrated.yaml"),
        (["--out"], r"^--out=: a profile is a YAML file"),
        (["--out=nowhere/mine.yaml"], r"^--out=nowhere/mine.yaml: there is no folder nowhere"),
        (["--out=/proc/mine.yaml"], r"^--out=/proc/mine.yaml: no folder can be made in /proc"),
        (["trainer.num_nodes=2"], r"^trainer.num_nodes=2: one node's processes are measured"),
        (["trainer.devices=0"], r"^trainer.devices=0: use a number of at least 1"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, ConfigErrors), match=message):
        calibrate(["trainer.accelerator=cpu", *words])
    assert not list(tmp_path.iterdir())


def test_a_profile_of_an_unknown_accelerator_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(profile_text(measured()).replace("accelerator: cpu", "accelerator: gpu"))
    with pytest.raises(ConfigError, match="accelerator=gpu is unknown"):
        load_profile(str(file))


def test_a_small_constant_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgpu_pipe.planning.calibration.fit_constants", lambda measured: replace(TRUE, launch=2e-5))
    file = tmp_path / "mine.yaml"
    file.write_text(profile_text(measured()))
    assert load_profile(str(file)).all_constants.launch == 2e-5


def test_calibrate_replaces_its_own_profile_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgpu_pipe.launch.measurement.measure_hardware", lambda config: measured())
    file = tmp_path / "mine.yaml"
    words = ["trainer.accelerator=cpu", "--out", str(file)]
    assert calibrate(words) == 0
    calibrated = file.read_text()
    assert calibrate(words) == 0
    for text in (calibrated.replace("source: ", "source: not "), "a: [", "", "[1]"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"^--out=.*mine.yaml: .*calibrate did not write it; name another"):
            calibrate(words)
        assert file.read_text() == text


def test_a_profile_that_cannot_be_read_again_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgpu_pipe.launch.measurement.measure_hardware", lambda config: measured())
    monkeypatch.setattr("mgpu_pipe.planning.calibration.fit_constants", lambda measured: replace(TRUE, launch=-1.0))
    with pytest.raises(ConfigError, match=r"^--out=.*constants.launch=-1.0"):
        calibrate(["trainer.accelerator=cpu", f"--out={tmp_path / 'mine.yaml'}"])
    assert not list(tmp_path.iterdir())


def measured_shortly(arguments: list[str]) -> None:
    """The program, whose figures need not be good."""
    measure_hardware.WINDOW_S, measure_hardware.WINDOWS, measure_hardware.TRIP_WINDOWS = 0.005, 2, 1
    command_line(arguments)


@pytest.mark.slow
def test_two_processes_are_measured_and_planned_for(cache: Path, tmp_path: Path) -> None:
    words = ["calibrate", "trainer.accelerator=cpu", "trainer.devices=2", "--out", "mine.yaml"]
    out = run_program(words, tmp_path, environment(cache), 300, measured_shortly).stdout
    assert "all-reduce" in out and "copy in memory" in out and "backward" in out
    assert load_profile(str(tmp_path / "mine.yaml")).gpus_per_node == 2
    words = ["model=llama_tiny", "trainer.devices=2", "plan.hardware=mine.yaml"]
    assert "trainer.accelerator=cpu" in mgpu(cache, tmp_path, "plan", *words)
