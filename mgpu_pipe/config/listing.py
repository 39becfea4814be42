"""The groups and their options, the working folder's own too, each with the first comment line of its file."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from mgpu_pipe.config import plugins
from mgpu_pipe.config.conf_folders import CONFIG_NAME, OWN, conf_dir, own_conf
from mgpu_pipe.config.plain_files import MAX_CONFIG_BYTES, read_bytes
from mgpu_pipe.config.sections import SECTIONS
from mgpu_pipe.config.suggest import choose_from
from mgpu_pipe.errors import BadInputError


@dataclass(frozen=True)
class Option:
    """One choice of a group."""

    name: str
    description: str
    is_default: bool


def list_groups(group: str | None = None) -> dict[str, list[Option]]:
    """Groups in the order of the primary configuration's defaults, or the one asked for, with their options.

    Raises:
        BadInputError: there is no such group, or an own option has the name of a shipped one.
    """
    shipped, own = conf_dir(), own_conf()
    defaults = _defaults(shipped)
    order = list(defaults)
    roots = [shipped] if own is None else [shipped, own]
    names = sorted(
        {folder.name for root in roots for folder in root.iterdir() if any(folder.glob("*.yaml"))},
        key=lambda name: (order.index(name) if name in order else len(order), name),
    )
    if group is not None and group not in names:
        raise BadInputError(f"mgpu-pipe ls {group}: no such group; {choose_from(group, names)}")
    return {
        name: [
            *(
                Option(file.stem, _description(file, root == own), defaults.get(name) == file.stem)
                for root in roots
                for file in sorted((root / name).glob("*.yaml"))
            ),
            *_registered(name, [file.stem for root in roots for file in (root / name).glob("*.yaml")]),
        ]
        for name in ([group] if group else names)
    }


def _registered(group: str, files: Collection[str]) -> Iterator[Option]:
    """What installed packages bring to a group, and the key that chooses it; not what an option's file is named for."""
    for section in SECTIONS.values():
        for name in sorted(set(plugins.registered(section.code)).difference(files)) if section.name == group else ():
            yield Option(name, f"Of an installed package: {section.chooser}={name}", False)


def _defaults(root: Path) -> dict[str, str | None]:
    """Group to default option, from the primary configuration's defaults list."""
    content = yaml.safe_load((root / f"{CONFIG_NAME}.yaml").read_text(encoding="utf-8"))
    entries = [entry for entry in content["defaults"] if isinstance(entry, dict)]
    return {group: option for entry in entries for group, option in entry.items() if " " not in group}


def _description(file: Path, own: bool) -> str:
    """The first comment line that is neither a package directive nor the command that runs an experiment."""
    try:
        lines = read_bytes(file, MAX_CONFIG_BYTES, file.parents[1]).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{file}: cannot be read ({error})") from error
    comments = (line.lstrip("# ").rstrip() for line in lines if line.startswith("#"))
    said = [text for text in comments if text and not text.startswith("@package")]
    text = next((text for text in said if not text.startswith("mgpu-pipe ")), said[0] if said else "")
    return f"{text} (./{OWN})".lstrip() if own else text
