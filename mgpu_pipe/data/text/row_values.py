"""Numbers of the rows of a token store, read from the rows themselves a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.paths import cache_folder
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import Progress, build_once, no_progress
from mgpu_pipe.data.data_source import open_source, validation_source_config
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.prepared_rows import RowFolders
from mgpu_pipe.data.text.token_store import TokenStore, load_array, save_array


def prepare_values(
    config: RunConfig,
    rows: RowFolders,
    name: str,
    values_of: Callable[[Iterable[Document]], Sequence[float]],
    progress: Progress | None = None,
) -> None:
    """Writes the values of all rows, once for each token store; :func:`open_values` reads them.

    Args:
        name: of the values.
        values_of: a value for each document, or several one after another.

    Raises:
        DataError: a row has no value.
    """
    cache = cache_folder(config.data.cache_dir).absolute()
    settings = {rows.folder: (config, "data.paths")}
    if config.data.validation_paths:
        settings.setdefault(rows.held_out_folder, (validation_source_config(config), "data.validation_paths"))
    for folder, (chosen, key) in settings.items():
        usable = TokenStore.open(folder).usable

        def build(out: Path, chosen: RunConfig = chosen, key: str = key, usable: Any = usable) -> dict[str, Any]:
            documents = open_source(chosen, cache, progress or no_progress, key).documents()
            read = (document for index, document in enumerate(documents) if usable is None or usable[index])
            values = np.array(values_of(read), np.float64)
            save_array(out / f"{name}.npy", values)
            return {"rows": len(values)}

        build_once(_folder(folder, name), build)


def open_values(folder: Path, name: str) -> NDArray[np.float64]:
    """The values of a token store's rows, in the order of the rows, (values,)."""
    values: NDArray[np.float64] = load_array(_folder(folder, name) / f"{name}.npy")
    return values


def _folder(folder: Path, name: str) -> Path:
    """Folder next to a token store."""
    return folder.with_name(f"{folder.name}.{name}")
