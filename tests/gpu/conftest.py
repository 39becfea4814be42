"""Where the tests of this folder run: on a GPU where there is one, else dry, on the CPU, small and in fp32."""

from __future__ import annotations

import os

import pytest
import torch

# Of programs that tests start: several compile beside one another, and their models are tiny.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
