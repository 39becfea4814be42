"""Files of a plain Hugging Face folder other than weights, and the mapping from a model's tensors to its tensors.

transformers' folders may store a module's tensors under other names, or cut differently (the experts of a mixture).
transformers' conversion on meta tensors gives the mapping, so weights can be written a few at a time.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mgpu_pipe.config.hub import template_files
from mgpu_pipe.errors import BadInputError, ModelFolderError
from mgpu_pipe.models.build import REFUSALS, tied_sources
from mgpu_pipe.models.field_types import KIND, PARAMETERS, PARTIAL, SCALING, THETA
from mgpu_pipe.models.reached_fields import FULL, LENGTH, SLIDING
from mgpu_pipe.models.shard_units import as_saved
from mgpu_pipe.models.weights.folder import GENERATION
from mgpu_pipe.models.weights.sentence_modules import MODULES, SHAPES
from mgpu_pipe.system.compat.transformers_private import has_conversions, keys_not_saved, set_conversions

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

TOKENIZER_SETTINGS, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    TEMPLATE,
    "chat_template.json",
    "preprocessor_config.json",
)

SENTENCES = (*SHAPES, "config_sentence_transformers.json")
"""Files of sentence-transformers in addition to its list of modules."""

OLDER_ROTARY = {
    **dict.fromkeys(("gpt_neox", "gpt_neox_japanese"), ("rotary_emb_base", "rotary_pct", "")),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), ("global_rope_theta", PARTIAL, "local_rope_theta")),
}
"""Names of transformers 4 for the base of rotations, their share of a head, and the base of sliding windows, in
families with unusual names."""
COUNTED_EXPERTS = ("qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe")
"""Families that called ``num_local_experts`` ``num_experts``."""
OLDER_LAYERS = {"linear_attention": "mamba", FULL: "attention"}
"""Types of layers of Granite 4."""
TOWER_PREFIXES = ("vision_model", "text_model")
"""Modules around the layers of CLIP's and SigLIP's towers in folders; transformers 5 has them no more."""
_BLOCK = re.compile(r"(?:.*?\.)?\d+(?=\.)")

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class SavedGroup:
    """Tensors of the model to convert together, and the resulting tensors of the folder."""

    sources: tuple[str, ...]
    outputs: Shapes


def saved_groups(model: PreTrainedModel) -> list[SavedGroup]:
    """Groups of tensors of ``model`` (meta is enough) to write, in module order; of tied ones the first.

    Most tensors are groups of one; those that transformers merges are grouped by block.
    """
    tied = tied_sources(model)
    ignored = set(keys_not_saved(model))
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name not in ignored and tied.get(name, name) == name
    }
    together = _converted_shapes(model, list(shapes)) or {}
    groups: dict[str, list[str]] = {}
    for name in shapes:
        alone = _converted_shapes(model, [name])
        complete = alone is not None and all(together.get(key) == shape for key, shape in alone.items())
        block = _BLOCK.match(name)
        groups.setdefault(name if complete else block[0] if block else "", []).append(name)
    apart = [SavedGroup(tuple(names), _converted_shapes(model, names) or {}) for names in groups.values()]
    outputs = [(name, shape) for group in apart for name, shape in group.outputs.items()]
    if len(outputs) != len(together) or dict(outputs) != together:  # tensors of several blocks are merged: one group
        return [SavedGroup(tuple(shapes), together)]
    return apart


def _converted_shapes(model: PreTrainedModel, names: list[str]) -> Shapes | None:
    """Names and shapes after the conversion of ``names``; None if it needs other tensors."""
    state = model.state_dict()
    try:
        done = convert_for_saving(model, {name: state[name].to("meta") for name in names})
    except REFUSALS:
        return None
    return {name: tuple(tensor.shape) for name, tensor in done.items()}


def convert_for_saving(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The folder's tensors, by name, from the model's ``tensors``."""
    from transformers.core_model_loading import revert_weight_conversion

    if not has_conversions(model):
        _keep_tower_prefixes(model)
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, as_saved(model, tensors))
    return converted


