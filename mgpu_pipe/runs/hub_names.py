"""Which commit the names of a configuration mean: that of the run that goes on, else what the Hub says now.

The commits are frozen with the run. So a resume trains what the run began with, also offline and after a branch was
moved; a revision that is typed is asked for, and compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from mgpu_pipe.config.freeze import load_untrusted
from mgpu_pipe.config.hub import HubName, commit_of, hub_name, hub_names, local_folder, matching, with_names
from mgpu_pipe.config.joined_world import existing_world
from mgpu_pipe.config.mathematics import differences
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigErrors
from mgpu_pipe.runs.newest import runs_in


@dataclass
class Pinned:
    """What became of a configuration's names.

    Attributes:
        config: with every name at its commit.
        told: keys, and what is worth knowing of them.
        by_rank_zero: in a joined world rank 0 alone asks the Hub, and the others take its commits.
        others_wait: this is rank 0 there, and the others wait for what it says.
    """

    config: RunConfig
    told: list[tuple[str, str]] = field(default_factory=list)
    errors: list[BadInputError] = field(default_factory=list)
    by_rank_zero: bool = False
    others_wait: bool = False


def pin(config: RunConfig) -> Pinned:
    """``config`` with every name at a commit, and the small files of its models fetched."""
    pinned = Pinned(config, _paths_told(config))
    try:
        named = list(hub_names(config))
    except BadInputError as error:
        pinned.errors.append(error)
        return pinned
    if not named:
        return pinned
    world = existing_world(os.environ)
    if int(world.get("RANK", "0")):
        pinned.by_rank_zero = True
        return pinned
    pinned.others_wait = int(world.get("WORLD_SIZE", "1")) > 1
    begun = dict(_begun_with(config))
    known: dict[HubName, str] = {}
    at: dict[str, str] = {}
    for key, name in named:
        repository = replace(name, files="")
        try:
            if name.commit is None and name.revision is None and (key, repository) in begun:
                known[repository] = begun[key, repository]
                pinned.told.append((key, f"{name} stays at commit {known[repository]}, which the run began with"))
            if repository not in known:
                known[repository] = name.commit or commit_of(name, key)
                pinned.told.append((key, f"{name.repository} on the Hub, commit {known[repository]}"))
            exact = replace(name, revision=known[repository])
            at[str(name)] = str(exact)
            if name.kind == "dataset":
                matching(exact, key)
            else:
                local_folder(str(exact), key)
        except BadInputError as error:
            pinned.errors.append(error)
    pinned.config = with_names(config, at)
    return pinned


def at_commits(config: RunConfig) -> RunConfig:
    """``config`` with every name at a commit.

    Raises:
        ConfigErrors: what is wrong with the names.
    """
    pinned = pin(config)
    if pinned.errors:
        raise ConfigErrors(pinned.errors)
    return pinned.config


def _paths_told(config: RunConfig) -> list[tuple[str, str]]:
    """A folder here that a name on the Hub could be."""
    told = []
    for key, text in (("model.path", config.model.path), ("data.tokenizer", config.data.tokenizer)):
        if text and text != "auto" and Path(text).is_dir() and hub_name(f"{text}@main") is not None:
            told.append((key, f"{text} is the folder here; {text}@main is what the Hub has under this name"))
    return told


def _begun_with(config: RunConfig) -> Iterator[tuple[tuple[str, HubName], str]]:
    """The commits of the run that ``config`` goes on with, by key and repository; of this user's own runs alone."""
    for folder in _continued(config):
        try:
            before, own = load_untrusted(RunPaths(folder).config)
            names = [(key, name) for key, name in hub_names(before) if name.commit] if own else []
        except BadInputError:
            continue
        found = {(key, replace(name, revision=None, files="")): str(name.commit) for key, name in names}
        if not found:
            continue
        if config.run.dir is None and config.checkpoint.resume == "auto":
            texts = {
                str(name): str(replace(name, revision=found[key, replace(name, files="")]))
                for key, name in hub_names(config)
                if (key, replace(name, files="")) in found
            }
            if differences(with_names(config, texts), before):
                continue
        yield from found.items()
        return


def _continued(config: RunConfig) -> list[Path]:
    """The runs, or the step, that ``config`` may go on with."""
    resume, run = config.checkpoint.resume, config.run
    if resume not in ("none", "auto"):
        return [Path(resume).expanduser()]
    if run.dir is not None:
        return [Path(run.dir).expanduser()] if resume == "auto" else []
    return runs_in(Path(run.root).expanduser() / run.name) if resume == "auto" else []
