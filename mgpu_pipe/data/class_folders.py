"""Folders of files by class: a folder below the root for each, as in Hugging Face's imagefolder and audiofolder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mgpu_pipe.config.hub import DATA
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.files import files_below, is_no_data
from mgpu_pipe.data.tables import Entry
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.system.local_files import expand_home

TRAIN, HELD_OUT = "train", ("validation", "test")
SPLITS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Names of split folders in Hugging Face's imagefolder."""


@dataclass(frozen=True)
class ClassFolders:
    """Reads folders whose files have one of these suffixes, lower case; ``what`` names the files in messages."""

    what: str
    suffixes: tuple[str, ...]

    def entries(self, pattern: str, key: str) -> Iterator[Entry]:
        """Yields the files of a folder of classes, in a fixed order.

        Raises:
            ConfigError: it is no folder, or holds no class.
        """
        root = expand_home(pattern)
        if pattern.startswith(DATA) or not root.is_dir():
            fix = f"give a folder that holds a folder of {self.what} for each class"
            raise ConfigError(key, pattern, fix, "is no folder here")
        classes = self.classes_in(root)
        if not classes:
            fix = f"put each class's {self.what} ({', '.join(self.suffixes)}) into a folder of its name below it"
            raise ConfigError(key, pattern, fix, f"holds no folder of {self.what}")
        for folder, paths in classes.items():
            yield from (Entry(path, folder, str(path)) for path in paths)

    def classes_in(self, root: Path) -> dict[str, list[Path]]:
        """Folders of classes below ``root`` by name, with the files below each; skips hidden ones."""
        stat, classes = root.stat(), {}
        for folder in sorted(root.iterdir()):
            if folder.is_dir() and not is_no_data(folder.name):
                # A link to a parent folder would put every file into its class.
                below = files_below(folder, walked={(stat.st_dev, stat.st_ino)})
                if files := sorted(path for path in below if path.suffix.lower() in self.suffixes):
                    classes[folder.name] = files
        return classes

    def loose_files(self, root: str) -> list[Path]:
        """Files next to the folders of classes; they have no class."""
        visible = (path for path in sorted(expand_home(root).iterdir()) if not is_no_data(path.name))
        return [path for path in visible if path.suffix.lower() in self.suffixes and path.is_file()]

    def with_splits(self, data: DataConfig) -> tuple[list[str], list[str]]:
        """``data.paths`` and ``data.validation_paths``, with folders of splits (such as ``train`` and ``val``) replaced
        by these splits.

        Raises:
            ConfigError: a folder holds splits and classes.
        """
        trained, held_out = list[str](), list[str]()
        for key, patterns in (("data.paths", data.paths), ("data.validation_paths", data.validation_paths)):
            for pattern in patterns:
                splits = self._splits_in(pattern, key)
                first_held = next((splits[kind] for kind in HELD_OUT if kind in splits), None)
                if key == "data.paths":
                    trained.append(splits.get(TRAIN, pattern))
                    if first_held is not None and not data.validation_paths and data.validation_fraction > 0:
                        held_out.append(first_held)
                else:
                    held_out.append(first_held or pattern)
        return trained, held_out

    def _splits_in(self, pattern: str, key: str) -> dict[str, str]:
        """Splits that a folder has instead of classes, by kind."""
        root = expand_home(pattern)
        if not root.is_dir():
            return {}
        folders = [folder for folder in sorted(root.iterdir()) if folder.is_dir() and not is_no_data(folder.name)]
        kinds = {kind: folder for folder in folders for kind, names in SPLITS.items() if folder.name.lower() in names}
        if TRAIN not in kinds:
            return {}
        others = [folder for folder in folders if folder not in kinds.values() and self._holds_files(folder)]
        if not others:
            return {kind: str(folder) for kind, folder in kinds.items()}
        if len(kinds) == 1:
            return {}  # a class of trains
        fix = "name the splits by data.paths and data.validation_paths"
        names = " and ".join(folder.name for folder in kinds.values())
        raise ConfigError(key, pattern, fix, f"holds the splits {names}, and {others[0].name} besides")

    def _holds_files(self, folder: Path) -> bool:
        return any(path.suffix.lower() in self.suffixes for path in files_below(folder))
