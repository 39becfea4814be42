"""Where configurations lie: the shipped Hydra tree, and ``./conf`` of the working folder, which is searched after it.

The working folder's adds options and groups, and never takes the place of a shipped one: Hydra would leave such a file
aside without a word, so it is refused. Only the shipped tree is followed by it, not a folder that ``--config-path``
puts in its place.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from mgpu_pipe.errors import BadInputError, ConfigErrors

CONFIG_NAME = "config"
OWN = "conf"
PROVIDER = "working-folder"
"""Hydra's name for where the working folder's options come from."""


def conf_dir() -> Path:
    """The shipped Hydra tree: ``mgpu_pipe/conf`` in an installed wheel, ``conf`` in a source tree."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / f"{CONFIG_NAME}.yaml").is_file():
            return folder
    raise BadInputError(f"no conf/{CONFIG_NAME}.yaml beside {package}: install mgpu_pipe again")


def own_conf() -> Path | None:
    """The working folder's ``conf``; None where that is missing or is the shipped tree.

    Raises:
        ConfigErrors: it has files with the names of shipped ones; one line each, with both.
    """
    folder, shipped = Path(OWN).absolute(), conf_dir()
    if not folder.is_dir() or folder.resolve() == shipped.resolve():
        return None
    names = sorted(path.relative_to(shipped) for path in shipped.rglob("*.yaml"))
    taken = [_taken(folder / name, shipped / name) for name in names if (folder / name).exists()]
    if taken:
        raise ConfigErrors(taken)
    return folder


def _taken(own: Path, shipped: Path) -> BadInputError:
    return BadInputError(
        f"{own}: has the name of the shipped {shipped}; give it another one, for a folder's own conf adds options and "
        "replaces none"
    )


@functools.cache
def own_conf_plugin() -> type:
    """The plug-in that has Hydra search :func:`own_conf` after the shipped tree, whatever it composes or answers."""
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
    """What of a composition came from :func:`own_conf`, as it is typed (``experiment=mine``).

    Args:
        runtime: Hydra's node ``hydra.runtime`` of that composition.
    """
    folders = [Path(source.path) for source in runtime.config_sources if source.provider == PROVIDER]
    return sorted(
        f"{group}={option}"
        for group, option in runtime.choices.items()
        if any((folder / group / f"{option}.yaml").is_file() for folder in folders)
    )
