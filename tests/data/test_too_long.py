"""Samples that do not fit follow one rule, ``data.on_too_long``, whatever the source; what is left out is counted."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.prepare_audio import PreparedSpeech
from mgpu_pipe.data.bad_samples import check_rule
from mgpu_pipe.data.images.prepare_captions import PreparedCaptions
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors, DataError
from tests.data.support import WORDS, config, write_jsonl
from tests.objectives.test_contrastive import captioned
from tests.objectives.test_ctc import SPEECH
from tests.objectives.test_speech_seq2seq import WHISPER
from tests.support.needs import need_speech
from tests.support.sounds import tones, write_wav

LENGTHS = (3, 4, 5, 150, 6, 200, 2, 3)
"""Words of an answer; two do not fit."""
SEQ_LEN = 100


def words(count: int, seed: int = 0) -> str:
    drawn = random.Random(seed * 1000 + count)
    return " ".join(drawn.choice(WORDS) for _ in range(count))


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def row_of(source: str, number: int, count: int) -> dict[str, Any]:
    question, answer = words(3, number), words(count, number)
    return {
        "chat_jsonl": chat(question, answer),
        "preferences_jsonl": {"prompt": question, "chosen": answer, "rejected": words(2, number + 50)},
        "unpaired_jsonl": {"prompt": question, "completion": answer, "label": number % 2 == 0},
        "pairs_jsonl": {"source": question, "target": answer},
        "labelled_jsonl": {"text": answer, "label": WORDS[number % 2]},
        "jsonl": {"text": answer},
    }[source]


def configured(tmp_path: Path, source: str, rule: str = "auto", lengths: tuple[int, ...] = LENGTHS) -> RunConfig:
    rows = [row_of(source, number, count) for number, count in enumerate(lengths)]
    data = {"seq_len": SEQ_LEN, "on_too_long": rule, "validation_fraction": 0.0}
    if source in ("chat_jsonl", "preferences_jsonl", "unpaired_jsonl"):
        data["chat_template"] = "chatml"
    paths = [str(write_jsonl(tmp_path / f"{source}.jsonl", rows))]
    return config(tmp_path, source=source, paths=paths, **data)


def trained_tokens(prepared: Prepared, run: RunConfig) -> int:
    samples = prepared.open(run, "train")
    every = np.arange(len(samples))
    return int((samples.batch(every, every)["labels"] != IGNORE_INDEX).sum())


@pytest.mark.parametrize(
    "source", ["chat_jsonl", "preferences_jsonl", "unpaired_jsonl", "pairs_jsonl", "labelled_jsonl"]
)
def test_what_has_an_answer_is_dropped_and_counted(tmp_path: Path, source: str) -> None:
    run = configured(tmp_path, source)
    prepared = prepare(run)
    assert (prepared.too_long_samples, prepared.on_too_long) == (2, "drop")
    short = tuple(count for count in LENGTHS if count < 50)
    rows = [row_of(source, number, count) for number, count in enumerate(LENGTHS) if count in short]
    fitting = replace(run, data=replace(run.data, paths=[str(write_jsonl(tmp_path / "short.jsonl", rows))]))
    fitting.data.tokenizer = str(prepared.tokenizer_folder)
    alone = prepare(fitting)
    assert prepared.train_samples == alone.train_samples and alone.too_long_samples == 0
    if source != "labelled_jsonl":
        assert trained_tokens(prepared, run) == trained_tokens(alone, fitting)
    plain = prepared.as_dict()
    assert plain["too_long_samples"] == 2 and plain["on_too_long"] == "drop"
    assert read_prepared(json.loads(json.dumps(plain))) == prepared
    assert "2 " in prepared.too_long(run.data) and "left out (data.on_too_long=drop)" in prepared.too_long(run.data)
    assert alone.too_long(fitting.data) == ""


def test_text_is_split_and_no_label_is_lost(tmp_path: Path) -> None:
    run = configured(tmp_path, "jsonl")
    prepared: Any = prepare(run)
    assert (prepared.too_long_samples, prepared.on_too_long) == (2, "split")
    assert trained_tokens(prepared, run) == prepared.num_tokens - prepared.num_documents
    dropped: Any = prepare(replace(run, data=replace(run.data, on_too_long="drop")))
    assert dropped.train.documents == prepared.train.documents
    assert dropped.train_tokens < prepared.train_tokens and dropped.digest != prepared.digest


@pytest.mark.parametrize("source", ["jsonl", "chat_jsonl", "preferences_jsonl", "pairs_jsonl", "labelled_jsonl"])
def test_refused_with_number_longest_and_fix(tmp_path: Path, source: str) -> None:
    with pytest.raises(
        ConfigError, match=r"=100: 2 of 8 .* are longer, the longest \(number 6\) has \d+ tokens"
    ) as told:
        prepare(configured(tmp_path, source, "refuse"))
    most = int(str(told.value).split(" has ")[1].split()[0])
    key = told.value.key.removeprefix("data.")
    run = configured(tmp_path, source, "refuse")
    assert prepare(replace(run, data=replace(run.data, **{key: most}))).too_long_samples == 0


@pytest.mark.parametrize("source", ["jsonl", "chat_jsonl", "pairs_jsonl", "labelled_jsonl"])
def test_truncated_at_the_end(tmp_path: Path, source: str) -> None:
    run = configured(tmp_path, source, "truncate")
    run.data.packing = "none"
    prepared: Any = prepare(run)
    assert (prepared.too_long_samples, prepared.on_too_long, prepared.train_samples) == (2, "truncate", 8)
    samples, every = prepared.open(run, "train"), np.arange(8)
    batch = samples.batch(every, every)
    if source == "pairs_jsonl":
        labels = batch["labels"]
        assert labels.shape == (8, SEQ_LEN) and (labels[[3, 5], -1] == prepared.padding_token_id).all()
        assert int((labels != IGNORE_INDEX).sum()) == samples.valid_units(every, every)
    else:
        assert samples.padding(np.array([3, 5])) == 0


def test_a_conversation_cut_before_its_answer_is_left_out(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", [chat("Hi", "Yes"), chat(words(200), "No")])
    for rule in ("truncate", "split"):
        run = config(tmp_path, source="chat_jsonl", paths=[str(path)], chat_template="chatml", validation_fraction=0.0)
        run.data.packing, run.data.on_too_long = "none", rule
        prepared = prepare(run)
        samples, every = prepared.open(run, "train"), np.arange(prepared.train_samples)
        assert len(every) == {"truncate": 1, "split": 2}[rule]
        assert ((samples.batch(every, every)["labels"] != IGNORE_INDEX).sum(1) > 0).all()


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        *(("labelled_jsonl", "split"), ("pairs_jsonl", "split"), ("embedding_pairs", "split")),
        ("scored_pairs", "split"),
        *(("preferences_jsonl", rule) for rule in ("split", "truncate")),
        *(("picture_chats", rule) for rule in ("split", "truncate")),
        *(("captions", "split"), ("audio_list", "truncate")),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused_before_the_start(source: str, rule: str) -> None:
    run = RunConfig()
    run.data.source, run.data.on_too_long = source, rule
    with pytest.raises(
        BadInputError, match=f"data.on_too_long={rule}: data.source={source}: .*; (use auto, refuse|leave it at auto)"
    ):
        check_rule(run.data)


@pytest.mark.parametrize("source", ["chat_jsonl", "preferences_jsonl", "pairs_jsonl", "labelled_jsonl"])
def test_nothing_left_is_one_line(tmp_path: Path, source: str) -> None:
    with pytest.raises(DataError, match="nothing to train on") as told:
        prepare(configured(tmp_path, source, lengths=(150, 200)))
    assert "\n" not in str(told.value)


def test_data_whose_samples_all_fit_is_named_as_before(tmp_path: Path) -> None:
    """A run folder of an earlier version goes on."""
    found = [prepare(configured(tmp_path, "chat_jsonl", rule, lengths=(3, 4, 5))).digest for rule in ("auto", "split")]
    assert found[0] == found[1]


@pytest.mark.parametrize("source", ["preferences_jsonl", "unpaired_jsonl"])
def test_answers_to_a_prompt_stand_on_one_side(tmp_path: Path, source: str) -> None:
    said = [{"prompt": words(3, 3 * at), "answer": f"{WORDS[turn]} {at}"} for at in range(30) for turn in range(2)]
    rows: list[dict[str, Any]] = [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": WORDS[2]}
        if source == "preferences_jsonl"
        else {"prompt": row["prompt"], "completion": row["answer"], "label": at % 2 == 0}
        for at, row in enumerate(said)
    ]
    paths = [str(write_jsonl(tmp_path / "rows.jsonl", rows))]
    prepared: Any = prepare(
        config(tmp_path, source=source, paths=paths, chat_template="chatml", seq_len=SEQ_LEN, validation_fraction=0.4)
    )
    train, held = ({rows[at]["prompt"] for at in prepared.documents(split)} for split in ("train", "validation"))
    assert train and held and not train & held


LONG = "a square with very many words of which each costs more than one of the tokens that there are"


def prepared_captions(folder: Path, *overrides: str) -> PreparedCaptions:
    """Sixty pictures, every fifth with a long caption."""
    config = captioned(folder, *overrides)
    table = folder / "captions.csv"
    header, *lines = table.read_text().splitlines()
    lines = [f"{line.partition(',')[0]},{LONG}" if at % 5 == 0 else line for at, line in enumerate(lines)]
    table.write_text("\n".join([header, *lines]) + "\n")
    found = prepare(config)
    assert isinstance(found, PreparedCaptions)
    again = read_prepared(found.as_dict())
    assert again == found and isinstance(again, PreparedCaptions)
    return again


def test_long_captions_are_cut_or_left_out_and_counted(tmp_path: Path) -> None:
    cut = prepared_captions(tmp_path, "data.on_too_long=auto")
    said = prepared_captions(tmp_path, "data.on_too_long=truncate")
    left = prepared_captions(tmp_path, "data.on_too_long=drop")
    assert cut.digest == said.digest != left.digest and cut.too_long_samples == left.too_long_samples == 12
    assert cut.train_samples + cut.held_out_samples == 60 and left.train_samples + left.held_out_samples == 48
    config = captioned(tmp_path)
    assert cut.too_long(config.data) == "12 captions are longer than data.seq_len=12: cut at their end " + (
        "(data.on_too_long=truncate)"
    )
    assert "12 captions are longer than data.seq_len=12: left out" in left.too_long(config.data)
    config = captioned(tmp_path, "data.on_too_long=drop")
    samples = left.open(config, "train")
    batch = samples.batch(np.arange(len(samples)), np.arange(len(samples)))
    captions = {tuple(row) for row in batch["input_ids"].tolist()}
    assert len(captions) == 3, "one a class: the long one is gone"
    fits = prepared_captions(tmp_path, "data.on_too_long=drop", "data.seq_len=120")
    whole = prepared_captions(tmp_path, "data.seq_len=120")
    assert fits.digest == whole.digest and fits.train_samples + fits.held_out_samples == 60


def test_long_captions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.seq_len=12: 1 of 4 captions are longer.*data.on_too_long=refuse"):
        prepared_captions(tmp_path, "data.on_too_long=refuse")
    with pytest.raises(ConfigErrors, match=r"data.on_too_long=split: .*; use auto, refuse, drop, truncate"):
        preflight(captioned(tmp_path, "data.on_too_long=split"))


KINDS = {
    "the file": ("long.wav,b a", SPEECH, ("data.max_seconds=2.5",), "lasts 3.0 s, longer than data.max_seconds=2.5"),
    "the frames": ("0.wav," + "ab" * 40, SPEECH, (), "has a text that needs 80 frames"),
    "the window": ("long.wav,b", WHISPER, (), "lasts 3.0 s; the model's window has 2 s"),
    "the decoder": ("0.wav," + "b a " * 40, WHISPER, (), "tokens; the model writes at most 64"),
}


def listed(folder: Path, kind: str, *overrides: str, others: str = "") -> RunConfig:
    """Eight tones and one sample that is too long."""
    line, objective, more, _ = KINDS[kind]
    write_wav(folder / "0.wav", tones("ab", 1))
    write_wav(folder / "long.wav", tones("ab" * 8, 1)[: 3 * 8000])
    (folder / "list.csv").write_text("path,text\n" + "0.wav,ab\n" * 8 + f"{line}\n{others}")
    given = (f"data.paths=[{folder / 'list.csv'}]", f"data.cache_dir={folder / 'cache'}", "data.speed=0")
    own = ("model.config.max_source_positions=100",) if objective is WHISPER else ("data.sampling_rate=8000",)
    sizes = ("data.validation_fraction=0", *own, *more)
    return compose([*objective, "data=audio_list", *given, *sizes, *overrides])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_too_long_is_refused_or_left_out_and_counted(tmp_path: Path, kind: str) -> None:
    need_speech()
    said = re.escape(KINDS[kind][-1])
    with pytest.raises(DataError, match=f"data.on_too_long=refuse: .*{said}.*data.on_too_long=drop"):
        prepare(listed(tmp_path, kind, "data.on_too_long=refuse"))
    with pytest.raises(DataError, match=f"{said}.*data.on_bad_sample=skip"):
        prepare(listed(tmp_path, kind))
    config = listed(tmp_path, kind, "data.on_too_long=drop")
    left = prepare(config)
    assert isinstance(left, PreparedSpeech) and read_prepared(left.as_dict()) == left
    assert (left.train_samples, left.too_long_samples, left.bad_samples) == (8, 1, 0)
    assert left.too_long(config.data).startswith("1 recordings or their texts are longer than data.max_seconds=")
    assert left.digest == prepare(listed(tmp_path, kind, "data.on_bad_sample=skip")).digest


def test_other_bad_recordings_still_stop_the_run(tmp_path: Path) -> None:
    need_speech()
    with pytest.raises(DataError, match=r"csv:\d+: has no text; correct or remove it"):
        prepare(listed(tmp_path, "the frames", "data.on_too_long=drop", others="0.wav,   \n"))
    both = ("data.on_too_long=drop", "data.on_bad_sample=skip")
    found = prepare(listed(tmp_path, "the frames", *both, others="0.wav,   \n"))
    assert (found.too_long_samples, found.bad_samples) == (1, 1)
    with pytest.raises(ConfigErrors, match=r"data.on_too_long=truncate: .*; use auto, refuse, drop"):
        preflight(listed(tmp_path, "the frames", "data.on_too_long=truncate"))
