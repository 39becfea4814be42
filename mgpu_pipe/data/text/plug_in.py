"""Sources of documents that installed packages provide.

A package registers a callable in the entry point group ``mgpu_pipe.data``. It takes the :class:`RunConfig` and returns
an iterable of documents, all of one kind: ``str``, or token ids as a NumPy array of whole numbers, or a pair of such an
array and a loss mask of its length (1 where a token counts as a label). Token ids are those of ``data.tokenizer``.

If the callable has an attribute ``fingerprint`` (RunConfig to str), that is the identity of the documents; otherwise
every document is read once more to hash it. With ``data.validation_paths`` the callable gets those as ``data.paths``
for the held-out documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.bad_samples import OR_SKIP, Fault
from mgpu_pipe.data.cache import digest_of
from mgpu_pipe.data.text.documents import Document, Source
from mgpu_pipe.errors import DataError

_TEXT = str.__name__
Load = Callable[[RunConfig], Iterable[Any]]


def plug_in_source(data: DataConfig, load: Callable[[], Iterable[Any]], fingerprint: object = None) -> Source:
    """Builds the source of the documents that ``load`` yields.

    With ``data.on_bad_sample=skip`` an item that is not a document, or of another kind than the first, becomes a
    document with a fault.

    Args:
        fingerprint: identity of the documents; without one they are read once more to hash them.

    Raises:
        DataError: there is such an item, with ``data.on_bad_sample=stop``.
    """
    name = data.source
    skips = data.on_bad_sample == "skip"
    first = _kind(next((item for item in load() if not skips or _is_document(item)), ""))

    def documents() -> Iterator[Document]:
        for number, item in enumerate(load()):
            origin = f"data.source={name}: document {number}"
            try:
                if _kind(item) != first:
                    raise DataError(f"{origin} is {_kind(item)}, the first {first}; yield documents of the same kind")
                document = _document(item, origin)
            except DataError as error:
                if not skips:
                    raise DataError(f"{error}{OR_SKIP}") from error
                document = Document.from_fault(Fault(str(error), origin, 1))
            yield document

    def stream(identity: str, size: int, documents: Callable[[], Iterator[Document]]) -> Source:
        return Source(
            name, digest_of("plug-in", name, identity), size, documents, "text" if first == _TEXT else "tokens"
        )

    if fingerprint is not None:
        return stream(str(fingerprint), 0, documents)
    expected, count = hashlib.sha256(), 0
    for document in documents():
        _add(expected, document)
        count += 1
    identity = expected.hexdigest()
    return stream(identity, count, lambda: _require_identity(documents(), identity, name))


def _require_identity(documents: Iterator[Document], identity: str, name: str) -> Iterator[Document]:
    """Yields the documents.

    Raises:
        DataError: after the last document, where their digest is not ``identity``.
    """
    digest = hashlib.sha256()
    for document in documents:
        _add(digest, document)
        yield document
    if digest.hexdigest() != identity:
        raise DataError(
            f"data.source={name}: yields other documents than the first time; yield the same ones, or set its "
            "attribute fingerprint"
        )


def _kind(item: object) -> str:
    """Kind of a document in messages."""
    import numpy as np

    if isinstance(item, tuple):
        return "token ids with a loss mask"
    return "token ids" if isinstance(item, np.ndarray) else type(item).__name__


def _is_document(item: object) -> bool:
    try:
        _document(item, "")
    except DataError:
        return False
    return True


def _document(item: Any, origin: str) -> Document:
    if isinstance(item, str):
        files.check_unicode(item, origin)
        return Document(item, origin, 1)
    import numpy as np

    tokens, mask = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        what = f"{type(item).__name__}, not str, nor a NumPy array of token ids in one dimension"
        raise DataError(f"{origin} is {what}, nor a pair of such an array and its loss mask; yield one of these")
    if mask is not None:
        mask = np.asarray(mask)
        if mask.shape != tokens.shape or not np.isin(mask, (0, 1)).all():
            raise DataError(f"{origin}: its loss mask must hold one 0 or 1 for each of its {len(tokens)} tokens")
        mask = mask.astype(np.uint8)
    return Document("", origin, 1, tokens=tokens.astype(np.int64), loss_mask=mask)


def _add(digest: Any, document: Document) -> None:
    digest.update(len(document.content).to_bytes(8, "little") + document.content)
