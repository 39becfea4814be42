"""Makes the run folders that later versions must read: ``TMPDIR=/gone python -m tests.old_runs.make [RUN ...]``.

Run it at the commit whose folders are to be kept, never after a change that these folders are to hold against. Each run
stops after four of six steps. ``expected.json`` has what the same run computes in the two steps that are left, so that
a later version can resume it and compare. ``tables.json`` has hashes, digests and random numbers (:mod:`.tables`).

An adapter's checkpoint holds the path of its base model, and a manifest hashes it. So ``TMPDIR`` is a folder whose name
says nothing of the machine. The name of a run alone makes that run again; ``tables`` makes the tables again.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from PIL import Image

from tests.old_runs import tables
from tests.support.command import column, mgpu
from tests.support.sounds import RATE, list_of_tones

HERE = Path(__file__).parent
RUNS, INPUTS, EXPECTED, TABLES = HERE / "runs", HERE / "inputs", HERE / "expected.json", HERE / "tables.json"
STEPS, STOP = 6, 4
LEFT_OUT = ("*.log", "*.html", "rank-*", ".lock")
SHARED = (
    "trainer.accelerator=cpu",
    "precision=fp32",
    "logger=none",
    "data.global_batch_size=4",
    "data.micro_batch_size=2",
    f"scheduler.total_steps={STEPS}",
    "scheduler.warmup_steps=1",
    "trainer.val_every_n_steps=2",
    "checkpoint.every_n_steps=4",
    "checkpoint.keep_last=1",
    "optimizer.lr=1e-3",
)
LLAMA = (
    *("model=llama_tiny", "model.config.vocab_size=384", "model.config.hidden_size=16"),
    *("model.config.intermediate_size=32", "model.config.num_hidden_layers=2", "model.config.num_attention_heads=2"),
    "model.config.num_key_value_heads=1",
)
TEXT = (*LLAMA, "data=synthetic", "data.seq_len=32", "data.synthetic.num_documents=60")
BERT = (
    *("model=bert_tiny", "model.config.vocab_size=384", "model.config.hidden_size=16"),
    *("model.config.intermediate_size=32", "model.config.num_hidden_layers=2", "model.config.num_attention_heads=2"),
    "model.config.max_position_embeddings=64",
)
TOWERS = tuple(
    f"model.config.{part}_config.{key}={value}"
    for part in ("text", "vision")
    for key, value in {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }.items()
)
OBJECTIVES = {
    "causal_lm": TEXT,
    "masked_lm": (*BERT, "objective=masked_lm", "data=synthetic", "data.seq_len=32", "data.synthetic.num_documents=60"),
    "sequence_classification": (*BERT, "objective=sequence_classification", "data=labelled_jsonl")
    + ("data.paths=[inputs/labels.jsonl]", "data.seq_len=24", "data.validation_fraction=0.2"),
    "seq2seq": ("model=t5_tiny", "model.config.vocab_size=384", "model.config.d_model=16", "model.config.d_ff=32")
    + ("model.config.num_heads=2", "objective=seq2seq", "data=number_words"),
    "image_classification": ("model=vit_tiny", "model.config.hidden_size=16", "model.config.intermediate_size=32")
    + ("model.config.num_hidden_layers=2", "model.config.num_attention_heads=2", "objective=image_classification")
    + ("data=digits",),
    "contrastive": ("model=clip_tiny", *TOWERS, "model.config.projection_dim=16", "objective=contrastive")
    + ("data=captioned_digits",),
    "vision_language": ("model=llava_tiny", *TOWERS, "model.config.text_config.num_key_value_heads=1")
    + ("objective=vision_language", "data=digit_questions"),
    "ctc": ("model=wav2vec2_tiny", "model.config.hidden_size=16", "model.config.intermediate_size=32")
    + ("model.config.conv_dim=[8,16]", "objective=ctc", "data=audio_list", "data.paths=[inputs/tones/spoken.csv]")
    + (f"data.sampling_rate={RATE}",),
    "speech_seq2seq": ("model=whisper_tiny", "model.config.d_model=16", "model.config.encoder_ffn_dim=32")
    + ("model.config.decoder_ffn_dim=32", "model.config.encoder_layers=1", "model.config.decoder_layers=1")
    + ("model.config.max_source_positions=100", "objective=speech_seq2seq", "objective.max_new_tokens=9")
    + ("data=audio_list", "data.paths=[inputs/tones/spoken.csv]"),
    "dpo": (*LLAMA, "objective=dpo", "data=spoken_preferences", "data.chat_template=chatml", "data.seq_len=80")
    + ("data.numbers={count: 60, digits: 3}",),
    "distill": (*TEXT, "objective=distill", "objective.teacher=inputs/model", "objective.teacher_weight=0.7"),
}
OPTIMIZERS = {
    "muon": (*TEXT, "optimizer=muon"),
    "adamw_bf16": (*TEXT, "optimizer=adamw_bf16"),
    "ema": (*TEXT, "optimizer.ema.decay=0.9"),
}
ADAPTERS = {"lora": ("model=hf", "model.path=inputs/model", *TEXT[len(LLAMA) :], "peft=lora", "peft.r=2")}
STRATEGIES = {
    "fsdp2": (*TEXT, "strategy=fsdp", "trainer.devices=2"),
    "zero2": (*TEXT, "strategy=zero2", "trainer.devices=2"),
}
ALL = {**OBJECTIVES, **OPTIMIZERS, **ADAPTERS, **STRATEGIES}


def command(name: str, steps: int, folder: str) -> tuple[str, ...]:
    """The words of one run; paths are relative to the folder that holds ``inputs``."""
    return (*SHARED, *ALL[name], f"trainer.max_steps={steps}", f"run.dir={folder}")


def write_inputs(place: Path, cache: Path) -> None:
    """The small files that the runs read: rows with labels, recordings, and a model's folder."""
    inputs = place / "inputs"
    (inputs / "tones").mkdir(parents=True)
    list_of_tones(inputs / "tones", each=4)
    rows = [{"text": ("ab " if n % 2 else "xy ") * (2 + n % 5), "label": ("a", "x")[n % 2 == 0]} for n in range(40)]
    (inputs / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_files(inputs / "files")
    mgpu(cache, place, *command("causal_lm", STOP, "base"))
    mgpu(cache, place, "export", "base", "--out", "inputs/model")


def write_files(folder: Path) -> None:
    """One small file of each kind whose digest stands in the tables."""
    pictures = folder / "pictures"
    said: list[dict[str, str]] = []
    for number in range(6):
        picture = pictures / "ab"[number % 2] / f"{number}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (40 * number, 200 - 30 * number, 7)).save(picture)
        said.append({"picture": f"pictures/{'ab'[number % 2]}/{number}.png", "text": f"colour {number}"})
        (folder / f"{number}.txt").write_text(f"The colour {number} comes after {number - 1}.\n", encoding="utf-8")
    rows: dict[str, list[Any]] = {
        "chats": [[chat("user", one["text"]), chat("assistant", "yes")] for one in said],
        "preferences": [{"prompt": one["text"], "chosen": "yes", "rejected": "no no"} for one in said],
        "picture_chats": [[pictured(one["picture"]), chat("assistant", one["text"])] for one in said],
    }
    for name, lines in rows.items():
        lines = [{"messages": line} if isinstance(line, list) else line for line in lines]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "held_out.jsonl").write_text('{"text": "by by"}\n', encoding="utf-8")
    captions = "".join(f"{one['picture']},{one['text']}\n" for one in said)
    (folder / "captions.csv").write_text(f"path,caption\n{captions}", encoding="utf-8")


