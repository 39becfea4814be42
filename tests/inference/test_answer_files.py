"""Files of prompts answered by real processes. The oracle of greedy answers is transformers' own ``generate`` on the
export, prompt by prompt; of everything else, a job of one process that nothing disturbed.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet
from torch.distributed.fsdp import FSDPModule
from transformers import T5Config, T5ForConditionalGeneration

from mgpu_pipe.cli.main import main
from mgpu_pipe.cli.processes import compose_processes
from mgpu_pipe.inference.find_model import find_model
from mgpu_pipe.inference.generation import generate_text
from mgpu_pipe.inference.open import load_run
from mgpu_pipe.inference.parallel_run import EncoderDecoderForward, evaluation_config, open_parallel
from tests.inference.support import WORDS, write_run, write_texts
from tests.objectives.test_seq2seq import small_data
from tests.support import small_runs
from tests.support.command import launched, mgpu
from tests.support.processes import run_processes
from tests.support.sampling import one_in, sampled

PROMPTS = [" ".join(WORDS[(at * 3 + k) % len(WORDS)] for k in range(1 + at % 7)) for at in range(20)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    write_run(folder / "run", "llama", write_texts(folder / "texts", 12), folder / "cache")
    write_rows(folder / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    return folder


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def answer(place: Path, name: str, *words: str) -> bytes:
    """What a job of this process writes."""
    arguments = ["generate", str(place / "run"), "--input", str(place / "prompts.jsonl"), "--output"]
    assert main([*arguments, str(place / name), *words]) == 0
    assert not (place / f"{name}.unfinished").exists()
    return (place / name).read_bytes()


GREEDY = ("--temperature", "0", "--max-new-tokens", "9")
SAMPLED = ("--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--max-new-tokens", "9", "--seed", "5")


def test_greedy_answers_are_those_of_transformers_prompt_by_prompt(place: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [json.loads(line) for line in answer(place, "greedy.jsonl", *GREEDY, "--batch-size", "6").splitlines()]
    assert main(["export", str(place / "run"), "--out", str(place / "exported")]) == 0
    model = AutoModelForCausalLM.from_pretrained(place / "exported", local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(place / "exported", local_files_only=True)
    assert [row["line"] for row in rows] == list(range(1, 1 + len(PROMPTS)))
    for prompt, row in zip(PROMPTS, rows, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=9, pad_token_id=0)[0]
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        assert whole == prompt + row["answer"]
        ended = ids[-1] == tokenizer.eos_token_id
        new = len(ids) - inputs["input_ids"].shape[1] - int(ended)
        assert (row["tokens"], row["finish_reason"]) == (new, "stop" if ended else "length")


@pytest.mark.parametrize("batches", ["continuous", "padded"])
def test_an_answer_ends_before_a_stop_text_across_tokens(
    place: Path, batches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = place / "greedy.jsonl"
    before = whole.read_bytes() if whole.exists() else answer(place, whole.name, *GREEDY, "--batch-size", "6")
    rows = [json.loads(line) for line in before.splitlines()]
    texts = [row["answer"] for row in rows if len(row["answer"]) > 12]
    stops = [texts[0][4:9], texts[-1][5:8]]
    if batches == "padded":
        monkeypatch.setattr("mgpu_pipe.inference.batch.answer.takes_rows", lambda model: False)
    words = [*GREEDY, "--batch-size", "6", *(word for stop in stops for word in ("--stop", stop))]
    stopped = [json.loads(line) for line in answer(place, f"stop_{batches}.jsonl", *words).splitlines()]
    for row, full in zip(stopped, rows, strict=True):
        places = [full["answer"].find(stop) for stop in stops if stop in full["answer"]]
        assert row["answer"] == (full["answer"][: min(places)] if places else full["answer"])
        assert row["finish_reason"] == ("stop" if places else full["finish_reason"])
        assert row["tokens"] <= full["tokens"]
    assert any(row != full for row, full in zip(stopped, rows, strict=True))


@pytest.mark.parametrize("form", ["p.csv", "p.parquet", "p.json", "batch.jsonl"])
def test_tables_and_batch_files_are_answered_as_rows_of_prompts(
    place: Path, form: str, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": "same" if at < 2 else f"row {at}", "prompt": prompt} for at, prompt in enumerate(PROMPTS[:6])]
    file, key = place / form, "id"
    if form == "p.csv":
        with file.open("w", newline="", encoding="utf-8-sig") as out:
            csv.writer(out).writerows([["id", "prompt"], [], *(row.values() for row in rows)])
    elif form == "p.parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=4)
    elif form == "p.json":
        file.write_text(json.dumps(rows), encoding="utf-8")
    else:
        key, head = "custom_id", {"method": "POST", "url": "/v1/completions"}
        bodies = [{"model": "m", "prompt": row["prompt"], "max_tokens": 2, "temperature": 1} for row in rows]
        write_rows(file, [{key: row["id"], **head, "body": body} for row, body in zip(rows, bodies, strict=True)])
    words = ["--input", str(file), "--output", str(place / f"{form}.out"), *GREEDY]
    assert main(["generate", str(place / "run"), *words]) == 0
    whole = place / "greedy.jsonl"
    expected = whole.read_bytes() if whole.exists() else answer(place, whole.name, *GREEDY, "--batch-size", "6")
    answers = [json.loads(line) for line in (place / f"{form}.out").read_bytes().splitlines()]
    assert [row["answer"] for row in answers] == [json.loads(line)["answer"] for line in expected.splitlines()[:6]]
    assert [row[key] for row in answers] == [row["id"] for row in rows]
    note = "the max_tokens, temperature of its rows are not read; give options of generate"
    assert (note in capfd.readouterr().err) == (form == "batch.jsonl")


def test_sampled_answers_depend_on_neither_processes_nor_batches(place: Path, cache: Path) -> None:
    one = answer(place, "one.jsonl", *SAMPLED, "--batch-size", "4")
    assert answer(place, "other.jsonl", *SAMPLED, "--batch-size", "7") == one
    assert answer(place, "seed.jsonl", *SAMPLED[:-1], "6", "--batch-size", "4") != one
    words = ["run", "--input", "prompts.jsonl", "--output", "two.jsonl", *SAMPLED, "--batch-size", "4"]
    said = mgpu(cache, place, "generate", *words, "trainer.devices=2", "trainer.accelerator=cpu")
    assert (place / "two.jsonl").read_bytes() == one and said == ""
    texts = [json.loads(line)["answer"] for line in one.splitlines()]
    assert len(set(texts)) > len(texts) // 2, "rows draw from different streams"


STRATEGIES = {
    "tp": ("strategy=tp", "trainer.devices=2"),
    "tp with sequences": ("strategy=tp", "strategy.sequence_parallel=true", "trainer.devices=2"),
    "fsdp": ("strategy=fsdp", "trainer.devices=2"),
    "pp": ("strategy=pp", "trainer.devices=2"),
    "tp twice": ("strategy=tp", "strategy.tp=2", "strategy.dp_replicate=2", "trainer.devices=4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", sampled([(name,) for name in STRATEGIES], lambda strategy: strategy != "tp"))
def test_processes_that_share_the_model_give_the_same_answers(place: Path, cache: Path, strategy: str) -> None:
    name = strategy.replace(" ", "_")
    for settings, kind in ((GREEDY, "greedy"), (SAMPLED, "sampled")):
        whole = place / f"whole_{kind}.jsonl"
        expected = whole.read_bytes() if whole.exists() else answer(place, whole.name, *settings, "--batch-size", "6")
        words = ["run", "--input", "prompts.jsonl", "--output", f"{name}_{kind}.jsonl", *settings, "--batch-size", "6"]
        mgpu(cache, place, "generate", *words, *STRATEGIES[strategy], "trainer.accelerator=cpu")
        assert (place / f"{name}_{kind}.jsonl").read_bytes() == expected, kind


def _gathers(run: Path) -> bool:
    source = find_model(run)
    config = compose_processes(
        "generate", [*STRATEGIES["tp twice"], "trainer.accelerator=cpu"], "auto", strategies=True
    )
    model = open_parallel(source, evaluation_config(source, config), torch.device("cpu")).model
    return any(isinstance(module, FSDPModule) for module in model.modules())


@pytest.mark.slow
def test_a_model_that_is_not_trained_runs_without_the_hooks_of_fsdp(place: Path) -> None:
    assert run_processes(4, _gathers, place / "run") == [False] * 4


@pytest.mark.slow
@pytest.mark.parametrize("strategy", one_in(3, ["pp", "tp", "fsdp"]))
def test_a_folder_is_cut_as_a_run_is(place: Path, cache: Path, strategy: str) -> None:
    if not (place / "folder").exists():
        assert main(["export", str(place / "run"), "--out", str(place / "folder")]) == 0
    whole = place / "whole_greedy.jsonl"
    expected = whole.read_bytes() if whole.exists() else answer(place, whole.name, *GREEDY, "--batch-size", "6")
    words = ["folder", "--input", "prompts.jsonl", "--output", f"folder_{strategy}.jsonl", *GREEDY, "--batch-size", "6"]
    mgpu(cache, place, "generate", *words, *STRATEGIES[strategy], "trainer.accelerator=cpu")
    assert (place / f"folder_{strategy}.jsonl").read_bytes() == expected


def test_a_folder_of_another_kind_is_refused_under_a_strategy(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = T5Config(vocab_size=384, d_model=16, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)  # type: ignore[call-arg]
    T5ForConditionalGeneration(config).save_pretrained(place / "t5")
    words = [str(place / "t5"), "--input", str(place / "prompts.jsonl"), "--output", str(place / "no.jsonl")]
    assert main(["generate", *words, *STRATEGIES["tp"]]) == 2
    said = capfd.readouterr().err
    assert "t5: strategy=tp opens folders of causal language models alone; use strategy=ddp" in said


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--weights", "ema"), "--weights=ema: strategy=tp opens the trained weights alone; use strategy=ddp"),
        (("--frozen-weights", "run"), "--frozen-weights=run: strategy=tp opens the trained weights alone"),
    ],
)
def test_options_of_whole_weights_are_refused_under_a_strategy(
    place: Path, words: tuple[str, ...], problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    files = ["--input", str(place / "prompts.jsonl"), "--output", str(place / "none.jsonl")]
    processes = ["strategy=tp", "trainer.devices=2", "trainer.accelerator=cpu"]
    assert main(["generate", str(place / "run"), *files, *words, *processes]) == 2
    assert problem in capfd.readouterr().err


@pytest.mark.slow
def test_a_killed_job_goes_on_with_another_number_of_processes(place: Path, cache: Path) -> None:
    rows = [{"prompt": PROMPTS[at % len(PROMPTS)]} for at in range(120)]
    write_rows(place / "many.jsonl", rows)
    words = ["generate", "run", "--input", "many.jsonl", *SAMPLED, "--max-new-tokens", "24", "--batch-size", "2"]
    mgpu(cache, place, *words, "--output", "whole.jsonl")
    job = launched(cache, place, *words, "--output", "killed.jsonl", "trainer.devices=2", "trainer.accelerator=cpu")
    parts = place / "killed.jsonl.unfinished"
    while sum(part.read_bytes().count(b"\n") for part in parts.glob("rank-*.jsonl")) < 10:
        assert job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGKILL)
    job.communicate()
    while not_ended := [part for part in parts.glob("rank-*.jsonl") if is_open(part)]:
        assert not_ended
        time.sleep(0.05)
    kept = sum(part.read_bytes().count(b"\n") for part in parts.glob("rank-*.jsonl"))
    assert 10 <= kept < len(rows)
    torn = parts / "rank-00000.jsonl"
    torn.write_bytes(torn.read_bytes() + b'{"line": 3, "ans')  # a kill in the middle of a write
    with pytest.raises(AssertionError, match="another seed"):
        mgpu(cache, place, *words[:-2], "--batch-size", "2", "--seed", "8", "--output", "killed.jsonl")
    mgpu(cache, place, *words, "--output", "killed.jsonl", "trainer.devices=3", "trainer.accelerator=cpu")
    assert (place / "killed.jsonl").read_bytes() == (place / "whole.jsonl").read_bytes()
    assert not parts.exists()


def is_open(path: Path) -> bool:
    """Whether any process has the file open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.path.realpath(link) == str(path.resolve()):
                return True
        except OSError:
            continue
    return False


