"""Checks that the configured optimizer can be built, saved, and used on this topology.

torch's optimizers are known. Others, and options that are not plain numbers, are tried on tiny tensors in a separate
process (:mod:`mgpu_pipe.optim.probe`), so that this process does not import torch.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mgpu_pipe.config.group_keys import ADAMW_BF16, StrategyConfig
from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import OptimizerConfig, TrainerConfig
from mgpu_pipe.config.targets.source_class import NoSuchName, NotAClass, Unknown, find_class
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.import_path import python_module
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.deepspeed.deepspeed_config import ENGINE

BF16_BETAS_BELOW = 1 - 2**-7
"""Bound of the betas; from here on a bfloat16 moment does not decay, see :mod:`mgpu_pipe.optim.adamw_bf16`."""
NOT_NEGATIVE = (
    *("eps", "momentum", "alpha", "lr_decay", "initial_accumulator_value", "momentum_decay", "adamw_lr", "adamw_eps"),
)
SWITCHES = ("amsgrad", "maximize", "foreach", "fused", "capturable", "differentiable", "centered", "nesterov")
MOST_STEPS = 99
ADJUSTMENTS = (None, "original", "match_rms_adamw")

Rule = tuple[Callable[[Any], bool], str, str]
"""A function that tests a value, the fix, and the reason."""


def option_errors(optimizer: OptimizerConfig, betas_below: float = 1.0, why_below: str = "") -> list[ConfigError]:
    """An error for every option of ``optimizer`` outside the range that its constructor accepts.

    Args:
        betas_below: exclusive upper bound of the betas.
        why_below: the reason for a bound other than 1.
    """
    errors = []
    for option, value in optimizer.options.items():
        rule = _rule(option, betas_below, why_below)
        if rule is not None and not rule[0](value):
            _, fix, reason = rule
            key = f"optimizer.options.{option}"
            errors.append(ConfigError(key, value, f"give {fix}, or leave it out", reason or "out of range"))
    return errors


def _rule(option: str, betas_below: float, why_below: str) -> Rule | None:
    if option in ("betas", "adamw_betas"):
        below = 1.0 if option == "adamw_betas" else betas_below
        example = "[0.9, 0.95]"
        fix = f"two numbers of at least 0 and below {below:g}, such as {example}"
        return lambda value: is_pair(value) and all(0 <= beta < below for beta in value), fix, why_below
    if option in NOT_NEGATIVE:
        return lambda value: is_number(value) and value >= 0, "a number of at least 0", ""
    if option == "rho":
        return lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1", ""
    if option == "etas":
        fix = "a number above 0 and below 1 and one above 1, such as [0.5, 1.2]"
        return lambda value: is_pair(value) and 0 < value[0] < 1 < value[1], fix, ""
    if option == "step_sizes":
        return is_pair, "two numbers, such as [1e-6, 50]", ""
    if option == "ns_steps":
        most = f"a whole number from 1 to {MOST_STEPS}"
        return lambda value: is_number(value) and value == int(value) and 1 <= value <= MOST_STEPS, most, ""
    if option == "adjust_lr_fn":
        return lambda value: value in ADJUSTMENTS, "original, match_rms_adamw or null", ""
    if option in SWITCHES:
        may_be_null = option in ("foreach", "fused")
        words = "true, false or null" if may_be_null else "true or false"
        return lambda value: isinstance(value, bool) or (value is None and may_be_null), words, ""
    return None


def is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_number, value))


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


MUON = "mgpu_pipe.optim.muon.Muon"
KEY = "optimizer._target_"
ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""torch's optimizers whose update of an element depends only on that element."""
STATE_AT_START = ("Adagrad",)
"""torch's optimizers whose constructor creates the state; DeepSpeed supports this one."""
TIMEOUT_S = 120.0
ADAMW = "use optimizer=adamw without optimizer._target_ and optimizer.options"

Findings = Mapping[str, Any]


