"""Masked language modelling. Oracle: transformers' own BERT, one document at a time, in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.prepare import prepare
from mgpu_pipe.data.samples import evaluation_numbers
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.errors import ConfigErrors
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.losses.cross_entropy import correct_predictions
from mgpu_pipe.objectives.masked_lm import MaskedLMObjective
from mgpu_pipe.training.strategy import EngineStrategy
from mgpu_pipe.verify.certificate import Worst, worst_of
from mgpu_pipe.verify.comparison import compare
from tests.support.processes import run_processes
from tests.verify.support import small_run

BERT = ("objective=masked_lm", "model=bert_tiny", "logger=none", "trainer.progress=off")
TARGET = "bert.encoder.layer.1.output.dense"


def small_data(cache: Path, *overrides: str) -> RunConfig:
    shape = ("data=synthetic", "data.seq_len=32", "data.global_batch_size=8", "data.validation_max_samples=16")
    return compose([*BERT, *shape, f"data.cache_dir={cache}", "trainer.max_steps=4", *overrides])[0]


def verified(config: RunConfig, planted: bool = False) -> list[Worst]:
    def wrong_gradient(strategy: EngineStrategy) -> None:
        module = strategy.objective.model.get_submodule(TARGET)

        def on_first_forward(_: torch.nn.Module, __: Any) -> None:
            handle.remove()
            module.weight.register_hook(lambda gradient: gradient * 1.001)

        handle = module.register_forward_pre_hook(on_first_forward)

    return worst_of(compare(config, on_start=wrong_gradient if planted else lambda strategy: None))


@pytest.mark.parametrize(
    ("processes", "strategy"),
    [
        (1, ("strategy=single", "objective.loss_chunk_tokens=0")),
        (2, ("strategy=ddp",)),
        pytest.param(2, ("strategy=fsdp", "data.micro_batch_size=2"), marks=pytest.mark.exhaustive),
        pytest.param(2, ("strategy=tp",), marks=pytest.mark.exhaustive),
        pytest.param(4, ("strategy=hsdp", "strategy.dp_replicate=2"), marks=pytest.mark.exhaustive),
        pytest.param(4, ("strategy=fsdp", "strategy.tp=2"), marks=pytest.mark.slow),
        *(pytest.param(2, (f"strategy=zero{stage}",), marks=pytest.mark.exhaustive) for stage in (1, 2, 3)),
    ],
)
def test_every_strategy_is_one_document_at_a_time(processes: int, strategy: tuple[str, ...]) -> None:
    config = small_run(*BERT, f"trainer.devices={processes}", *strategy)
    worst = run_processes(processes, verified, config)[0]
    assert [one.quantity for one in worst] == ["initial weights", "loss", "gradient norm", "gradient", "weights"]
    assert [one for one in worst if not one.passed] == []


def test_a_planted_error_is_found() -> None:
    config = small_run(*BERT, "trainer.devices=2", "strategy=fsdp")
    found = {one.quantity: one for one in run_processes(2, verified, config, True)[0] if not one.passed}
    assert found["gradient"].where == f"{TARGET}.weight"


def test_hidden_tokens_depend_on_the_seed_and_the_samples_number_alone(tmp_path: Path) -> None:
    config = small_data(tmp_path)
    prepared = prepare(config)
    text = prepared.open(config, "train")
    samples = MaskedLMObjective.samples(config, text)
    indices, numbers = np.array([5, 2, 9]), np.array([17, 3, 40])
    together = samples.batch(indices, numbers)
    plain = text.batch(indices, numbers)["input_ids"]
    for row in range(3):
        alone = samples.batch(indices[row : row + 1], numbers[row : row + 1])
        assert all(torch.equal(alone[name][0], together[name][row]) for name in together)
    labels = together["labels"]
    hidden = labels != IGNORE_INDEX
    assert torch.equal(labels[hidden], plain[hidden])
    assert torch.equal(together["input_ids"][~hidden], plain[~hidden])
    assert int(hidden.sum()) == samples.valid_units(indices, numbers) > 0
    next_epoch = samples.batch(indices, numbers + 1000)
    assert not torch.equal(next_epoch["labels"], labels)
    held_out = np.array([0, 1, 2, 3])
    evaluated = MaskedLMObjective.samples(config, prepared.open(config, "validation"))
    shown = evaluated.batch(held_out, evaluation_numbers(held_out))["labels"] != IGNORE_INDEX
    assert len({tuple(row.tolist()) for row in shown}) > 1, "each held-out sample has tokens of its own hidden"
    many = samples.batch(np.arange(200), np.arange(200))
    was_hidden = many["labels"] != IGNORE_INDEX
    share = float((many["input_ids"][was_hidden] == 1023).double().mean())
    assert 0.72 < share < 0.88, "four in five are behind the mask token"


def test_correct_predictions_are_those_of_whole_logits() -> None:
    hidden, weight, bias = torch.randn(3, 7, 8), torch.randn(20, 8), torch.randn(20)
    labels = F.linear(hidden, weight, bias).argmax(-1)
    labels[0, :3], labels[1] = IGNORE_INDEX, (labels[1] + 1) % 20
    right = correct_predictions(hidden, weight, bias, labels, 4)
    expected = torch.ones(3, 7, dtype=torch.bool)
    expected[0, :3], expected[1] = False, False
    assert torch.equal(right, expected)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("strategy=pp", "trainer.devices=2"), "strategy.pp=2: bert cannot be cut into stages"),
        (("strategy=cp", "trainer.devices=2"), "strategy.cp=2: attention of the bert family cannot run over several"),
        (("model=llama_tiny",), "model.type=llama: transformers has no masked language model llama"),
        (("objective.mask_share=-1",), "objective.mask_share=-1.0: use a number of at least 0"),
    ],
)
def test_what_cannot_be_done_is_refused_beforehand(overrides: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigErrors) as refused:
        preflight(compose([*BERT, *overrides])[0])
    assert told in str(refused.value)


def tokenizer_with(folder: Path, mask: str | None) -> Path:
    """A tokenizer folder of 600 words whose mask token, where it has one, stands among them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [mask if number == 103 and mask else f"w{number}" for number in range(600)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", mask_token=mask)
    fast.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize(("mask", "token"), [("[MASK]", 103), ("<mask>", 103), (None, 1023)])
def test_the_mask_token_is_the_tokenizers(tmp_path: Path, mask: str | None, token: int) -> None:
    texts = tmp_path / "texts.jsonl"
    rows = [{"text": " ".join(f"w{2 + (row * word) % 90}" for word in range(60))} for row in range(40)]
    texts.write_text("\n".join(map(json.dumps, rows)) + "\n")
    tokenizer = tokenizer_with(tmp_path / "tokenizer", mask)
    given = ("data=jsonl", f"data.paths=[{texts}]", f"data.tokenizer={tokenizer}", "data.validation_fraction=0")
    config = small_data(tmp_path / "cache", *given)
    prepared = prepare(config)
    samples = MaskedLMObjective.samples(prepared.complete(config), prepared.open(config, "train"))
    batch = samples.batch(np.arange(16), np.arange(16))
    hidden = batch["input_ids"][batch["labels"] != IGNORE_INDEX]
    assert 0.6 < float((hidden == token).double().mean()) < 0.95


def test_a_pretrained_model_whose_tokenizer_has_no_mask_token_is_refused(tmp_path: Path) -> None:
    folder = tokenizer_with(tmp_path / "hf", None)
    model = materialise(build_meta(small_data(tmp_path).model, "AutoModelForMaskedLM"), 1, "cpu")
    model.save_pretrained(folder)
    given = ("model=hf", f"model.path={folder}", "model.type=null", "data=jsonl", f"data.paths=[{folder}/config.json]")
    with pytest.raises(ConfigErrors, match=r"objective\.mask_token_id=auto: .* has no mask token; give the id"):
        preflight(compose([*BERT, *given])[0])


def trained(folder: str, overrides: list[str], cache: str, resume: str | None) -> dict[str, Any]:
    from mgpu_pipe.training.train import train

    config = small_data(Path(cache), *overrides)
    step = None if resume is None else Path(resume)
    return train(config, RunPaths(Path(folder)), prepare(config), resume=step).summary["metrics"]


def run(folder: Path, cache: Path, processes: int, *overrides: str, resume: Path | None = None) -> dict[str, float]:
    folder.mkdir()
    given = [*overrides, f"trainer.devices={processes}"]
    config = small_data(cache, *given)
    freeze(config, RunPaths(folder).config)
    prepare(config)
    step = None if resume is None else str(resume)
    metrics: dict[str, float] = run_processes(processes, trained, str(folder), given, str(cache), step)[0]
    return metrics


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_checkpoint_goes_on_under_another_strategy_is_evaluated_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForMaskedLM

    from mgpu_pipe.cli.main import main

    cache = tmp_path / "cache"
    whole = run(tmp_path / "whole", cache, 1, "strategy=single")
    half = ("checkpoint.every_n_steps=2", "checkpoint.keep_last=0")
    run(tmp_path / "first", cache, 2, "strategy=fsdp", *half)
    saved = tmp_path / "first" / "checkpoints" / "step-00000002"
    metrics = run(tmp_path / "second", cache, 2, "strategy=tp", resume=saved)
    assert metrics["train/loss"] == pytest.approx(whole["train/loss"], rel=1e-5)
    assert metrics["val/loss"] == pytest.approx(whole["val/loss"], rel=1e-5)
    assert metrics["val/accuracy"] == whole["val/accuracy"]
    assert main(["eval", str(tmp_path / "second"), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert f"loss        {metrics['val/loss']:.6f} nats a token" in printed
    assert f"accuracy    {100 * metrics['val/accuracy']:.2f}%" in printed
    assert main(["generate", str(tmp_path / "second"), "--prompt", "1"]) == 2
    assert "BertForMaskedLM does not generate text" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "second"), "--out", str(tmp_path / "out")]) == 0
    assert "AutoModelForMaskedLM" in capsys.readouterr().out
    exported, info = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(exported).__name__ == "BertForMaskedLM"
