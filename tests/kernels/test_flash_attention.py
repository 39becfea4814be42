"""transformers' flash attention is told where documents start. The package is played, one document at a time; oracle:
the same model with torch's attention and a mask."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import attention
from transformers import modeling_flash_attention_utils as flash_attention

from mgpu_pipe.architectures.find import families_with
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.kernels.packed_attention import use_flash_attention_3
from mgpu_pipe.objectives.packed_text import forward_kwargs, wants_starts
from mgpu_pipe.system.compat.transformers_private import set_attention, works_with_flash_attention
from tests.checks.test_packing import CUTS, packed_batch
from tests.models.tiny import tiny_model
from tests.support.sampling import one_in

LOOKING = {"nemotron", "stablelm"}
"""Families whose blocks do not hand on what they do not know."""
UNTRIED = {"gpt2", "gpt_neo"}
"""The first has no linear layer, which transformers asks for the type to compute in; the other's class of attention is
chosen when it is built."""
FAMILIES = [name for name in families_with(lambda family: family.packing == "positions") if name not in UNTRIED]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """Of the package's signature: (tokens, heads, size) each."""
    assert isinstance(max_seqlen_q, int) and max_seqlen_k == max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
    groups, outputs = q.shape[1] // k.shape[1], []
    k, v = (states.repeat_interleave(groups, 1) for states in (k, v))
    for begin, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        at = torch.arange(end - begin)
        distance = at[:, None] - at[None, :]
        seen = (distance >= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
        if window_size[0] >= 0:
            seen = seen & (distance <= window_size[0])
        queries, keys, values = (states[begin:end].transpose(0, 1) for states in (q, k, v))
        scores = queries @ keys.mT * (softmax_scale or q.shape[-1] ** -0.5)
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        outputs.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("flash_attn_interface")
    package.__spec__ = ModuleSpec("flash_attn_interface", None)
    package.flash_attn_func = package.flash_attn_with_kvcache = None
    package.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    monkeypatch.setattr(flash_attention, "_loaded_implementation", None)

    def looked_for(*_: object) -> None:
        raise AssertionError("a layer looked for the documents")

    monkeypatch.setattr(flash_attention, "prepare_fa_kwargs_from_position_ids", looked_for)


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("family", one_in(6, FAMILIES))
def test_no_layer_looks_for_documents(family: str) -> None:
    model: Any = materialise(build_meta(tiny_model(family)), 1, "cpu").eval()
    assert works_with_flash_attention(model)
    batch = packed_batch()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
        expected = model(**forward_kwargs(model, batch)).logits
        set_attention(model.config, "flash_attention_3")
        assert wants_starts(model)
        kwargs = forward_kwargs(model, batch)
        assert kwargs["cu_seq_lens_q"][: 1 + sum(map(len, CUTS))].tolist() == [0, 5, 9, 12, 14, 21, 24]
        if family in LOOKING:
            with pytest.raises(AssertionError, match="a layer looked for the documents"):
                model(**kwargs)
            return
        found = model(**kwargs).logits.view_as(expected)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


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
