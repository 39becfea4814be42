from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _cache_of_no_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs made here are this user's own, which is remembered in a cache; it must not be that of who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGPU_PIPE_CACHE", str(tmp_path_factory.mktemp("user") / "cache"))
        yield
