"""Names that no file can have, given to every command and in rows of data: one line, exit 2, and nothing is left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from mgpu_pipe.cli import main as cli
from mgpu_pipe.system.local_files import exists, is_file, is_folder, name_problem
from tests.support.no_launch import Result, launches_by
from tests.support.sampling import one_in

LONG, DEEP, HALF = "n" * 300, "/".join(["d" * 200] * 30), "x\ud800"
INSIDE_A_FILE = "file.txt/x"
ODD = (LONG, DEEP, HALF, "a\0b", INSIDE_A_FILE)
RUN = ("model=llama_tiny", "trainer.accelerator=cpu", "trainer.max_steps=1", "data.seq_len=32")
COMMANDS = (
    ("{}",),
    ("eval", "{}"),
    ("generate", "{}"),
    ("encode", "{}", "--input", "{}", "--output", "{}.npy"),
    ("mine", "{}", "--input", "{}", "--output", "{}.jsonl"),
    ("chat", "{}"),
    ("doctor", "{}"),
    ("export", "{}", "--out", "o"),
    ("import", "--from", "{}", "--out", "o", "model=llama_tiny"),
    ("report", "{}"),
    *(("checkpoints", action, "{}") for action in ("list", "check", "prune")),
    ("checkpoints", "compare", "{}", "{}"),
    *(("sweeps", action, "{}") for action in ("show", "resume", "extend", "cancel", "retry", "best", "report")),
    ("runs", "{}"),
    ("jobs", "cancel", "{}"),
    ("init", "{}"),
    ("ls", "{}"),
    ("check", "{}"),
    ("submit", "{}"),
    ("check", "--config-dir", "{}"),
    ("check", "--config-path", "{}"),
    ("check", "--config-name", "{}"),
    *(
        ("check", *RUN, f"{key}={{}}")
        for key in ("model.path", "run.dir", "run.root", "data.tokenizer", "data.cache_dir", "checkpoint.resume")
    ),
    ("check", *RUN, "data=jsonl", "data.paths=[{}]"),
    ("-m", *RUN, "sweep.name={}", "seed=1,2"),
)
ROWS = {
    "image_list": ("model=vit_tiny objective=image_classification", {"image": "{}", "label": "a"}),
    "captions": ("model=clip_tiny objective=contrastive data.seq_len=32", {"image": "{}", "caption": "a cat"}),
    "audio_list": ("model=wav2vec2_tiny objective=ctc", {"path": "{}", "text": "a"}),
    "picture_chats": (
        "model=llava_tiny objective=vision_language data.seq_len=128 data.chat_template=plain",
        {
            "images": ["{}"],
            "messages": [{"role": r, "content": "<image>"[: 9 * (r == "user")] or "a"} for r in ("user", "assistant")],
        },
    ),
}


def refused(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    code = cli.main(list(words))
    told = capsys.readouterr()
    lines = told.err.splitlines()
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: "), (words, code, told)
    assert len(lines[0]) < 4000
    return lines[0]


@pytest.mark.parametrize(
    "command", one_in(2, [(words,) for words in COMMANDS]), ids=lambda words: " ".join(words)[-40:]
)
def test_every_command_takes_no_name_for_a_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.txt").write_text("x")
    for odd in (LONG, HALF, INSIDE_A_FILE):
        refused([word.replace("{}", odd) for word in command], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]


@pytest.mark.parametrize(
    "command", one_in(4, [(command,) for command in COMMANDS]), ids=lambda words: " ".join(words)[-40:]
)
def test_control_characters_of_a_name_reach_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    """Names that files may have: a command may take one, and where it refuses it, it does so in a line."""
    monkeypatch.chdir(tmp_path)
    launches_by(monkeypatch, lambda config, asked: Result("finished", 0, tmp_path))
    for odd in ("a\nb", "\x1b]0;owned\x07", "\x1b[31mred\r"):
        code = cli.main([word.replace("{}", odd) for word in command])
        out, err = capsys.readouterr()
        assert code in (0, 2) and not set("\x1b\x07\r") & set(out + err), (command, out, err)
        if code == 2:
            assert err.startswith("error: ") and err.count("\n") == 1, (command, err)


@pytest.mark.slow
@pytest.mark.parametrize("source", ROWS)
def test_what_stands_in_the_column_of_files_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words, row = ROWS[source]
    for odd in (*ODD, "a cat on a mat " * 40, "iVBORw0KGgo" * 5000):
        Path("rows.jsonl").write_text(json.dumps(row).replace('"{}"', json.dumps(odd)) + "\n")
        said = refused(["check", *words.split(), f"data={source}", "data.paths=[rows.jsonl]", RUN[1]], capsys)
        assert "rows.jsonl:1" in said and "correct or remove it" in said


def test_a_zero_byte_in_a_configuration_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/mine.yaml").write_text('# @package _global_\nmodel:\n  path: "a\\0b"\n')
    assert "model.path='a\\x00b': holds a zero byte" in refused(["check", "experiment=mine", *RUN], capsys)


def test_asking_never_raises(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("x")
    assert exists(tmp_path) and is_folder(tmp_path) and is_file(tmp_path / "file.txt")
    for odd in ODD:
        assert not exists(tmp_path / odd) and not is_file(tmp_path / odd) and not is_folder(tmp_path / odd)
        assert bool(name_problem(odd)) == (odd != INSIDE_A_FILE)
    assert not name_problem("é" * 127) and name_problem("é" * 128)
