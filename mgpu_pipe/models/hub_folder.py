"""The weights of a model that the Hub has: safetensors alone, fetched when they are wanted. No torch."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from mgpu_pipe.config.hub import SMALL, fetch, hub_name, is_at_commit, listing, local_folder
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.folder import ADAPTER, PICKLES, WEIGHTS, weight_files


def whole_folder(path: Path | str, key: str = "model.path") -> Path:
    """The folder of a model with its weights: a path as it is, a name at a commit fetched, once a machine.

    Raises:
        ConfigError: it cannot be fetched, or has no safetensors weights.
    """
    folder = local_folder(path, key)
    if not is_at_commit(path):
        return folder
    check_weights_listed(str(path), key)
    name = hub_name(str(path))
    assert name is not None
    names = [WEIGHTS] if WEIGHTS in listing(name, key) else weight_files(folder)
    return fetch(name, (*SMALL, *names), key)


def check_weights_listed(path: str, key: str = "model.path") -> None:
    """Refuse a name at a commit that has no weights this program reads; none of them is fetched.

    Raises:
        ConfigError: saying what it has instead.
    """
    name = hub_name(path)
    assert name is not None
    there = listing(name, key)
    if WEIGHTS in there or f"{WEIGHTS}.index.json" in there:
        return
    if ADAPTER in there:
        reason = f"{ADAPTER} names other weights, which are not followed"
        raise ConfigError(key, path, "give a model of whole weights", reason)
    pickled = [one for one in there if any(fnmatch(one, pattern) for pattern in PICKLES)]
    fix = "give a model with safetensors weights (model.safetensors, or its index and shards)"
    reason = f"only pickled weights ({pickled[0]}), which are never fetched for they can run code" if pickled else ""
    raise ConfigError(key, path, fix, reason or "the repository has no weights")
