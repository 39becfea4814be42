"""Uploads a model to the Hub with a README.md: base model, data, settings and metrics.

The README.md names no path of this machine. Format: https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from mgpu_pipe import __version__
from mgpu_pipe.config.hub import HubName, asking, data_name, fetch, file_lists, hub_name
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import resolve_precision
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError, one_line
from mgpu_pipe.inference.open import StoredModel
from mgpu_pipe.models.fields import builder_of, class_of
from mgpu_pipe.runs.history import read_summary
from mgpu_pipe.system.local_files import MAX_CONFIG_BYTES, parse_yaml, read_bytes

CARD = "README.md"


def model_card(stored: StoredModel, name: str, dtype: str) -> str:
    """The model card of ``stored``, whose name on the Hub is ``name``.

    Args:
        dtype: of the exported weights.
    """
    config = stored.config
    meta: dict[str, Any] = {"library_name": "transformers", "tags": ["mgpu_pipe"]}
    rows = [("weights", f"{dtype}, safetensors")]
    if config is not None:
        base, data = _base_model(config), _datasets(config)
        if base is not None:
            meta["base_model"] = base.repository
        if data:
            meta["datasets"] = sorted({dataset.repository for dataset in data})
        rows += _training_rows(stored, config, base, data)
    rows.append(("written by", f"mgpu_pipe {__version__}"))
    table = "\n".join(["| | |", "|---|---|", *(f"| {label} | {_escape_cell(text)} |" for label, text in rows)])
    loader = builder_of(stored.model.config.model_type, class_of([type(stored.model).__name__]))
    code = [
        f"from transformers import AutoTokenizer, {loader}",
        "",
        f'model = {loader}.from_pretrained("{name}")',
        *([f'tokenizer = AutoTokenizer.from_pretrained("{name}")'] if stored.tokenizer_folder else []),
    ]
    front = yaml.safe_dump(meta, sort_keys=False, allow_unicode=True)
    return "\n".join([f"---\n{front}---\n", f"# {name}\n", table, "\n## Load it\n", "```python", *code, "```", ""])


def _training_rows(
    stored: StoredModel, config: RunConfig, base: HubName | None, data: list[HubName]
) -> list[tuple[str, str]]:
    summary = read_summary(RunPaths(stored.source.parents[1]))
    if base is not None:
        start = f"{base.repository} at commit {base.commit}{_licence_text(base)}"
    elif config.model.path is not None:
        start = "the weights of a local folder"
    else:
        start = f"random weights, seed {config.seed}"
    sets = [f"{name.repository} at commit {name.commit} ({name.files}){_licence_text(name)}" for name in data]
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
    if isinstance(measured, dict) and summary.get("step") == stored.step:  # metrics are of the last step
        for metric in description(config.objective.name).metrics:
            value = measured.get(metric.key)
            if isinstance(value, (int, float)):
                rows.append((metric.name, f"{100 * value:.2f}%" if metric.percent else f"{value:.{metric.digits}g}"))
    return rows


def _base_model(config: RunConfig) -> HubName | None:
    return hub_name(config.model.path) if config.model.path is not None else None


def _datasets(config: RunConfig) -> list[HubName]:
    """The training data sets on the Hub, each at its commit; without local files."""
    names = [data_name(path) for _, files in file_lists(config.data) for path in files.paths]
    return [name for name in names if name is not None and name.commit]


def _licence_text(name: HubName) -> str:
    """The licence in the repository's card as ``, licence NAME``; empty if the card is missing or unreadable."""
    try:
        folder = fetch(replace(name, files=""), (CARD,), "--push")
        text = read_bytes(folder / CARD, MAX_CONFIG_BYTES).decode("utf-8")
        front = parse_yaml(text.split("---")[1]) if text.startswith("---") else {}
        licence = front.get("license") if isinstance(front, dict) else None
    except (BadInputError, OSError, ValueError, yaml.YAMLError):
        licence = None
    return f", licence {licence}" if isinstance(licence, str) else ""


def _escape_cell(text: str) -> str:
    """Escapes text for a cell of a Markdown table."""
    return one_line(text).replace("|", "\\|").replace("<", "&lt;")


def write_card(stored: StoredModel, folder: Path, name: str, dtype: str) -> None:
    (folder / CARD).write_text(model_card(stored, name, dtype), encoding="utf-8")


KEY = "--push"
REPLACED = ["model*.safetensors", "model.safetensors.index.json", "pytorch_model*", "tokenizer*"]
"""Files of an earlier push that this one deletes; a library that finds two models loads the wrong one."""


def push_target(text: str) -> HubName:
    """The repository that ``--push`` names, after the Hub has accepted the user's token.

    Raises:
        ConfigError: the name is wrong, the token is missing or unknown, or the Hub cannot be reached.
    """
    name = hub_name(f"{text}@main")
    if name is None or name.revision != "main":
        raise ConfigError(KEY, text, "give <org>/<name>")
    name = HubName("model", text, None)
    with asking(name, KEY):
        from huggingface_hub import HfApi

        HfApi().whoami()
    return name


def push_folder(folder: Path, name: HubName, private: bool, message: str) -> str:
    """Upload ``folder`` as one commit and return its address; creates the repository if it does not exist.

    Args:
        private: of a new repository; an existing one keeps its visibility.

    Raises:
        ConfigError: this account may not write there, or the Hub cannot be reached.
    """
    with asking(name, KEY):
        from huggingface_hub import HfApi

        hub = HfApi()
        hub.create_repo(name.repository, private=private or None, exist_ok=True)
        done = hub.upload_folder(
            repo_id=name.repository, folder_path=folder, commit_message=message, delete_patterns=REPLACED
        )
        return str(done.commit_url)