def _keep_tower_prefixes(model: Any) -> None:
    """Sets transformers' changes from a folder to ``model``, with the prefixes of towers in it.

    Of a model that ``from_pretrained`` did not make, transformers forgets all prefixes. A published folder names a
    tower's tensors ``vision_tower.vision_model.*``, and older readers know no other name.
    """
    from transformers import conversion_mapping, core_model_loading

    prefix_change = getattr(core_model_loading, "PrefixChange", None)
    if prefix_change is None:  # in earlier versions a tower has that prefix itself
        return

    def keeps(change: Any) -> bool:
        part = (change.scope_prefix or "").rpartition(".")[2]
        is_tower = part not in ("", *TOWER_PREFIXES) and getattr(change, "prefix_to_remove", None) in TOWER_PREFIXES
        return is_tower or not isinstance(change, prefix_change)

    changes = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    set_conversions(model, list(filter(keeps, changes)))


def write_configuration(model: PreTrainedModel, out: Path, dtype: torch.dtype, maker: Path | None = None) -> None:
    """Writes ``config.json`` and ``generation_config.json`` for weights of ``dtype``.

    Args:
        maker: model folder that the model comes from; its generation settings are copied.
    """
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    _drop_invalid_first_tokens(config)
    if getattr(config, "scale_decoder_outputs", None) is False:
        config.tie_word_embeddings = False  # T5 1.1: other readers of a folder know this field alone
    config.save_pretrained(str(out))
    _add_older_names(out / "config.json", config)
    settings = generation_settings(maker) if maker is not None else None
    if settings is not None:
        (out / GENERATION).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    elif model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(str(out))


def _add_older_names(file: Path, config: PretrainedConfig) -> None:
    """Adds transformers 4's names to a ``config.json``; engines that read only these would rotate by other angles.

    The file stays as it is where this transformers would read other rotations with them.
    """
    text = file.read_text(encoding="utf-8")
    content = json.loads(text)
    _name_as_before(content)
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again = _rotations(type(config).from_pretrained(str(file.parent), local_files_only=True).to_dict())
    except Exception:  # the libraries raise nothing narrower; classes newer than transformers 4 take no older names
        again = None
    if again != _rotations(config.to_dict()):
        file.write_text(text, encoding="utf-8")


def _name_as_before(content: dict[str, Any]) -> None:
    """Adds ``torch_dtype``, ``rope_theta``, ``rope_scaling`` and their like to a configuration and its parts."""
    for name, part in content.items():
        if isinstance(part, dict) and name != PARAMETERS:
            _name_as_before(part)
    kind = content.get("model_type", "")
    if content.get("dtype") is not None:
        content["torch_dtype"] = content["dtype"]
    if isinstance(content.get("text_config"), dict) and "tie_word_embeddings" in content:
        content["text_config"]["tie_word_embeddings"] = content["tie_word_embeddings"]  # transformers 4 reads only this
    if kind.startswith(COUNTED_EXPERTS) and "num_local_experts" in content:
        content["num_experts"] = content["num_local_experts"]
    if kind == "granitemoehybrid":
        content["layer_types"] = [OLDER_LAYERS.get(layer, layer) for layer in content["layer_types"]]
    rotary = content.get(PARAMETERS) or {}
    full, sliding = rotary.get(FULL, rotary) or {}, rotary.get(SLIDING) or {}
    if THETA not in full:
        return
    usual = (THETA, PARTIAL, "rope_local_base_freq")
    base, share, local = OLDER_ROTARY.get(kind, usual)
    scaling = {name: value for name, value in full.items() if name not in (THETA, PARTIAL) and value is not None}
    if scaling.get(KIND[0]) == "longrope" and LENGTH in content:  # Phi-3 takes these three entries only
        scaling = {KIND[1]: "longrope", **{name: full[name] for name in ("short_factor", "long_factor")}}
    older = {base: full[THETA], share: full.get(PARTIAL), local: sliding.get(THETA)}
    content.update({name: value for name, value in older.items() if value is not None})
    content[SCALING] = None if scaling == {KIND[0]: "default"} else scaling


