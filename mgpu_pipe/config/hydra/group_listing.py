"""Groups and their options, shipped and from ``./conf``, each with the first comment line of its file."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from mgpu_pipe.config import plugins
from mgpu_pipe.config.sections import SECTIONS
from mgpu_pipe.config.suggest import choose_from
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.system.conf_folders import CONFIG_NAME, OWN, conf_dir, own_conf
from mgpu_pipe.system.local_files import MAX_CONFIG_BYTES, read_bytes


@dataclass(frozen=True)
class Option:
    """An option of a group."""

    name: str
    description: str
    is_default: bool


def list_groups(group: str | None = None) -> dict[str, list[Option]]:
    """Groups with their options, in the order of the primary configuration's defaults; or one and the groups in it.

    Raises:
        BadInputError: no such group, or a local option has a shipped option's name.
    """
    shipped, local = conf_dir(), own_conf()
    defaults = _defaults(shipped)
    order = {name: index for index, name in enumerate(defaults)}
    roots = [shipped] if local is None else [shipped, local]
    folders = {file.parent.relative_to(root) for root in roots for file in root.rglob("*.yaml") if file.parent != root}
    sorted_folders = sorted(folders, key=lambda folder: (order.get(folder.parts[0], len(order)), folder))
    names = [folder.as_posix() for folder in sorted_folders]
    if group is not None and group not in names:
        raise BadInputError(f"mgpu-pipe ls {group}: no such group; {choose_from(group, names)}")
    return {
        name: [
            *(
                Option(file.stem, _description(file, root == local), defaults.get(name) == file.stem)
                for root in roots
                for file in sorted((root / name).glob("*.yaml"))
            ),
            *_registered(name, [file.stem for root in roots for file in (root / name).glob("*.yaml")]),
        ]
        for name in names
        if group is None or f"{name}/".startswith(f"{group}/")
    }


def _registered(group: str, files: Collection[str]) -> Iterator[Option]:
    """Options that installed packages add to a group, except those with a file of the same name."""
    for section in SECTIONS.values():
        for name in sorted(set(plugins.registered(section.code)).difference(files)) if section.name == group else ():
            yield Option(name, f"Of an installed package: {section.chooser}={name}", False)


def _defaults(root: Path) -> dict[str, str | None]:
    """Default option by group, from the primary configuration's defaults list."""
    content = yaml.safe_load((root / f"{CONFIG_NAME}.yaml").read_text(encoding="utf-8"))
    entries = [entry for entry in content["defaults"] if isinstance(entry, dict)]
    return {group: option for entry in entries for group, option in entry.items() if " " not in group}


def _description(file: Path, is_local: bool) -> str:
    """First comment line that is neither a package directive nor an experiment's command."""
    try:
        lines = read_bytes(file, MAX_CONFIG_BYTES, file.parents[1]).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{file}: cannot be read ({error})") from error
    comments = (line.lstrip("# ").rstrip() for line in lines if line.startswith("#"))
    texts = [text for text in comments if text and not text.startswith("@package")]
    text = next((text for text in texts if not text.startswith("mgpu-pipe ")), texts[0] if texts else "")
    return f"{text} (./{OWN})".lstrip() if is_local else text
