"""A step of a tiny model by torch and by Liger's kernels in Triton's interpreter; a program, for the interpreter is
chosen before Triton is imported. Prints the errors as JSON.

    TRITON_INTERPRET=1 python -m tests.kernels.liger_steps <model types> [--checkpoint full|selective] [--twice]
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

import numpy as np
import torch
import triton.language as tl
from liger_kernel.ops import geglu, rms_norm
from triton.runtime import interpreter

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.kernels import layers as liger
from mgpu_pipe.parallel.checkpointing import apply_activation_checkpointing
from tests.support.tiny import COMMON, global_batch

CALLS: Counter[str] = Counter()
"""By name of a kernel."""
MORE: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 16},
    "gemma3_text": {"sliding_window": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "hunyuan_v1_dense": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "qwen3": {"head_dim": 8},
    "smollm3": {"pad_token_id": 0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"pad_token_id": 0, "partial_rotary_factor": 0.5},
}


def interpret() -> None:
    """Fill what Triton 3.9's interpreter lacks: scalars of floating point, which a compiled kernel gets as fp32, and
    functions of CUDA's libdevice. And have tensors on the CPU pass for those of a GPU."""
    convert, run = interpreter._implicit_cvt, interpreter.GridExecutor.__call__

    def scalars_too(value: Any) -> Any:
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return convert(value)

    def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
        CALLS[executor.fn.__name__] += 1
        return run(executor, *args, **kwargs)

    interpreter._implicit_cvt = scalars_too
    interpreter.GridExecutor.__call__ = counted
    rms_norm.rsqrt = lambda x: 1 / tl.sqrt(x)
    geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
    liger.on_gpu = lambda states: True


def step(model: Any, batch: dict[str, torch.Tensor], twice: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of packed rows, and every gradient; of the second of two backward passes where ``twice``."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    if twice:
        loss.backward(retain_graph=True)
        model.zero_grad()
    loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return loss.item(), gradients


def compared(model_type: str, checkpoint: Any, twice: bool) -> dict[str, Any]:
    """Relative errors of the loss and of the worst gradient, and how often each kernel ran."""
    model: Any = build_meta(ModelConfig(type=model_type, config={**COMMON, **MORE.get(model_type, {})}))
    materialise(model, 1, torch.device("cpu"))
    for weight in model.parameters():  # norms are not to be ones, nor biases zeros
        weight.data += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    batch = global_batch(0, 2)
    loss, gradients = step(model, batch)
    liger.use_liger(model)
    apply_activation_checkpointing(model, checkpoint)
    CALLS.clear()
    other, others = step(model, batch, twice)
    assert gradients.keys() == others.keys()
    errors = {name: float((others[name] - one).norm() / one.norm()) for name, one in gradients.items()}
    worst = max(errors, key=lambda name: errors[name])
    return {"loss": abs(other - loss) / loss, "gradient": errors[worst], "worst": worst, "calls": dict(CALLS)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="+")
    parser.add_argument("--checkpoint", default="none")
    parser.add_argument("--twice", action="store_true")
    asked = parser.parse_args()
    interpret()
    print(json.dumps({name: compared(name, asked.checkpoint, asked.twice) for name in asked.types}))


if __name__ == "__main__":
    main()
