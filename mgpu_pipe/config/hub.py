"""Names on the Hugging Face Hub: resolves them to commits and finds their files in this machine's cache.

``<org>/<name>[@revision]`` is a model or a tokenizer, ``hf://datasets/<org>/<name>[@revision]/<file or glob>`` files of
a data set. A run's configuration pins the name to a commit and holds no path of a machine; every process finds the
files in its machine's cache by that name. All access goes through ``huggingface_hub``: its cache, its token,
``HF_ENDPOINT``, ``HF_HUB_OFFLINE``. It is imported only if a configuration has such a name.
"""

from __future__ import annotations

import glob
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from mgpu_pipe.config.data_sources import find_source
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.system.local_files import exists, expand_home, is_file

T = TypeVar("T")
DATA = "hf://"
NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer's chat templates by name, next to the default one."""
SMALL = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    f"{NAMED_TEMPLATES}/*.jinja",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
)
"""Description files of a model; the launch fetches its weights."""
LISTED = 4
_REPOSITORY = r"\w[\w.-]*/\w[\w.-]*"
_MODEL = re.compile(rf"({_REPOSITORY})(?:@([^@\s]+))?")
_DATASET = re.compile(rf"hf://datasets/({_REPOSITORY})(?:@([^@/\s]+))?/(\S.*)")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubName:
    """A parsed name on the Hub.

    Attributes:
        revision: a branch, tag or commit; None for the repository's main branch.
        files: file or glob of a data set.
    """

    kind: Literal["model", "dataset"]
    repository: str
    revision: str | None
    files: str = ""

    @property
    def commit(self) -> str | None:
        """The revision if it is a commit, else None."""
        return self.revision if self.revision and _COMMIT.fullmatch(self.revision) else None

    def __str__(self) -> str:
        name = f"{self.repository}@{self.revision}" if self.revision else self.repository
        return name if self.kind == "model" else f"hf://datasets/{name}/{self.files}"


def hub_name(text: str) -> HubName | None:
    """Name of a model or tokenizer; None for a path. An existing path wins, as in transformers."""
    match = _MODEL.fullmatch(text)
    if match is None or text.endswith(".json"):
        return None
    name = HubName("model", *match.groups())
    return name if name.commit or not exists(Path(text)) else None


def data_name(text: str, key: str = "data.paths") -> HubName | None:
    """Name of a data set's files, None for a path; ConfigError for an invalid name after ``hf://``."""
    if not text.startswith(DATA):
        return None
    match = _DATASET.fullmatch(text)
    if match is None:
        raise ConfigError(key, text, "write it as hf://datasets/<org>/<name>[@revision]/<file or glob>")
    return HubName("dataset", *match.groups())


def hub_names(model: ModelConfig, data: DataConfig) -> Iterator[tuple[str, HubName]]:
    """Every key with a name on the Hub, and that name; ConfigError as :func:`data_name`."""
    for key, text in (("model.path", model.path or ""), ("data.tokenizer", data.tokenizer)):
        if (name := hub_name(text)) is not None:
            yield key, name
    for section, files in file_lists(data):
        for key, paths in ((f"{section}.paths", files.paths), (f"{section}.validation_paths", files.validation_paths)):
            source = find_source(files.source)
            for path in paths if source and source.reads_files else ():
                if (name := data_name(path, key)) is not None:
                    yield key, name


def template_files(folder: Path) -> list[str]:
    """Files of a tokenizer folder in :data:`NAMED_TEMPLATES`, from ``folder`` on."""
    return [f"{NAMED_TEMPLATES}/{path.name}" for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))]


def file_lists(data: DataConfig) -> Iterator[tuple[str, Any]]:
    """Sections with ``paths`` and ``validation_paths`` by key: ``data`` and each source of a mixture."""
    yield "data", data
    yield from ((f"data.sources.{name}", source) for name, source in data.parts().items())


def _with_files(files: T, names: dict[str, str]) -> T:
    lists = {name: [names.get(path, path) for path in getattr(files, name)] for name in ("paths", "validation_paths")}
    return replace(files, **lists)  # type: ignore[type-var]  # a dataclass


def names_files(model: ModelConfig, data: DataConfig) -> bool:
    """Whether a key names a model, a tokenizer or data, local or on the Hub."""
    files = any(section.paths or section.validation_paths for _, section in file_lists(data))
    return model.path is not None or data.tokenizer != "auto" or files


