from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inference.support import write_run, write_texts


@pytest.fixture(scope="module", autouse=True)
def _cache_of_no_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A run that is made here is remembered as its maker's, in a cache that those who open it do not have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGPU_PIPE_CACHE", str(tmp_path_factory.mktemp("user") / "cache"))
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, before anybody changes it."""
    base = tmp_path_factory.mktemp("made")
    write_run(base / "run", "llama", write_texts(base / "texts", 4), base / "cache")
    return base / "run"
