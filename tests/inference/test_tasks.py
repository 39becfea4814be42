"""Tasks of local files, measured during training. Oracles: transformers' own logits and ``generate``, row by row; for
strategies one process.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.errors import BadInputError, ConfigErrors
from tests.support.processes import run_processes

ASKED = [f"Is {n} even{' or odd' * (n % 3)}?" for n in range(12)]  # of several lengths
CHAT = [{"prompt": asked, "completion": ("Yes.", "No.")[n % 2]} for n, asked in enumerate(ASKED)]
CHOICES = [
    {"prompt": f"{n} is", "choices": [" even", " odd and not even", " a word"][: 2 + n % 2], "answer": n % 2}
    for n in range(5)
]
STRATEGIES = {"ddp": (), "tp": (), "pp": (), "zero3": (), "fsdp": (), "cp": ("data.seq_len=64",)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name, rows in (("chat.jsonl", CHAT * 4), ("answers.jsonl", CHAT[:7]), ("choices.jsonl", CHOICES)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "long.txt").write_text("All numbers are even or odd. " * 40)
    (folder / "texts.jsonl").write_text('{"text": "Two is even."}\n{"text": "x"}\n')
    return folder


def config_of(place: Path, *overrides: str) -> RunConfig:
    tasks = {
        "exact": f"{{paths: [{place}/answers.jsonl], max_new_tokens: 6, batch_size: 4}}",
        "found": f"{{paths: [{place}/answers.jsonl], max_new_tokens: 6, pattern: '[A-Z]'}}",
        "quiz": f"{{kind: choice, paths: [{place}/choices.jsonl], batch_size: 3}}",
        "prose": f"{{kind: perplexity, paths: [{place}/long.txt, {place}/texts.jsonl], batch_size: 2}}",
    }
    common = [
        *(
            "model=llama_tiny",
            "model.config.vocab_size=300",
            "model.config.initializer_range=0.3",
            "data=chat_jsonl",
            f"data.paths=[{place}/chat.jsonl]",
        ),
        *("data.chat_template=chatml", "data.seq_len=64", "data.global_batch_size=4", "optimizer.lr=3e-5"),
        *("precision=fp32", "trainer.max_steps=2", "logger=none", "trainer.progress=off", "checkpoint.keep_best=1"),
        *("checkpoint.best_metric=val/prose", "objective.sample_prompts=[]", f"data.cache_dir={place}/cache"),
    ]
    return compose([*common, *(f"eval.tasks.{name}={keys}" for name, keys in tasks.items()), *overrides])[0]


def trained(place: str, strategies: list[str]) -> list[tuple[dict[str, float], dict[str, Any]]]:
    from mgpu_pipe.inference.during_training import INFERENCE
    from mgpu_pipe.training.train import train

    results = []
    for name in strategies:
        processes = torch.distributed.get_world_size()
        config = config_of(Path(place), f"strategy={name}", f"trainer.devices={processes}", *STRATEGIES.get(name, ()))
        paths = RunPaths(Path(place) / f"run-{name}-{processes}")
        prepared = prepare(config)
        if torch.distributed.get_rank() == 0:
            paths.root.mkdir()
            freeze(config, paths.config)
            shutil.copytree(prepared.tokenizer_folder, paths.tokenizer)
        torch.distributed.barrier()
        result = train(config, paths, prepared, inference=INFERENCE)
        results.append(({k: v for k, v in result.metrics.items() if k.startswith("val/")}, result.summary["tasks"]))
    return results


@pytest.fixture(scope="module")
def alone(place: Path) -> tuple[dict[str, float], dict[str, Any]]:
    return run_processes(1, trained, str(place), ["single"])[0][0]


def test_figures_are_those_of_one_row_at_a_time(place: Path, alone: Any) -> None:
    from mgpu_pipe.inference.open import load_run

    metrics, told = alone
    run = load_run(place / "run-single-1")
    model, tokenizer = run.model, run.tokenizer()

    def loss(given: list[int], counted: list[int]) -> float:
        with torch.no_grad():
            logits = model(torch.tensor([given + counted])).logits[0].double().log_softmax(-1)
        return -sum(float(logits[at - 1, token]) for at, token in enumerate(given + counted) if at >= len(given))

    def asked(text: str) -> list[int]:
        talk = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(talk, add_generation_prompt=True)["input_ids"])

    ends = tokenizer.convert_tokens_to_ids([tokenizer.eos_token, "<|im_end|>"])
    answers = []
    for row in CHAT[:7]:
        ids = torch.tensor([asked(row["prompt"])])
        made = model.generate(ids, do_sample=False, max_new_tokens=6, eos_token_id=ends, pad_token_id=ends[0])
        answers.append(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
    assert [one["answer"] for one in told["exact"]["shown"]] == answers and any(answers)
    right = [text.strip() == row["completion"] for text, row in zip(answers, CHAT, strict=False)]
    assert metrics["val/exact"] == sum(right) / 7 and told["exact"]["counted"] == 7
    chosen = []
    for choice in CHOICES:
        losses = [loss(asked(choice["prompt"]), tokenizer(text)["input_ids"]) for text in choice["choices"]]  # type: ignore[attr-defined]
        chosen.append(choice["choices"][losses.index(min(losses))])
    assert [one["answer"] for one in told["quiz"]["shown"]] == chosen
    total, count = 0.0, 0
    for text in ((place / "long.txt").read_text(), "Two is even.", "x"):
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        for start in range(0, len(ids) - 1, 64):
            total += loss(ids[start : start + 1], ids[start + 1 : start + 65])
        count += len(ids) - 1
    assert count > 150 and told["prose"]["counted"] == count
    assert metrics["val/prose"] == pytest.approx(math.exp(total / count), rel=1e-5)
    state = json.loads((place / "run-single-1" / "checkpoints" / "step-00000002" / "state.json").read_text())
    assert state["metrics"]["val/prose"] == metrics["val/prose"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategies",
    [
        ["ddp", "tp", "pp"],
        *(pytest.param(names, marks=pytest.mark.exhaustive) for names in (["zero3"], ["fsdp", "cp"])),
    ],
)
def test_every_strategy_measures_the_same(place: Path, alone: Any, strategies: list[str]) -> None:
    expected, told = alone
    for rank in run_processes(2, trained, str(place), strategies):
        for name, (metrics, shown) in zip(strategies, rank, strict=True):
            assert metrics == pytest.approx(expected, rel=2e-5), name
            for task, of_task in shown.items():
                mine = [one["answer"] for one in of_task["shown"]]
                whole = [one["answer"] for one in told[task]["shown"]]
                assert len(mine) >= len(whole) // 2 and any(mine == whole[at : at + len(mine)] for at in (0, 3)), name


def test_a_pattern_finds_what_is_compared() -> None:
    import re

    from mgpu_pipe.inference.tasks.answers import _extract

    assert _extract(re.compile(r"is (\d+)"), "It is 12 or 13.") == "12"
    assert _extract(re.compile(r"\d+"), "It is 12 or 13.") == "12" and _extract(re.compile(r"\d+"), "None.") is None
    assert _extract(None, " 12 ") == "12"


@pytest.mark.slow
def test_eval_measures_tasks_of_the_run_and_others(
    place: Path, alone: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mgpu_pipe.cli.main import main

    monkeypatch.setenv("MGPU_PIPE_CACHE", str(place / "cache"))
    monkeypatch.chdir(place)
    typed = ["eval.tasks.more.kind=choice", "eval.tasks.more.paths=[choices.jsonl]"]
    assert main(["eval", "run-single-1", *typed, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert f"more        {100 * alone[0]['val/quiz']:.2f}% of 5 choice" in said and "perplexity" not in said


@pytest.mark.slow
def test_wrong_tasks_are_refused_in_one_line(place: Path) -> None:
    (place / "bad.jsonl").write_text('{"prompt": "a", "choices": ["b"], "answer": 0}\n')
    (place / "far.jsonl").write_text('{"prompt": "a", "choices": ["b", "c"], "answer": 2}\n')
    (place / "asks.jsonl").write_text(
        '{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}\n'
    )
    for keys, told in (
        ("kind: choice", "eval.tasks.wrong.paths=[]: there is nothing to measure; give files or globs"),
        (f"kind: choice, paths: [{place}/bad.jsonl]", "bad.jsonl:1: is not a question with two choices or more"),
        (f"kind: choice, paths: [{place}/far.jsonl]", "far.jsonl:1: answer is 2; use the place of the right choice"),
        (f"paths: [{place}/asks.jsonl]", "asks.jsonl:1: the last message is not an answer of the assistant"),
        (f"paths: [{place}/answers.jsonl], pattern: '('", "eval.tasks.wrong.pattern=(: no regular expression"),
        (f"kind: perplexity, pattern: x, paths: [{place}/long.txt]", "leave it out, or use kind=answers"),
        (f"paths: [{place}/answers.jsonl], source: rule_chat", "give paths or source, not both"),
        (f"paths: [{place}/answers.jsonl], batch_size: 0", "use a number of at least 1"),
        (f"paths: [{place}/nowhere.jsonl]", "eval.tasks.wrong.paths"),
    ):
        with pytest.raises((ConfigErrors, BadInputError)) as refused:
            preflight(config_of(place, f"eval.tasks.wrong={{{keys}}}"))
        assert told in str(refused.value), str(refused.value)
    for name, told in (("loss", "the objective measures val/loss itself"), ("Quiz", "use small letters")):
        with pytest.raises(ConfigErrors) as refused:
            preflight(config_of(place, f"eval.tasks.{name}={{paths: [{place}/answers.jsonl]}}"))
        assert told in str(refused.value)
