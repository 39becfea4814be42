"""Folders of configurations: the shipped Hydra tree, followed by ``./conf`` of the working directory.

``./conf`` adds options and groups. A file with the name of a shipped one is refused, because Hydra would ignore it
silently. ``./conf`` is searched only with the shipped tree, not with a folder of ``--config-path``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from mgpu_pipe.errors import BadInputError, ConfigErrors

CONFIG_NAME = "config"
OWN = "conf"
PROVIDER = "working-folder"
"""Hydra's provider name of ``./conf``."""


def conf_dir() -> Path:
    """Folder of the shipped Hydra tree: ``mgpu_pipe/conf`` in an installed wheel, ``conf`` in a source tree."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / f"{CONFIG_NAME}.yaml").is_file():
            return folder
    raise BadInputError(f"no conf/{CONFIG_NAME}.yaml next to {package}: install mgpu_pipe again")


def own_conf() -> Path | None:
    """``./conf`` unless missing or the shipped tree; ConfigErrors for files of shipped names, with both paths."""
    folder, shipped = Path(OWN).absolute(), conf_dir()
    if not folder.is_dir() or folder.resolve() == shipped.resolve():
        return None
    names = sorted(path.relative_to(shipped) for path in shipped.rglob("*.yaml"))
    advice = "give it another one: ./conf adds options and replaces none"
    taken = [
        BadInputError(f"{folder / name}: has the name of the shipped {shipped / name}; {advice}")
        for name in names
        if (folder / name).exists()
    ]
    if taken:
        raise ConfigErrors(taken)
    return folder


@functools.cache
def own_conf_plugin() -> type:
    """Hydra plug-in that searches :func:`own_conf` after the shipped tree."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class OwnConf(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            main = [entry.path for entry in search_path.get_path() if entry.provider == "main"]
            folder = own_conf() if main == [str(conf_dir())] else None
            if folder is not None:
                search_path.append(PROVIDER, f"file://{folder}")

    return OwnConf


def own_options(runtime: Any) -> list[str]:
    """Options of a composition from :func:`own_conf`, as typed (``experiment=mine``); ``runtime`` is Hydra's node."""
    folders = [Path(source.path) for source in runtime.config_sources if source.provider == PROVIDER]
    return sorted(
        f"{group}={option}"
        for group, option in runtime.choices.items()
        if any((folder / group / f"{option}.yaml").is_file() for folder in folders)
    )