def _rotations(content: object) -> object:
    """The ``rope_parameters`` of a configuration and of its parts."""
    if not isinstance(content, dict):
        return None
    return {
        name: {entry: value for entry, value in part.items() if entry != KIND[1]} if name == PARAMETERS else inner
        for name, part in content.items()
        if isinstance(part, dict) and ((inner := _rotations(part)) or name == PARAMETERS)
    }


def _drop_invalid_first_tokens(config: PretrainedConfig) -> None:
    """Drops a first token outside of the vocabulary (CLIP's default, 49406), of which every load warns."""
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        size, begin = getattr(part, "vocab_size", None), getattr(part, "bos_token_id", None)
        if isinstance(size, int) and isinstance(begin, int) and begin >= size:
            part.bos_token_id = None


def generation_settings(folder: Path) -> dict[str, object] | None:
    """A model folder's ``generation_config.json``; None if missing or unreadable."""
    try:
        settings = json.loads((folder / GENERATION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return settings if isinstance(settings, dict) else None


def stored_end_tokens(folder: Path) -> list[int]:
    """The tokens that end a text by a model folder's ``generation_config.json``, which names a number or a list."""
    ends = (generation_settings(folder) or {}).get("eos_token_id")
    return [token for token in (ends if isinstance(ends, list) else [ends]) if type(token) is int and token >= 0]


def copy_sentence_modules(maker: Path, out: Path) -> None:
    """Copies the sentence-transformers files of ``maker``: its list of modules, and modules next to the model.

    Raises:
        ModelFolderError: the list is damaged, or names a folder elsewhere.
    """
    if not (maker / MODULES).is_file():
        return
    try:
        entries = json.loads((maker / MODULES).read_text(encoding="utf-8"))
        folders = [str(entry["path"]) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelFolderError(f"{maker}: its {MODULES} is not a list of modules; correct it, or remove it") from error
    for name in (MODULES, *SENTENCES):
        if (maker / name).is_file():
            shutil.copyfile(maker / name, out / name)
    for name in filter(None, folders):
        place = maker / name
        if Path(name).name != name or place.is_symlink():
            raise ModelFolderError(f"{maker}: its {MODULES} names {name}, which is not a folder in it; correct it")
        if place.is_dir():
            (out / name).mkdir(exist_ok=True)
            for file in sorted(place.iterdir()):
                if file.is_file() and not file.is_symlink():
                    shutil.copyfile(file, out / name / file.name)


def write_tokenizer(tokenizer_folder: Path, out: Path, adopt_special_tokens: bool) -> None:
    """Copies the tokenizer's files.

    Args:
        adopt_special_tokens: whether to write its special ids into the configurations, for a model without a folder
            whose configuration has an end-of-text token.
    """
    for name in (*TOKENIZER_FILES, *template_files(tokenizer_folder)):
        if (tokenizer_folder / name).is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(tokenizer_folder / name, out / name)
    if (out / TOKENIZER_SETTINGS).is_file():
        _name_settings_as_before(out)
    if adopt_special_tokens:
        _adopt_special_tokens(out)


def _name_settings_as_before(out: Path) -> None:
    """Gives a tokenizer's settings the names of transformers 4, which has neither those of 5 nor a template's file."""
    file, template = out / TOKENIZER_SETTINGS, out / TEMPLATE
    settings = json.loads(file.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if template.is_file():
        files = {"default": template, **{Path(name).stem: out / name for name in template_files(out)}}
        listed = [{"name": name, "template": file.read_text(encoding="utf-8")} for name, file in files.items()]
        settings["chat_template"] = listed if len(listed) > 1 else listed[0]["template"]
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _adopt_special_tokens(out: Path) -> None:
    """Writes the tokenizer's end-of-text id into the folder's configurations, so that ``generate`` stops there."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(out), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the libraries raise nothing narrower
        raise BadInputError(f"the tokenizer cannot be loaded ({' '.join(str(error).split())})") from error
    if tokenizer.eos_token_id is None:
        return
    for name in ("config.json", GENERATION):
        file = out / name
        if not file.is_file():
            continue
        content = json.loads(file.read_text(encoding="utf-8"))
        content["eos_token_id"] = tokenizer.eos_token_id
        if tokenizer.bos_token_id is not None:
            content["bos_token_id"] = tokenizer.bos_token_id
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
