"""Preferences. Oracle: the loss written by hand over transformers' own model, one answer at a time."""

from __future__ import annotations

import copy
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.order import GlobalOrder
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.models.build import materialise, run_model
from tests.objectives.harness import PAIRS, answers_config
from tests.support import small_runs
from tests.support.processes import run_processes
from tests.support.sampling import one_in


def small_data(folder: Path, *overrides: str, rows: list[Any] = PAIRS) -> RunConfig:
    return answers_config("dpo", folder, "trainer.max_steps=3", *overrides, rows=rows)


run = partial(small_runs.run, small_data)


def trained_beside(files: list[Path], composed: Any, folder: str, *given: Any) -> dict[str, Any]:
    """The metrics of a run in whose folder lie copies of ``files``."""
    for path in files:
        shutil.copy(path, folder)
    return small_runs.trained(composed, folder, *given)


def weights_of(folder: Path) -> tuple[str, ...]:
    return ("model=hf", f"model.path={folder}", "~model.config.vocab_size")


def answers(tokenizer: Any, row: dict[str, str]) -> list[tuple[list[int], int, int]]:
    """Of each side the tokens, their end included, how many are the prompt's, and how many end with the turn."""
    asked, found = [{"role": "user", "content": row["prompt"]}], []
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    for side in ("chosen", "rejected"):
        said = [*asked, {"role": "assistant", "content": row[side]}]
        ids = tokenizer(tokenizer.apply_chat_template(said, tokenize=False), add_special_tokens=False)["input_ids"]
        length = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        turn = len(ids) - ids[::-1].index(tokenizer.convert_tokens_to_ids("<|im_end|>"))
        found.append(([*ids, tokenizer.eos_token_id], length, turn))
    return found


def log_probability(model: Any, ids: list[int], prompt: int) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([ids])).logits[0, prompt - 1 : -1]
    return -F.cross_entropy(logits, torch.tensor(ids[prompt:]), reduction="sum")


def by_hand(config: RunConfig, steps: int, beta: float) -> tuple[list[float], dict[str, float]]:
    """The losses of the steps, and the held-out metrics behind them."""
    from transformers import AutoTokenizer

    prepared = prepare(config)
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
    train, held = ([PAIRS[document] for document in prepared.documents(split)] for split in ("train", "validation"))  # type: ignore[attr-defined]
    model = materialise(run_model(config), config.seed, "cpu")
    reference, keys = copy.deepcopy(model).eval(), config.optimizer
    decayed = {
        True: [p for p in model.parameters() if p.dim() > 1],
        False: [p for p in model.parameters() if p.dim() < 2],
    }
    groups = [{"params": params, "weight_decay": keys.weight_decay * decay} for decay, params in decayed.items()]
    optimizer = torch.optim.AdamW(groups, lr=keys.lr, **keys.options)

    def margin(row: dict[str, str]) -> tuple[torch.Tensor, list[float]]:
        gains = []
        for ids, prompt, turn in answers(tokenizer, row):
            with torch.no_grad():
                before = log_probability(reference, ids[:turn], prompt)
            gains.append(log_probability(model, ids[:turn], prompt) - before)
        return gains[0] - gains[1], [beta * float(gain.detach()) for gain in gains]

    order, losses, size = GlobalOrder(config.seed, len(train)), [], config.data.global_batch_size
    for step in range(steps):
        rows = [train[index] for index in order.indices(step * size, size)]
        loss = torch.stack([-F.logsigmoid(beta * margin(row)[0]) for row in rows]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.gradient_clip_val)
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        found = [margin(row) for row in held]
    rewards = np.array([both for _, both in found])
    return losses, {
        "val/loss": float(torch.stack([-F.logsigmoid(beta * value) for value, _ in found]).mean()),
        "val/preference_accuracy": float(np.mean(rewards[:, 0] > rewards[:, 1])),
        "val/margin": float(np.mean(rewards[:, 0] - rewards[:, 1])),
        "val/chosen_reward": float(np.mean(rewards[:, 0])),
        "val/rejected_reward": float(np.mean(rewards[:, 1])),
    }


def losses_of(folder: Path) -> list[float]:
    rows = (folder / "metrics.csv").read_text(encoding="utf-8").splitlines()
    at = rows[0].split(",").index("train/loss")
    return [float(row.split(",")[at]) for row in rows[1:]]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "strategy"), one_in(3, [(2, "zero3"), (1, "single"), (2, "fsdp")]))
