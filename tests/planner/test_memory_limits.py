"""A run that cannot fit is refused with changes that fit. Oracle: the formulas, which tests/planner compares."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest

import mgpu_pipe
from mgpu_pipe.config import resolve
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.run_identity import mathematics_hash
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.planning import memory_limits as memory
from mgpu_pipe.planning.memory import memory_by_rank
from mgpu_pipe.planning.memory_limits import memory_errors, memory_notice, predict_fit, predict_memory, with_overrides
from mgpu_pipe.system import hardware
from tests.support.sampling import one_in

ROOM = 80 << 30
HALF_STATE = ["optimizer=adamw_bf16"]
H100 = "plan.hardware=[h100]"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight GPUs, the last of them smaller."""
    monkeypatch.setattr(hardware, "_driver_gpus", lambda: 8)
    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(resolve, "gpu_capability", lambda: (9, 0))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(memory, "used_memory", lambda: dict.fromkeys(range(7), (0, 2 * ROOM)) | {7: (0, ROOM)})
    monkeypatch.setattr(memory, "host_memory", lambda: 2 << 40)


def changes_of(error: str) -> list[str]:
    """The overrides that an error names."""
    return re.findall(r"(?:^|, )([a-z][^(]*) \(about", error.rpartition("; try ")[2])


def composed(*overrides: str) -> RunConfig:
    return compose(["model=llama3_8b", *overrides])[0]


def said(*overrides: str, elsewhere: bool = False) -> list[str]:
    return [str(error) for error in memory_errors(composed(*overrides), elsewhere)]


def notice_of(config: RunConfig, elsewhere: bool) -> str:
    return memory_notice(predict_fit(config, elsewhere), config.trainer)


def test_a_run_that_cannot_fit_is_refused_with_three_changes() -> None:
    (error,) = said("strategy=ddp", "trainer.devices=8")
    plan = memory_by_rank(composed("strategy=ddp", "trainer.devices=8"))
    assert plan is not None
    assert error.startswith(
        f"strategy.name=ddp: a rank needs at least {plan.low / 2**30:.1f} GiB, likely {plan.likely / 2**30:.1f} GiB"
    )
    assert "optimizer 59.8 GiB" in error and "its GPU has 80.0 GiB" in error and "\n" not in error
    assert len(changes_of(error)) == 3
    assert changes_of(error)[0] == "strategy=fsdp"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "model"), one_in(3, product(("cuda", "cpu"), ("llama3_8b", "llama32_1b", "llama3_70b", "mixtral_8x7b")))
)
def test_changes_fit_when_they_are_made(monkeypatch: pytest.MonkeyPatch, model: str, device: str) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: 24 << 30 if device == "cpu" else 2 << 40)
    strategies: tuple[str, ...] = (
        "single",
        "ddp trainer.devices=8",
        "fsdp trainer.devices=8",
        "zero1 trainer.devices=8",
    )
    strategies += ("hsdp strategy.dp_replicate=4 trainer.devices=8", "megatron strategy.tp=2 trainer.devices=4")
    for strategy in strategies:
        words = [f"model={model}", f"trainer.accelerator={device}", *f"strategy={strategy}".split()]
        for error in said(*words):
            changes = changes_of(error)
            assert bool(changes) != ("use a smaller model" in error), error
            for change in changes:
                assert said(*words, *change.split()) == [], (error, change)


@pytest.mark.slow
def test_the_changes_of_an_error_are_what_the_command_line_makes_of_them() -> None:
    sharded = ["strategy=fsdp", "strategy.offload=cpu"]
    zero = ["strategy=zero3", "strategy.offload=cpu"]
    changes = (("ddp", sharded), ("zero1", zero[:1]), ("ddp", ["peft=lora"]), ("fsdp", HALF_STATE), ("single", zero))
    for base, words in changes:
        begun = (f"strategy={base}", f"trainer.devices={1 if base == 'single' else 8}")
        changed, typed = with_overrides(composed(*begun), words), composed(*begun, *words)
        predictions = [memory_by_rank(each) for each in (changed, typed)]
        assert predictions[0] == predictions[1], words


@pytest.mark.slow
def test_seventy_billion_parameters_on_eight_gpus() -> None:
    words = ["model=llama3_70b", "strategy=ddp", "trainer.devices=8", "trainer.accelerator=cuda", H100]
    with pytest.raises(BadInputError) as refused:
        mgpu_pipe.check(words)
    changes = changes_of(str(refused.value))
    assert len(changes) == 3
    assert "strategy.offload=cpu" in changes[0] and "trainer.num_nodes=" in changes[1] and "peft=" in changes[2]
    for change in changes:
        assert "memory" in dict(mgpu_pipe.check([*words, *change.split()]).rows), change


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_one_gpu_offloads_what_it_cannot_hold(offload: str) -> None:
    words = ["model=llama3_70b", "peft=qlora", "trainer.accelerator=cuda", "plan.hardware=[rtx4090]"]
    words += ["strategy=single", f"strategy.offload={offload}"]
    with pytest.raises(BadInputError) as refused:
        mgpu_pipe.check([*words, "trainer.devices=1"])
    changes = changes_of(str(refused.value))
    assert changes[0].startswith("strategy=zero3 strategy.offload=cpu"), changes
    assert "memory" in dict(mgpu_pipe.check([*words, *changes[0].split()]).rows)


