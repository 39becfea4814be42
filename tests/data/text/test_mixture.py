"""Several sources in one run. Oracles: each source alone, and a count of slots one by one."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.cli.main import main
from mgpu_pipe.config.freeze import untrusted_data
from mgpu_pipe.config.hub import hub_names, with_names
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.run_identity import mathematics_hash
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.loader import train_step_batches
from mgpu_pipe.data.order import GlobalOrder
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.data.sources.mixture import SLOTS, source_data
from mgpu_pipe.data.text.mixed_samples import MixedOrder, PreparedMixture
from mgpu_pipe.errors import BadInputError, ConfigErrors
from mgpu_pipe.topology import BatchPlan
from tests.data.support import sentences, write_jsonl


def _words(folder: Path, **changes: str) -> list[str]:
    """Three sources of three forms: text, JSON Lines of a column of their own, conversations."""
    (folder / "a.txt").write_text(sentences(1, 3000))
    write_jsonl(folder / "web.jsonl", [{"body": sentences(n, 5 + n % 60)} for n in range(200)])
    rows = [{"prompt": sentences(n, 4), "completion": sentences(-n, 1 + n % 9)} for n in range(80)]
    write_jsonl(folder / "chat.jsonl", rows)
    sources = {
        "notes": f"{{weight: 1, source: text_files, paths: [{folder}/a.txt]}}",
        "web": f"{{weight: 6, paths: [{folder}/web.jsonl], text_column: body}}",
        "chat": f"{{weight: 3, source: chat_jsonl, paths: [{folder}/chat.jsonl]}}",
    } | changes
    given = ", ".join(f"{name}: {keys}" for name, keys in sources.items())
    return [
        "model=llama_tiny",
        "model.config.vocab_size=300",
        "data=mixture",
        f"data.sources={{{given}}}",
        "data.chat_template=chatml",
        "data.seq_len=32",
        "data.global_batch_size=8",
        "data.validation_fraction=0.1",
        "data.tokenize_workers=1",
    ]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, PreparedMixture]:
    folder = tmp_path_factory.mktemp("mixture")
    # A text alone cannot be split: the notes' held-out half is a file of its own.
    (folder / "held.txt").write_text(sentences(2, 300))
    notes = f"{{weight: 1, source: text_files, paths: [{folder}/a.txt], validation_paths: [{folder}/held.txt]}}"
    run = compose([*_words(folder, notes=notes), f"data.cache_dir={folder}/cache"])[0]
    prepared = prepare(run)
    assert isinstance(prepared, PreparedMixture)
    return run, prepared


def test_each_source_has_its_share_and_all_its_samples_in_every_pass() -> None:
    slots, sizes = {"a": 2500, "b": 1, "c": 7499}, [40, 7, 100_000]
    order = MixedOrder(5, slots, sizes)
    found = order.indices(0, 3 * SLOTS)
    first = np.cumsum([0, *sizes])
    for number, (name, share) in enumerate(slots.items()):
        own = [index - first[number] for index in found if first[number] <= index < first[number + 1]]
        assert len(own) == 3 * share, name
        seen = Counter(own)
        assert max(seen.values()) - (min(seen.values()) if len(seen) == sizes[number] else 0) <= 1, name
    pieces = [order.indices(at, min(777, 3 * SLOTS - at)) for at in range(0, 3 * SLOTS, 777)]
    assert np.array_equal(np.concatenate(pieces), found), "a pure function of the sample's number"
    assert not np.array_equal(found[:SLOTS], found[SLOTS : 2 * SLOTS])
    assert not np.array_equal(MixedOrder(6, slots, sizes).indices(0, 100), found[:100])
    twins = MixedOrder(5, {"a": 5000, "b": 5000}, [100_000, 100_000]).indices(0, SLOTS)
    halves = [set(twins[twins < 100_000].tolist()), set((twins[twins >= 100_000] - 100_000).tolist())]
    assert len(halves[0] & halves[1]) < 1000, "sources of one size are read in orders of their own"
    alone = MixedOrder(5, {"a": SLOTS}, [SLOTS]).indices(0, SLOTS)
    assert sorted(alone) == list(range(SLOTS)) and not np.array_equal(alone, GlobalOrder(5, SLOTS).indices(0, SLOTS))


def test_samples_are_those_of_the_sources_alone(mixed: tuple[RunConfig, PreparedMixture]) -> None:
    run, prepared = mixed
    assert read_prepared(json.loads(json.dumps(prepared.as_dict()))) == prepared
    same_tokenizer = replace(run, data=replace(run.data, tokenizer=str(prepared.tokenizer_folder)))
    alone = [prepare(replace(same_tokenizer, data=own)) for _, own in source_data(same_tokenizer.data)]
    assert list(prepared.slots.items()) == [("chat", 3000), ("notes", 1000), ("web", 6000)]
    for split, counts in (("train", "train_samples"), ("validation", "validation_samples")):
        samples, first = prepared.open(run, split), 0  # type: ignore[arg-type]
        for one in alone:
            own = one.open(run, split)  # type: ignore[arg-type]
            here, places = np.arange(first, first + len(own)), np.arange(len(own))
            expected = own.batch(places, places)
            for name, values in samples.batch(here, here).items():
                assert torch.equal(values, expected[name])
            assert samples.valid_units(here, here) == own.valid_units(places, places) > 0
            assert samples.padding(here) == own.padding(places)
            first += len(own)
        assert first == len(samples)
        assert getattr(prepared, counts) == sum(getattr(one, counts) for one in alone) > 0
    shuffled = np.random.default_rng(0).permutation(len(samples))
    every = samples.batch(np.arange(len(samples)), np.arange(len(samples)))
    assert samples.costs(shuffled).tolist() == samples.costs(np.arange(len(samples)))[shuffled].tolist()
    for name, values in samples.batch(shuffled, shuffled).items():
        assert torch.equal(values, every[name][shuffled])
    assert len(prepared.evaluated_samples()) == prepared.validation_samples
    assert len(set(prepared.evaluated_samples().tolist())) == prepared.validation_samples <= len(samples)


def test_a_cursor_goes_on_on_any_number_of_processes(mixed: tuple[RunConfig, PreparedMixture]) -> None:
    run, prepared = mixed

    def together(ranks: int, start: int, steps: int) -> torch.Tensor:
        shares = [
            list(train_step_batches(run, prepared, BatchPlan(8, ranks, 1), r, 8 * start, steps)) for r in range(ranks)
        ]
        return torch.stack(
            [
                torch.cat([batch["input_ids"] for share in shares for batch in share[step].micro_batches])
                for step in range(steps - start)
            ]
        )

    whole = together(1, 0, 40)
    assert torch.equal(together(2, 11, 40), whole[11:])
    assert torch.equal(together(4, 27, 40), whole[27:])
    count = prepared.source_tokens(run.seed, run.data)
    assert count is not None
    padding = sum(batch.padding for batch in train_step_batches(run, prepared, BatchPlan(8, 1, 8), 0, 0, 40))
    totals = count(0, 320)
    assert sum(totals.values()) == 320 * 32 - padding
    parts = [count(0, 100), count(100, 220)]
    assert totals == {name: sum(part[name] for part in parts) for name in totals}


def test_the_verb_shows_each_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MGPU_PIPE_CACHE", str(tmp_path / "cache"))
    assert main(["data", *_words(tmp_path), "--samples", "9"]) == 0
    out = capsys.readouterr().out
    for words in (
        "chat   30% of the samples;",
        "notes  10% of the samples;",
        "web    60% of the samples;",
        " times an epoch",
    ):
        assert words in out, out
    assert ", of web" in out and ", of chat" in out and "sample 8, of " in out and "tokens a document" in out


def test_names_on_the_hub_and_the_hash_know_the_sources(tmp_path: Path) -> None:
    words = _words(tmp_path, far="{paths: ['hf://datasets/a/b/x.jsonl']}")
    run = compose(words)[0]
    assert [(key, str(name)) for key, name in hub_names(run.model, run.data)] == [
        ("data.sources.far.paths", "hf://datasets/a/b/x.jsonl")
    ]
    kept = with_names(run.model, run.data, {"hf://datasets/a/b/x.jsonl": "hf://datasets/a/b@0/x.jsonl"})["data"]
    assert kept.sources["far"].paths == ["hf://datasets/a/b@0/x.jsonl"]
    other = compose([*words, "data.sources.web.weight=2"])[0]
    assert mathematics_hash(other) != mathematics_hash(run)
    with pytest.raises(ConfigErrors, match=r"give data\.sources on the command line"):
        untrusted_data(run.data, set())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"web": "{weight: 0, paths: [a.txt]}"}, "data.sources.web.weight=0.0: use a number above 0"),
        ({"web": "{weight: 0.0002, paths: [a.txt]}"}, "data.sources.web.weight=0.0002: is a share below 0.01%"),
        (
            {"web": "{source: jsnl, paths: [a.txt]}"},
            "data.sources.web.source=jsnl: cannot be mixed; did you mean jsonl?",
        ),
        ({"web": "{source: pairs_jsonl, paths: [a.txt]}"}, "data.sources.web.source=pairs_jsonl: cannot be mixed"),
        ({"web": "{source: jsonl}"}, "data.sources.web.paths=[]: source=jsonl reads files; give files or globs"),
        ({"web": "{paths: [absent.jsonl]}"}, "data.sources.web.paths=absent.jsonl: matches no file"),
        (
            {"web": "{source: text_files, paths: [a.txt], validation_paths: [absent]}"},
            "data.sources.web.validation_paths=absent: matches",
        ),
        ({"web": "{source: stdlib_text, paths: [a.txt]}"}, "source=stdlib_text reads no files; leave it out"),
        ({"web": "{paths: [web.jsonl], text_column: txt}"}, "web.jsonl:1: has no column 'txt'"),
        ({"web": "{paths: [web.jsonl], text_colum: txt}"}, "did you mean data.sources.web.text_column?"),
        ({"a/b": "{paths: [web.jsonl], text_column: body}"}, "data.sources=a/b: use names of letters"),
    ],
)
def test_a_source_that_cannot_be_is_refused_in_one_line(
    changes: dict[str, str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInputError) as refused:
        preflight(compose(_words(tmp_path, **changes))[0])
    assert told in str(refused.value) and len(str(refused.value).splitlines()) == 1, refused.value


def test_no_source_and_no_template_are_refused(tmp_path: Path) -> None:
    words = _words(tmp_path)
    for more, told in (
        (["data.sources={}"], "data.sources={}: give at least one"),
        (["data.chat_template=null"], "needs a chat template"),
        (["data.paths=[a.txt]"], "data.paths=a.txt: data.source=mixture reads no files"),
    ):
        kept = [word for word in words if not (more[0].startswith("data.sources") and word.startswith("data.sources"))]
        with pytest.raises(ConfigErrors) as refused:
            preflight(compose([*kept, *more])[0])
        assert told in str(refused.value)