def optimizer_errors(
    optimizer: OptimizerConfig, strategy: StrategyConfig, trainer: TrainerConfig, dims: ParallelDims
) -> list[ConfigError]:
    """Errors of ``optimizer`` on this topology, whose sizes must be valid."""
    if optimizer.ema.decay is not None and strategy.offload == "nvme":
        fix = "use strategy=zero3_cpu, or leave it out"
        reason = "strategy.offload=nvme has a weight in memory during its own update only"
        return [ConfigError("optimizer.ema.decay", optimizer.ema.decay, fix, reason)]
    guard = optimizer.spike_guard
    if guard.factor is not None and guard.action == "skip" and strategy.offload == "nvme":
        reason = "strategy.offload=nvme was never tried with an update left out"
        return [ConfigError("optimizer.spike_guard.action", "skip", "use stop, or strategy=zero3_cpu", reason)]
    target, name = optimizer._target_, torch_optimizer_name(optimizer._target_)
    if name == "Muon":
        reason = "it takes matrices alone, and a model has other parameters"
        return [ConfigError(KEY, target, "use optimizer=muon, which gives the others to AdamW", reason)]
    if target == MUON and strategy.engine == ENGINE:
        reason = "ZeRO updates flat pieces of the weights, and Muon needs whole matrices"
        return [ConfigError(KEY, target, f"use strategy=fsdp, or {ADAMW}", reason)]
    if target == ADAMW_BF16 and strategy.offload == "nvme":
        reason = "DeepSpeed swaps state in fp32 alone to the disk"
        return [ConfigError(KEY, target, f"use strategy=zero3_cpu, or {ADAMW}", reason)]
    if name is not None or target in (MUON, ADAMW_BF16):
        in_bf16 = (BF16_BETAS_BELOW, "bfloat16 loses a moment's decay") if target == ADAMW_BF16 else ()
        if errors := option_errors(optimizer, *in_bf16):
            return errors
    below = 0.99 if target == ADAMW_BF16 else 1.0
    plain = all(_is_plain(*option, below) for option in optimizer.options.items())
    if target == MUON and plain:
        return []
    if (name in ELEMENTWISE or target == ADAMW_BF16) and plain:
        findings: Findings = {"scope": "element", "in_place": True, "state_at_start": name in STATE_AT_START}
    else:
        request = {
            "target": target,
            "lr": optimizer.lr,
            "weight_decay": optimizer.weight_decay,
            "options": optimizer.options,
            "cuda": device_type(trainer) == "cuda",
        }
        findings = _probe(json.dumps(request))
    if findings.get("refusal") is not None:
        return [_refusal(optimizer, findings)]
    if target == MUON:  # Muon gathers sharded matrices
        return []
    return [
        *_scope_errors(optimizer, strategy, dims, str(findings["scope"])),
        *_zero_errors(optimizer, strategy, name, findings),
    ]


def torch_optimizer_name(target: str) -> str | None:
    """The class name of one of torch's optimizers, by any import path; None for other classes."""
    try:
        cls = find_class(target)
    except (NoSuchName, NotAClass, Unknown):
        return None
    return cls.name if cls.module.startswith("torch.optim.") else None


def _is_plain(option: str, value: Any, betas_below: float) -> bool:
    """Whether every optimizer that has ``option`` accepts this value, with betas below ``betas_below``."""
    if option in ("betas", "adamw_betas"):
        return is_pair(value) and all(0 <= beta < betas_below for beta in value)
    return option in ("eps", "momentum", "adamw_lr", "adamw_eps") and is_number(value) and 0 <= value < float("inf")


@functools.lru_cache(maxsize=256)
def _probe(request: str) -> Findings:
    """The result of the probe for a JSON request; cached, because a sweep's jobs repeat requests."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = python_module("mgpu_pipe.optim.probe")
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"refusal": f"three steps of it on a tiny tensor take over {TIMEOUT_S:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"refusal": f"trying it on a tiny tensor failed: {last}"}
    findings: Findings = json.loads(lines[-1])
    return findings


def _refusal(optimizer: OptimizerConfig, findings: Findings) -> ConfigError:
    option, target = findings.get("option"), optimizer._target_
    if option is None:
        return ConfigError(KEY, target, "use another optimizer, or correct optimizer.options", str(findings["refusal"]))
    default = f" (the default is {findings['default']})" if findings.get("default") else ""
    key = f"optimizer.options.{option}"
    reason = f"{target} refuses it: {findings['refusal']}"
    return ConfigError(key, optimizer.options[option], f"correct it, or leave it out{default}", reason)


def _scope_errors(
    optimizer: OptimizerConfig, strategy: StrategyConfig, dims: ParallelDims, scope: str
) -> list[ConfigError]:
    if scope == "element":
        return []
    target = optimizer._target_
    zero = strategy.engine == ENGINE
    if scope == "tensor":
        if not zero and dims.dp_shard * dims.cp * dims.tp * dims.ep == 1:
            return []
        reason = "its update of an element depends on the whole tensor, which this strategy cuts"
        return [ConfigError(KEY, target, f"use strategy=ddp, or {ADAMW}", reason)]
    if not zero and dims.world_size == dims.dp_replicate:
        return []
    reason = "its update of a tensor depends on the other tensors, and a rank has not all of them here"
    return [ConfigError(KEY, target, f"use strategy=ddp, or {ADAMW}", reason)]


def _zero_errors(
    optimizer: OptimizerConfig, strategy: StrategyConfig, name: str | None, findings: Findings
) -> list[ConfigError]:
    """Errors with DeepSpeed, which replaces the parameters by flat tensors after the optimizer's construction."""
    if strategy.engine != ENGINE:
        return []
    target, fix = optimizer._target_, f"use strategy=fsdp, or {ADAMW}"
    if not findings["in_place"]:
        return [ConfigError(KEY, target, fix, "it replaces the parameters' tensors, which DeepSpeed shares")]
    if findings["state_at_start"] and (name not in STATE_AT_START or strategy.offload == "nvme"):
        reason = "its constructor makes the state, of the parameters and not of DeepSpeed's parts of them"
        return [ConfigError(KEY, target, fix, reason)]
    return []
