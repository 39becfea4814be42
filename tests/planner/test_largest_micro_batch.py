"""``data.micro_batch_size=max``: predicted, measured, frozen. Oracle of the search: limits of a stand-in."""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mgpu_pipe.checks.planned_keys import micro_batch_sizes, with_predicted_micro_batch
from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.hydra.compose import Composition, compose, compose_checked
from mgpu_pipe.config.run_identity import mathematics_hash
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_STOPPED, ConfigError, ConfigErrors
from mgpu_pipe.launch import micro_batch_tries
from mgpu_pipe.launch.compositions import launch_composition, notices_of
from mgpu_pipe.launch.outcome import LaunchResult
from mgpu_pipe.planning.memory_limits import predict_fit
from tests.support.command import start

LARGE = [
    *("model=llama3_8b", "data.global_batch_size=96", "strategy=fsdp", "strategy.activation_checkpointing=full"),
    *("trainer.accelerator=cuda", "trainer.devices=8", "plan.hardware=[h100]", "data.micro_batch_size=max"),
]
PIPELINE = [
    *("model=llama_tiny", "strategy=megatron", "strategy.pp=2", "trainer.devices=2", "data.global_batch_size=8"),
    *("strategy.pipeline.schedule=1f1b", "trainer.accelerator=cpu", "data.micro_batch_size=max"),
]


def with_micro_batch(config: RunConfig, size: int) -> RunConfig:
    return replace(config, data=replace(config.data, micro_batch_size=size))


def test_the_largest_that_is_predicted_to_fit_is_taken_and_changes_no_identity() -> None:
    composition = compose_checked([*LARGE, "data.seq_len=32768", "model.config.max_position_embeddings=32768"])
    before = composition.config
    notices_of(composition, elsewhere=True)
    size = composition.config.data.micro_batch_size
    assert size in (1, 2, 3, 4, 6) and composition.measures_micro_batch
    larger = next(other for other in (1, 2, 3, 4, 6, 12) if other > int(size))
    chosen, next_one = predict_fit(composition.config, True), predict_fit(with_micro_batch(before, larger), True)
    assert chosen is not None and chosen.is_likely and next_one is not None and not next_one.is_likely
    assert mathematics_hash(composition.config) == mathematics_hash(before)


def test_a_pipelines_schedule_limits_the_sizes() -> None:
    assert micro_batch_sizes(compose(PIPELINE)[0]) == [1, 2, 4]  # two ranks take two micro-batches


@pytest.mark.parametrize(("limit", "tries"), [(12, [4, 6, 12]), (5, [4, 6]), (2, [4, 3, 2]), (1, [4, 3, 2, 1])])
def test_the_search_goes_from_the_prediction_to_the_limit(
    limit: int, tries: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def problem(config: RunConfig) -> str:
        seen.append(int(config.data.micro_batch_size))
        return "" if seen[-1] <= limit else "error: out of memory"

    monkeypatch.setattr(micro_batch_tries, "_problem", problem)
    config = compose([*LARGE, "trainer.accelerator=cpu"])[0]
    found = micro_batch_tries.largest_micro_batch(with_micro_batch(config, 4))
    assert found.data.micro_batch_size == max(size for size in seen if size <= limit) and seen == tries


def test_nothing_that_fits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch_tries, "_problem", lambda config: "rank 0 ran out of memory")
    config = with_micro_batch(compose([*LARGE, "trainer.accelerator=cpu"])[0], 2)
    with pytest.raises(ConfigError, match=r"^data.micro_batch_size=max: not even 1 fits: rank 0 ran out of memory; "):
        micro_batch_tries.largest_micro_batch(config)


def test_a_resumed_run_keeps_its_micro_batch(tmp_path: Path) -> None:
    old = compose(LARGE)[0]
    freeze(with_micro_batch(old, 3), tmp_path / "config.yaml")
    composition = compose_checked([*LARGE, f"run.dir={tmp_path}", "checkpoint.resume=auto"])
    notices_of(composition, elsewhere=True)
    assert composition.config.data.micro_batch_size == 3 and not composition.measures_micro_batch


