"""Oracle: what issue 3 promises of the generated DeepSpeed configuration, and of what contradicts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import ConfigErrors
from mgpu_pipe.launch.deepspeed_build import write_engine_settings
from mgpu_pipe.report.overview import overview
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.training.deepspeed.deepspeed_config import deepspeed_config
from tests.support.needs import need_torch_compile
from tests.support.sampling import one_in

BASE = ("model=llama_tiny", "trainer.devices=2", "trainer.accelerator=cpu")
RAW = "strategy.deepspeed_config."


def settings(*overrides: str) -> dict[str, object]:
    config, _ = compose([*BASE, *overrides])
    preflight(config)
    dims = ParallelDims.from_config(config.trainer, config.strategy)
    plan = BatchPlan.resolve(config.data, dims.data_parallel_size)
    return deepspeed_config(config.strategy, config.precision, config.trainer, plan)


@pytest.mark.parametrize(
    ("overrides", "said"),
    one_in(
        3,
        [
            ([f"{RAW}gradient_clipping=1.0"], "leave it out and set trainer.gradient_clip_val"),
            ([f"{RAW}train_batch_size=8"], "leave it out and set data.global_batch_size"),
            ([f"{RAW}bf16.enabled=true"], "leave it out and set precision"),
            ([f"{RAW}zero_optimization.stage=2"], "leave it out and set strategy.deepspeed.stage"),
            ([f"{RAW}zero_optimization.reduce_bucket_size=9"], "leave it out and set strategy.bucket_mib"),
            ([f"{RAW}zero_optimization.offload_param.device=cpu"], "leave it out and set strategy.offload"),
            ([f"{RAW}zero_optimisation.overlap_comm=true"], "no such setting; did you mean zero_optimization?"),
            ([f"{RAW}zero_optimization.stage3_prefetch_bucket=9"], "did you mean stage3_prefetch_bucket_size?"),
            ([f"{RAW}zero_optimization.offload_param.bufer_count=9"], "did you mean buffer_count?"),
            ([f"{RAW}checkpoint.tag_validation=Warn"], "not supported here"),
            ([f"{RAW}gradient_allreduce_op=sum"], "leave it out: the loss"),
            ([f"{RAW}zero_optimization.zero_quantized_gradients=true"], "not supported here"),
            (["strategy=zero2", f"{RAW}zero_optimization.stage3_max_live_parameters=9"], "ZeRO-2 does not have it"),
            ([f"{RAW}zero_optimization.ignore_unused_parameters=false"], "ZeRO-3 does not have it"),
            (["strategy=zero1", "strategy.offload=nvme", "strategy.offload_path=."], "ZeRO-1 offloads to the CPU only"),
            (["strategy.offload=nvme"], "strategy.offload_path=null: strategy.offload=nvme writes to one"),
            (["strategy.offload=nvme", "strategy.offload_path=/no/such"], "no such folder"),
            (["strategy.offload=nvme", "strategy.offload_path=/proc"], "it cannot be written"),
            (["strategy.deepspeed.stage=4"], "strategy.deepspeed.stage=4"),
            (["strategy.tp=2"], "strategy.engine=deepspeed shards data only"),
            (["precision=fp16"], "precision.name=fp16: the deepspeed engine has fp32 and bf16 only"),
            (["strategy=zero1", "precision=bf16_true"], "the deepspeed engine has fp32 and bf16 only"),
            (["model.compile=true"], "use false, or strategy=fsdp, zero1 or zero2"),
            (["strategy.dp_shard=3"], "strategy=zero3 makes a world of dp_shard=3 = 3"),
            (["optimizer=sgd", "optimizer._target_=torch.optim.Adafactor"], "depends on the whole tensor"),
        ],
    ),
)
def test_what_contradicts_is_refused_in_one_line(overrides: list[str], said: str) -> None:
    if "model.compile=true" in overrides:  # what the machine lacks would be said first
        need_torch_compile()
    config, _ = compose([*BASE, "strategy=zero3", *overrides]) if "stage=4" not in overrides[0] else (None, None)
    if config is None:
        with pytest.raises(ConfigErrors, match=said):
            compose([*BASE, "strategy=zero3", *overrides])
        return
    with pytest.raises(ConfigErrors) as caught:
        preflight(config)
    assert any(said in str(error) and "\n" not in str(error) for error in caught.value.errors), str(caught.value)


def test_a_disk_too_small_for_the_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Nearly:
        free = 328256 * 16 - 1  # one byte less than master, gradient and two moments of llama_tiny's parameters

    monkeypatch.setattr("shutil.disk_usage", lambda path: Nearly)
    config, _ = compose([*BASE, "strategy=zero3_nvme", f"strategy.offload_path={tmp_path}"])
    with pytest.raises(ConfigErrors, match="are free; give a larger disk"):
        preflight(config)


def test_the_raw_settings_add_to_and_replace_the_defaults() -> None:
    found = settings("strategy=zero3", f"{RAW}zero_optimization.overlap_comm=true", f"{RAW}wall_clock_breakdown=true")
    zero = found["zero_optimization"]
    assert isinstance(zero, dict)
    assert zero["overlap_comm"] is True and zero["stage"] == 3
    assert found["wall_clock_breakdown"] is True


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_keys_of_this_project_decide(stage: int) -> None:
    found = settings(f"strategy=zero{stage}", "data.micro_batch_size=4", "strategy.bucket_mib=1", "precision=bf16")
    zero = found["zero_optimization"]
    assert isinstance(zero, dict)
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [found[name] for name in sizes] == [32, 4, 4]
    assert (zero["stage"], zero["reduce_bucket_size"]) == (stage, 262144)
    assert found["bf16"] == {"enabled": True, "check_grad_overflow": False}
    assert found["communication_data_type"] == "fp32" and found["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (
            ["strategy=fsdp", "strategy.fsdp.prefetch=2", f"{RAW}wall_clock_breakdown=true"],
            ["strategy.deepspeed_config"],
        ),
        (
            ["strategy=zero3", "strategy.fsdp.prefetch=2", "strategy.offload_path=."],
            ["strategy.offload_path", "strategy.fsdp"],
        ),
        (["strategy=zero1", "strategy.engine=mesh"], ["strategy.deepspeed"]),
        (["strategy=zero3_cpu", f"{RAW}wall_clock_breakdown=true"], []),
    ],
)
def test_what_does_nothing_here_is_said(overrides: list[str], keys: list[str]) -> None:
    config, _ = compose([*BASE, *overrides])
    assert [notice.key for notice in preflight(config) if "does nothing here" in notice.text] == keys


def test_check_shows_what_matters_of_the_settings_and_the_run_keeps_them_all(tmp_path: Path) -> None:
    config, _ = compose([*BASE, "strategy=zero3"])
    line = dict(overview(config))["deepspeed"]
    assert line.startswith("ZeRO-3 shards weights, gradients and optimizer state, buckets of ") and "{" not in line
    config, _ = compose([*BASE, "strategy=zero3_cpu", f"{RAW}wall_clock_breakdown=true"])
    line = dict(overview(config))["deepspeed"]
    assert 'set by you: {"wall_clock_breakdown": true}; all settings: deepspeed.json' in line
    write_engine_settings(RunPaths(tmp_path), config, 2)
    written = json.loads((tmp_path / "deepspeed.json").read_text())
    assert written["wall_clock_breakdown"] is True and written["zero_optimization"]["stage"] == 3
    write_engine_settings(RunPaths(tmp_path / "none"), compose([*BASE, "strategy=ddp"])[0], 1)


def test_neither_torch_nor_deepspeed_is_imported_to_check() -> None:
    program = (
        "import sys; from mgpu_pipe.cli import main as cli; "
        "code = cli.main(['check', 'strategy=zero3', 'model=llama_tiny']); "
        "sys.exit(code or bool({'torch', 'deepspeed'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0
