"""FlashAttention 3 through torch; its package is played by operators that compute nothing, for no GPU is here."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch.nn import attention

from mgpu_pipe.models.kernels.packed_attention import use_flash_attention_3


def test_torch_is_told_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    for name in ("fwd", "bwd"):
        library.define(f"{name}(Tensor query) -> Tensor")
    assert attention.current_flash_attention_impl() is None
    try:
        use_flash_attention_3()
        assert attention.current_flash_attention_impl() == "FA3"
    finally:
        attention.restore_flash_attention_impl()
        library._destroy()