def with_names(model: ModelConfig, data: DataConfig, names: dict[str, str]) -> dict[str, Any]:
    """The sections ``model`` and ``data`` with each name replaced by its value in ``names``."""
    path = None if model.path is None else names.get(model.path, model.path)
    data = _with_files(replace(data, tokenizer=names.get(data.tokenizer, data.tokenizer)), names)
    if mixed := data.parts():
        sources: dict[str, Any] = {name: _with_files(source, names) for name, source in mixed.items()}
        data = replace(data, sources=sources)  # type: ignore[call-arg]  # a mixture's own key
    return {"model": replace(model, path=path), "data": data}


def without_revisions(model: ModelConfig, data: DataConfig) -> dict[str, Any]:
    """The sections with the revision removed from every name, for comparing two nodes."""
    names = [name for _, name in hub_names(model, data)]
    return with_names(model, data, {str(name): str(replace(name, revision=None)) for name in names})


def commit_of(name: HubName, key: str) -> str:
    """Commit that a name resolves to now, offline the cached one; ConfigError without a commit."""
    with asking(name, key):
        from huggingface_hub import HfApi

        return HfApi().resolve_revision(name.repository, repo_type=name.kind, revision=name.revision).resolved


def local_folder(text: str | Path, key: str = "model.path") -> Path:
    """Folder of a model or tokenizer: a path unchanged, or the cache with a name's :data:`SMALL` files; or
    ConfigError."""
    name = _at_commit(text)
    return expand_home(text) if name is None else fetch(name, SMALL, key)


def is_at_commit(text: str | Path) -> bool:
    """Whether ``text`` is a name at a commit, not a path."""
    return _at_commit(text) is not None


def _at_commit(text: str | Path) -> HubName | None:
    match = _MODEL.fullmatch(str(text))
    name = None if match is None else HubName("model", *match.groups())
    return name if name is not None and name.commit else None


def data_files(text: str, key: str) -> list[Path]:
    """Fetch the files of a data set's name at a commit into the cache; returns sorted paths, or ConfigError without
    any."""
    name = data_name(text, key)
    assert name is not None and name.commit, text
    names = matching(name, key)
    folder = fetch(name, tuple(glob.escape(file) for file in names), key)
    return [folder / file for file in names]


def matching(name: HubName, key: str) -> list[str]:
    """Files of the repository that match the file or glob of ``name``, sorted; ConfigError if none does."""
    files = listing(name, key)
    pattern = _as_regex(name.files)
    matches = sorted(file for file in files if file == name.files or pattern.fullmatch(file))
    if not matches:
        examples = ", ".join(files[:LISTED]) + (f" and {len(files) - LISTED} more" if len(files) > LISTED else "")
        raise ConfigError(key, name, f"give one of its files or a glob: {examples}", "matches no file")
    return matches


def listing(name: HubName, key: str) -> list[str]:
    """Files of the repository at the commit of ``name``, sorted."""
    there = _cached_listing(name)
    if there is None:
        folder = fetch(name, SMALL if name.kind == "model" else ("README.md",), key)
        there = _cached_listing(name)
    if there is None:  # another program fetched it, and the Hub is out of reach
        if name.kind == "dataset":
            fix, reason = "fetch it with the network once", "the cache does not know which files the data set has"
            raise ConfigError(key, name, fix, reason)
        there = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if is_file(path))
    return there


def _cached_listing(name: HubName) -> list[str] | None:
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(name.repository, repo_type=name.kind, revision=str(name.commit))
    except CachedRepoTreeNotFoundError:
        return None
    return sorted(entry.path for entry in tree)


@lru_cache(maxsize=64)
def fetch(name: HubName, patterns: tuple[str, ...], key: str) -> Path:
    """Fetch the matching files of ``name`` (at a commit) into this machine's cache; returns the folder.

    Cached files cause no request. Concurrent processes fetch each file once.

    Raises:
        ConfigError: the files cannot be fetched.
    """
    with asking(name, key):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        options: Any = {"repo_type": name.kind, "revision": name.commit, "allow_patterns": list(patterns)}
        if _cached_listing(name) is not None:  # without the listing the cache cannot tell whether it is complete
            with suppress(LocalEntryNotFoundError):
                return Path(snapshot_download(name.repository, local_files_only=True, **options))
        return Path(snapshot_download(name.repository, **options))


