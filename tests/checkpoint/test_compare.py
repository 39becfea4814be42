"""What may differ on a resume, by DESIGN 9, key by key of the schema."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass
from typing import Any

import pytest

from mgpu_pipe.checkpoint.compare import FIXED, FREE, TOLD, check_resume_compatible
from mgpu_pipe.config.schema import RunConfig


def _changed(key: str, value: object) -> dict[str, Any]:
    plain = asdict(RunConfig())
    *path, last = key.split(".")
    node = plain
    for part in path:
        node = node[part]
    node[last] = value
    return plain


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("strategy.dp_shard", 4), ("strategy.name", "fsdp"), ("trainer.devices", 4), ("trainer.num_nodes", 2),
        ("data.micro_batch_size", 2), ("data.num_workers", 3), ("data.cache_dir", "/x"), ("trainer.max_steps", 9),
        ("trainer.max_epochs", 2), ("trainer.log_every_n_steps", 5), ("logger", {"csv": {"_target_": "x.Y"}}),
        ("checkpoint.keep_last", 9), ("launch.max_restarts", 1), ("run.name", "other"), ("model.name", "Llama"),
        ("objective.loss_chunk_tokens", 64), ("callbacks", {"a": {"_target_": "x.Y"}}),
    ],
)  # fmt: skip
def test_what_does_not_change_the_result_may_differ(key: str, value: object) -> None:
    assert check_resume_compatible(asdict(RunConfig()), _changed(key, value)) == ([], [])


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("optimizer.lr", 1e-3, "optimizer.lr: 0.0003 -> 0.001"),
        ("optimizer.options", {"betas": [0.9, 0.95]}, "optimizer.options.betas: absent -> [0.9, 0.95]"),
        ("precision.name", "bf16", "precision.name: fp32 -> bf16"),
        ("scheduler.total_steps", 50, "scheduler.total_steps: null -> 50"),
        ("trainer.gradient_clip_val", None, "trainer.gradient_clip_val: 1.0 -> null"),
        ("trainer.deterministic", True, "trainer.deterministic: false -> true"),
    ],
)
def test_optimizer_settings_and_precision_may_differ_with_a_notice(key: str, value: object, line: str) -> None:
    assert check_resume_compatible(asdict(RunConfig()), _changed(key, value)) == ([], [line])


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("seed", 5, "seed: 1234 -> 5"),
        ("data.global_batch_size", 64, "data.global_batch_size: 32 -> 64"),
        ("data.seq_len", 128, "data.seq_len: 256 -> 128"),
        ("data.paths", ["a.txt"], "data.paths: [] -> ['a.txt']"),
        ("model.config", {"hidden_size": 64}, "model.config.hidden_size: absent -> 64"),
        ("model.type", "gpt2", "model.type: null -> gpt2"),
        ("objective.name", "mlm", "objective.name: causal_lm -> mlm"),
        ("optimizer._target_", "torch.optim.SGD", "optimizer._target_: torch.optim.AdamW -> torch.optim.SGD"),
        ("peft", {"rank": 8}, "peft.rank: absent -> 8"),
    ],
)
def test_model_data_objective_batch_and_seed_may_not(key: str, value: object, line: str) -> None:
    assert check_resume_compatible(asdict(RunConfig()), _changed(key, value)) == ([line], [])


def test_several_differences_are_all_listed() -> None:
    current = _changed("seed", 5)
    current["data"]["seq_len"], current["optimizer"]["lr"] = 8, 1.0
    errors, notices = check_resume_compatible(asdict(RunConfig()), current)
    assert errors == ["data.seq_len: 256 -> 8", "seed: 1234 -> 5"] and notices == ["optimizer.lr: 0.0003 -> 1.0"]


def test_a_checkpoint_older_than_a_key_counts_as_its_default() -> None:
    saved = asdict(RunConfig())
    del saved["data"]["packing"], saved["precision"]
    assert check_resume_compatible(saved, asdict(RunConfig())) == ([], [])
    assert check_resume_compatible(saved, _changed("data.packing", "none"))[0] == ["data.packing: best_fit -> none"]


def test_every_key_that_is_classed_exists() -> None:
    def exists(key: str) -> bool:
        node: object = RunConfig()
        for part in key.split("."):
            if not is_dataclass(node) or part not in {field.name for field in fields(node)}:
                return False
            node = getattr(node, part)
        return True

    assert [key for key in (*FREE, *TOLD, *FIXED) if not exists(key)] == []
