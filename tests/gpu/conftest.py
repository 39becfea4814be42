"""Where the tests of this folder run: on a GPU where there is one, else dry, on the CPU, small and in fp32."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
