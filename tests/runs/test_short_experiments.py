"""Shipped experiments, a few steps long."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.checks.notices import notices
from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.text.generated import answers
from mgpu_pipe.data.text.heldout_split import held_out
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.errors import ConfigErrors
from tests.objectives.test_reranker import ranked_rows
from tests.runs.test_chat_runs import until
from tests.support.command import environment, mgpu, run_folder
from tests.support.embedding_pairs import write_pairs
from tests.support.sampling import one_in


def test_four_steps_measure_the_search(cache: Path, tmp_path: Path) -> None:
    short = ("trainer.max_steps=4", "trainer.val_every_n_steps=2", "scheduler.warmup_steps=1", "logger=none")
    small = ("data.global_batch_size=16", "data.micro_batch_size=4", "data.seq_len=24", "data.validation_fraction=0.25")
    pairs = ("data=embedding_pairs", f"data.paths=[{write_pairs(tmp_path / 'pairs.jsonl')}]")
    folder = run_folder(mgpu(cache, tmp_path, "experiment=stdlib_search", *pairs, *short, *small))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "finished" and summary["model"]["class"] == "BertModel"
    metrics = summary["metrics"]
    assert 0 < metrics["val/recall@1"] <= metrics["val/mrr@10"] <= metrics["val/recall@10"] <= 1


def test_four_steps_rank_random_negatives(cache: Path, tmp_path: Path) -> None:
    pairs = ("data=embedding_pairs", f"data.paths=[{ranked_rows(tmp_path / 'pairs.jsonl')}]")
    short = ("trainer.max_steps=4", "trainer.val_every_n_steps=2", "scheduler.warmup_steps=1", "logger=none")
    small = ("data.global_batch_size=8", "data.micro_batch_size=4", "data.seq_len=24", "data.validation_fraction=0.25")
    small = (*small, *pairs, "model.config.vocab_size=384")
    folder = run_folder(mgpu(cache, tmp_path, "experiment=stdlib_rerank", "trainer.devices=2", *short, *small))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "finished" and summary["model"]["class"] == "BertForSequenceClassification"
    assert 0 < summary["metrics"]["val/accuracy"] <= summary["metrics"]["val/mrr@10"] <= 1


def test_four_steps_measure_exact_match_and_show_answers(cache: Path, tmp_path: Path) -> None:
    short = ("trainer.max_steps=4", "trainer.val_every_n_steps=2", "scheduler.warmup_steps=1", "logger=none")
    small = ("data.numbers.count=200", "data.global_batch_size=16")
    folder = run_folder(mgpu(cache, tmp_path, "experiment=translate_numbers", "trainer.devices=2", *short, *small))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "finished" and summary["model"]["class"] == "T5ForConditionalGeneration"
    assert 0 <= summary["metrics"]["val/exact_match"] <= summary["metrics"]["val/accuracy"] < 1
    assert [sample["prompt"] for sample in summary["samples"]] == ["907", "two thousand thirteen"]
    assert all(sample["text"].startswith(" \u2192 ") for sample in summary["samples"])
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert "exact match" in report and "two thousand thirteen" in report


@pytest.mark.exhaustive
@pytest.mark.slow
def test_four_steps_learn_from_the_run_of_another_experiment(cache: Path, tmp_path: Path) -> None:
    own = tmp_path / "conf" / "experiment"
    own.mkdir(parents=True)
    teacher = (Path(__file__).parents[2] / "conf" / "experiment" / "quickstart.yaml").read_text(encoding="utf-8")
    for long, small in (("max_steps: 280", "max_steps: 4"), ("warmup_steps: 20", "warmup_steps: 1")):
        assert long in teacher
        teacher = teacher.replace(long, small)
    teacher = teacher.replace("  global_batch_size: 16", "  global_batch_size: 2\n  validation_max_samples: 2")
    (own / "short_quickstart.yaml").write_text(teacher, encoding="utf-8")
    short = ("trainer.max_steps=4", "trainer.val_every_n_steps=2", "scheduler.warmup_steps=1", "logger=none")
    small = ("data.global_batch_size=2", "data.validation_max_samples=2", "objective.teacher_strategy=fsdp")
    words = ("experiment=distill_small", "run.starts_from=short_quickstart", "trainer.devices=2", *short, *small)
    folder = run_folder(mgpu(cache, tmp_path, *words))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "finished" and summary["objective"] == "distill"
    assert summary["metrics"]["val/divergence"] > 0 and summary["metrics"]["val/loss"] > 0
    assert [sample["prompt"] for sample in summary["samples"]] == ["def ", "import ", "The "]
    (taught_by,) = (tmp_path / "outputs" / "quickstart").iterdir()
    kept = (folder / "config.yaml").read_text(encoding="utf-8")
    assert f"teacher: {taught_by}\n" in kept and "init_from: null" in kept
    again = mgpu(cache, tmp_path, "--config-path", str(folder), f"run.dir={folder}", "checkpoint.resume=auto")
    assert run_folder(again) == folder, "a run that is continued by its own configuration knows its teacher"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "shares"),
    one_in(
        4,
        [
            ("dpo", ("val/preference_accuracy", "val/style_rate")),
            ("kto", ("val/accuracy",)),
            ("orpo", ("val/preference_accuracy",)),
            ("simpo", ("val/preference_accuracy",)),
        ],
    ),
)
def test_four_steps_start_from_the_run_of_another_experiment(
    cache: Path, tmp_path: Path, objective: str, shares: tuple[str, ...]
) -> None:
    own = tmp_path / "conf" / "experiment"
    own.mkdir(parents=True)
    shipped = Path(__file__).parents[2] / "conf" / "experiment" / "spoken_base.yaml"
    base = shipped.read_text(encoding="utf-8")
    for long, small in (
        ("max_steps: 600", "max_steps: 4"),
        ("count: 3000", "count: 200"),
        ("steps: 20\n", "steps: 1\n"),
    ):
        assert long in base
        base = base.replace(long, small)
    (own / "short_base.yaml").write_text(base, encoding="utf-8")
    short = (
        "trainer.max_steps=4",
        "trainer.val_every_n_steps=2",
        "scheduler.warmup_steps=1",
        "logger=none",
        "data.numbers.count=200",
    )
    words = (f"experiment={objective}_style", "run.starts_from=short_base", "trainer.devices=2", *short)
    out = mgpu(cache, tmp_path, *words)
    folder = run_folder(out)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    metrics = summary["metrics"]
    assert summary["status"] == "finished" and summary["objective"] == objective
    assert all(0 <= metrics[share] <= 1 for share in shares)
    assert [sample["prompt"] for sample in summary["samples"]] == ["9 0 7", "2 4 6 8"]
    (first,) = (tmp_path / "outputs" / "spoken_base").iterdir()
    assert str(first) in (folder / "config.yaml").read_text(encoding="utf-8")
    mgpu(cache, tmp_path, *words, "run.name=again")
    assert len(list((tmp_path / "outputs" / "spoken_base").iterdir())) == 1, "the finished run is taken"


@pytest.mark.slow
def test_both_styles_are_held_out_alike(cache: Path) -> None:
    held = []
    for words in (
        ["data=spoken_chat"],
        ["data=spoken_preferences", "objective=dpo"],
        ["data=spoken_unpaired", "objective=kto"],
    ):
        sizes = ["data.numbers.count=300", "data.chat_template=chatml", f"data.cache_dir={cache}"]
        config = compose([*words, *sizes])[0]
        hashes = TokenStore.open(prepare(config).folder).hashes  # type: ignore[attr-defined]
        held.append(set(hashes[held_out(hashes, config.data.validation_fraction)].tolist()))
    assert answers(907) == ("It is nine zero seven.", "nine zero seven")
    assert held[0] == held[1] == held[2] and 0 < len(held[0]) < 60


def test_check_says_what_is_trained_first() -> None:
    told = [notice.text for notice in notices(compose(["experiment=dpo_style"])[0]) if notice.key == "run.starts_from"]
    assert told == ["experiment=spoken_base is trained first, unless outputs holds a finished run of it"]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("checkpoint.init_from=elsewhere", "leave it or checkpoint.init_from out"),
        ("launch=slurm", "run that experiment first, and give its folder by checkpoint.init_from"),
    ],
)
def test_a_start_that_cannot_be_is_refused(override: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors) as refused:
        preflight(compose(["experiment=dpo_style", override])[0])
    assert told in str(refused.value)


SHIPPED = Path(__file__).parents[2] / "conf" / "experiment"
QUESTION = "Please say lamp, cloud, hat backwards."


@pytest.fixture(scope="module")
def short(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps, on four of the base."""
    folder = tmp_path_factory.mktemp("lora_chat")
    (folder / "conf" / "experiment").mkdir(parents=True)
    text = (SHIPPED / "rules_base.yaml").read_text(encoding="utf-8")
    for line in ("max_steps: ", "val_every_n_steps: ", "warmup_steps: "):
        long = next(one for one in text.splitlines() if one.strip().startswith(line))
        text = text.replace(long, long[: long.index(":")] + (": 1" if line == "warmup_steps: " else ": 4"))
    text = text.replace("max_samples: null", "max_samples: 8")
    (folder / "conf" / "experiment" / "short_base.yaml").write_text(text, encoding="utf-8")
    return four_steps(cache, folder, "lora_chat")


