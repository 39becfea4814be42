"""Names on the Hugging Face Hub: which commit they mean, and where their files lie on this machine. No torch.

``<org>/<name>[@revision]`` is a model or a tokenizer, ``hf://datasets/<org>/<name>[@revision]/<file or glob>`` files of
a data set. A run keeps the name at a commit; every process finds the files in its own machine's cache by that name, so
that no path of one machine stands in a configuration. All access is ``huggingface_hub``'s own: its cache, its token,
``HF_ENDPOINT``, ``HF_HUB_OFFLINE``. It is imported only where there is such a name.
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

from mgpu_pipe.config.plugins import FILE_SOURCES
from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.errors import ConfigError

T = TypeVar("T")
DATA = "hf://"
SMALL = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
"""Files of a model that say what it is; its weights come with the launch."""
LISTED = 4
_REPOSITORY = r"\w[\w.-]*/\w[\w.-]*"
_MODEL = re.compile(rf"({_REPOSITORY})(?:@([^@\s]+))?")
_DATASET = re.compile(rf"hf://datasets/({_REPOSITORY})(?:@([^@/\s]+))?/(\S.*)")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubName:
    """What a name says.

    Attributes:
        revision: a branch, tag or commit; None: the repository's main branch.
        files: of a data set, a file or a glob.
    """

    kind: Literal["model", "dataset"]
    repository: str
    revision: str | None
    files: str = ""

    @property
    def commit(self) -> str | None:
        """The revision, where it is a commit."""
        return self.revision if self.revision and _COMMIT.fullmatch(self.revision) else None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{at}" if self.kind == "model" else f"hf://datasets/{self.repository}{at}/{self.files}"


def hub_name(text: str) -> HubName | None:
    """The model or tokenizer that ``text`` names; None for a path. What exists here is a path, as for transformers."""
    found = _MODEL.fullmatch(text)
    if found is None or text.endswith(".json"):
        return None
    name = HubName("model", *found.groups())
    return name if name.commit or not Path(text).exists() else None


def data_name(text: str, key: str = "data.paths") -> HubName | None:
    """The files of a data set that ``text`` names; None for a path.

    Raises:
        ConfigError: it begins like such a name, but is not one.
    """
    if not text.startswith(DATA):
        return None
    found = _DATASET.fullmatch(text)
    if found is None:
        raise ConfigError(key, text, "write it as hf://datasets/<org>/<name>[@revision]/<file or glob>")
    return HubName("dataset", *found.groups())


def hub_names(config: RunConfig) -> Iterator[tuple[str, HubName]]:
    """Every key that names something on the Hub, and the name.

    Raises:
        ConfigError: as of :func:`data_name`.
    """
    data = config.data
    for key, text in (("model.path", config.model.path or ""), ("data.tokenizer", data.tokenizer)):
        if (name := hub_name(text)) is not None:
            yield key, name
    for section, files in file_lists(data):
        for key, paths in ((f"{section}.paths", files.paths), (f"{section}.validation_paths", files.validation_paths)):
            for path in paths if files.source in FILE_SOURCES else ():
                if (name := data_name(path, key)) is not None:
                    yield key, name


def file_lists(data: DataConfig) -> Iterator[tuple[str, Any]]:
    """What has ``paths`` and ``validation_paths``, by its key: ``data``, and each source of a mixture."""
    yield "data", data
    yield from ((f"data.sources.{name}", one) for name, one in _mixed(data).items())


def _mixed(data: DataConfig) -> dict[str, Any]:
    return getattr(data, "sources", {}) if data.source == "mixture" else {}


def _with_files(files: T, names: dict[str, str]) -> T:
    lists = {name: [names.get(one, one) for one in getattr(files, name)] for name in ("paths", "validation_paths")}
    return replace(files, **lists)  # type: ignore[type-var]  # a dataclass


def names_files(config: RunConfig) -> bool:
    """Whether a key names a model, a tokenizer or data, which may be here or on the Hub."""
    data = config.data
    files = any(one.paths or one.validation_paths for _, one in file_lists(data))
    return config.model.path is not None or data.tokenizer != "auto" or files


def with_names(config: RunConfig, names: dict[str, str]) -> RunConfig:
    """``config`` with other texts in the place of these names."""
    model, data = config.model, config.data
    path = None if model.path is None else names.get(model.path, model.path)
    data = _with_files(replace(data, tokenizer=names.get(data.tokenizer, data.tokenizer)), names)
    if mixed := _mixed(data):
        sources: dict[str, Any] = {name: _with_files(one, names) for name, one in mixed.items()}
        data = replace(data, sources=sources)  # type: ignore[call-arg]  # a mixture's own key
    return replace(config, model=replace(model, path=path), data=data)


def without_revisions(config: RunConfig) -> RunConfig:
    """``config`` with every name as if no revision had been given: what two nodes can be compared by."""
    return with_names(config, {str(name): str(replace(name, revision=None)) for _, name in hub_names(config)})


def commit_of(name: HubName, key: str) -> str:
    """The commit that a name means now; without the Hub, the one that the cache knows.

    Raises:
        ConfigError: there is no such name, or it cannot be asked for.
    """
    with asking(name, key):
        from huggingface_hub import HfApi

        return HfApi().resolve_revision(name.repository, repo_type=name.kind, revision=name.revision).resolved


def local_folder(text: str | Path, key: str = "model.path") -> Path:
    """The folder of a model or tokenizer: a path as it is, a name at a commit in this machine's cache, its
    :data:`SMALL` files fetched.

    Raises:
        ConfigError: they cannot be fetched.
    """
    name = _at_commit(text)
    return Path(text).expanduser() if name is None else fetch(name, SMALL, key)


def is_at_commit(text: str | Path) -> bool:
    """Whether this is a name at a commit, and so no path."""
    return _at_commit(text) is not None


def _at_commit(text: str | Path) -> HubName | None:
    found = _MODEL.fullmatch(str(text))
    name = None if found is None else HubName("model", *found.groups())
    return name if name is not None and name.commit else None


def data_files(text: str, key: str) -> list[Path]:
    """The files of a data set's name at a commit, sorted, fetched into this machine's cache.

    Raises:
        ConfigError: no file of the repository matches, or they cannot be fetched.
    """
    name = data_name(text, key)
    assert name is not None and name.commit, text
    names = matching(name, key)
    folder = fetch(name, tuple(glob.escape(one) for one in names), key)
    return [folder / one for one in names]


def matching(name: HubName, key: str) -> list[str]:
    """The repository's files that the file or glob of ``name`` means.

    Raises:
        ConfigError: none does.
    """
    there = listing(name, key)
    pattern = _as_regex(name.files)
    found = sorted(one for one in there if one == name.files or pattern.fullmatch(one))
    if not found:
        shown = ", ".join(there[:LISTED]) + (f" and {len(there) - LISTED} more" if len(there) > LISTED else "")
        raise ConfigError(key, name, f"give a file or a glob of what is there: {shown}", "matches no file")
    return found


def listing(name: HubName, key: str) -> list[str]:
    """The files that the repository has at the commit of ``name``, sorted."""
    there = _cached_listing(name)
    if there is None:
        folder = fetch(name, SMALL if name.kind == "model" else ("README.md",), key)
        there = _cached_listing(name)
    if there is None:  # what another program fetched, and nothing can be asked now
        if name.kind == "dataset":
            fix, reason = "fetch it with the network once", "the cache does not know which files the data set has"
            raise ConfigError(key, name, fix, reason)
        there = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
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
    """The folder of ``name`` (at a commit) in this machine's cache, with the files that match; nothing is asked of the
    Hub where they are there. Processes that call it at once fetch a file once.

    Raises:
        ConfigError: they cannot be fetched.
    """
    with asking(name, key):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        what: Any = {"repo_type": name.kind, "revision": name.commit, "allow_patterns": list(patterns)}
        if _cached_listing(name) is not None:  # without it the cache cannot tell whether it holds all
            with suppress(LocalEntryNotFoundError):
                return Path(snapshot_download(name.repository, local_files_only=True, **what))
        return Path(snapshot_download(name.repository, **what))


def _as_regex(pattern: str) -> re.Pattern[str]:
    """A glob as :mod:`glob` reads it: ``*`` stays in a folder, ``**/`` does not, names with a dot first are named."""
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
    """Turn what the library raises, which has no base of its own, into one line.

    Raises:
        ConfigError: naming ``key``, the name and what to do.
    """
    try:
        from huggingface_hub.utils import disable_progress_bars, logging

        logging.set_verbosity_error()  # what goes wrong is told here
        if not sys.stderr.isatty():
            disable_progress_bars()
        yield
    except ConfigError:
        raise
    except Exception as error:
        fix, reason = refusal(name, error)
        raise ConfigError(key, name, fix, reason) from error


def refusal(name: HubName, error: Exception) -> tuple[str, str]:
    """What to do about an error of ``huggingface_hub``, and what happened."""
    from huggingface_hub import constants, errors

    what = "model" if name.kind == "model" else "data set"
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None and len(causes) < 8:
        causes.append(cause)
    log_in = "log in (hf auth login) or set HF_TOKEN"
    for one in causes:
        response = getattr(one, "response", None)
        status = getattr(response, "status_code", None)
        if isinstance(one, errors.GatedRepoError):
            page = f"{constants.ENDPOINT}/{'datasets/' if name.kind == 'dataset' else ''}{name.repository}"
            return f"ask for access on {page}, then {log_in}", f"the {what} is gated, and this account has no access"
        if isinstance(one, errors.RevisionNotFoundError):
            return "give a branch, tag or commit that it has", f"{name.repository} has no revision {name.revision}"
        if isinstance(one, errors.LocalTokenNotFoundError):
            return log_in, f"there is no token for {constants.ENDPOINT}"
        if isinstance(one, errors.RepositoryNotFoundError):
            path = "no such path here, and " if name.kind == "model" and name.revision is None else ""
            fix = f"correct the name; if it is private, {log_in}"
            return fix, f"{path}no {what} of this name on {constants.ENDPOINT} that this account may see"
        if status in (401, 403):
            return f"{log_in} with a token that may", f"{constants.ENDPOINT} refuses this account ({status})"
        if status is not None:
            fix = "try again later; HF_HUB_OFFLINE=1 goes on with what the cache holds"
            return fix, f"{constants.ENDPOINT} answers with an error ({status})"
        if isinstance(one, errors.HFValidationError):
            return "correct the name", _first_line(one)
    if constants.HF_HUB_OFFLINE or any(isinstance(one, errors.OfflineModeIsEnabled) for one in causes):
        fix = "unset HF_HUB_OFFLINE and fetch it once"
        return fix, f"HF_HUB_OFFLINE is set, and the cache ({constants.HF_HUB_CACHE}) does not hold it whole"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.RevisionResolutionError)) or not isinstance(
        error, OSError
    ):
        fix = "look at the network and HF_ENDPOINT; HF_HUB_OFFLINE=1 goes on with what the cache holds"
        broken = any(type(one).__name__ in ("RemoteProtocolError", "ReadError") for one in causes)
        what = "broke the transfer off" if broken else "cannot be reached"
        return fix, f"{constants.ENDPOINT} {what} ({_first_line(causes[-1])})"
    return "free some space or look at the network, and try again", f"fetching it failed ({_first_line(error)})"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
