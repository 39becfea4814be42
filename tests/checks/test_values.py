"""Validation and preflight: each kind of bad input is refused by key, and good configurations pass."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mgpu_pipe.checks import devices as numerics
from mgpu_pipe.checks.notices import notices, unused_options
from mgpu_pipe.checks.preflight import preflight, preflight_errors
from mgpu_pipe.config import resolve
from mgpu_pipe.config.hydra.compose import compose, compose_checked
from mgpu_pipe.config.run_identity import mathematics_hash
from mgpu_pipe.errors import ConfigErrors
from mgpu_pipe.system import hardware
from tests.support.needs import nobodys_folder

CPU = "trainer.accelerator=cpu"


def messages(*overrides: str) -> list[str]:
    config, _ = compose([CPU, *overrides])
    with pytest.raises(ConfigErrors) as caught:
        preflight(config)
    return [str(error) for error in caught.value.errors]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Stand in for a machine's GPUs: a driver and a CUDA build of torch cannot exist here."""

    def have(count: int, torch_built_for_cuda: bool = True) -> None:
        monkeypatch.setattr(hardware, "_driver_gpus", lambda: count)
        monkeypatch.setattr(hardware, "torch_has_cuda", lambda: torch_built_for_cuda)
        monkeypatch.setattr(resolve, "gpu_capability", lambda: (9, 0) if count else None)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return have


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optimizer.lr=0"], "optimizer.lr=0.0: use a number above 0"),
        (["trainer.devices=0", "strategy=ddp"], "trainer.devices=0: use a number of at least 1"),
        (["scheduler.min_lr_ratio=2"], "at most 1"),
        (["trainer.gradient_clip_val=0"], "or null not to clip"),
        (["data.validation_fraction=1"], "data.validation_fraction=1.0: use a number below 1"),
        (["data.source=stdlib_txt"], "did you mean stdlib_text?"),
        (["objective.name=causl_lm"], "did you mean causal_lm?"),
        (["run.name=a/b"], "use a plain name"),
        (["model=hf"], "model.path=null: no model is chosen"),
        (["model.path=."], "model.path=.: model.type=llama is set too"),
        (["model.type=lama"], "did you mean llama?"),
        (["model.config.num_hiden_layers=3"], "did you mean model.config.num_hidden_layers?"),
        (["trainer.max_steps=null"], "give trainer.max_steps or trainer.max_epochs"),
        (["trainer.max_epochs=2"], "add trainer.max_steps=null"),
        (["scheduler.warmup_ratio=1.5"], "scheduler.warmup_ratio=1.5: use "),
        (
            ["scheduler.warmup_ratio=0.1", "scheduler.warmup_steps=5"],
            "scheduler.warmup_steps=5 is set too; leave one of",
        ),
        (["scheduler=wsd", "scheduler.warmup_steps=60", "scheduler.decay_steps=50"], "use at most 40"),
        (
            ["scheduler=wsd", "scheduler.warmup_steps=200", "scheduler.decay_steps=50"],
            "use a scheduler.warmup_steps of at most 50",
        ),
        (["data=jsonl"], "data.paths=[]: data.source=jsonl reads files"),
        (["data=text_files", "data.paths=[/nothing/*.txt]"], "data.paths=/nothing/*.txt: matches no file"),
        (["trainer.val_every_n_steps=5", "data.validation_fraction=0"], "no data is held out"),
        (["trainer.sample_every_n_steps=5"], "the objective has no prompt to continue"),
        (["trainer.sample_every_n_steps=0", "objective.sample_prompts=[a]"], "use a number of at least 1"),
        (["trainer.devices=2"], "trainer.devices=2: strategy=single is one process; use 1, or strategy=ddp"),
        (["strategy=ddp", "trainer.devices=3"], "data.global_batch_size=32: not divisible by the 3"),
        (["data.micro_batch_size=5"], "data.micro_batch_size=5: does not divide"),
        (["strategy.tp=2"], "strategy=single makes a world of tp=2 = 2"),
        (["strategy=fsdp", "strategy.dp_shard=3", "trainer.devices=4"], "makes a world of dp_shard=3 = 3"),
        (["strategy=hsdp", "strategy.dp_replicate=3", "trainer.devices=4"], "4 processes are not divisible by dp_repl"),
        (["strategy=fsdp", "strategy.offload=cpu"], "strategy.offload=cpu: on the CPU everything is in host memory"),
        (["strategy=fsdp", "strategy.offload=nvme"], "use strategy=zero3_nvme, or cpu"),
        (["precision=fp8"], "precision.name=fp8: float8 needs a GPU of compute capability 8.9 or higher"),
        (["strategy=fsdp", "strategy.fsdp.prefetch=-1"], "strategy.fsdp.prefetch=-1: use a number of at least 0"),
        (["strategy.engine=deepsped"], "strategy.engine=deepsped: no such engine; use mesh or deepspeed"),
        (["data.seq_len=4096"], "model llama_small has 2048 positions; use at most 2048"),
        (
            [
                *("model=hf", "model.path=null", "model.type=roberta", "model.config.is_decoder=true"),
                *("data.packing=none", "data.seq_len=511"),
            ],
            "510 positions; use at most 510",
        ),
        (["model=gpt2_tiny", "data.seq_len=2048"], "raise model.config.n_positions"),
        (["checkpoint.resume=auot"], "did you mean auto?"),
        (["data.source=squares"], ", ...; or install the package that brings it"),
        (["checkpoint.init_from=/nothing/here"], "no such file or folder"),
        (["checkpoint.init_from=/etc/passwd"], "mgpu-pipe import --from /etc/passwd --out"),
        (["data.tokenizer=/nothing/here"], "give a tokenizer folder"),
        (["optimizer._target_=os.system"], "not a class; use a subclass of torch.optim.Optimizer"),
        (["optimizer.options.lr=1"], "set optimizer.lr instead"),
        (["optimizer.options.beta=1"], "did you mean betas?"),
        (["optimizer=sgd", "optimizer._target_=torch.optim.Rprop", "optimizer.weight_decay=0.1"], "no weight decay"),
        (["optimizer=sgd", "optimizer._target_=torch.optim.LBFGS"], "evaluates the loss itself, several times a step"),
        (["data.paths=[corpus.txt]"], "data.source=stdlib_text reads no files; use data=text_files"),
        (["checkpoint.init_from=/tmp", "checkpoint.resume=/tmp"], "checkpoint.resume=/tmp brings its weights"),
        (["strategy=zero3", "objective.router_aux_loss=0.1"], "objective.router_aux_loss=0.1: the llama family has no"),
        (["strategy=zero2", "strategy.sequence_parallel=true"], "strategy.sequence_parallel=true: strategy.engine="),
        (
            [
                "strategy=pp",
                "strategy.pipeline.stages_per_rank=3",
                "trainer.devices=2",
                "strategy.pipeline.schedule=zbv",
            ],
            "strategy.pipeline.stages_per_rank=3: zbv has 2 on a rank",
        ),
        (["model.attn_implementation=flash_attention_2"], "flash-attn is not installed; install flash-attn"),
        (["precision.reduce=bf16"], "precision.reduce=bf16: the run computes in fp32; use fp32, or precision=bf16"),
        (
            [
                "precision=bf16",
                "precision.reduce=bf16",
                "strategy=hsdp",
                "strategy.dp_replicate=2",
                "trainer.devices=2",
            ],
            "replicas would sum up 2 micro-batches in bf16 too; use fp32, or strategy=fsdp, or data.micro_batch_size=",
        ),
        (
            ["precision=bf16", "precision.reduce=bf16", "strategy=pp", "trainer.devices=2"],
            "pipeline stages would sum up 4 micro-batches in bf16 too; use fp32, or strategy=fsdp",
        ),
        (["checkpoint.best_metric=val/los"], "did you mean val/loss?"),
        (["+callbacks.x._target_=pytorch_lightning.callbacks.ModelCheckpoint"], "use checkpoint.every_n_steps"),
        (["run.dir=/proc/x"], "run.dir=/proc/x: no folder can be made in /proc (No such file or directory); give"),
        (["data.cache_dir=/proc/x"], "data.cache_dir=/proc/x: no folder can be made in /proc (No such file or"),
        (["model.config.hidden_act=relu9"], "model.config.hidden_act=relu9: transformers has no such activation"),
        (["+logger.x=3"], "logger.x._target_=3: give the dotted path"),
    ],
)
def test_each_fault_is_one_line_with_key_and_fix(overrides: list[str], said: str) -> None:
    (message,) = messages(*overrides)
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize("key", ["checkpoint.resume", "checkpoint.init_from"])
def test_a_start_without_a_checkpoint_is_refused_by_check(key: str, tmp_path: Path) -> None:
    (message,) = messages(f"{key}={tmp_path}")
    assert message == f"{key}={tmp_path}: holds no checkpoint; give another run's folder or a step-* folder"