def test_a_host_without_memory_for_offloaded_state_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("strategy=fsdp", "strategy.offload=cpu", "trainer.devices=8", "data.seq_len=512")
    assert said(*words) == []
    monkeypatch.setattr(memory, "host_memory", lambda: 100 << 30)
    (error,) = said(*words)
    assert error.startswith("strategy.offload=cpu: 8 ranks of a node keep 119.") and "memory of 100.0 GiB" in error
    for change in ("trainer.num_nodes=2", "peft=lora"):
        assert said(*words, change) == []


def test_the_user_may_know_better() -> None:
    words = ("strategy=ddp", "trainer.devices=8")
    assert said(*words, "trainer.memory_check=warn") == said(*words, "trainer.memory_check=off") == []
    assert "it may not fit" in notice_of(composed(*words, "trainer.memory_check=warn"), False)
    assert notice_of(composed(*words, "trainer.memory_check=off"), False) == ""
    plain = composed(*words)
    other = replace(plain, trainer=replace(plain.trainer, memory_check="off"), plan=replace(plain.plan, hardware=["x"]))
    assert mathematics_hash(plain) == mathematics_hash(other)


@pytest.mark.slow
def test_within_the_uncertainty_a_run_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("strategy=fsdp", "trainer.devices=8", "data.seq_len=4096")
    plan = memory_by_rank(composed(*words))
    assert plan is not None
    for size, is_refused, is_warned in ((plan.low - 1, True, True), (plan.low, False, True), (plan.high, False, False)):
        monkeypatch.setattr(memory, "used_memory", lambda size=size: {0: (0, size)})
        assert bool(said(*words)) is is_refused
        assert bool(notice_of(composed(*words), False)) is is_warned


@pytest.mark.slow
def test_elsewhere_the_hardware_has_to_be_named() -> None:
    words = ("strategy=single", "trainer.accelerator=cuda")
    assert said(*words, elsewhere=True) == said(*words, "launch=slurm") == []
    for named in (said(*words, H100, elsewhere=True), said(*words, H100, "launch=slurm")):
        assert "a GPU of plan.hardware=h100 has 79.6 GiB" in named[0]
    with pytest.raises(ConfigError, match="no such hardware"):
        said(*words, "plan.hardware=[h101]", elsewhere=True)


def test_a_machine_without_gpus_checks_runs_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_driver_gpus", lambda: 0)
    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: False)
    monkeypatch.setattr(memory, "host_memory", lambda: 24 << 30)
    assert said(elsewhere=True) == [] and "it may not fit" in notice_of(composed(), True)
    assert said() and said("trainer.accelerator=cpu", elsewhere=True), "here it would run on this machine's CPU"


@pytest.mark.slow
def test_processes_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("strategy=ddp", "trainer.accelerator=cpu", "precision=fp32", "trainer.devices=8")
    plan = memory_by_rank(composed(*words))
    assert plan is not None
    monkeypatch.setattr(memory, "host_memory", lambda: 8 * plan.low)
    assert said(*words) == []
    monkeypatch.setattr(memory, "host_memory", lambda: 8 * plan.low - 8)
    (error,) = said(*words)
    assert "this machine has" in error and "trainer.devices=" not in error and "trainer.num_nodes=" not in error


def test_models_without_known_shapes_are_not_refused() -> None:
    config = compose(["model=vit_b16", "data=digits", "objective=image_classification", "trainer.accelerator=cuda"])[0]
    assert memory_errors(config, False) == [] and notice_of(config, False) == ""


def test_one_process_has_the_largest_gpu() -> None:
    assert said("strategy=single") == [], "137 GiB on a GPU of 160, next to a smaller one"


def test_what_is_not_counted_exactly_refuses_no_run() -> None:
    counted = memory_by_rank(composed())
    assert counted is not None
    for words in (["optimizer=sgd"], ["model.freeze=[model.layers.*]"]):
        plan = memory_by_rank(composed(*words))
        assert plan is not None and plan.low < counted.low - counted.terms["optimizer"] * 0.99, words


def test_experts_are_cut_in_pipelines_too() -> None:
    words = ["model=qwen3_30b_a3b", "strategy=megatron", "strategy.pp=2", "trainer.num_nodes=4", "trainer.devices=8"]
    whole, cut = (memory_by_rank(compose([*words, f"strategy.ep={ep}"])[0]) for ep in (1, 8))
    assert whole is not None and cut is not None
    for term in ("gradients", "gathered weights"):
        assert cut.terms[term] < 0.3 * whole.terms[term], "most parameters are experts'"


def test_ranks_of_a_cpu_pipeline_share_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["model=llama32_1b", "strategy=pp", "strategy.pp=4", "trainer.devices=4", "trainer.accelerator=cpu"]
    plan = memory_by_rank(compose(words)[0])
    assert plan is not None and plan.mean_low < plan.low
    for size, fits in ((4 * plan.low - 1, True), (4 * plan.mean_low - 4, False)):
        monkeypatch.setattr(memory, "host_memory", lambda size=size: size)
        assert (memory_errors(compose(words)[0], False) == []) == fits


def test_verbs_that_train_no_whole_model_check_no_memory() -> None:
    config = composed("strategy=ddp", "trainer.devices=8")
    unchecked = replace(config, trainer=replace(config.trainer, memory_check="off"))
    assert memory_errors(config, False) and not memory_errors(unchecked, False)


def test_memory_is_not_predicted_where_the_model_is_refused() -> None:
    config = compose(["model=llama_tiny", "trainer.accelerator=cpu"])[0]
    assert predict_memory(config) is not None
    config.model.config["num_key_value_heads"] = float("nan")
    assert predict_memory(config) is None
