"""The folder in which the newcomer's commands are typed, and the list of these commands."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

COMMANDS = Path(__file__).with_name("commands.txt")
ANSWER = "=>"


@dataclass(frozen=True)
class WrongCommand:
    """The words after ``mgpu-pipe`` as typed, and what the line that refuses them must hold; may be empty."""

    typed: str
    answer: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.typed)


def wrong_commands() -> list[WrongCommand]:
    """Every command of ``commands.txt``, in its order."""
    lines = COMMANDS.read_text(encoding="utf-8").splitlines()
    parts = [line.rpartition(ANSWER) for line in lines if line.strip() and not line.startswith("#")]
    return [WrongCommand(typed.strip(), answer.strip()) for typed, _, answer in parts]


def make_folder(folder: Path) -> None:
    """Write what the commands name: texts, rows of several forms, pictures, folders that are no models."""
    for name in ("corpus", "empty", "pictures", "config_only", "old_weights", "broken_config", "outputs"):
        (folder / name).mkdir(parents=True)
    for name in "ab":
        (folder / "corpus" / f"{name}.txt").write_text("A sentence of a corpus.\n" * 20, encoding="utf-8")
    (folder / "notes.txt").write_text("To do: train a model.\n", encoding="utf-8")
    (folder / "empty.txt").touch()
    (folder / "my.yaml").write_text("model:\n  type: llama\n", encoding="utf-8")
    (folder / "train.py").write_text("import torch\n", encoding="utf-8")
    write_rows(folder / "rows.jsonl", [{"text": f"Row {n} of a corpus."} for n in range(20)])
    write_rows(folder / "other.jsonl", [{"body": f"Row {n} of a corpus."} for n in range(20)])
    (folder / "broken.jsonl").write_text('{"text": "cut\n{"text": "whole"}\n', encoding="utf-8")
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]
    write_rows(folder / "chats.jsonl", [{"messages": turns}] * 20)
    write_rows(folder / "roles.jsonl", [{"messages": [{"role": "boss", "content": "Work!"}, turns[1]]}] * 20)
    write_rows(folder / "pairs.jsonl", [{"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}] * 20)
    (folder / "labels.csv").write_text("image,label\nnosuch.png,cat\n", encoding="utf-8")
    (folder / "speech.csv").write_text("path,text\nnosuch.wav,good day\n", encoding="utf-8")
    for path in ("photo.png", "pictures/a.png", "pictures/b.png"):
        Image.new("L", (8, 8), 128).save(folder / path)
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    for name in ("config_only", "old_weights"):
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "old_weights" / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    (folder / "broken_config" / "config.json").write_text("{'model_type': 'llama'}", encoding="utf-8")
    (folder / "weights.ckpt").write_bytes(b"no weights at all" * 100)
    (folder / "pickled.ckpt").write_bytes(b"\x80\x04}.")  # protocol 4, of which torch warns


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
