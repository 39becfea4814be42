"""Sequence-to-sequence learning. Oracle: transformers' own T5, one pair at a time without padding, in one process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.errors import BadInputError, ConfigErrors
from mgpu_pipe.models.build import materialise, run_model
from mgpu_pipe.objectives.registry import objective_class
from tests.objectives.harness import check_evaluated, exported_model
from tests.support import small_runs
from tests.support.processes import run_processes

T5 = ("objective=seq2seq", "data=number_words", "model=t5_tiny", "logger=none", "trainer.progress=off")
TARGET = "decoder.block.1.layer.1.EncDecAttention.k"


def small_data(folder: Path, *overrides: str) -> RunConfig:
    shape = ("data.numbers.count=40", "data.seq_len=24", "data.global_batch_size=8", "data.validation_fraction=0.5")
    steps = ("trainer.max_steps=4", "model.config.vocab_size=384")
    return compose([*T5, *shape, *steps, f"data.cache_dir={folder / 'cache'}", *overrides])[0]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", ["auto", "0"])
def test_exact_match_is_that_of_greedy_answers(tmp_path: Path, chunk: str) -> None:
    config = small_data(tmp_path, f"objective.loss_chunk_tokens={chunk}")
    model = materialise(run_model(config), 3, "cpu").eval()
    model.generation_config.eos_token_id = None
    objective = objective_class("seq2seq").from_config(config, model, None, lambda step: 1.0)
    samples = prepare(config).open(config, "train")
    everything = np.arange(len(samples))
    batch = samples.batch(everything, everything)
    rows, room = batch["labels"].shape
    for row in range(rows):  # every other target becomes what the model itself answers, some with a wrong last token
        source = batch["input_ids"][row][batch["attention_mask"][row] == 1][None]
        length = int((batch["labels"][row] != IGNORE_INDEX).sum())
        answer = model.generate(source, max_new_tokens=length, do_sample=False)[0, 1:]
        if row % 2:
            batch["labels"][row, :length] = answer
        if row % 6 == 5:
            batch["labels"][row, length - 1] = (answer[-1] + 1) % 384
    wrong = sum(row % 2 == 0 or row % 6 == 5 for row in range(rows))
    metrics = objective.description.measured(
        [*objective.evaluation_sums(batch).tolist(), objective.batch_spec.valid_targets(batch)]
    )
    assert metrics["val/exact_match"] == (rows - wrong) / rows
    assert 0 < metrics["val/accuracy"] < 1
    empty = objective.batch_spec.empty(room, torch.device("cpu"))
    assert objective.evaluation_sums(empty).tolist() == [0.0] * 4


def pairs_file(folder: Path, *rows: object) -> str:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f"data.paths=[{path}]"


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"source": "one"}, "has no column 'target'; set data.target_column to one that is there: source"),
        ({"source": "one", "target": ""}, "pairs.jsonl:2: column 'target' is empty"),
        ({"source": "one", "target": 1}, "pairs.jsonl:2: column 'target' holds int, not a string"),
        ({"source": "one" * 90, "target": "1"}, "data.seq_len=24: 1 of 2 sources are longer, the longest (number 2)"),
        ({"source": "one", "target": "1 2" * 90}, "data.target_len=24: 1 of 2 targets are longer"),
    ],
)
def test_pairs_that_cannot_be_learned_are_refused(tmp_path: Path, row: object, told: str) -> None:
    files = pairs_file(tmp_path, {"source": "two", "target": "2"}, row)
    config = small_data(tmp_path, "data=pairs_jsonl", files, "model.config.vocab_size=257", "data.on_too_long=refuse")
    with pytest.raises(BadInputError) as refused:
        preflight(config)
        prepare(config)
    assert told in str(refused.value)


def test_a_pair_without_the_column_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    files = pairs_file(tmp_path, {"en": "two", "de": "zwei"})
    with pytest.raises(ConfigErrors) as refused:
        preflight(small_data(tmp_path, "data=pairs_jsonl", files))
    assert "has no column 'source'; set data.source_column to one that is there: en, de" in str(refused.value)


def test_a_sample_is_its_pair_padded(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    rows = [{"en": f"the number {number}", "de": f"Zahl {number}"} for number in range(40)]
    columns = ("data.source_column=en", "data.target_column=de", "data.target_len=16")
    config = small_data(tmp_path, "data=pairs_jsonl", pairs_file(tmp_path, *rows, rows[3]), *columns)
    prepared = prepare(config)
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_folder / "tokenizer.json"))
    assert len(tokenizer.encode("Zahl").ids) == len(tokenizer.encode("the").ids) == 1, "it learned from both sides"
    seen = []
    for split in ("train", "validation"):
        samples = prepared.open(config, split)
        everything = np.arange(len(samples))
        batch = samples.batch(everything, everything)
        assert {name: value.shape[1] for name, value in batch.items()} == {
            "input_ids": 24,
            "attention_mask": 24,
            "labels": 16,
        }
        assert samples.valid_units(everything, everything) == int((batch["labels"] != IGNORE_INDEX).sum())
        filled = int(batch["attention_mask"].sum()) + int((batch["labels"] != IGNORE_INDEX).sum())
        assert samples.positions(everything) - samples.padding(everything) == filled
        for ids, mask, labels in zip(*batch.values(), strict=True):
            source, target = ids[mask == 1].tolist(), labels[labels != IGNORE_INDEX].tolist()
            assert source[-1] == target[-1] == 0 and bool((labels[len(target) :] == IGNORE_INDEX).all())
            seen.append((split, tokenizer.decode(source[:-1]), tokenizer.decode(target[:-1])))
    expected = sorted((row["en"], row["de"]) for row in [*rows, rows[3]])
    assert sorted(pair[1:] for pair in seen) == expected
    assert len({split for split, source, _ in seen if source == "the number 3"}) == 1, "copies stay on one side"


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_another_strategy_is_evaluated_answers_and_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForSeq2SeqLM

    from mgpu_pipe.cli.main import main
    from mgpu_pipe.inference.generation import load_tokenizer
    from mgpu_pipe.inference.open import load_run

    metrics = small_runs.run_moved(small_data, tmp_path, "val/exact_match")
    folder = tmp_path / "second"
    check_evaluated(
        folder,
        capsys,
        f"loss         {metrics['val/loss']:.6f} nats a token",
        f"exact_match  {100 * metrics['val/exact_match']:.2f}%",
    )
    loaded = load_run(folder)
    tokenizer = load_tokenizer(loaded.tokenizer_folder)
    source = torch.tensor([[*tokenizer("42")["input_ids"], tokenizer.eos_token_id]])
    answer = loaded.model.generate(source, max_new_tokens=6, do_sample=False, eos_token_id=0, pad_token_id=0)[0]
    assert main(["generate", str(folder), "--prompt", "42", "--max-new-tokens", "6", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == tokenizer.decode(answer, skip_special_tokens=True) + "\n"
    exported = exported_model(folder, AutoModelForSeq2SeqLM, capsys)
    with torch.no_grad():
        same = [model.eval()(input_ids=source, labels=source).logits for model in (loaded.model, exported)]
    assert torch.equal(*same)
    assert torch.equal(exported.generate(source, max_new_tokens=6, do_sample=False)[0], answer)


def answered(overrides: list[str], cache: str, folder: str) -> list[str]:
    from mgpu_pipe.inference.generation import generate_text
    from mgpu_pipe.training.train import train

    config = small_data(Path(cache), *overrides)
    prepared = prepare(config)
    result = train(config, RunPaths(Path(folder)), prepared)
    return generate_text(result.model, prepared.tokenizer_folder, ["42", "seven"], max_new_tokens=6, together=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["fsdp", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("tp", "zero3"))]
)
def test_a_sharded_model_answers_as_a_whole_one(tmp_path: Path, strategy: str) -> None:
    cache, found = tmp_path / "cache", {}
    for name, processes in (("single", 1), (strategy, 2)):
        overrides = [f"strategy={name}", f"trainer.devices={processes}", "model.config.pad_token_id=1"]
        (tmp_path / name).mkdir()
        freeze(small_data(cache, *overrides), RunPaths(tmp_path / name).config)
        found[name] = run_processes(processes, answered, overrides, str(cache), str(tmp_path / name))
    assert all(texts == found["single"][0] for texts in found[strategy]) and any(found["single"][0])
