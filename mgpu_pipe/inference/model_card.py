"""The README.md of a model that is pushed to the Hub: what was trained, from what, on what, and what it reached.

It names no path of this machine. Format: https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from mgpu_pipe import __version__
from mgpu_pipe.config.hub import HubName, data_name, fetch, file_lists, hub_name
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.plain_files import MAX_CONFIG_BYTES, parse_yaml, read_bytes
from mgpu_pipe.config.resolve import resolve_precision
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, one_line
from mgpu_pipe.inference.load import StoredModel
from mgpu_pipe.models.fields import class_of, maker_of
from mgpu_pipe.runs.summary import read_summary

CARD = "README.md"


def model_card(stored: StoredModel, name: str, dtype: str) -> str:
    """The card of ``stored``, which becomes ``name`` on the Hub.

    Args:
        dtype: of the exported weights.
    """
    config = stored.config
    meta: dict[str, Any] = {"library_name": "transformers", "tags": ["mgpu_pipe"]}
    rows = [("weights", f"{dtype}, safetensors")]
    if config is not None:
        base, data = _base(config), _datasets(config)
        if base is not None:
            meta["base_model"] = base.repository
        if data:
            meta["datasets"] = sorted({one.repository for one in data})
        rows += _facts(stored, config, base, data)
    rows.append(("written by", f"mgpu_pipe {__version__}"))
    table = "\n".join(["| | |", "|---|---|", *(f"| {what} | {_plain(told)} |" for what, told in rows)])
    loader = maker_of(stored.model.config.model_type, class_of([type(stored.model).__name__]))
    code = [
        f"from transformers import AutoTokenizer, {loader}",
        "",
        f'model = {loader}.from_pretrained("{name}")',
        *([f'tokenizer = AutoTokenizer.from_pretrained("{name}")'] if stored.tokenizer_folder else []),
    ]
    front = yaml.safe_dump(meta, sort_keys=False, allow_unicode=True)
    return "\n".join([f"---\n{front}---\n", f"# {name}\n", table, "\n## Load it\n", "```python", *code, "```", ""])


def _facts(stored: StoredModel, config: RunConfig, base: HubName | None, data: list[HubName]) -> list[tuple[str, str]]:
    summary = read_summary(RunPaths(stored.source.parents[1]))
    if base is not None:
        start = f"{base.repository} at commit {base.commit}{_licence(base)}"
    elif config.model.path is not None:
        start = "the weights of a local folder"
    else:
        start = f"random weights, seed {config.seed}"
    sets = [f"{one.repository} at commit {one.commit} ({one.files}){_licence(one)}" for one in data]
    local = "" if sets or not any(files.paths for _, files in file_lists(config.data)) else ", local files"
    world = summary.get("world_size")
    spread = f" on {world} process{'' if world == 1 else 'es'}" if isinstance(world, int) else ""
    size = f" of {config.data.seq_len} tokens" if config.data.tokens() else ""
    rows = [
        ("model type", str(stored.model.config.model_type)),
        ("trained from", start),
        ("data", "; ".join(sets) or f"{config.data.source}{local}"),
        ("objective", config.objective.name),
        ("steps", f"{stored.step} of {config.data.global_batch_size} samples{size}"),
        ("optimizer", f"{config.optimizer._target_.rpartition('.')[2]}, learning rate {config.optimizer.lr}"),
        ("strategy", f"{config.strategy.name}{spread}, {resolve_precision(config)}"),
    ]
    measured = summary.get("metrics")
    if isinstance(measured, dict) and summary.get("step") == stored.step:  # they are the last step's
        for metric in description(config.objective.name).metrics:
            value = measured.get(metric.key)
            if isinstance(value, (int, float)):
                rows.append((metric.name, f"{100 * value:.2f}%" if metric.percent else f"{value:.{metric.digits}g}"))
    return rows


def _base(config: RunConfig) -> HubName | None:
    return hub_name(config.model.path) if config.model.path is not None else None


def _datasets(config: RunConfig) -> list[HubName]:
    """The data sets on the Hub that were trained on, each at its commit; local files are left out."""
    names = [data_name(path) for _, files in file_lists(config.data) for path in files.paths]
    return [name for name in names if name is not None and name.commit]


def _licence(name: HubName) -> str:
    """The licence that a repository's own card names, where it can be had; it decides nothing."""
    try:
        folder = fetch(replace(name, files=""), (CARD,), "--push")
        text = read_bytes(folder / CARD, MAX_CONFIG_BYTES).decode("utf-8")
        front = parse_yaml(text.split("---")[1]) if text.startswith("---") else {}
        licence = front.get("license") if isinstance(front, dict) else None
    except (BadInputError, OSError, ValueError, yaml.YAMLError):
        licence = None
    return f", licence {licence}" if isinstance(licence, str) else ""


def _plain(text: str) -> str:
    """In a table's cell."""
    return one_line(text).replace("|", "\\|").replace("<", "&lt;")


def write_card(stored: StoredModel, folder: Path, name: str, dtype: str) -> None:
    (folder / CARD).write_text(model_card(stored, name, dtype), encoding="utf-8")
