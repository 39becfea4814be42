"""A model folder that learns to answer: trained under two strategies, talked to in a terminal, exported.

Oracles: the run of one process; transformers' own ``generate`` and ``apply_chat_template`` on the exported folder.
"""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import column, environment, mgpu, run_folder

pytestmark = pytest.mark.slow
ANSWER = "Yes, of course."
HORIZON = ("scheduler.total_steps=25", "run.name=cut")


@pytest.fixture(scope="module")
def answers(cache: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned one answer, on a base without the tokens of the template."""
    folder = tmp_path_factory.mktemp("answers")
    rows = [{"prompt": f"Is {n} a number?", "completion": ANSWER} for n in range(200)]
    (folder / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = [
        *("model=hf", f"model.path={base}", "data=chat_jsonl", "data.paths=[talk.jsonl]", "data.chat_template=chatml"),
        *("data.seq_len=64", "data.global_batch_size=8", "precision=fp32", "optimizer.lr=3e-3", "logger=none"),
        *("trainer.max_steps=25", "trainer.val_every_n_steps=25", "objective.sample_prompts=[]"),
    ]
    refused = mgpu(cache, folder, "train", *common, code=2)
    size = refused.partition("add model.config.vocab_size=")[2].partition(",")[0]
    assert size.isdecimal(), refused
    common.append(f"model.config.vocab_size={size}")
    out = mgpu(cache, folder, *common, "run.name=answers")
    whole = run_folder(out)
    assert f"chat {whole}" in out
    cut = mgpu(cache, folder, *common, "strategy=tp", "trainer.devices=2", "trainer.max_steps=4", *HORIZON)
    mine, truth = column(run_folder(cut), "train/loss"), column(whole, "train/loss")
    assert len(mine) == 4 and max(abs(mine[step] / truth[step] - 1) for step in mine) <= 1e-5
    return whole


def test_it_answers_stops_and_does_so_in_transformers(cache: Path, answers: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    asked = ("--prompt", "Is 7 a number?", "--temperature", "0")
    assert mgpu(cache, tmp_path, "generate", str(answers), *asked).strip() == ANSWER
    raw = mgpu(cache, tmp_path, "generate", str(answers), *asked, "--raw", "--max-new-tokens", "3")
    assert raw.startswith("Is 7 a number?") and ANSWER not in raw
    mgpu(cache, tmp_path, "export", str(answers), "--out", "exported")
    load: Any = AutoModelForCausalLM.from_pretrained
    model, tokenizer = load(tmp_path / "exported"), AutoTokenizer.from_pretrained(tmp_path / "exported")
    talk = [{"role": "user", "content": "Is 8 a number?"}]
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**ids, do_sample=False, max_new_tokens=60)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(made) == f"{ANSWER}<|im_end|>"
    assert mgpu(cache, tmp_path, "generate", "exported", *asked).strip() == ANSWER


def test_a_conversation_in_a_terminal(cache: Path, answers: Path, tmp_path: Path) -> None:
    mine, theirs = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-m", "mgpu_pipe", "chat", str(answers), "--temperature", "0"],
        cwd=tmp_path,
        env={**environment(cache), "TERM": "dumb"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    said = until(mine, "> ")
    assert str(answers) in said and "/reset" in said
    for line, expected in (
        ("/system Be kind.", ""),
        ("Is 9 a number?", ANSWER),
        ("/save talk.jsonl", "saved: talk.jsonl"),
        ("/reset", ""),
        ("/save talk.jsonl", "saved: talk.jsonl"),
        ("/nonsense", "no such word: /nonsense"),
        ("/save", "name a file"),
        ("Is 3 a number? " + "word " * 4000, "/reset clears the conversation"),
    ):
        os.write(mine, f"{line[:3000]}\n".encode())
        assert expected in until(mine, "> "), line
    os.write(mine, b"/exit\n")
    assert program.wait(60) == 0
    os.close(mine)
    kept = [json.loads(line)["messages"] for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    system = {"role": "system", "content": "Be kind."}
    question = {"role": "user", "content": "Is 9 a number?"}
    assert kept == [[system, question, {"role": "assistant", "content": ANSWER}], [system]]


def until(terminal: int, prompt: str, seconds: float = 120) -> str:
    """What the terminal shows until it ends with ``prompt``."""
    shown, end = b"", time.monotonic() + seconds
    while not shown.decode(errors="replace").endswith(prompt):
        assert time.monotonic() < end, shown[-2000:]
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 65536)
    return shown.decode(errors="replace")


def test_a_run_of_plain_text_is_not_talked_to(cache: Path, alone: Path, tmp_path: Path) -> None:
    said = mgpu(cache, tmp_path, "chat", str(alone), code=2)
    assert "was not trained on conversations, or has no chat template; use mgpu-pipe generate" in said
