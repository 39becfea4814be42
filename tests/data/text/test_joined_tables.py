"""Tables whose rows earlier versions left out or mixed up. Oracle: the rows that were written, as JSON Lines."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.data.cache import digest_of, no_progress
from mgpu_pipe.data.data_source import check_sources, open_source
from mgpu_pipe.data.earlier_tables import is_table_anew
from mgpu_pipe.data.fingerprint import fingerprints
from mgpu_pipe.data.tables import row_lines
from mgpu_pipe.data.text.file_source import contents_of
from mgpu_pipe.errors import DataError
from tests.data.support import config

ROWS: list[dict[str, Any]] = [{"text": f"text {at}", "label": "ab"[at % 2]} for at in range(5)]
PRETTY, MORE = json.dumps(ROWS[:2], indent=1), json.dumps(ROWS[2:], indent=1)


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line, *_ in row_lines(path)]


def zipped(path: Path, *contents: str, name: str = "part") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for number, content in enumerate(contents):
            file.writestr(f"{name}{number}", content)
    return path


def as_table(rows: list[dict[str, Any]], *columns: str, **form: Any) -> str:
    content = io.StringIO()
    writer = csv.DictWriter(content, columns or list(rows[0]), **form)
    writer.writeheader()
    writer.writerows(rows)
    return content.getvalue()


@pytest.mark.parametrize(
    "joined",
    [
        *(f"{PRETTY}{between}{MORE}" for between in ("", "\n", ",\n", "\n\ufeff", "[]\n")),
        f"{json.dumps(ROWS[:2])}\n{json.dumps(ROWS[2:])}\n",
        f"{PRETTY}\n{json.dumps(ROWS[2:])}",
        f"{json.dumps(ROWS[:2])}{MORE}",
    ],
)
def test_json_lists_that_were_joined_are_read_one_after_another(tmp_path: Path, joined: str) -> None:
    (tmp_path / "a.json").write_text(joined)
    assert rows_in(tmp_path / "a.json") == ROWS and is_table_anew(tmp_path / "a.json")


def test_json_lists_in_a_zip_file_are_read_one_after_another(tmp_path: Path) -> None:
    for parts in ((PRETTY, MORE), (json.dumps(ROWS[:2]), json.dumps(ROWS[2:])), (PRETTY, json.dumps(ROWS[2:]))):
        path = zipped(tmp_path / "a.json.zip", *parts)
        assert rows_in(path) == ROWS
        assert sum(size for *_, size in row_lines(path)) <= path.stat().st_size


@pytest.mark.parametrize("rest", ["{}", json.dumps(ROWS[2]), "]", "text"])
def test_what_goes_on_after_a_json_list_is_refused(tmp_path: Path, rest: str) -> None:
    for joined in (f"{PRETTY}\n{rest}", f"{PRETTY}{MORE}{rest}\n"):
        (tmp_path / "a.json").write_text(joined)
        with pytest.raises(DataError, match=r"a.json: has other text after a JSON list; correct or remove it"):
            rows_in(tmp_path / "a.json")
    assert is_table_anew(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(f"{PRETTY}\n{MORE[:-1]}")
    with pytest.raises(DataError, match="is a JSON list without its end"):
        rows_in(tmp_path / "a.json")


@pytest.mark.parametrize(("ending", "form"), [(".csv", {}), (".tsv", {"delimiter": "\t"})])
def test_each_table_in_a_zip_file_has_its_own_columns(tmp_path: Path, ending: str, form: dict[str, Any]) -> None:
    parts = [
        as_table(ROWS[:2], **form),
        as_table([], "text", "label", **form),
        as_table(ROWS[2:], "label", "text", **form),
    ]
    path = zipped(tmp_path / f"a{ending}.zip", *parts, name="x/part")
    assert rows_in(path) == ROWS
    found = list(row_lines(path))
    assert sum(size for *_, size in found) <= path.stat().st_size
    assert [origin for _, origin, _ in found][1:3] == [f"{path}: x/part0:3", f"{path}: x/part2:2"]
    run = config(tmp_path, source="labelled_jsonl", paths=[str(path)])
    check_sources(run.model, run.data)
    with pytest.raises(DataError, match="holds no rows"):
        rows_in(zipped(path, parts[1], parts[1]))
    assert next(row_lines(zipped(path, parts[0])))[1] == f"{path}:2"


@pytest.mark.parametrize(
    "lines",
    [
        'label\ttext\n1\t"def f():\n\treturn 1"\n',
        'text\n"hello\nworld"\n',
        'text\n"hello\n\nbig\n""world"""\n',
        'text\n"whole"\n"""hello\nworld"\n',
        'label\ttext\tlanguage\n1\ta\tb\n1\t"def f():\n\treturn 1"\t"python"\n',
    ],
)
def test_a_quoted_field_of_several_lines_is_refused_in_tsv(tmp_path: Path, lines: str) -> None:
    (tmp_path / "a.tsv").write_text(lines)
    said = r"a.tsv:\d: a quoted field goes over several lines, which a TSV file cannot hold; write the table as CSV"
    with pytest.raises(DataError, match=said):
        list(row_lines(tmp_path / "a.tsv"))
    assert is_table_anew(tmp_path / "a.tsv")


