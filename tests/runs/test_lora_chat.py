"""The experiments lora_chat and qlora_chat: four steps, and, exhaustively, the whole: talked to, exported, read.

Oracle: transformers' own ``generate`` on the exported folder.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs.test_chat_runs import until
from tests.support.command import environment, mgpu, run_folder

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
