"""The model card of an export, its README.md, and its upload to the Hub.

The card has base model, data, settings, hardware, metrics, and how to load it. It names no path of this machine. Texts
of others, such as names and licences, are escaped: they are data, not Markdown.
Format: https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml

from mgpu_pipe import __version__
from mgpu_pipe.config.hub import HubName, asking, data_name, fetch, file_lists, hub_name
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import resolve_precision
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.errors import BadInputError, ConfigError, one_line
from mgpu_pipe.inference.onnx import FILE, PICTURE_FILE, TEXT_FILE
from mgpu_pipe.inference.open import StoredModel
from mgpu_pipe.models.fields import HEADLESS, builder_of, class_of, has_two_towers
from mgpu_pipe.models.weights.sentence_modules import MODULES
from mgpu_pipe.runs.history import read_summary
from mgpu_pipe.system.local_files import MAX_CONFIG_BYTES, MAX_JSON_BYTES, parse_json, parse_yaml, read_bytes

CARD = "README.md"
MARKUP = re.compile(r"([\\`*\[\]|!~])")
"""Characters that Markdown reads as more than themselves inside a cell."""
Format = Literal["hf", "sentence-transformers", "peft", "gguf", "onnx"]
FORMATS = {
    "hf": "safetensors",
    "sentence-transformers": "safetensors",
    "peft": "safetensors, adapters alone",
    "gguf": "GGUF",
    "onnx": "ONNX",
}
GENERATIVE = "AutoModelForCausalLM"


def model_card(stored: StoredModel, name: str, dtype: str, format: Format = "hf", asks_hub: bool = False) -> str:
    """The model card of ``stored``.

    Args:
        name: on the Hub, or of the folder.
        dtype: of the exported weights.
        asks_hub: whether licences of base model and data are read from the Hub.
    """
    config = stored.config
    meta: dict[str, Any] = {"library_name": "transformers" if format == "hf" else format, "tags": ["mgpu_pipe"]}
    rows = [("weights", f"{dtype}, {FORMATS[format]}")]
    licence = _local_licence(stored.maker)
    if config is not None:
        base = hub_name(config.model.path) if config.model.path is not None else None
        data = _datasets(config.data)
        if base is not None:
            meta["base_model"] = base.repository
            licence = licence or (_licence(base) if asks_hub else None)
        if data:
            meta["datasets"] = sorted({dataset.repository for dataset in data})
        rows += _training_rows(stored, base, data, asks_hub)
    rows.append(("licence", f"{licence} of the base model" if licence else "none is given; add it as license: above"))
    rows.append(("written by", f"mgpu_pipe {__version__}"))
    table = "\n".join(["| | |", "|---|---|", *(f"| {label} | {_escape_cell(text)} |" for label, text in rows)])
    front = yaml.safe_dump(meta, sort_keys=False, allow_unicode=True)
    title = _escape_cell(name)
    loading = _loading(stored, name, format)
    return "\n".join([f"---\n{front}---\n", f"# {title}\n", table, "\n## Load it\n", *loading])


def _loading(stored: StoredModel, name: str, format: Format) -> list[str]:
    """Lines that load the export in each engine that takes it."""
    place = re.sub(r"[^\w./-]", "_", name)
    if format == "gguf":
        lines = [f"llama-server --model {place}/model.gguf", f"ollama create {Path(place).name.lower()} -f Modelfile"]
        return ["```bash", *lines, "```", ""]
    if format == "onnx":
        files = (TEXT_FILE, PICTURE_FILE) if has_two_towers(stored.model) else (FILE,)
        opened = [f'session = onnxruntime.InferenceSession("{place}/{file}")' for file in files]
        return ["```python", "import onnxruntime", "", *opened, "```", ""]
    if format == "sentence-transformers":
        code = ["from sentence_transformers import SentenceTransformer", "", f'model = SentenceTransformer("{place}")']
        return ["```python", *code, "```", ""]
    loader = builder_of(stored.model.config.model_type, class_of([type(stored.model).__name__]))
    code = [
        f"from transformers import AutoTokenizer, {loader}",
        *(["from peft import PeftModel"] if format == "peft" else []),
        "",
        f'model = {loader}.from_pretrained("{"BASE_MODEL" if format == "peft" else place}")',
        *([f'model = PeftModel.from_pretrained(model, "{place}")'] if format == "peft" else []),
        *([f'tokenizer = AutoTokenizer.from_pretrained("{place}")'] if stored.tokenizer_folder else []),
    ]
    lines = ["```python", *code, "```", ""]
    if format == "hf" and loader == GENERATIVE and stored.tokenizer_folder is not None:
        servers = ["mgpu-pipe serve", "vllm serve", "python -m sglang.launch_server --model-path"]
        lines += ["```bash", *(f"{server} {place}" for server in servers), "```", ""]
    return lines


def _training_rows(
    stored: StoredModel, base: HubName | None, data: list[HubName], asks_hub: bool
) -> list[tuple[str, str]]:
    """Names and values of the card's table: how the model was trained, and its metrics at this step.

    Args:
        asks_hub: whether to ask the Hub for the licences of model and data.
    """
    paths, config = RunPaths(stored.source.parents[1]), stored.config
    assert config is not None
    summary = read_summary(paths)

    def licence_of(name: HubName) -> str:
        licence = _licence(name) if asks_hub else None
        return f", licence {licence}" if licence else ""

    if base is not None:
        start = f"{base.repository} at commit {base.commit}{licence_of(base)}"
    elif config.model.path is not None:
        start = "the weights of a local folder"
    else:
        start = f"random weights, seed {config.seed}"
    sets = [f"{name.repository} at commit {name.commit} ({name.files}){licence_of(name)}" for name in data]
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
        ("strategy", f"{config.strategy.name}{spread}, {resolve_precision(config.precision, config.trainer)}"),
        ("hardware", _hardware(paths)),
    ]
    measured = summary.get("metrics")
    if isinstance(measured, dict) and summary.get("step") == stored.step:  # metrics are of the last step
        for metric in description(config.objective.name).metrics:
            value = measured.get(metric.key)
            if isinstance(value, (int, float)):
                rows.append((metric.name, f"{100 * value:.2f}%" if metric.percent else f"{value:.{metric.digits}g}"))
        tasks = {task: measured.get(f"val/{task}") for task in config.eval.tasks}
        figures = {task: figure for task, figure in tasks.items() if isinstance(figure, float)}
        rows += [(f"task {_escape_cell(task)}", f"{figure:.6g}") for task, figure in figures.items()]
    return rows


def _datasets(data: DataConfig) -> list[HubName]:
    """The training data sets on the Hub, each at its commit; without local files."""
    names = [data_name(path) for _, files in file_lists(data) for path in files.paths]
    return [name for name in names if name is not None and name.commit]


def _hardware(paths: RunPaths) -> str:
    """The machine of the run's last attempt; without host names."""
    try:
        recorded = parse_json(read_bytes(paths.environment, MAX_JSON_BYTES), paths.environment)
    except (OSError, ValueError, BadInputError):
        return "not recorded"
    if not isinstance(recorded, dict):
        return "not recorded"
    gpus = [str(gpu).partition(",")[0] for gpu in recorded.get("gpus") or []]
    named_gpus = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    cpu = recorded.get("cpu")
    cores = f"{cpu.get('usable_cores')} cores of {cpu.get('model')}" if isinstance(cpu, dict) else "not recorded"
    return ", ".join(named_gpus) or cores