def chat(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def pictured(path: str) -> dict[str, object]:
    return chat("user", [{"type": "image", "image": path}, {"type": "text", "text": "What colour?"}])


def move_sweep(sweep: Path, old: str, new: str) -> None:
    """Replace the folder in which a sweep began, in its command and in the records of its points."""
    command = sweep / "sweep.json"
    command.write_text(command.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with closing(sqlite3.connect(sweep / "points.sqlite")) as store, store:
        store.execute("UPDATE points SET record = replace(record, ?, ?)", (old, new))


def hide_paths(run: Path, place: Path) -> None:
    """Replace the paths of this machine in a run folder's files of text."""
    for file in run.rglob("*"):
        if file.suffix in (".json", ".yaml", ".txt") and "checkpoints" not in file.parts:  # a manifest hashes those
            file.write_text(hide(file.read_text(encoding="utf-8"), place), encoding="utf-8")


def hide(text: str, place: Path) -> str:
    for path, name in ((sys.executable, "python"), (str(place), "/gone"), (str(HERE.parents[1]), "/gone")):
        text = text.replace(path, name)
    return text


def make(names: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        place, cache = Path(folder) / "place", Path(folder) / "cache"
        place.mkdir()
        if INPUTS.exists():
            shutil.copytree(INPUTS, place / "inputs")
        else:
            write_inputs(place, cache)
            shutil.copytree(place / "inputs", INPUTS)
        expected = json.loads(EXPECTED.read_text(encoding="utf-8")) if EXPECTED.exists() else {}
        for name in names:
            mgpu(cache, place, *command(name, STEPS, f"whole/{name}"))
            mgpu(cache, place, *command(name, STOP, f"runs/{name}"))
            rows = {key: column(place / "whole" / name, key) for key in ("train/loss", "train/grad_norm", "val/loss")}
            expected[name] = {key: {step: value for step, value in rows[key].items() if step > STOP} for key in rows}
            shutil.rmtree(RUNS / name, ignore_errors=True)
            shutil.copytree(place / "runs" / name, RUNS / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
            hide_paths(RUNS / name, Path(folder))
        EXPECTED.write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n", encoding="utf-8")


SWEEP = (
    *(word for word in SHARED if not word.startswith("checkpoint.")),
    *TEXT,
    "trainer.max_steps=2",
    "checkpoint.every_n_steps=2",
    "optimizer.lr=1e-3,3e-4",
    "sweep.name=rates",
)
JOB = (
    "submit",
    "--dry-run",
    "launch=slurm",
    "strategy=ddp",
    *TEXT,
    "trainer.num_nodes=2",
    "trainer.devices=2",
    "run.dir=/gone/run",
)


def make_rest() -> None:
    """A finished sweep (its store, and its runs without their checkpoints), a job's script, the example packages."""
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        place, cache = Path(folder) / "place", Path(folder) / "cache"
        place.mkdir()
        mgpu(cache, place, "-m", *SWEEP)
        shutil.rmtree(HERE / "sweep", ignore_errors=True)
        left_out = shutil.ignore_patterns(*LEFT_OUT, "checkpoints", "tokenizer", "logs")
        shutil.copytree(place / "outputs", HERE / "sweep", ignore=left_out)
        hide_paths(HERE / "sweep", Path(folder))
        move_sweep(HERE / "sweep" / "sweeps" / "rates", folder, "/gone")
        script = mgpu(cache, place, *JOB, "run.dir=/gone/run")
        (HERE / "job.sh").write_text(hide(script, Path(folder)), encoding="utf-8")
    shutil.rmtree(HERE / "packages", ignore_errors=True)
    cached = shutil.ignore_patterns("__pycache__")
    for package in sorted((HERE.parents[1] / "examples").glob("*/pyproject.toml")):
        shutil.copytree(package.parent, HERE / "packages" / package.parent.name, ignore=cached)


def make_tables() -> None:
    """What :mod:`.tables` computes, written down."""
    with tempfile.TemporaryDirectory(prefix="run-") as cache:
        os.chdir(HERE)
        values = {
            "configurations": tables.configuration_hashes(tables.options()),
            "data": tables.data_digests(tables.DATA, Path(cache)),
            "parameters": tables.parameters(tables.tiny_models()),
            "random_numbers": tables.random_numbers(),
        }
    TABLES.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    names = sys.argv[1:] or [*ALL, "rest", "tables"]
    make([name for name in names if name in ALL])
    if "rest" in names:
        make_rest()
    if "tables" in names:
        make_tables()