def _as_regex(pattern: str) -> re.Pattern[str]:
    """Regex of a glob as :mod:`glob` reads it: only ``**/`` crosses folders, and wildcards skip hidden names."""
    text = ""
    for part in re.split(r"(\*\*/|\*|\?|\[[^\]]+\])", pattern):
        if part in ("**/", "*", "?"):
            hidden = r"(?!\.)" if not text or text.endswith(("/", ")*")) else ""
            text += {"**/": r"(?:(?!\.)[^/]+/)*", "*": rf"{hidden}[^/]*", "?": rf"{hidden}[^/]"}[part]
        elif part.startswith("[") and part.endswith("]"):
            text += part.replace("[!", "[^", 1)
        else:
            text += re.escape(part)
    try:
        return re.compile(text)
    except re.error:
        return re.compile(re.escape(pattern))


@contextmanager
def asking(name: HubName, key: str) -> Iterator[None]:
    """Turn every error of ``huggingface_hub`` into a ConfigError that names ``key``, the name and the fix."""
    try:
        from huggingface_hub.utils import disable_progress_bars, logging

        logging.set_verbosity_error()  # errors are reported here
        if not sys.stderr.isatty():
            disable_progress_bars()
        yield
    except ConfigError:
        raise
    except Exception as error:
        fix, reason = refusal(name, error)
        raise ConfigError(key, name, fix, reason) from error


def refusal(name: HubName, error: Exception) -> tuple[str, str]:
    """Fix and reason for an error of ``huggingface_hub``."""
    from huggingface_hub import constants, errors

    noun = "model" if name.kind == "model" else "data set"
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None and len(causes) < 8:
        causes.append(cause)
    log_in = "log in (hf auth login) or set HF_TOKEN"
    for cause_ in causes:
        response = getattr(cause_, "response", None)
        status = getattr(response, "status_code", None)
        if isinstance(cause_, errors.GatedRepoError):
            page = f"{constants.ENDPOINT}/{'datasets/' if name.kind == 'dataset' else ''}{name.repository}"
            return f"ask for access on {page}, then {log_in}", f"the {noun} is gated, and this account has no access"
        if isinstance(cause_, errors.RevisionNotFoundError):
            return "give a branch, tag or commit that it has", f"{name.repository} has no revision {name.revision}"
        if isinstance(cause_, errors.LocalTokenNotFoundError):
            return log_in, f"this machine has no token for {constants.ENDPOINT}"
        if isinstance(cause_, errors.RepositoryNotFoundError):
            path = "no such path here, and " if name.kind == "model" and name.revision is None else ""
            fix = f"correct the name; if it is private, {log_in}"
            return fix, f"{path}no {noun} of this name on {constants.ENDPOINT} that this account may see"
        if status in (401, 403):
            return f"{log_in} with a token that may", f"{constants.ENDPOINT} refuses this account ({status})"
        if status is not None:
            fix = "try again later; HF_HUB_OFFLINE=1 uses the cache alone"
            return fix, f"{constants.ENDPOINT} answers with an error ({status})"
        if isinstance(cause_, errors.HFValidationError):
            return "correct the name", _first_line(cause_)
    if constants.HF_HUB_OFFLINE or any(isinstance(cause_, errors.OfflineModeIsEnabled) for cause_ in causes):
        fix = "unset HF_HUB_OFFLINE and fetch it once"
        return fix, f"HF_HUB_OFFLINE is set, and the cache ({constants.HF_HUB_CACHE}) does not hold it whole"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.RevisionResolutionError)) or not isinstance(
        error, OSError
    ):
        fix = "check the network and HF_ENDPOINT; HF_HUB_OFFLINE=1 uses the cache alone"
        broken = any(type(cause_).__name__ in ("RemoteProtocolError", "ReadError") for cause_ in causes)
        noun = "broke the transfer off" if broken else "cannot be reached"
        return fix, f"{constants.ENDPOINT} {noun} ({_first_line(causes[-1])})"
    return "free some space or look at the network, and try again", f"fetching it failed ({_first_line(error)})"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