def test_a_run_is_that_of_a_loop_by_hand(tmp_path: Path, processes: int, strategy: str) -> None:
    given = ("objective.beta=0.5", "trainer.log_every_n_steps=1", f"strategy={strategy}")
    found = run(tmp_path / "run", processes, *given)
    losses, expected = by_hand(small_data(tmp_path, *given), 3, 0.5)
    assert losses_of(tmp_path / "run") == pytest.approx(losses, rel=1e-5)
    assert losses[0] == pytest.approx(np.log(2)) and abs(losses[2] - losses[0]) > 1e-3
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_live_reference_is_the_cached_one(tmp_path: Path) -> None:
    given = ("peft=lora", "objective.beta=0.5", "optimizer.lr=1e-3", "trainer.log_every_n_steps=1")
    cached = run(tmp_path / "cached", 1, *given, "strategy=single")
    live = run(tmp_path / "live", 2, *given, "strategy=tp", "objective.reference=live")
    assert losses_of(tmp_path / "live") == pytest.approx(losses_of(tmp_path / "cached"), rel=1e-5)
    assert abs(losses_of(tmp_path / "live")[2] - np.log(2)) > 1e-4
    for key in ("val/loss", "val/margin", "val/chosen_reward"):
        assert live[key] == pytest.approx(cached[key], rel=1e-4, abs=1e-6)
    assert not list((tmp_path / "live").glob("reference-*")) and list((tmp_path / "cached").glob("reference-*"))


@pytest.mark.slow
def test_a_run_that_goes_on_elsewhere_keeps_its_reference_and_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mgpu_pipe.cli.main import main

    whole = run(tmp_path / "whole", 1, "strategy=single", "checkpoint.every_n_steps=2")
    saved = tmp_path / "whole" / "checkpoints" / "step-00000002"
    second = run(tmp_path / "second", 2, "strategy=tp", resume=saved)
    for key in ("train/loss", "val/loss", "val/margin"):
        assert second[key] == pytest.approx(whole[key], rel=1e-5, abs=1e-6)
    evaluate = ["eval", str(tmp_path / "second"), "--device", "cpu"]
    assert main(evaluate) == 0
    printed = capsys.readouterr().out
    assert f"{second['val/loss']:.6f} nats a pair" in printed and "pairs of" in printed
    for kept in (tmp_path / "second").glob("reference-*.npy"):
        kept.unlink()
    assert main(evaluate) == 2
    assert "no such numbers of the reference for these samples" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reference_of_other_first_weights_is_not_taken(tmp_path: Path) -> None:
    """An attempt that ended before its first row leaves its reference to the next one in that ``run.dir``."""
    given = ("strategy=single", "trainer.val_every_n_steps=100")
    run(tmp_path / "earlier", 1, *given)
    left = list((tmp_path / "earlier").glob("reference-*"))
    for name, other in (("seed", "seed=7"), ("model", "model.config.hidden_act=gelu")):
        run(tmp_path / name, 1, *given, other, trained=partial(trained_beside, left))
        assert losses_of(tmp_path / name)[0] == pytest.approx(np.log(2), abs=1e-6)


@pytest.mark.slow
def test_a_damaged_reference_is_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = ("strategy=single", "checkpoint.every_n_steps=2")
    run(tmp_path / "run", 1, *given, "checkpoint.keep_last=0")
    losses = losses_of(tmp_path / "run")
    [kept] = (tmp_path / "run").glob("reference-*.npy")
    whole = np.load(kept)
    damaged = bytearray(kept.read_bytes())
    damaged[128:136] = np.float64(-1.0).tobytes()
    kept.write_bytes(damaged)
    again, saved = [*given, "trainer.devices=1"], tmp_path / "run" / "checkpoints" / "step-00000002"
    run_processes(1, small_runs.trained, small_data, str(tmp_path / "run"), again, str(saved))
    assert losses_of(tmp_path / "run") == losses
    assert np.array_equal(np.load(kept), whole)


