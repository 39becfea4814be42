"""Hard negatives. Oracle: ``mine_hard_negatives`` of sentence-transformers on the exported folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mgpu_pipe.cli.main import main
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.inference.batch import mine_negatives as mine
from mgpu_pipe.inference.batch.mine_negatives import MiningRules, mine_negatives
from tests.data.support import write_jsonl
from tests.inference.support import WORDS
from tests.inference.test_encode import PROMPTS, REASON, place

__all__ = ["place"]


def text(at: int, step: int) -> str:
    return " ".join(WORDS[(at * step + k * k) % len(WORDS)] for k in range(2 + at % 5)) + f" {at}"


ROWS: list[Any] = [{"query": text(at // 2 * 2, 3), "positive": text(at, 5), "id": at} for at in range(30)]
"""Two rows have each query."""


def mined_rows(place: Path, rows: list[Any], name: str, *words: str, model: str = "exported") -> list[dict[str, Any]]:
    """Rows that ``mine`` writes for ``rows`` by a folder."""
    given, out = write_jsonl(place / f"{name}.jsonl", rows), place / f"{name}.mined.jsonl"
    device = ("--device", "cpu", "--batch-size", "7")
    assert main(["mine", str(place / model), "--input", str(given), "--output", str(out), *device, *words]) == 0
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("margin", "skipped"), [(None, 0), (0.01, 0), (None, 2), (0.005, 1)])
def test_negatives_are_those_of_sentence_transformers(place: Path, margin: float | None, skipped: int) -> None:
    library, datasets = pytest.importorskip("sentence_transformers", reason=REASON), pytest.importorskip("datasets")
    model = library.SentenceTransformer(str(place / "exported"), device="cpu")
    columns = {name: [row[name] for row in ROWS] for name in ("query", "positive")}
    expected = library.util.mine_hard_negatives(
        datasets.Dataset.from_dict(columns),
        model,
        num_negatives=3,
        range_min=skipped,
        range_max=len(ROWS) - 2,
        absolute_margin=margin,
        query_prompt_name="query",
        corpus_prompt_name="document",
        verbose=False,
    )
    wanted: dict[str, list[str]] = {}
    for row in expected:
        found = wanted.setdefault(row["query"], [])
        found += [row["negative"]] * (row["negative"] not in found)
    words = ["--negatives", "3", "--skip-top", str(skipped), *([] if margin is None else ["--margin", str(margin)])]
    rows = mined_rows(place, ROWS, f"oracle-{margin}-{skipped}", *words)
    assert [{**row, "negative": None} for row in rows] == [{**row, "negative": None} for row in ROWS]
    for row in rows:
        assert row["negative"] == wanted.get(row["query"], [])
    sizes = [len(row["negative"]) for row in rows]
    assert set(sizes) == {3} if margin is None else 0 < sum(sizes) < 3 * len(ROWS)


@pytest.mark.parametrize("similarity", [None, "cosine", "dot"])
def test_scores_are_the_similarity_of_the_folder(place: Path, tmp_path: Path, similarity: str | None) -> None:
    """Its vectors differ in length, for no module normalises them."""
    library = pytest.importorskip("sentence_transformers", reason=REASON)
    folder = unnormalized_folder(place, tmp_path / "folder", similarity)
    model = library.SentenceTransformer(str(folder), device="cpu")
    texts = [row["positive"] for row in ROWS]
    queries = model.encode([row["query"] for row in ROWS], prompt_name="query")
    scores = model.similarity(queries, model.encode(texts, prompt_name="document"))
    for at, row in enumerate(mined_rows(place, ROWS, f"by-{similarity}", "--negatives", "28", model=str(folder))):
        found = scores[at][[texts.index(text) for text in row["negative"]]]
        assert len({*row["negative"]}) == 28 and not {*row["negative"]} & {*texts[at // 2 * 2 :][:2]}
        torch.testing.assert_close(found, found.sort(descending=True).values, rtol=1e-6, atol=0)  # texts cut alike tie


def unnormalized_folder(place: Path, folder: Path, similarity: str | None) -> Path:
    """The exported folder without its module Normalize."""
    shutil.copytree(place / "exported", folder)
    modules = json.loads((folder / "modules.json").read_text())
    kept = [module for module in modules if not module["type"].endswith("Normalize")]
    assert len(kept) < len(modules)
    (folder / "modules.json").write_text(json.dumps(kept))
    file = folder / "config_sentence_transformers.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "similarity_fn_name": similarity}))
    return folder


def plain(queries: Any, documents: Any, positives: Any, others: Any, rules: MiningRules) -> list[list[int]]:
    """All scores, sorted."""
    mined = []
    for query, right, more in zip(queries, positives, others, strict=True):
        scores = (documents @ query).tolist()
        limit = min(scores[number] for number in right) - (rules.margin or 0)
        able = [
            number
            for number, score in enumerate(scores)
            if number not in right | more and (rules.margin is None or score <= limit)
        ]
        able.sort(key=lambda number: -scores[number])
        mined.append(able[rules.skip_top :][: rules.negatives])
    return mined


@pytest.mark.parametrize("at_once", [8, 64, 1 << 22])
def test_scores_in_blocks_find_the_same(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(mine, "SCORES_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(2)
    queries, documents = (torch.randn(number, 6, generator=generator) for number in (13, 37))
    positives = [{at, (at * 5) % 37} for at in range(13)]
    others = [{(at * 7) % 37} for at in range(13)]
    for rules in (MiningRules(4, None, 0), MiningRules(3, 0.3, 2), MiningRules(50, None, 0), MiningRules(2, 0.0, 40)):
        found = mine_negatives(queries, documents, positives, others, rules)
        assert found == plain(queries, documents, positives, others, rules), rules


def test_the_rows_keep_their_negatives_and_can_be_trained_on(place: Path, cache: Path) -> None:
    rows: list[Any] = [{**row, "negative": [ROWS[(row["id"] + 7) % 30]["positive"]]} for row in ROWS[:20]]
    rows.append({"query": "a list", "positive": ["first text", "second text"]})
    mined = mined_rows(place, rows, "kept", "--negatives", "2")
    for before, after in zip(rows, mined, strict=True):
        own = before.get("negative", [])
        assert after["negative"][: len(own)] == own and len(after["negative"]) == len(own) + 2
        same = [row["positive"] for row in rows if row["query"] == before["query"]]
        right = {text for texts in same for text in ([texts] if isinstance(texts, str) else texts)}
        assert not right & {*after["negative"][len(own) :]}
        assert len({*after["negative"]}) == len(after["negative"])
    words = ("objective=reranker", "model=bert_tiny", "model.config.vocab_size=384", "data=embedding_pairs")
    paths = (f"data.paths=[{place / 'kept.mined.jsonl'}]", f"data.cache_dir={cache}", "data.validation_fraction=0")
    prepared: Any = prepare(compose([*words, *paths, "data.seq_len=48"])[0])
    assert (prepared.texts, prepared.num_pairs) == (2 + 3, 22)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--output", "mined.json"], "--output=mined.json: unknown ending; let it end in .jsonl"),
        (["--output", "texts.jsonl"], "--output=texts.jsonl: exists already; choose another name"),
        (["--output", "gone/mined.jsonl"], "--output=gone/mined.jsonl: there is no folder"),
        (["--input", "gone.jsonl"], "gone.jsonl: no such file"),
        (["--input", "bad.jsonl"], "bad.jsonl:2: column 'positive' is empty"),
        (["--input", "equal.jsonl"], "equal.jsonl:1: a text of column 'negative' is the positive"),
        (["--skip-top", "99"], "no document is a negative of any query by these rules; lower --margin or --skip-top"),
        (["--margin", "-1"], "-1: use a number of at least 0"),
        (["--negatives", "0"], "0: use a whole number of at least 1"),
    ],
)
def test_what_cannot_be_mined_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], fault: str
) -> None:
    monkeypatch.chdir(place)
    write_jsonl(place / "given.jsonl", ROWS)
    write_jsonl(place / "bad.jsonl", [ROWS[0], {"query": "a", "positive": ""}])
    write_jsonl(place / "equal.jsonl", [{"query": "a", "positive": "b", "negative": "b"}])
    default = [] if "--input" in words else ["--input", "given.jsonl"]
    default += [] if "--output" in words else ["--output", "refused.jsonl"]
    try:
        code = main(["mine", "exported", *default, "--device", "cpu", *words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    shown = capsys.readouterr().err
    assert code == 2 and fault in shown and not (place / "refused.jsonl").exists(), shown


def test_prompts_of_the_model_stand_before_the_texts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = []
    encoder = mine.TextEncoder

    def noted(run: Any, given: Path, prompt: str, size: int) -> Any:
        prompts.append(prompt)
        return encoder(run, given, prompt, size)

    monkeypatch.setattr(mine, "TextEncoder", noted)
    mined_rows(place, ROWS[:8], "prompted", "--negatives", "1")
    assert prompts == [word.partition("=")[2].strip("'") for word in PROMPTS]