def four_steps(cache: Path, folder: Path, experiment: str) -> Path:
    few = ("trainer.max_steps=4", "trainer.val_every_n_steps=4", "scheduler.warmup_steps=1", "logger=none")
    words = (f"experiment={experiment}", "run.starts_from=short_base", "eval.tasks.exact_match.max_samples=8")
    return run_folder(mgpu(cache, folder, *words, *few))


def asked(cache: Path, run: Path, question: str) -> str:
    """What ``mgpu-pipe chat`` answers in a terminal."""
    mine, theirs = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-m", "mgpu_pipe", "chat", str(run), "--temperature", "0", "--max-new-tokens", "32"],
        cwd=run.parents[2],
        env={**environment(cache), "TERM": "dumb"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    assert "/reset" in until(mine, "> ")
    os.write(mine, f"{question}\n".encode())
    said = until(mine, "> ")
    os.write(mine, b"/exit\n")
    assert program.wait(60) == 0
    os.close(mine)
    return said.replace("\r", "").partition("\n")[2].removesuffix("> ").strip()


def exported(cache: Path, run: Path, question: str) -> tuple[str, bool]:
    """The answer of transformers' own ``generate`` to the merged export, and whether it ended there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = run / "merged"
    mgpu(cache, run.parents[2], "export", str(run), "--merge", "--out", str(out))
    load: Any = AutoModelForCausalLM.from_pretrained
    model, tokenizer = load(out), AutoTokenizer.from_pretrained(out)
    talk = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**ids, do_sample=False, max_new_tokens=32)[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(made, skip_special_tokens=True), tokenizer.decode(made[-1:]) == "<|im_end|>"


@pytest.mark.slow
def test_four_steps_train_adapters_on_the_other_experiments_run(cache: Path, short: Path) -> None:
    summary = json.loads((short / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "finished" and 0 <= summary["metrics"]["val/exact_match"] <= 1
    assert summary["model"]["trained"] < summary["model"]["parameters"]
    shown = summary["tasks"]["exact_match"]["shown"]
    assert summary["tasks"]["exact_match"]["counted"] == 8 and {"question", "answer", "truth", "right"} == set(shown[0])
    report = (short / "report.html").read_text(encoding="utf-8")
    assert "Task exact_match" in report and shown[0]["truth"] in report.replace("&#39;", "'")
    (base,) = (short.parents[1] / "rules_base").iterdir()
    (export,) = base.glob("exported-step-00000004-*")
    assert (export / "model.safetensors").is_file()
    assert "val/exact_match" in json.loads((base / "summary.json").read_text(encoding="utf-8"))["metrics"]
    state = json.loads((short / summary["checkpoint"] / "state.json").read_text(encoding="utf-8"))
    assert export.name in json.dumps(state["left_out"]), "the checkpoint names the base"
    answer, _ = exported(cache, short, QUESTION)
    assert asked(cache, short, QUESTION).split() == answer.split()


@pytest.mark.slow
def test_four_steps_beside_four_bit_weights_take_the_same_base(cache: Path, short: Path) -> None:
    run = four_steps(cache, short.parents[2], "qlora_chat")
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "finished" and summary["tasks"]["exact_match"]["counted"] == 8
    assert len(list((short.parents[1] / "rules_base").iterdir())) == 1, "the base was trained again"
    state = json.loads((run / summary["checkpoint"] / "state.json").read_text(encoding="utf-8"))
    assert "exported" in json.dumps(state["left_out"])
    beside, plain = (json.loads((one / "summary.json").read_text())["memory"]["weights_gib"] for one in (run, short))
    assert beside[0] < 0.5 * plain[0], "the frozen matrices are not kept in four bits"


@pytest.mark.exhaustive
@pytest.mark.parametrize("experiment", ["lora_chat", "qlora_chat"])
def test_the_whole_answers_what_was_held_out_and_its_base_does_not(
    cache: Path, tmp_path: Path, experiment: str
) -> None:
    run = run_folder(mgpu(cache, tmp_path, f"experiment={experiment}", "logger=none", timeout=3600))
    (base,) = (tmp_path / "outputs" / "rules_base").iterdir()
    reached = [json.loads((one / "summary.json").read_text(encoding="utf-8"))["metrics"] for one in (base, run)]
    assert reached[0]["val/exact_match"] < 0.1 and reached[1]["val/exact_match"] > 0.9
    truth = "lamp, cloud, hat backwards is hat, cloud, lamp."
    assert exported(cache, run, QUESTION) == (truth, True)
    assert asked(cache, run, QUESTION) == truth