def test_faults_of_all_kinds_come_together() -> None:
    wrong = ["trainer.devcies=4", "optimizer.lr=-1", "model.config.hiden_size=3", "data=jsonl"]
    composition = compose_checked([CPU, *wrong])
    found = [str(error).split("=")[0] for error in preflight_errors(composition.config, composition.errors)]
    assert found == ["trainer.devcies", "optimizer.lr", "data.paths", "model.config.hiden_size"]


def test_a_wrong_override_causes_no_errors_that_only_follow_from_it() -> None:
    composition = compose_checked([CPU, "strategy=dpp", "trainer.devices=3", "model=llama_tny", "data.seq_len=2000"])
    found = preflight_errors(composition.config, composition.errors)
    assert [str(error).split("=")[0] for error in found] == ["strategy", "model"]


def test_a_used_run_folder_is_refused_and_a_resume_is_not(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step\n1\n")
    (message,) = messages(f"run.dir={tmp_path}")
    assert "is not empty and holds no run (metrics.csv)" in message
    (tmp_path / "config.yaml").write_text("")
    (message,) = messages(f"run.dir={tmp_path}")
    assert re.search(r"continue it with: .*mgpu[-_]pipe ", message)  # as this process can start the program
    preflight(compose([CPU, f"run.dir={tmp_path}", "checkpoint.resume=auto"])[0])
    preflight(compose([CPU, f"run.dir={tmp_path}/new"])[0])
    (message,) = messages(f"run.dir={tmp_path}/metrics.csv")
    assert "this is a file" in message


def test_a_joined_worlds_processes_leave_the_run_folder_to_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("written by rank 0 a moment ago")
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    preflight(compose([CPU, f"run.dir={tmp_path}", "strategy=ddp", "trainer.devices=2"])[0])


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    messages("run.root=/dev/null/runs", f"data.cache_dir={tmp_path}")  # nobody may not read what it imports
    with nobodys_folder() as folder:
        (folder / "closed").mkdir(mode=0o500)
        told = messages(f"run.root={folder}/closed/runs", f"data.cache_dir={folder}")
    (message,) = [line for line in told if line.startswith("run.root=")]
    assert "cannot be written" in message


def test_devices_auto_is_one_on_cpu_and_all_gpus_on_cuda(gpus: Callable[..., None]) -> None:
    gpus(4)
    for words, world in ((["ddp"], 4), (["single"], 1), (["ddp", CPU], 1), (["ddp", "trainer.num_nodes=2"], 8)):
        config, _ = compose([f"strategy={words[0]}", *words[1:]])
        assert resolve.device_type(config.trainer) == ("cpu" if CPU in words else "cuda")
        assert resolve.world_size(config.trainer, config.strategy) == world
    assert compose(["experiment=quickstart"])[0].trainer.devices == 4
    assert compose(["experiment=quickstart", CPU])[0].trainer.devices == 2
    gpus(4, torch_built_for_cuda=False)
    assert resolve.device_type(config.trainer) == "cpu"
    assert [notice.key for notice in preflight(config)] == ["trainer.accelerator"]


def test_float8_is_refused_without_compilation(gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    monkeypatch.setattr(numerics, "gpu_capability", lambda: (9, 0))
    with pytest.raises(ConfigErrors, match=r"model.compile=false: float8 products are slower .* use auto or true"):
        preflight(compose(["precision=fp8", "model.compile=false"])[0])


def test_more_devices_than_gpus_are_refused_on_cuda_only(gpus: Callable[..., None]) -> None:
    gpus(2)
    with pytest.raises(ConfigErrors, match="this machine has 2 GPUs to use; use at most 2, or"):
        preflight(compose(["strategy=ddp", "trainer.devices=4"])[0])
    preflight(compose(["strategy=ddp", "trainer.devices=4", CPU])[0])
    gpus(0)
    with pytest.raises(ConfigErrors, match="torch can use no GPU here"):
        preflight(compose(["trainer.accelerator=cuda"])[0])
    told = preflight(compose(["trainer.accelerator=cuda"])[0], elsewhere=True)
    assert [notice.key for notice in told] == ["trainer.accelerator"]


@pytest.mark.parametrize(
    ("visible", "count"), [("0,1", 2), ("", 0), ("-1", 0), ("3", 1), ("0,9,1", 1), ("0,0", 0), ("GPU-a,GPU-b", 2)]
)
def test_visible_devices_are_counted_as_cuda_counts_them(
    gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    gpus(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.gpu_count() == count


@pytest.fixture
def bf16_units(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Stand in for a CPU with, or without, bf16 units."""

    def have(units: bool) -> None:
        monkeypatch.setattr(hardware, "_cpu_flags", lambda: frozenset({"avx512_bf16"} if units else ()))
        hardware.cpu_is_fast_at_bf16.cache_clear()

    yield have
    monkeypatch.undo()
    hardware.cpu_is_fast_at_bf16.cache_clear()


def test_precision_auto_is_the_default_and_bf16_on_gpus_that_have_it_alone(
    gpus: Callable[..., None], bf16_units: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def computes(*words: str) -> str:
        config, _ = compose(list(words))
        return resolve.resolve_precision(config.precision, config.trainer)

    for units in (True, False):
        bf16_units(units)
        assert (computes(CPU), computes(CPU, "precision=bf16")) == ("fp32", "bf16")
    gpus(1)
    for capability, name in (((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp32")):
        monkeypatch.setattr(resolve, "gpu_capability", lambda capability=capability: capability)
        assert (computes(), computes("precision=fp32")) == (name, "fp32")


def test_the_quickstart_asks_for_bf16_where_a_cpu_has_units_for_it(
    gpus: Callable[..., None], bf16_units: Callable[[bool], None]
) -> None:
    gpus(0)
    for units, name in ((True, "bf16"), (False, "auto")):
        bf16_units(units)
        assert compose(["experiment=quickstart"])[0].precision.name == name
        assert compose(["experiment=quickstart", "precision=fp32"])[0].precision.name == "fp32"
    bf16_units(True)
    gpus(2)
    assert compose(["experiment=quickstart"])[0].precision.name == "auto"


def test_a_cpu_that_emulates_bf16_is_told(bf16_units: Callable[[bool], None]) -> None:
    for units, told in ((True, []), (False, ["precision.name"])):
        bf16_units(units)
        assert [notice.key for notice in preflight(compose([CPU, "precision=bf16"])[0])] == told


def test_rows_of_json_that_train_as_a_text_are_named() -> None:
    for path, told in (("rows.jsonl", ["data.paths"]), ("rows.ndjson.gz", ["data.paths"]), ("code.json", [])):
        config = compose([CPU, "data=text_files", f"data.paths=[{path}]"])[0]
        assert [notice.key for notice in notices(config)] == told
    assert not notices(compose([CPU, "data=jsonl", "data.paths=[rows.jsonl]"])[0])


def test_a_recipe_of_another_precision_is_told() -> None:
    told = [key for key, _ in unused_options(compose([CPU, "precision.fp8_recipe=rowwise"])[0])]
    assert told == ["precision.fp8_recipe"]
    assert unused_options(compose(["precision=fp8", "precision.fp8_recipe=rowwise"])[0]) == []


def test_a_reduction_in_bf16_that_no_process_takes_part_in_is_told() -> None:
    words = [CPU, "precision=bf16", "precision.reduce=bf16", "trainer.devices=2"]
    assert [key for key, _ in unused_options(compose([*words, "strategy=tp"])[0])] == ["precision.reduce"]
    assert unused_options(compose([*words, "strategy=fsdp"])[0]) == []


def test_accelerator_gpu_means_cuda(gpus: Callable[..., None]) -> None:
    gpus(2)
    config, _ = compose(["trainer.accelerator=gpu", "strategy=ddp"])
    assert (resolve.device_type(config.trainer), resolve.world_size(config.trainer, config.strategy)) == ("cuda", 2)
    preflight(config)
    gpus(0)
    with pytest.raises(ConfigErrors, match=r"trainer\.accelerator=gpu: torch can use no GPU here"):
        preflight(config)


@pytest.mark.parametrize(
    ("capability", "precision", "used"),
    [((8, 0), "fp32", True), ((7, 5), "fp32", False), ((8, 0), "bf16", False), ((8, 0), "auto", False)],
)
def test_tf32_is_used_where_it_has_an_effect_and_told_where_it_has_none(
    gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], precision: str, used: bool
) -> None:
    gpus(1)
    monkeypatch.setattr(resolve, "gpu_capability", lambda: capability)
    config, _ = compose(["precision.tf32=true", f"precision={precision}"])
    assert resolve.uses_tf32(config.precision, config.trainer) is used
    assert [key for key, _ in unused_options(config)] == ([] if used else ["precision.tf32"])
    plain, _ = compose([f"precision={precision}"])
    assert not resolve.uses_tf32(plain.precision, plain.trainer)
    (notice,) = preflight(compose([CPU, "precision.tf32=true"])[0])
    assert notice.text.startswith("does nothing here: TF32 is a mode of CUDA GPUs")


def test_a_model_folder_and_its_tokenizer_must_fit(tmp_path: Path) -> None:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **dict.fromkeys(sizes, 8)}))
    assert "weights" in messages("model=hf", f"model.path={tmp_path}")[0]
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert "no tokenizer.json" in messages("model=hf", f"model.path={tmp_path}")[0]
    vocabulary = {f"t{index}": index for index in range(12)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert "vocab" in messages("model=hf", f"model.path={tmp_path}")[0]
    (tmp_path / "tokenizer.json").write_text("{")
    assert "give a whole tokenizer.json" in messages("model=hf", f"model.path={tmp_path}")[0]


def test_a_pattern_that_freezes_nothing_is_refused_by_check() -> None:
    (message,) = messages("model=llama_tiny", "model.freeze=[model.embed_token.*]")
    assert message.startswith("model.freeze=model.embed_token.*: matches no parameter of the model; did you mean ")
    (message,) = messages("model=llama_tiny", "model.freeze=['*']")
    assert "no parameter is left to train" in message
    preflight(compose([CPU, "model=llama_tiny", "model.freeze=['model.embed_tokens.*']"])[0])


@pytest.mark.parametrize(
    ("words", "choice"),
    [
        (["model.name=gpt2"], "model=gpt2_124m"),
        (["model.name=qwen3_8b"], "model=qwen3_8b"),
        (["model.name=opt"], "model=hf model.type=opt"),
        (["model.name=llama"], ""),
        (["model.name=my_gpt2"], ""),
        (["model=gpt2_tiny", "model.name=gpt2"], ""),
        (["model=gpt2_tiny"], ""),
    ],
)
def test_a_name_of_another_family_is_noticed_for_it_chooses_nothing(words: list[str], choice: str) -> None:
    texts = [notice.text for notice in preflight(compose([CPU, *words])[0]) if notice.key == "model.name"]
    name = words[-1].removeprefix("model.name=")
    noticed = [f"only names the model, which stays of the llama family; for {name} use {choice}"]
    assert texts == (noticed if choice else [])


def test_a_short_run_of_a_longer_warm_up_is_noticed_and_is_the_same_run() -> None:
    long, short = (compose([CPU, "scheduler.warmup_steps=10", f"trainer.max_steps={steps}"])[0] for steps in (100, 5))
    said = [notice.text for notice in preflight(short) if notice.key == "scheduler.warmup_steps"]
    kept = "a resumed run keeps the schedule that it began with"
    assert said == [f"10 is longer than trainer.max_steps=5: all 5 steps are warm-up; {kept}"]
    assert not [notice for notice in preflight(long) if notice.key == "scheduler.warmup_steps"]
    assert mathematics_hash(long) == mathematics_hash(short)
    assert short.scheduler.warmup_steps == 10, "the configuration stays as it was written"