def test_quotes_of_no_program_of_csv_stay_in_tsv(tmp_path: Path) -> None:
    texts = ['"Yes,', "he said.", 'a 5" disk', '"No," he said', 'so he said."', '"whole"', '""Yes""']
    for order in (
        texts,
        texts[::-1],
        texts[2:] + texts[:2],
        texts[2:3] + texts[:2] + texts[4:5],
        ['"Yes,', '"No," he said', '5"'],
    ):
        (tmp_path / "a.tsv").write_text("\n".join(["id\ttext", *(f"{at}\t{text}" for at, text in enumerate(order))]))
        plain = ["whole" if text == '"whole"' else text for text in order]
        assert [row["text"] for row in rows_in(tmp_path / "a.tsv")] == plain
        assert not is_table_anew(tmp_path / "a.tsv")


def test_the_first_of_columns_with_one_name_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.csv").write_text("text,id,text,,\nfirst,1,last,,\n")
    assert rows_in(tmp_path / "a.csv") == [{"text": "first", "id": "1", "": ""}]
    assert "a.csv: has several columns 'text'; the first one is read" in caplog.text
    caplog.clear()
    (tmp_path / "b.csv").write_text("text,,\nfirst,,\n")
    assert rows_in(tmp_path / "b.csv") == [{"text": "first", "": ""}] and not caplog.text


def test_an_unclosed_quote_is_named_by_the_line_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text\n1,"fine"\n\n2,"unclosed\n3,row\n4,row\n')
    assert [origin for _, origin, _ in row_lines(tmp_path / "a.csv")] == [
        str(tmp_path / "a.csv") + end for end in (":2", ":4")
    ]


ANEW = {
    "lists.json": f"{PRETTY}\n{MORE}",
    "list and lines.json": f"{PRETTY}\n{{}}",
    "twins.csv": "text,label,label\na,b,c\n",
    "two lines.tsv": 'label\ttext\na\tb\na\t"c\n\td"\n',
}
KEPT = {
    "list.json": PRETTY,
    "object.json": json.dumps({"data": ROWS}),
    "lines.jsonl": "\n".join(map(json.dumps, ROWS)),
    "plain.csv": as_table(ROWS),
    "nameless.csv": "text,label,,\na,b,,\n",
    "quotes.tsv": 'label\ttext\na\t"b\na\t"c"d\na\te"\n',
}


def test_only_tables_that_are_read_otherwise_get_another_identity(tmp_path: Path) -> None:
    tables = {tmp_path / name: name in ANEW for name in (*ANEW, *KEPT)}
    for path in tables:
        path.write_text({**ANEW, **KEPT}[path.name])
    tables[zipped(tmp_path / "several.csv.zip", as_table(ROWS), as_table(ROWS))] = True
    tables[zipped(tmp_path / "several.json.zip", PRETTY, MORE)] = True
    tables[zipped(tmp_path / "lone.csv.zip", as_table(ROWS))] = False
    for path, is_anew in tables.items():
        cache = tmp_path / "cache"
        run = config(tmp_path, source="jsonl", paths=[str(path)])
        contents = contents_of([path], {}, fingerprints([path], cache, no_progress))
        before = digest_of("files", "jsonl", "text", contents)
        for _ in range(2):
            assert (open_source(run, cache).identity != before) == is_anew, path
        run = config(tmp_path, source="text_files", paths=[str(path)])
        assert open_source(run, cache).identity == digest_of("files", "text_files", None, contents), path