def _licence(name: HubName) -> str | None:
    """The licence in the repository's card on the Hub; None if the card is missing or unreadable."""
    try:
        return _local_licence(fetch(replace(name, files=""), (CARD,), "--push"))
    except BadInputError:
        return None


def _local_licence(folder: Path | None) -> str | None:
    """The licence in a folder's card; None if the card is missing or unreadable."""
    try:
        text = read_bytes(folder / CARD, MAX_CONFIG_BYTES).decode("utf-8") if folder is not None else ""
        front = parse_yaml(text.split("---")[1]) if text.startswith("---") else {}
    except (BadInputError, OSError, ValueError, LookupError, yaml.YAMLError):
        return None
    licence = front.get("license") if isinstance(front, dict) else None
    return licence if isinstance(licence, str) else None


def _escape_cell(text: str) -> str:
    """Escapes text for a cell of a Markdown table."""
    return MARKUP.sub(r"\\\1", one_line(text)).replace("<", "&lt;")


def write_card(
    stored: StoredModel, folder: Path, name: str, dtype: str, format: Format = "hf", asks_hub: bool = False
) -> None:
    """Write the card into ``folder``, see :func:`model_card`."""
    if format == "hf" and makes_vectors(stored, folder):
        format = "sentence-transformers"
    (folder / CARD).write_text(model_card(stored, name, dtype, format, asks_hub), encoding="utf-8")


def makes_vectors(stored: StoredModel, folder: Path) -> bool:
    """Whether sentence-transformers loads all of the export in ``folder``; it would leave out the head of a model."""
    return class_of([type(stored.model).__name__]) == HEADLESS and (folder / MODULES).is_file()


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
