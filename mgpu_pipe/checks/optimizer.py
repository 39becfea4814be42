"""Whether the configured optimizer can be built, saved, and used on this topology. No torch in this process.

torch's own optimizers are known; any other, and values that are not plain numbers, are tried on tiny tensors in a
process of their own (:mod:`mgpu_pipe.training.optimizer_probe`).
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.source_class import NoSuchName, NotAClass, Unknown, find_class
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.strategies.deepspeed_config import ENGINE
from mgpu_pipe.topology import ParallelDims

MUON = "mgpu_pipe.parallel.muon.Muon"
ADAMW_BF16 = "mgpu_pipe.training.adamw_bf16.AdamWBf16"
KEY = "optimizer._target_"
ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""torch's optimizers whose update of an element depends on that element alone."""
STATE_AT_START = ("Adagrad",)
"""torch's optimizers whose constructor makes the state; DeepSpeed knows this one."""
TIMEOUT_S = 120.0
ADAMW = "use optimizer=adamw without optimizer._target_ and optimizer.options"

Findings = Mapping[str, Any]


def optimizer_errors(config: RunConfig, dims: ParallelDims) -> list[ConfigError]:
    """What is wrong with ``optimizer``, given sizes that are right."""
    optimizer = config.optimizer
    if optimizer.ema.decay is not None and config.strategy.offload == "nvme":
        fix = "use strategy=zero3_cpu, or leave it out"
        reason = "strategy.offload=nvme has a weight in memory during its own update only"
        return [ConfigError("optimizer.ema.decay", optimizer.ema.decay, fix, reason)]
    guard = optimizer.spike_guard
    if guard.factor is not None and guard.action == "skip" and config.strategy.offload == "nvme":
        reason = "strategy.offload=nvme was never tried with an update left out"
        return [ConfigError("optimizer.spike_guard.action", "skip", "use stop, or strategy=zero3_cpu", reason)]
    target, name = optimizer._target_, torchs_own(optimizer._target_)
    if name == "Muon":
        reason = "it takes matrices alone, and a model has other parameters"
        return [ConfigError(KEY, target, "use optimizer=muon, which gives the others to AdamW", reason)]
    if target == MUON and config.strategy.engine == ENGINE:
        reason = "ZeRO updates flat pieces of the weights, and Muon needs whole matrices"
        return [ConfigError(KEY, target, f"use strategy=fsdp, or {ADAMW}", reason)]
    if target == ADAMW_BF16 and config.strategy.offload == "nvme":
        reason = "DeepSpeed swaps state in fp32 alone to the disk"
        return [ConfigError(KEY, target, f"use strategy=zero3_cpu, or {ADAMW}", reason)]
    below = 0.99 if target == ADAMW_BF16 else 1.0
    plain = all(_is_plain(*option, below) for option in optimizer.options.items())
    if target == MUON and plain:
        return []
    if (name in ELEMENTWISE or target == ADAMW_BF16) and plain:
        findings: Findings = {"scope": "element", "in_place": True, "state_at_start": name in STATE_AT_START}
    else:
        given = {
            "target": target,
            "lr": optimizer.lr,
            "weight_decay": optimizer.weight_decay,
            "options": optimizer.options,
            "cuda": device_type(config) == "cuda",
        }
        findings = _tried(json.dumps(given))
    if findings.get("refusal") is not None:
        return [_refusal(config, findings)]
    if target == MUON:  # it puts together what is cut
        return []
    return [*_scope_errors(config, dims, str(findings["scope"])), *_zero_errors(config, name, findings)]


def torchs_own(target: str) -> str | None:
    """The name of one of torch's own optimizers, by whatever path it is named; None for others."""
    try:
        cls = find_class(target)
    except (NoSuchName, NotAClass, Unknown):
        return None
    return cls.name if cls.module.startswith("torch.optim.") else None


def _is_plain(option: str, value: object, betas_below: float) -> bool:
    """Whether every optimizer that takes ``option``, and betas up to there, takes this value."""
    if option in ("betas", "adamw_betas"):
        return isinstance(value, list | tuple) and len(value) == 2 and all(_in(beta, betas_below) for beta in value)
    return option in ("eps", "momentum", "adamw_lr", "adamw_eps") and _in(value, float("inf"))


def _in(value: object, below: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < below


@functools.lru_cache(maxsize=256)
def _tried(given: str) -> Findings:
    """What the probe finds out; a sweep's jobs ask the same."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "mgpu_pipe.training.optimizer_probe"]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"refusal": f"three steps of it on a tiny tensor take over {TIMEOUT_S:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"refusal": f"trying it on a tiny tensor failed: {last}"}
    findings: Findings = json.loads(lines[-1])
    return findings


def _refusal(config: RunConfig, findings: Findings) -> ConfigError:
    option, target = findings.get("option"), config.optimizer._target_
    if option is None:
        return ConfigError(KEY, target, "use another optimizer, or correct optimizer.options", str(findings["refusal"]))
    default = f" (the default is {findings['default']})" if findings.get("default") else ""
    key = f"optimizer.options.{option}"
    reason = f"{target} refuses it: {findings['refusal']}"
    return ConfigError(key, config.optimizer.options[option], f"correct it, or leave it out{default}", reason)


def _scope_errors(config: RunConfig, dims: ParallelDims, scope: str) -> list[ConfigError]:
    if scope == "element":
        return []
    target = config.optimizer._target_
    zero = config.strategy.engine == ENGINE
    if scope == "tensor":
        if not zero and dims.dp_shard * dims.cp * dims.tp * dims.ep == 1:
            return []
        reason = "its update of an element depends on the whole tensor, which this strategy cuts"
        return [ConfigError(KEY, target, f"use strategy=ddp, or {ADAMW}", reason)]
    if not zero and dims.world_size == dims.dp_replicate:
        return []
    reason = "its update of a tensor depends on the other tensors, and a rank has not all of them here"
    return [ConfigError(KEY, target, f"use strategy=ddp, or {ADAMW}", reason)]


def _zero_errors(config: RunConfig, name: str | None, findings: Findings) -> list[ConfigError]:
    """What DeepSpeed cannot do, which gives the optimizer flat tensors of its own once that is built."""
    if config.strategy.engine != ENGINE:
        return []
    target, fix = config.optimizer._target_, f"use strategy=fsdp, or {ADAMW}"
    if not findings["in_place"]:
        return [ConfigError(KEY, target, fix, "it replaces the parameters' tensors, which DeepSpeed shares")]
    if findings["state_at_start"] and (name not in STATE_AT_START or config.strategy.offload == "nvme"):
        reason = "its constructor makes the state, of the parameters and not of DeepSpeed's parts of them"
        return [ConfigError(KEY, target, fix, reason)]
    return []
