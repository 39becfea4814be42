"""Reads a file of texts to encode, and how a model makes vectors of them; without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.compressed import codec_of
from mgpu_pipe.data.tables import row_lines
from mgpu_pipe.data.text.file_source import text_of
from mgpu_pipe.data.text.tokenizer_folder import TOKENIZER, load_tokenizer_file
from mgpu_pipe.errors import BadInputError, DataError
from mgpu_pipe.inference.find_model import ModelSource
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.models.weights.sentence_modules import SentenceModules, read_sentence_modules
from mgpu_pipe.objectives.vector_keys import TEXT_EMBEDDING, VectorConfig, vector_width
from mgpu_pipe.system.local_files import is_file

LINES = ".txt"
"""Ends the name of a file with a text in each line."""
AT_ONCE = 1000
"""Texts that are tokenized together."""
KINDS = ("query", "document")
"""Kinds of prompts that the data of embeddings has."""


@dataclass(frozen=True)
class TextRow:
    """A text of the input.

    Attributes:
        line: number of its row, from 1; blank lines are no rows.
    """

    line: int
    text: str


def read_texts(path: Path, column: str) -> Iterator[TextRow]:
    """Yields the texts of a file of plain lines (``.txt``), JSON Lines, CSV, TSV or Parquet.

    Raises:
        DataError: the file cannot be read; a row is broken, lacks the column, or has an empty text.
    """
    plain = (Path(path.stem) if codec_of(path) else path).suffix.lower() == LINES
    for number, (line, origin, _) in enumerate(files.read_lines(path) if plain else row_lines(path), start=1):
        if plain:
            yield TextRow(number, files.whole_row(line, origin).rstrip("\r\n"))
            continue
        text = text_of(files.json_row(line, origin, column), "--column", column, origin)
        if not text.strip():
            raise DataError(f"{origin}: column '{column}' is empty; {files.FIX}")
        yield TextRow(number, text)


def count_texts(path: Path, column: str, tokenizer_folder: Path | None, prompt: str) -> int:
    """Number of the texts of a file.

    Args:
        prompt: text before every text.

    Raises:
        DataError: see :func:`read_texts`; or the tokenizer makes no token of a text.
    """
    file = None if tokenizer_folder is None else tokenizer_folder / TOKENIZER
    tokenizer = load_tokenizer_file(file) if file is not None and is_file(file) else None
    if tokenizer is not None and tokenizer.encode("").ids:
        tokenizer = None  # every text has the special tokens
    count, rows = 0, read_texts(path, column)
    while some := list(islice(rows, AT_ONCE)):
        count += len(some)
        encoded = [] if tokenizer is None else tokenizer.encode_batch([prompt + row.text for row in some])
        for row, tokens in zip(some, encoded, strict=bool(encoded)):
            if not tokens.ids:
                raise no_tokens(path, row)
    return count


def no_tokens(path: Path, row: TextRow) -> DataError:
    return DataError(f"{path}: row {row.line} has no tokens; {files.FIX}")


def vectors_of(config: RunConfig | None, folder: Path) -> SentenceModules:
    """How a run with ``config``, or the model's folder without one, makes vectors of texts.

    Raises:
        BadInputError: it makes no vectors of texts, or makes them unlike ``objective=text_embedding``.
    """
    if config is not None:
        keys, data = config.objective, config.data
        if not isinstance(keys, VectorConfig):
            raise BadInputError(f"{folder}: learned objective={keys.name}; give a run of objective=text_embedding")
        prompts = {kind: getattr(data, f"{kind}_prompt", None) or "" for kind in KINDS}
        similarity = "cosine" if keys.normalize else "dot"
        return SentenceModules(keys.pooling, keys.normalize, prompts, max_tokens=data.seq_len, similarity=similarity)
    modules = read_sentence_modules(folder)
    if modules is None:
        raise BadInputError(
            f"{folder}: has no modules.json, which names the pooling; export a run of objective=text_embedding, or "
            "save it by sentence-transformers"
        )
    return modules


def width_of(source: ModelSource) -> int:
    """Numbers of a vector of the model.

    Raises:
        BadInputError: objective=text_embedding does not train its family.
    """
    folder = source.folder
    model = ModelConfig(name=folder.name, path=str(folder)) if source.config is None else source.config.model
    fields = resolved_fields(model)
    if fields["model_type"] not in TEXT_EMBEDDING.families:
        known = ", ".join(TEXT_EMBEDDING.families)
        raise BadInputError(f"{folder}: objective=text_embedding has no {fields['model_type']}; use {known}")
    return vector_width(fields)


def prompt_of(vectors: SentenceModules, kind: str | None) -> str:
    """The prompt that ``--prompt`` names, or else the default one.

    Raises:
        BadInputError: the model has no prompt of that kind.
    """
    kind = vectors.default_prompt if kind is None else kind
    if kind is None:
        return ""
    if kind not in vectors.prompts:
        known = ", ".join(vectors.prompts) or "none"
        raise BadInputError(f"--prompt={kind}: the model has no such prompt (it has {known}); leave it out")
    return vectors.prompts[kind]
