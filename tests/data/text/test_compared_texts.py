"""Pairs for embeddings and sentences with scores: rows, their texts as rows of tokens, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import digest_of, no_progress
from mgpu_pipe.data.data_source import check_sources, open_source
from mgpu_pipe.data.fingerprint import fingerprints
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.data.sources.compared_texts import EmbeddingPairsConfig
from mgpu_pipe.data.sources.demo.stdlib_pairs import _functions, function_document
from mgpu_pipe.data.text.file_source import contents_of
from mgpu_pipe.data.text.preview import parts_of
from mgpu_pipe.errors import BadInputError, ConfigError, DataError
from tests.data.support import write_jsonl
from tests.support.sampling import one_in

ROWS: list[dict[str, Any]] = [
    {"query": "how tall", "positive": "as a house"},
    {"query": "how wide", "positive": ["as a street", "as a river"], "negative": "red"},
    {"query": "how old", "positive": "ten years", "negative": ["blue", "green"]},
    {"query": "how far", "positive": "two miles", "negative": []},
]


SCORED: list[dict[str, Any]] = [
    {"sentence1": "a man plays", "sentence2": "a man sings", "score": 2.5},
    {"sentence1": "a dog runs", "sentence2": "a dog is running fast", "score": 5},
    {"sentence1": "it rains", "sentence2": "a cat sleeps", "score": "0"},
]
PAIRS = ("data=embedding_pairs", "objective=text_embedding")
SCORED_PAIRS = ("data=scored_pairs", "objective=text_similarity")


def configured(tmp_path: Path, rows: list[Any] = ROWS, *words: str, source: tuple[str, ...] = PAIRS) -> RunConfig:
    return of_file(tmp_path, write_jsonl(tmp_path / "pairs.jsonl", rows), *words, source=source)


def scored(tmp_path: Path, rows: list[Any] = SCORED, *words: str) -> RunConfig:
    return configured(tmp_path, rows, *words, source=SCORED_PAIRS)


def of_file(tmp_path: Path, file: Path, *words: str, source: tuple[str, ...] = PAIRS) -> RunConfig:
    given = (*source, "model=bert_tiny", "model.config.vocab_size=300")
    paths = (f"data.paths=[{file}]", f"data.cache_dir={tmp_path / 'cache'}", "data.tokenize_workers=1")
    return compose([*given, *paths, "data.validation_fraction=0", "data.seq_len=16", *words])[0]


def texts_of(config: RunConfig, tmp_path: Path) -> list[list[str]]:
    return [json.loads(document.text) for document in open_source(config, tmp_path / "opened").documents()]


def batch_of(config: RunConfig) -> tuple[Any, dict[str, Any]]:
    prepared = prepare(config)
    samples = prepared.open(config, "train")
    every = np.arange(len(samples))
    return prepared, samples.batch(every, every)


def test_a_list_of_positives_gives_a_sample_each(tmp_path: Path) -> None:
    assert texts_of(configured(tmp_path), tmp_path) == [
        ["how tall", "as a house"],
        ["how wide", "as a street", "red"],
        ["how wide", "as a river", "red"],
        ["how old", "ten years", "blue", "green"],
        ["how far", "two miles"],
    ]


def test_a_padding_id_of_minus_1_is_none(tmp_path: Path) -> None:
    """As the folders of the first Llama state it."""
    words = ("model=llama_tiny", "model.config.vocab_size=300", "model.config.pad_token_id=-1")
    _, batch = batch_of(configured(tmp_path, ROWS, *words))
    assert all(values.min() >= 0 for name, values in batch.items() if name.endswith("ids"))


def test_csv_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    expected = texts_of(configured(tmp_path), tmp_path)
    table = tmp_path / "pairs.csv"
    with open(table, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["query", "positive", "negative"])
        for row in ROWS:
            cells = (row["query"], row["positive"], row.get("negative", ""))
            writer.writerow([json.dumps(cell) if isinstance(cell, list) else cell for cell in cells])
    assert texts_of(of_file(tmp_path, table), tmp_path) == expected
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows: list[Any] = [
        {name: [row[name]] if isinstance(row.get(name), str) else row.get(name) for name in row} for row in ROWS
    ]
    lists: list[Any] = [{"query": row["query"][0], **{n: row.get(n) for n in ("positive", "negative")}} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(lists), tmp_path / "pairs.parquet")
    assert texts_of(of_file(tmp_path, tmp_path / "pairs.parquet"), tmp_path) == expected


PASSAGE = {"docid": "7", "title": "Trees", "text": "blue"}
PUBLISHED: dict[str, tuple[Any, list[str]]] = {
    "sentence-transformers": ({"anchor": "how old", "positive": "ten years", "negative": "blue"}, ["blue"]),
    "its n-tuples": (
        {"anchor": "how old", "positive": "ten years", "negative_1": "blue", "negative_2": "", "negative_10": "green"},
        ["blue", "green"],
    ),
    "its lists": (["how old", "ten years", "blue", "green"], ["blue", "green"]),
    "its answers": ({"question": "how old", "answer": "ten years", "label": "ages"}, []),
    "right pairs": ({"query": "how old", "positive": "ten years", "gold_label": "entailment", "label": True}, []),
    "FlagEmbedding": (
        {"query": "how old", "pos": ["ten years"], "neg": ["blue"], "pos_scores": [1.0], "neg_scores": [0.5]},
        ["blue"],
    ),
    "Tevatron": (
        {"query": "how old", "positive_passages": [{"text": "ten years"}], "negative_passages": [PASSAGE]},
        ["Trees blue"],
    ),
    "DPR": (
        {"question": "how old", "positive_ctxs": [{"title": "", "text": "ten years"}], "hard_negative_ctxs": [PASSAGE]},
        ["Trees blue"],
    ),
    "SimCSE": ({"sent0": "how old", "sent1": "ten years", "hard_neg": "blue"}, ["blue"]),
}


@pytest.mark.parametrize("maker", list(PUBLISHED))
def test_pairs_are_read_as_their_makers_publish_them(tmp_path: Path, maker: str) -> None:
    row, negatives = PUBLISHED[maker]
    more: Any = ["how far", "two miles"] if isinstance(row, list) else {"query": "how far", "positive": "two miles"}
    expected = [["how old", "ten years", *negatives], ["how far", "two miles"]]
    config = configured(tmp_path, [row, more])
    check_sources(config.model, config.data)
    assert texts_of(config, tmp_path) == expected
    (tmp_path / "pairs.json").write_text(json.dumps([row, more], indent=1))
    assert texts_of(of_file(tmp_path, tmp_path / "pairs.json"), tmp_path) == expected


def test_negatives_under_published_names_change_the_identity_of_a_file(tmp_path: Path) -> None:
    """Earlier versions left them out, so their cached tokens lack them; all other files keep their identity."""

    def identity(rows: list[Any], *words: str) -> tuple[str, str]:
        config = configured(tmp_path, rows, *words)
        path = Path(config.data.paths[0])
        source = open_source(config, tmp_path / "opened")
        columns = (*config.data.text_columns(), None, None)  # type: ignore[attr-defined]
        known = fingerprints([path], tmp_path / "opened", no_progress)
        return source.identity, digest_of("files", "embedding_pairs", columns, contents_of([path], {}, known))

    pair = {"query": "how old", "positive": "ten years"}
    for row in ({"neg": ["blue"]}, {"negative_1": "blue"}, {"hard_neg": "blue"}):
        now, before = identity([pair, {**pair, **row}])
        assert now != before
    for row in ({"neg": "blue"}, {"negative": "blue"}, {"negative": ""}):
        now, before = identity([{**pair, **row, "negative_2": "red"}])
        assert now not in (before, identity([{**pair, **row}])[0])
    now, before = identity([{"query": "how old", "positive": ["ten years", "ten years"]}])
    assert now != before
    unread = {"pos": "red", "neg": [], "negative_1": "", "topic": "ages"}
    for rows in (ROWS, [{**pair, **unread}], [{**pair, "negative": "green", "neg": "blue"}]):
        now, before = identity(rows)
        assert now == before
    now, before = identity([{**pair, "neg": "blue"}], "data.negative_column=neg")
    assert now == before


def test_numbered_negatives_follow_the_plain_one(tmp_path: Path) -> None:
    pair = {"query": "how old", "positive": "ten years"}
    for plain, numbered, expected in (
        ({"negative": "blue"}, {"negative_2": "red", "negative_3": "", "negative_note": "x"}, ["blue", "red"]),
        ({"negative": ["blue", "green"]}, {"negative_1": "red"}, ["blue", "green", "red"]),
        ({"neg": ["blue"]}, {"negative_1": "red"}, ["blue", "red"]),
        ({"negative": ""}, {"negative_2": "red"}, ["red"]),
    ):
        assert texts_of(configured(tmp_path, [{**pair, **plain, **numbered}]), tmp_path) == [
            ["how old", "ten years", *expected]
        ]


def test_a_positive_that_a_row_has_twice_is_a_sample(tmp_path: Path) -> None:
    passages = [{"docid": at, "text": text} for at, text in enumerate(["ten years", "two", "ten years"])]
    for positives in (["ten years", "two", "ten years"], passages):
        rows = [{"query": "how old", "positive": positives}]
        assert texts_of(configured(tmp_path, rows), tmp_path) == [["how old", "ten years"], ["how old", "two"]]
    rows = [{"query": "how old", "positive": ["a", "a", "b"], "negative": ["n"], "s": [1, 2, 3, 4]}]
    found = open_source(configured(tmp_path, rows, "data.scores_column=s"), tmp_path / "opened").documents()
    assert [document.scores for document in found] == [(1, 4), (3, 4)]


def test_a_list_that_python_printed_is_refused_in_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("query,positive,negative\nhow old,ten years,\"['blue', 'red']\"\n")
    run = of_file(tmp_path, tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"a.csv:2: column 'negative' holds a list as Python .* write the list by json"):
        prepare(run)
    row = {"query": "a list", "positive": "['blue', 'red']"}
    assert texts_of(configured(tmp_path, [row]), tmp_path) == [["a list", "['blue', 'red']"]]


def test_a_column_that_is_named_goes_before_published_names(tmp_path: Path) -> None:
    row = {"query": "how old", "anchor": "other", "positive": "ten years", "pos": ["other"], "negative": [], "neg": "x"}
    assert texts_of(configured(tmp_path, [row]), tmp_path) == [["how old", "ten years"]]


def test_a_misspelt_column_is_refused_though_a_published_name_is_there(tmp_path: Path) -> None:
    rows = [{"anchor": "how old", "pos": ["ten years"], "neg": ["blue"]}]
    with pytest.raises(DataError, match=r"has no column 'qeury'; set data.query_column to one that is there: anchor"):
        prepare(configured(tmp_path, rows, "data.query_column=qeury"))
    with pytest.raises(DataError, match=r"has no column 'postive'; set data.positive_column to one"):
        prepare(configured(tmp_path, rows, "data.positive_column=postive"))
    with pytest.raises(ConfigError, match=r"data.negative_column=negtive: no row has a text in a column of this name"):
        prepare(configured(tmp_path, [*rows, *rows], "data.negative_column=negtive"))


def beir(folder: Path) -> Path:
    """Judgements of two queries next to their texts; a document is judged wrong, and one is not judged."""
    corpus = [("d1", "Houses", "as a house"), ("d2", "", "as a street"), ("d3", "", "red"), ("d4", "", "blue")]
    write_jsonl(folder / "corpus.jsonl", [dict(zip(("_id", "title", "text"), row, strict=True)) for row in corpus])
    write_jsonl(folder / "queries.jsonl", [{"_id": "q1", "text": "how tall"}, {"_id": "q2", "text": "how wide"}])
    judged = "q1\td1\t2\nq2\td2\t1\nq1\td3\t0\nq1\td4\t1\n"
    (folder / "qrels").mkdir()
    (folder / "qrels" / "train.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    return folder / "qrels" / "train.tsv"


def test_the_files_of_beir_are_joined(tmp_path: Path) -> None:
    run = of_file(tmp_path, beir(tmp_path))
    check_sources(run.model, run.data)
    joined = [["how tall", "Houses as a house"], ["how tall", "blue"], ["how wide", "as a street"]]
    assert texts_of(run, tmp_path) == joined
    before = open_source(run, tmp_path / "opened").identity
    (tmp_path / "queries.jsonl").write_text((tmp_path / "queries.jsonl").read_text().replace("tall", "high"))
    assert open_source(run, tmp_path / "opened").identity != before, "the texts are part of the identity"
    (tmp_path / "queries.jsonl").write_text('{"_id": "q2", "text": "how wide"}\n')
    with pytest.raises(DataError, match=r"train.tsv:2: queries.jsonl has no query 'q1'"):
        prepare(run)
    (tmp_path / "corpus.jsonl").unlink()
    with pytest.raises(BadInputError, match=r"train.tsv: BEIR's corpus.jsonl is not next to its folder; put it there"):
        check_sources(run.model, run.data)


def test_a_broken_packed_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv.gz").write_bytes(b"\x1f\x8bno packed text")
    run = of_file(tmp_path, tmp_path / "rows.tsv.gz")
    for work in (lambda: check_sources(run.model, run.data), lambda: prepare(run)):
        with pytest.raises(BadInputError, match=r"rows.tsv.gz"):
            work()


@pytest.mark.parametrize("columns", ["0\t10\t20", "how old\tten years and no more than that in the end\tblue"])
def test_a_table_without_names_of_columns_is_refused(tmp_path: Path, columns: str) -> None:
    (tmp_path / "triples.tsv").write_text(f"{columns}\n{columns}\n")
    with pytest.raises(DataError, match=r"triples.tsv:2: the first line of this table names no columns; put a line"):
        prepare(of_file(tmp_path, tmp_path / "triples.tsv"))


def test_texts_are_rows_and_equal_texts_have_equal_numbers(tmp_path: Path) -> None:
    config = configured(tmp_path)
    prepared, batch = batch_of(config)
    assert read_prepared(json.loads(json.dumps(prepared.as_dict()))) == prepared
    assert batch["input_ids"].shape == (5, 4, 16) and (prepared.texts, prepared.num_texts) == (4, 14)
    assert (batch["lengths"] == 0).tolist() == (batch["text_numbers"] == 0).tolist()
    assert (batch["lengths"] > 0).sum(1).tolist() == [2, 3, 3, 4, 2]
    numbers = batch["text_numbers"]
    assert numbers[1, 0] == numbers[2, 0] and numbers[1, 2] == numbers[2, 2] and (numbers >= 0).all()
    assert len(set(numbers.flatten().tolist())) == 1 + 12
    samples = prepared.open(config, "train")
    every = np.arange(5)
    assert samples.padding(every) == samples.positions(every) - int(batch["lengths"].sum())
    shown = parts_of(prepared, samples, every[:2], every[:2], False)
    assert [[part.text for part in row] for row in shown] == [
        ["how tall", "as a house"],
        ["how wide", "as a street", "red"],
    ]
    assert [part.trained for part in shown[1]] == [False, True, False]


def test_prompts_stand_before_the_texts(tmp_path: Path) -> None:
    config = configured(tmp_path, ROWS, "data.query_prompt='find: '", "data.document_prompt='text: '")
    assert texts_of(config, tmp_path)[1] == ["find: how wide", "text: as a street", "text: red"]
    assert prepare(config).digest != prepare(configured(tmp_path)).digest


@pytest.mark.parametrize("key", ["query_prompt", "document_prompt"])
def test_a_prompt_without_room_for_a_text_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{key}=find find .*: its 4\d tokens leave no room for a text"):
        prepare(configured(tmp_path, ROWS, f"data.{key}='{'find ' * 40}'"))


@pytest.mark.parametrize("specials", [False, True])
def test_a_long_text_is_cut_as_the_tokenizers_library_does(tmp_path: Path, specials: bool) -> None:
    from tokenizers import Tokenizer, processors

    long = " ".join(f"word{number}" for number in range(40))
    rows = [{"query": "how tall", "positive": long}, {"query": long[::-1], "positive": "ten", "negative": long}]
    config = configured(tmp_path, rows)
    if specials:
        folder = tmp_path / "tokenizer"
        folder.mkdir()
        made: Any = prepare(config).tokenizer_folder
        for file in made.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        ends = [("<|endoftext|>", 0)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A <|endoftext|>", special_tokens=ends
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        config = configured(tmp_path, rows, f"data.tokenizer={folder}")
    prepared, batch = batch_of(config)
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_folder / "tokenizer.json"))
    tokenizer.enable_truncation(16)
    for row, texts in zip(range(2), ([rows[0]["query"], long], [long[::-1], "ten", long]), strict=True):
        for at, text in enumerate(texts):
            length = int(batch["lengths"][row, at])
            assert batch["input_ids"][row, at, :length].tolist() == tokenizer.encode(text).ids
    assert (prepared.too_long_samples, prepared.on_too_long) == (2, "truncate")
    with pytest.raises(DataError, match="nothing to train on: 2 pairs are longer than"):
        prepare(configured(tmp_path, rows, "data.on_too_long=drop"))
    with pytest.raises(ConfigError, match=r"data\.seq_len=16: 3 of 5 texts are longer"):
        prepare(configured(tmp_path, rows, "data.on_too_long=refuse"))


BAD: list[tuple[Any, str]] = [
    ({"query": "a", "positive": ""}, "column 'positive' is empty"),
    ({"query": " \n", "positive": "b"}, "column 'query' is empty"),
    ({"query": None, "positive": "b"}, "column 'query' is empty"),
    ({"query": "a", "positive": []}, "column 'positive' is empty"),
    ({"query": "a", "positive": [["b"], "c"]}, "column 'positive' holds list, not a string"),
    ({"query": "a", "positive": 3}, "column 'positive' holds int, not a string"),
    ({"query": ["a", "b"], "positive": "c"}, "column 'query' is a list"),
    ({"query": "a"}, "has no column 'positive'; set data.positive_column to one"),
    ({"query": "a", "positive": "b", "negative": ["c", "b"]}, "a text of column 'negative' is the positive"),
    ({"query": "a", "positive": ["c", "b"], "negative": "b"}, "a text of column 'negative' is the positive"),
    ({"query": "a", "positive": "b", "negative": ["c", ""]}, "column 'negative' is empty"),
    ({"query": "a", "positive": "b", "score": 0.5}, "column 'score' is not read, a pair is right or wrong"),
    ({"query": "a", "positive": "b", "label": 0}, "column 'label' holds 0 and is not read; keep right pairs alone"),
    ({"query": "a", "positive": "b", "label": "Contradiction"}, "column 'label' holds 'Contradiction' and is not read"),
    ({"query-id": "1", "corpus-id": "2", "score": "1"}, "is a row of BEIR (query-id, corpus-id), which is no pair"),
    ({"_id": "1", "title": "", "text": "b"}, "is a row of BEIR (_id), which is no pair of texts; give the judgements"),
]


BAD_SCORED: list[tuple[Any, str]] = [
    ({**SCORED[0], "score": "much"}, "column 'score' holds 'much', not a number"),
    ({**SCORED[0], "score": None}, "column 'score' holds None, not a number"),
    ({**SCORED[0], "score": True}, "column 'score' holds True, not a number"),
    ({**SCORED[0], "score": "nan"}, "column 'score' holds 'nan', not a number"),
    ({**SCORED[0], "score": [1]}, "column 'score' holds [1], not a number"),
    ({**SCORED[0], "sentence1": " "}, "column 'sentence1' is empty"),
    ({**SCORED[0], "sentence2": 4}, "column 'sentence2' holds int, not a string"),
    ({"sentence1": "a", "score": 1}, "has no column 'sentence2'; set data.sentence2_column to one"),
    ({"sentence1": "a", "sentence2": "b"}, "has no column 'score'; set data.score_column to one"),
]


@pytest.mark.parametrize(
    ("source", "good", "row", "reason"),
    one_in(3, [(PAIRS, ROWS, *case) for case in BAD] + [(SCORED_PAIRS, SCORED, *case) for case in BAD_SCORED]),
)
def test_a_bad_row_is_one_line_with_its_place(
    tmp_path: Path, source: tuple[str, ...], good: list[Any], row: Any, reason: str
) -> None:
    def with_rows(*rows: Any, words: tuple[str, ...] = ()) -> RunConfig:
        return configured(tmp_path, list(rows), *words, source=source)

    with pytest.raises(DataError) as error:
        prepare(with_rows(good[0], row))
    assert reason in str(error.value) and "pairs.jsonl:2: " in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).endswith("data.on_bad_sample=skip leaves it out")
    run = with_rows(row, good[0])
    with pytest.raises(BadInputError, match=r"pairs\.jsonl:1: "):
        check_sources(run.model, run.data)
    skipping = with_rows(good[0], row, good[-1], words=("data.on_bad_sample=skip",))
    check_sources(skipping.model, skipping.data)
    prepared: Any = prepare(skipping)
    assert prepared.bad_samples == 1 and prepared.num_pairs >= 1


TAUGHT = ("objective.loss=kl", "data.scores_column=grades")


def test_scores_of_flag_embedding_become_a_list(tmp_path: Path) -> None:
    row = {
        "query": "how old",
        "pos": ["ten years", "a decade"],
        "neg": ["blue"],
        "pos_scores": [2, 1.5],
        "neg_scores": [-1],
    }
    run = configured(tmp_path, [row], "objective.loss=kl", "data.scores_column=scores")
    documents = open_source(run, tmp_path / "opened").documents()
    assert [document.scores for document in documents] == [(2, -1), (1.5, -1)]


def test_a_teachers_scores_are_those_of_the_documents_of_a_row(tmp_path: Path) -> None:
    rows = [
        {"query": "how tall", "positive": "as a house", "negative": "red", "grades": [2.5, "-1"]},
        {"query": "how old", "positive": ["ten years"], "negative": ["blue", "green"], "grades": [0, 0.25, -3]},
    ]
    prepared, batch = batch_of(configured(tmp_path, rows, *TAUGHT))
    assert batch["scores"].tolist() == [[2.5, -1.0, 0.0], [0.0, 0.25, -3.0]]
    assert (batch["lengths"] > 0).tolist() == [[True, True, True, False], [True] * 4]
    plain, _ = batch_of(configured(tmp_path, rows))
    assert plain.digest != prepared.digest


@pytest.mark.parametrize(
    ("row", "reason"),
    one_in(
        2,
        [
            ({"negative": "c", "grades": [1]}, "column 'grades' holds 1 scores for 1 positive and 1 negatives"),
            ({"negative": "c", "grades": 0.5}, "column 'grades' holds 0.5 for 1 positive and 1 negatives"),
            ({"negative": "c", "grades": [1, "high"]}, "column 'grades' holds 'high', not a number"),
            ({"negative": "c", "grades": [1, None]}, "column 'grades' holds None, not a number"),
            ({"grades": [1]}, "a positive without negatives has no score to be compared with"),
            ({"negative": "c"}, "has no column 'grades'; set data.scores_column to one"),
        ],
    ),
)
def test_scores_that_are_not_those_of_a_row_are_refused_with_their_place(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    good = {"query": "x", "positive": "y", "negative": "z", "grades": [1, 0]}
    with pytest.raises(DataError) as error:
        prepare(configured(tmp_path, [good, {"query": "a", "positive": "b", **row}], *TAUGHT))
    assert reason in str(error.value) and "pairs.jsonl:2: " in str(error.value)


def test_a_function_is_found_by_its_docstring() -> None:
    code = '''
class Box:
    def size(self, unit):
        """Measure the box along
        its longest side.

        More words.
        """
        return self.sides.max() * unit

    def empty(self):
        """Only a docstring of many words."""

def short():
    """Two words."""
    return 1
'''
    ((query, function, line),) = _functions(code)
    assert (query, line) == ("Measure the box along its longest side.", 3)
    assert function == "    def size(self, unit):\n        return self.sides.max() * unit"


def test_the_split_of_functions_does_not_depend_on_where_python_is(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for prefix in ("/usr/lib/python", "/opt/conda/lib/python"):
        monkeypatch.setattr("sysconfig.get_path", lambda name, at=prefix: at)
        line = json.dumps(["what the function returns", "def f(): pass"])
        keys.append(function_document(EmbeddingPairsConfig(), line, f"{prefix}/json/decoder.py:12", 0).key)
    assert keys == ["json/decoder.py"] * 2


def test_pairs_that_have_nothing_to_tell_apart_are_refused(tmp_path: Path) -> None:
    pairs = [{"query": f"how tall is {at}", "positive": f"as house {at}"} for at in range(3)]
    with pytest.raises(ConfigError, match=r"data\.global_batch_size=1: a pair .* always 0; use at least 2") as caught:
        prepare(configured(tmp_path, pairs, "data.global_batch_size=1", "data.micro_batch_size=1"))
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="there is 1 pair to train on"):
        prepare(configured(tmp_path, pairs[:1]))
    negative = [{**pair, "negative": "as a mouse"} for pair in pairs]
    assert prepare(configured(tmp_path, negative, "data.global_batch_size=1", "data.micro_batch_size=1")).texts == 3  # type: ignore[attr-defined]


def test_sentences_are_rows_with_their_scores(tmp_path: Path) -> None:
    config = scored(tmp_path)
    prepared, batch = batch_of(config)
    assert read_prepared(json.loads(json.dumps(prepared.as_dict()))) == prepared
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (3, 2, 16),
        "lengths": (3, 2),
        "scores": (3,),
    }
    shown = parts_of(prepared, prepared.open(config, "train"), np.arange(3), np.arange(3), False)
    assert [[part.text for part in row] for row in shown] == [
        ["a man plays", "a man sings", " \u2192 2.5"],
        ["a dog runs", "a dog is running fast", " \u2192 5"],
        ["it rains", "a cat sleeps", " \u2192 0"],
    ]


def test_csv_of_scores_with_other_columns_holds_the_same(tmp_path: Path) -> None:
    table = tmp_path / "scored.csv"
    with open(table, "w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "near"], *(list(row.values()) for row in SCORED)])
    columns = ("data.sentence1_column=a", "data.sentence2_column=b", "data.score_column=near")
    _, found = batch_of(of_file(tmp_path, table, *columns, source=SCORED_PAIRS))
    _, expected = batch_of(scored(tmp_path))
    assert all((found[name] == expected[name]).all() for name in expected)


def test_the_files_of_sts_benchmark_are_read(tmp_path: Path) -> None:
    row = 'main-news\tMSRpar\t2012\t0001\t4.5\tThe "cause", they said\t"He said so," she said\n'
    names = "genre\tfilename\tyear\tid\tscore\tsentence1\tsentence2\n"
    (tmp_path / "sts-dev.csv").write_text(names + row)
    run = of_file(tmp_path, tmp_path / "sts-dev.csv", source=SCORED_PAIRS)
    (document,) = open_source(run, tmp_path / "opened").documents()
    expected = ['The "cause", they said', '"He said so," she said']
    assert (json.loads(document.text), document.score) == (expected, 4.5)
    (tmp_path / "sts-dev.csv").write_text(2 * row)  # as the maker publishes it
    with pytest.raises(DataError, match=r"sts-dev.csv:2: the first line of this table names no columns; put a line of"):
        prepare(run)


def test_a_row_that_is_left_out_takes_its_score_along(tmp_path: Path) -> None:
    rows = [SCORED[0], {**SCORED[1], "sentence2": " "}, SCORED[2], {**SCORED[0], "sentence1": "word " * 40}, SCORED[1]]
    words = ("data.on_bad_sample=skip", "data.on_too_long=drop")
    prepared, batch = batch_of(scored(tmp_path, rows, *words))
    assert batch["scores"].tolist() == [2.5, 0, 5] and (prepared.bad_samples, prepared.too_long_samples) == (1, 1)


def test_scores_that_teach_nothing_are_refused(tmp_path: Path) -> None:
    same: list[Any] = [{**row, "score": 1} for row in SCORED]
    with pytest.raises(DataError, match="every score to train on is 1; give pairs that are more and less similar"):
        prepare(scored(tmp_path, same))
    held = write_jsonl(tmp_path / "held.jsonl", same)
    with pytest.raises(DataError, match="every score held out is 1"):
        prepare(scored(tmp_path, SCORED, f"data.validation_paths=[{held}]"))
    with pytest.raises(
        ConfigError, match=r"global_batch_size=1: the loss compares the pairs of a step; use at least 2"
    ):
        prepare(scored(tmp_path, SCORED, "data.global_batch_size=1", "data.micro_batch_size=1"))
    with pytest.raises(DataError, match="a score to train on is 5, no cosine; divide the scores"):
        prepare(scored(tmp_path, SCORED, "objective.loss=cosine"))
    halves = [{**row, "score": float(row["score"]) / 5} for row in SCORED]
    assert prepare(scored(tmp_path, halves, "objective.loss=cosine")).train_samples == 3
