from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _cache_of_no_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A run that is made here is remembered as its maker's, in a cache that those who open it do not have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGPU_PIPE_CACHE", str(tmp_path_factory.mktemp("user") / "cache"))
        yield
