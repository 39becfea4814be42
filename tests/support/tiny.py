"""Tiny models and step batchs for tests, and the plain one-process computation they are compared with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.step_batch import IGNORE_INDEX, StepBatch

VOCABULARY, SEQ_LEN = 96, 24
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
BERT = {
    **{name: value for name, value in COMMON.items() if name != "num_key_value_heads"},
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MODELS = {
    "llama": ModelConfig(name="llama", type="llama", config=dict(COMMON)),
    "qwen3": ModelConfig(name="qwen3", type="qwen3", config={**COMMON, "head_dim": 8}),
    "mixtral": ModelConfig(name="mixtral", type="mixtral", config={**COMMON, **EXPERTS}),
    # Fewer experts than ranks.
    "mixtral_2": ModelConfig(
        name="mixtral_2", type="mixtral", config={**COMMON, "num_local_experts": 2, "num_experts_per_tok": 1}
    ),
    "preferences": ModelConfig(name="preferences", type="llama", config=dict(COMMON)),
    "masked": ModelConfig(name="masked", type="bert", config={**BERT}),
    "classes": ModelConfig(name="classes", type="bert", config={**BERT, "num_labels": 3, "pad_token_id": 0}),
    "pairs": ModelConfig(
        name="pairs",
        type="t5",
        config={
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "pad_token_id": 0,
        },
    ),
    # Large enough for what is written in local shards of a mebibyte.
    "wide": ModelConfig(name="wide", type="llama", config={**COMMON, "hidden_size": 256, "intermediate_size": 768}),
    # Widths of which two ranks' halves are multiples of the 64 that four-bit weights share a scale by.
    **{
        f"{family}_128": ModelConfig(
            name=f"{family}_128",
            type=family,
            config={**COMMON, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, **more},
        )
        for family, more in (("llama", {}), ("qwen3", {}), ("mixtral", EXPERTS))
    },
    "gpt2_128": ModelConfig(
        name="gpt2_128",
        type="gpt2",
        config={
            "vocab_size": VOCABULARY,
            "n_embd": 128,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "gpt2": ModelConfig(
        name="gpt2",
        type="gpt2",
        config={
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
}


def model_class(source: ModelConfig) -> str | None:
    """transformers' class for a type that has no causal language model."""
    two_towers = dict.fromkeys(
        ("clip", "siglip", "vision-text-dual-encoder"), "AutoModelForZeroShotImageClassification"
    )
    known = {"t5": "AutoModelForSeq2SeqLM", "vit": "AutoModelForImageClassification", **two_towers}
    seeing = (
        *("llava", "qwen2_5_vl", "qwen3_vl", "smolvlm", "paligemma"),
        *("gemma3", "gemma4", "internvl", "llama4", "mistral3", "phi4_multimodal", "qwen3_5"),
        *("qwen2_5_omni_thinker", "qwen2_audio", "voxtral"),
    )
    known |= dict.fromkeys(seeing, "AutoModelForImageTextToText")
    known |= {"wav2vec2": "AutoModelForCTC", "whisper": "AutoModelForSpeechSeq2Seq"}
    known["audio-spectrogram-transformer"] = "AutoModelForAudioClassification"
    return known.get(str(source.type))


def global_batch(step: int, samples: int = 8) -> dict[str, torch.Tensor]:
    """Packed rows of uneven documents, some labels masked, and one row that is mostly padding."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCABULARY, (samples, SEQ_LEN + 1), generator=generator)
    labels = ids[:, 1:].clone()
    positions = torch.arange(SEQ_LEN).expand(samples, -1).clone()
    for row in range(samples):
        cut = int(torch.randint(3, SEQ_LEN - 3, (1,), generator=generator))
        positions[row, cut:] = torch.arange(SEQ_LEN - cut)
        labels[row, cut - 1] = IGNORE_INDEX
        if row % 3 == 1:
            labels[row, cut:] = IGNORE_INDEX
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels, "position_ids": positions}


def step_batch(step: int, rank: int, world_size: int, micro_batch_size: int, samples: int = 8) -> StepBatch:
    batch = global_batch(step, samples)
    share = samples // world_size
    mine = {name: value[rank * share : (rank + 1) * share] for name, value in batch.items()}
    micro_batches = [
        {name: value[at : at + micro_batch_size] for name, value in mine.items()}
        for at in range(0, share, micro_batch_size)
    ]
    loss_denominator = int((batch["labels"] != IGNORE_INDEX).sum())
    return StepBatch(step, step * samples, samples, micro_batches, loss_denominator)


def plain_steps(model: torch.nn.Module, steps: int, lr: float, max_norm: float | None = None) -> dict[str, Any]:
    """The oracle: whole batches, whole logits, stock AdamW, in one process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        batch = global_batch(step)
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE_INDEX)
        optimizer.zero_grad()
        loss.backward()
        present = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(torch.stack([g.double().square().sum() for g in present]).sum().sqrt())
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if max_norm is not None and norm > max_norm:
            for gradient in present:
                gradient.mul_(max_norm / (norm + 1e-6))
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}
