"""Pins the names of a configuration to commits: those of the resumed run, otherwise the Hub's present ones.

The commits are frozen with the run, so a resume uses the same files offline and after a branch moved. A typed revision
is resolved and compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from mgpu_pipe.config.freeze import load_untrusted
from mgpu_pipe.config.hub import HubName, commit_of, hub_name, hub_names, local_folder, matching, with_names
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.run_identity import differences
from mgpu_pipe.config.schema import DataConfig, ModelConfig, RunConfig
from mgpu_pipe.errors import BadInputError, ConfigErrors
from mgpu_pipe.runs.latest import resumable_folders
from mgpu_pipe.system.joined_world import existing_world
from mgpu_pipe.system.local_files import is_folder


@dataclass
class Pinned:
    """A configuration with pinned names.

    Attributes:
        config: configuration with every name at a commit.
        notices: keys and their notices.
        errors: errors of the names.
        by_rank_zero: whether rank 0 of a joined world pins the names and the others take its commits.
        others_wait: whether this is that rank 0, for which the others wait.
    """

    config: RunConfig
    notices: list[tuple[str, str]] = field(default_factory=list)
    errors: list[BadInputError] = field(default_factory=list)
    by_rank_zero: bool = False
    others_wait: bool = False

    def require(self) -> RunConfig:
        """The configuration; ConfigErrors if a name has an error."""
        if self.errors:
            raise ConfigErrors(self.errors)
        return self.config


def pin(config: RunConfig) -> Pinned:
    """Pin every name of ``config`` to a commit, and fetch the small files of its models."""
    pinned = Pinned(config, _path_notices(config.model, config.data))
    try:
        named = list(hub_names(config.model, config.data))
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
    started_with = dict(_commits_of_resumed_run(config))
    known: dict[HubName, str] = {}
    exact_names: dict[str, str] = {}
    for key, name in named:
        repository = replace(name, files="")
        try:
            if name.commit is None and name.revision is None and (key, repository) in started_with:
                known[repository] = started_with[key, repository]
                pinned.notices.append((key, f"{name} stays at commit {known[repository]}, which the run began with"))
            if repository not in known:
                known[repository] = name.commit or commit_of(name, key)
                pinned.notices.append((key, f"{name.repository} on the Hub, commit {known[repository]}"))
            exact = replace(name, revision=known[repository])
            exact_names[str(name)] = str(exact)
            if name.kind == "dataset":
                matching(exact, key)
            else:
                local_folder(str(exact), key)
        except BadInputError as error:
            pinned.errors.append(error)
    pinned.config = replace(config, **with_names(config.model, config.data, exact_names))
    return pinned


def _path_notices(model: ModelConfig, data: DataConfig) -> list[tuple[str, str]]:
    """Notices of folders whose path is also a name on the Hub."""
    notices = []
    for key, text in (("model.path", model.path), ("data.tokenizer", data.tokenizer)):
        if text and text != "auto" and is_folder(Path(text)) and hub_name(f"{text}@main") is not None:
            notices.append((key, f"{text} is the folder here; {text}@main is what the Hub has under this name"))
    return notices


def _commits_of_resumed_run(config: RunConfig) -> Iterator[tuple[tuple[str, HubName], str]]:
    """Commits of the run that ``config`` resumes, by key and repository; only from this user's runs."""
    for folder in resumable_folders(config.run, config.checkpoint):
        try:
            before, is_own_run = load_untrusted(RunPaths(folder).config)
            names = list(hub_names(before.model, before.data)) if is_own_run else []
        except BadInputError:
            continue
        pinned = [(key, name) for key, name in names if name.commit]
        commits = {(key, replace(name, revision=None, files="")): str(name.commit) for key, name in pinned}
        if not commits:
            continue
        if config.run.dir is None and config.checkpoint.resume == "auto":
            texts = {
                str(name): str(replace(name, revision=commits[key, replace(name, files="")]))
                for key, name in hub_names(config.model, config.data)
                if (key, replace(name, files="")) in commits
            }
            if differences(replace(config, **with_names(config.model, config.data, texts)), before):
                continue
        yield from commits.items()
        return
