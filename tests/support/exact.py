"""Cases computed in float64 throughout, where rounding hides nothing and no first gradient is too near to zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from mgpu_pipe.parallel import fsdp
from tests.support import training
from tests.support.plain_training import assembled

BOUND = 1e-12


def _norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.variance_epsilon)


def _double(model: Any) -> Any:
    if model.config.model_type == "mixtral":
        model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    return model.double()


@contextmanager
def in_float64() -> Iterator[None]:
    """Cases are of float64; so are norms, losses and FSDP's gradients, which go to fp32 otherwise."""
    built, exact = training.built, MixedPrecisionPolicy()
    with ExitStack() as stack:
        for norm in (LlamaRMSNorm, MixtralRMSNorm, Qwen3RMSNorm):
            stack.enter_context(mock.patch.object(norm, "forward", _norm))
        stack.enter_context(mock.patch.object(training, "built", lambda case: _double(built(case))))
        stack.enter_context(mock.patch.object(fsdp, "MixedPrecisionPolicy", return_value=exact))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of two tensors, relative to the second's length."""
    return float((found - expected).norm() / expected.norm())


def worst_gradient(results: list[training.Outcome], expected: dict[str, Any]) -> tuple[float, str]:
    gradients = assembled([result.gradients for result in results])
    assert gradients.keys() == expected["gradients"].keys()
    assert all(gradient.dtype == torch.float64 for gradient in gradients.values())
    return max((distance(gradients[name], truth), name) for name, truth in expected["gradients"].items())