def test_a_point_of_a_sweep_takes_the_micro_batch_of_its_own_run(tmp_path: Path) -> None:
    words = [*LARGE, f"run.root={tmp_path}", "run.name=swept", "checkpoint.resume=auto", "trainer.memory_check=off"]
    run = tmp_path / "swept" / "first"
    run.mkdir(parents=True)
    freeze(with_micro_batch(compose(words)[0], 3), run / "config.yaml")
    (run / "overrides.txt").write_text("strategy=fsdp\n")
    for strategy, is_resumed in (("ddp", False), ("fsdp", True)):
        composition = compose_checked([*words, f"strategy={strategy}"])
        composition.swept = [f"strategy={strategy}"]
        notices_of(composition, elsewhere=True)
        assert composition.measures_micro_batch == (not is_resumed)
    freeze(replace(compose(words)[0], seed=9), run / "config-attempt-1.yaml")
    composition = compose_checked(words)
    notices_of(composition, elsewhere=True)
    assert composition.measures_micro_batch  # an attempt of that run was another run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*LARGE, "trainer.num_nodes=2"], r"^data.micro_batch_size=max: it is measured by a command .*give a number"),
        ([*LARGE, "launch=slurm"], r"^data.micro_batch_size=max: it is measured by a command"),
        ([*LARGE, "data.micro_batch_size=maximum"], r"^data.micro_batch_size=maximum: did you mean max"),
        ([*LARGE, "data.global_batch_size=12"], r"^data.global_batch_size=12: "),
        ([*PIPELINE, "data.global_batch_size=1"], r"^strategy.pipeline.schedule=1f1b: on 2 ranks"),
    ],
)
def test_what_has_no_largest_micro_batch_is_refused(words: list[str], message: str) -> None:
    with pytest.raises((ConfigError, ConfigErrors), match=message):
        notices_of(compose_checked(words), elsewhere=True)


def test_the_memory_of_other_objectives_is_measured_alone() -> None:
    config = compose(["model=vit_tiny", "data=digits", "data.global_batch_size=64", "data.micro_batch_size=max"])[0]
    predicted, notice, is_measured = with_predicted_micro_batch(config, None, False)
    assert predicted.data.micro_batch_size == 8 and is_measured and "a first try" in notice.text


def try_of(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A configuration each of whose tries is a Python ``program``, in files below ``folder``."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(micro_batch_tries, "python_module", lambda module, file: [sys.executable, "-c", program, file])
    return with_micro_batch(compose([*LARGE, "trainer.accelerator=cpu"])[0], 4)


def test_a_stop_signal_ends_the_try_and_removes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stood = tmp_path / "pid"
    stood.touch()
    program = f"import os, time; open({str(stood)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    files = tmp_path / "files"
    files.mkdir()
    config = try_of(program, files, monkeypatch)
    before = signal.getsignal(signal.SIGTERM)

    def stop() -> None:
        while not stood.read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # timeout(1) delivers a request twice

    threading.Thread(target=stop).start()
    with pytest.raises(micro_batch_tries.MicroBatchStoppedError) as caught:
        micro_batch_tries.largest_micro_batch(config)
    assert caught.value.exit_code == EXIT_STOPPED and not list(files.iterdir())
    assert not Path(f"/proc/{stood.read_text()}").exists() and signal.getsignal(signal.SIGTERM) is before


def test_a_try_that_was_stopped_stops_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = try_of(f"raise SystemExit({EXIT_STOPPED})", tmp_path, monkeypatch)
    with pytest.raises(micro_batch_tries.MicroBatchStoppedError):
        micro_batch_tries.largest_micro_batch(config)


def test_the_kernel_kills_a_try_without_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = "import ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n)); exit(f'error: {n.value}')"
    config = try_of(asks, tmp_path, monkeypatch)
    with pytest.raises(micro_batch_tries.MicroBatchTryError, match=f"failed: {signal.SIGKILL.value}$"):
        micro_batch_tries.largest_micro_batch(config)


def test_a_run_from_a_base_run_is_measured_with_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunConfig] = []

    def with_base(composition: Composition, run: object) -> Composition:
        options = replace(composition.config.run, starts_from=None)
        composition.config = replace(composition.config, run=options)
        return composition

    def measured(config: RunConfig) -> RunConfig:
        seen.append(config)
        return with_micro_batch(config, 3)

    def launch(config: RunConfig, command_line: object) -> LaunchResult:
        seen.append(config)
        return LaunchResult("finished", 0, Path())

    monkeypatch.setattr("mgpu_pipe.launch.base_run.with_base", with_base)
    monkeypatch.setattr(micro_batch_tries, "largest_micro_batch", measured)
    monkeypatch.setattr("mgpu_pipe.launch.local.launch", launch)
    composition = compose_checked([*LARGE, "run.starts_from=quickstart"])
    composition.measures_micro_batch = True
    launch_composition(composition, [])
    assert seen[0].run.starts_from is None and seen[1].data.micro_batch_size == 3


@pytest.mark.slow
def test_tries_that_run_out_of_memory_end_in_a_smaller_one(cache: Path, tmp_path: Path) -> None:
    limit = 1_000_000_000
    words = ["model=llama_tiny", "model.config.num_hidden_layers=1", "model.config.vocab_size=16384"]
    words += ["data=synthetic", "data.synthetic.num_documents=100", "data.tokenize_workers=1", "data.seq_len=512"]
    words += ["data.global_batch_size=11", "data.validation_max_samples=2", "objective.loss_chunk_tokens=0"]
    process = start(
        cache,
        tmp_path,
        *(*words, "trainer.max_steps=1", "trainer.accelerator=cpu", "run.dir=run", "data.micro_batch_size=max"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said[-3000:]
    assert "11 does not fit" in said and "max is 1, measured" in said
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["data"]["micro_batch_size"] == 1
