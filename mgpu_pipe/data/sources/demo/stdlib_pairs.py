"""``data=stdlib_pairs``: functions of the running Python's standard library, each to be found by its docstring."""

from __future__ import annotations

import ast
import json
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.data.fingerprint import Fingerprint
from mgpu_pipe.data.sources.compared_texts import EmbeddingPairsConfig, document_of
from mgpu_pipe.data.sources.text_files import check_library
from mgpu_pipe.data.text.documents import Document, Source
from mgpu_pipe.data.text.file_source import FileFormat, Rows

FEWEST_WORDS = 4
"""Words of the shortest docstring that is a query."""


def function_rows(data: DataConfig, path: Path, expected: Fingerprint) -> Rows:
    """Yields the first paragraph of each function's docstring, and the function without its docstring."""
    text = files.read_bytes(path, expected).decode("utf-8", errors="replace")
    size = len(text)
    for query, code, line in _functions(text):
        yield json.dumps([query, code], ensure_ascii=False), f"{path}:{line}", size
        size = 0


def _functions(text: str) -> Iterator[tuple[str, str, int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            module = ast.parse(text)
        except (SyntaxError, ValueError):
            return  # a template, or code of another version
    lines = text.splitlines()
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        docstring = ast.get_docstring(node)
        query = " ".join((docstring or "").split("\n\n")[0].split())
        if len(query.split()) >= FEWEST_WORDS:
            said, end = node.body[0], node.end_lineno
            code = [*lines[node.lineno - 1 : said.lineno - 1], *lines[said.end_lineno : end]]
            yield query, "\n".join(code), node.lineno


def function_document(data: DataConfig, line: str, origin: str, size: int) -> Document:
    query, code = json.loads(line)
    document = document_of(cast(EmbeddingPairsConfig, data), query, code, (), origin, size)
    # The functions of a module stay on one side, the same for every prefix of Python.
    module = os.path.relpath(origin.rpartition(":")[0], sysconfig.get_path("stdlib"))
    return document._replace(key=Path(module).as_posix())


FORMAT = FileFormat(
    name="stdlib_pairs",
    rows=function_rows,
    document=function_document,
    check_file=lambda data, path, whole: None,
    columns=lambda data: [getattr(data, key) for key in ("query_prompt", "document_prompt")],
    kind="text_groups",
)


def open_library(data: DataConfig, cache: Path, progress: Progress, key: str) -> Source:
    return FORMAT.open_files(data, files.stdlib_files(), cache, progress)


SOURCE = DataSource(
    name="stdlib_pairs",
    samples="embedding_pairs",
    documents="text_groups",
    keys=EmbeddingPairsConfig,
    check=check_library,
    open=open_library,
)