BAD: list[Any] = [
    '{"prompt": "the',
    {"text": "the"},
    {"prompt": 3},
    {"prompt": "a", "messages": []},
    {"prompt": "the " * 3000},
]
BAD = [*BAD, {"messages": [{"role": "user", "content": "the"}]}]


def test_bad_rows_are_named_and_refused_or_skipped(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_rows(place / "bad.jsonl", [{"prompt": "the quick"}, *BAD, {"prompt": "lazy"}])
    words = ["generate", str(place / "run"), "--input", str(place / "bad.jsonl"), *GREEDY]
    words += ["--output", str(place / "some.jsonl")]
    assert main(words) == 2
    told = capfd.readouterr().err
    assert "bad.jsonl:2: is not valid JSON" in told and "5 more rows are bad" in told and "--on-bad-row skip" in told
    assert not (place / "some.jsonl.unfinished").exists()
    assert main([*words, "--on-bad-row", "skip"]) == 0
    told = capfd.readouterr().err
    for line, problem in enumerate(
        (
            *("is not valid JSON", "has neither prompt nor messages", "prompt is a int"),
            *("has both prompt and messages", "tokens: the model's context is", "the model has no chat template"),
        ),
        start=2,
    ):
        assert any(f"bad.jsonl:{line}: " in text and problem in text for text in told.splitlines()), (line, told)
    rows = [json.loads(line) for line in (place / "some.jsonl").read_bytes().splitlines()]
    assert ["error" in row for row in rows] == [False, *[True] * len(BAD), False]
    assert [row["line"] for row in rows] == list(range(1, len(BAD) + 3))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--input", "nosuch.jsonl", "--output", "x.jsonl"], "--input=nosuch.jsonl: no such file"),
        (["--input", "prompts.jsonl", "--output", "x.jsonl", "--stop", ""], "--stop=: every text holds an empty one"),
        (["--input", "prompts.jsonl"], "nowhere to write the answers; add --output FILE"),
        (["--prompt", "a", "--output", "x.jsonl"], "--output: only works with --input"),
        (["--prompt", "a", "trainer.devices=2"], "trainer.devices=2: only works with --input"),
        (["--input", "prompts.jsonl", "--output", "x.jsonl", "--prompt", "a"], "--prompt: a file of prompts holds all"),
        (["--input", "prompts.jsonl", "--output", "no/x.jsonl"], "--output=no/x.jsonl: cannot be written"),
        (["--input", "prompts.jsonl", "--output", "prompts.jsonl"], "exists already"),
        (["--input", "prompts.jsonl", "--output", "x.jsonl", "optimizer.lr=1"], "optimizer.lr=1: generate takes"),
        (
            ["--input", "prompts.jsonl", "--output", "x.jsonl", "trainer.num_nodes=2"],
            "trainer.num_nodes=2: this command",
        ),
        (
            ["--input", "prompts.jsonl", "--output", "x.jsonl", "launch=slurm", "launch.time=soon"],
            "launch.time=soon: use",
        ),
    ],
)
def test_wrong_jobs_are_one_line(
    place: Path, words: list[str], said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    assert main(["generate", "run", *words]) == 2
    told = capfd.readouterr().err
    assert said in told.replace(f"{place}/", "") and told.count("\n") == 1
    assert not (place / "x.jsonl.unfinished").exists()


def test_a_chat_model_answers_messages_and_prompts_by_its_template(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is ``generate_text``, which encodes a prompt as one message of the user."""
    import shutil

    from transformers import AutoTokenizer

    from mgpu_pipe.data.text.tokenizer_folder import chat_of

    if not (place / "exported").exists():
        assert main(["export", str(place / "run"), "--out", str(place / "exported")]) == 0
    folder = shutil.copytree(place / "exported", tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
        "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    talk = [{"role": "system", "content": "the dog"}, {"role": "user", "content": "quick"}]
    tool = {"type": "function", "function": {"name": "lazy"}}
    rows = [{"prompt": "a fox"}, {"messages": talk}, {"messages": talk[1:], "system": "the dog"}, {"prompt": talk}]
    write_rows(tmp_path / "talks.jsonl", [*rows, {"messages": talk, "tools": [tool]}])
    words = ["--input", str(tmp_path / "talks.jsonl"), "--output", str(tmp_path / "talked.jsonl"), *GREEDY]
    assert main(["generate", str(folder), *words]) == 0
    told = [json.loads(line)["answer"] for line in (tmp_path / "talked.jsonl").read_text().splitlines()]
    run = load_run(folder)
    expected = [
        generate_text(run.model, run.tokenizer(), [prompt], chat=chat_of(folder), max_new_tokens=9, temperature=0.0)[0]
        for prompt in ("a fox", talk)
    ]
    offered = run.tokenizer().apply_chat_template(talk, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert offered.startswith("lazy\n")
    [answered] = generate_text(run.model, run.tokenizer(), [offered], max_new_tokens=9, temperature=0.0)
    assert (
        told == [*expected, *expected[1:] * 2, answered.strip()] and all(expected) and answered.strip() != expected[1]
    )


def test_answers_end_at_each_token_of_the_folders_generation_settings(place: Path, tmp_path: Path) -> None:
    """Published chat models list several ends. Oracle: transformers' own ``generate`` in the same folder."""
    import shutil

    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (place / "exported").exists():
        assert main(["export", str(place / "run"), "--out", str(place / "exported")]) == 0
    folder = shutil.copytree(place / "exported", tmp_path / "listed")
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    words: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9, "pad_token_id": 0}
    whole = model.generate(**inputs, **words)[0, inputs["input_ids"].shape[1] :].tolist()
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["eos_token_id"] = [tokenizer.eos_token_id, whole[4]]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    ids = model.generate(**inputs, **words)[0].tolist()[:-1]
    ended = tmp_path / "ended.jsonl"
    files = ["--input", str(place / "prompts.jsonl"), "--output", str(ended)]
    assert main(["generate", str(folder), *files, *GREEDY]) == 0
    row = json.loads(ended.read_text().splitlines()[0])
    assert PROMPTS[0] + row["answer"] == tokenizer.decode(ids, skip_special_tokens=True)
    assert row["tokens"] == whole.index(whole[4]) < 9
    run = load_run(folder)
    [alone] = generate_text(run.model, run.tokenizer(), [PROMPTS[0]], max_new_tokens=9, temperature=0.0)
    assert alone == row["answer"]


@pytest.mark.slow
def test_an_encoder_decoder_keeps_its_cache_under_a_strategy(tmp_path: Path, cache: Path) -> None:
    """Oracle: transformers' own generation, row by row."""
    small_runs.run(small_data, tmp_path / "run", 1, "model.config.initializer_factor=9", "trainer.max_steps=1")
    sources = ["one hundred two", "three", "ninety nine", "seven thousand", "twelve"]
    write_rows(tmp_path / "sources.jsonl", [{"prompt": source} for source in sources])
    loaded = load_run(tmp_path / "run")
    tokenizer = loaded.tokenizer()
    alone = [
        generate_text(loaded.model, tokenizer, [source], max_new_tokens=9, temperature=0.0)[0] for source in sources
    ]
    encoded: list[int] = []
    loaded.model.get_encoder().register_forward_pre_hook(lambda *_: encoded.append(1))
    steps: list[int] = []
    loaded.model.get_decoder().register_forward_pre_hook(
        lambda _, __, inputs: steps.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    forward = EncoderDecoderForward(loaded.model)
    words: dict[str, Any] = {"max_new_tokens": 9, "temperature": 0.0, "forward": forward, "batch_size": 5}
    assert generate_text(loaded.model, tokenizer, sources, **words) == alone and len(set(alone)) > 2
    assert len(encoded) == 1 and set(steps) == {1}, "the encoder runs once, the decoder on a token at a time"
    for strategy in ("tp", "fsdp"):
        given = ["run", "--input", "sources.jsonl", "--output", f"{strategy}.jsonl", "--max-new-tokens", "9"]
        mgpu(cache, tmp_path, "generate", *given, *STRATEGIES[strategy], "trainer.accelerator=cpu")
        rows = [json.loads(line)["answer"] for line in (tmp_path / f"{strategy}.jsonl").read_text().splitlines()]
        assert rows == alone, strategy