@pytest.mark.slow
def test_a_reference_is_not_measured_again_from_other_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    config = small_data(tmp_path)
    model = materialise(run_model(config), 0, torch.device("cpu"))
    model.save_pretrained(folder)
    shutil.copytree(prepare(config).tokenizer_folder, folder, dirs_exist_ok=True)
    given = ("strategy=single", "checkpoint.every_n_steps=2", "checkpoint.keep_last=0", *weights_of(folder))
    run(tmp_path / "run", 1, *given)
    materialise(run_model(config), 1, torch.device("cpu")).save_pretrained(folder)
    saved = tmp_path / "run" / "checkpoints" / "step-00000002"
    with pytest.raises(AssertionError, match="its weights are not those that this run began with"):
        run(tmp_path / "second", 1, *given, resume=saved)


def test_a_sample_is_both_conversations_of_its_pair(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    asked = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Two?"},
    ]
    sides = {
        side: [*asked, {"role": "assistant", "content": text}]
        for side, text in (("chosen", "No."), ("rejected", "Maybe."))
    }
    rows = [
        *PAIRS,
        {"messages": asked, "chosen": "No.", "rejected": "Maybe."},
        {"prompt": "Two?", "messages": sides["chosen"], **sides},
        {"prompt": asked, "chosen": sides["chosen"][-1:], "rejected": sides["rejected"][-1:]},
        {"prompt": "Equal?", "chosen": "Yes.", "rejected": "Yes."},
        {"prompt": "Long?", "chosen": "Yes." * 40, "rejected": "No."},
    ]
    config = small_data(tmp_path, "data.validation_fraction=0", rows=rows)
    prepared = prepare(config)
    assert prepared.amounts()[0] == (len(PAIRS) + 3, "pairs")
    assert prepared.amounts()[2:] == [(1, "equal pairs left out")] and prepared.too_long_samples == 1
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
    samples = prepared.open(config, "train")
    everything = np.arange(len(samples))
    batch = samples.batch(everything, everything)
    assert samples.valid_units(everything, everything) == len(samples)
    for row in range(len(PAIRS)):
        start = 0
        for side, (ids, prompt, turn) in enumerate(answers(tokenizer, PAIRS[row])):
            at = slice(start, start + len(ids))
            assert batch["input_ids"][row, at].tolist() == ids
            assert batch["position_ids"][row, at].tolist() == list(range(len(ids)))
            before, after = [IGNORE_INDEX] * (prompt - 1), [IGNORE_INDEX] * (len(ids) - turn + 1)
            assert batch["labels"][row, at].tolist() == before + ids[prompt:turn] + after
            assert batch["rejected"][row, at].tolist() == [side] * len(ids)
            start += len(ids)
        assert set(batch["labels"][row, start:].tolist()) == {IGNORE_INDEX}
    said = [tokenizer.decode(labels[labels != IGNORE_INDEX]) for labels in batch["labels"][len(PAIRS) :]]
    assert len(set(said)) == 1 and "No." in said[0] and "Maybe." in said[0] and "Yes." not in said[0]
    assert all(torch.equal(batch["input_ids"][-1], ids) for ids in batch["input_ids"][len(PAIRS) :])


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "a", "chosen": "b"}, "pairs.jsonl:1: has no column 'rejected'; columns: prompt, chosen"),
        ({"chosen": "b", "rejected": "c"}, "pairs.jsonl:1: has no prompt (no column messages, prompt, "),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, "pairs.jsonl:1: column 'chosen' is empty"),
        ({"prompt": "a", "chosen": 1, "rejected": "c"}, "column 'chosen' must be a text or a list of messages"),
        (
            {
                side: [{"role": "user", "content": side}, {"role": "assistant", "content": "b"}]
                for side in ("chosen", "rejected")
            },
            "pairs.jsonl:1: chosen and rejected do not begin with the same message",
        ),
        (
            {"prompt": "a", "chosen": [{"role": "assistant"}], "rejected": "c"},
            "the content of message 2 must be a string",
        ),
    ],
)
def test_rows_that_are_no_pairs_are_refused(tmp_path: Path, row: object, told: str) -> None:
    with pytest.raises(BadInputError) as refused:
        preflight(small_data(tmp_path, rows=[row]))
    assert told in str(refused.value)


def test_nothing_to_train_on_is_told(tmp_path: Path) -> None:
    rows = [{"prompt": "Equal?", "chosen": "Yes.", "rejected": "Yes."}]
    with pytest.raises(BadInputError, match="nothing to train on: 1 pairs are equal, 0 pairs are longer than"):
        prepare(small_data(tmp_path, rows=rows))
