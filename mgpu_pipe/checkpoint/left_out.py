"""Frozen weights that a checkpoint leaves out: it names their model folder and the digest of its weights.

A frozen weight never changes, so a step need not store it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mgpu_pipe.checkpoint.strict_json import as_list, as_object, as_text
from mgpu_pipe.config.hub import is_at_commit
from mgpu_pipe.data.cache import writing_to_cache
from mgpu_pipe.data.fingerprint import fingerprints
from mgpu_pipe.errors import CheckpointError
from mgpu_pipe.models.weights.folder import check_model_folder, weight_files, whole_folder
from mgpu_pipe.system.local_files import expand_home

KEY = "left_out"
"""The field in ``state.json``."""


@dataclass(frozen=True)
class LeftOut:
    """Weights that a step leaves out, and their folder.

    Attributes:
        folder: the Hugging Face folder, absolute, or its name on the Hub at a commit.
        digest: SHA-256 over its weight files.
        names: names of the parameters.
    """

    folder: str
    digest: str
    names: tuple[str, ...]

    @classmethod
    def from_folder(cls, folder: str, cache: Path, names: Sequence[str]) -> LeftOut:
        """The weights ``names`` of ``folder``."""
        place = whole_folder(folder)
        known_as = folder if is_at_commit(folder) else str(place.absolute())
        return cls(known_as, weights_digest(place, cache), tuple(sorted(names)))

    @classmethod
    def from_state(cls, state: Mapping[str, Any], where: Path) -> LeftOut | None:
        """Weights that ``state.json`` lists as left out, or None; CheckpointError for a malformed entry."""
        if state.get(KEY) is None:
            return None
        location = f"{where}: state.json: {KEY}"
        fields = as_object(state[KEY], location, ("folder", "digest", "names"))
        names = tuple(as_text(name, location) for name in as_list(fields["names"], location))
        return cls(as_text(fields["folder"], location), as_text(fields["digest"], location), names)

    def as_state(self) -> dict[str, Any]:
        return {KEY: asdict(self)}

    def require(self, folder: Path | None, cache: Path, step: Path) -> None:
        """Refuse a ``folder`` without the weights that ``step`` leaves out (CheckpointError), or an incomplete one."""
        if folder is None:
            raise CheckpointError(
                f"{step}: leaves out {len(self.names)} frozen weights, which are those of {self.folder}; "
                "give that folder as model.path"
            )
        if weights_digest(folder, cache) != self.digest:
            raise CheckpointError(
                f"{step}: leaves out {len(self.names)} frozen weights, and those of {folder} differ; "
                f"give a copy of {self.folder} as it was"
            )


def weights_digest(folder: Path, cache: Path) -> str:
    """SHA-256 over names and contents of a folder's weight files, cached; ModelFolderError if incomplete."""
    folder = expand_home(folder)
    check_model_folder(folder)
    names = weight_files(folder)
    with writing_to_cache(cache):
        marks = fingerprints([folder / name for name in names], cache)
    text = "".join(f"{marks[folder / name].digest}  {name}\n" for name in names)
    return hashlib.sha256(text.encode()).hexdigest()
