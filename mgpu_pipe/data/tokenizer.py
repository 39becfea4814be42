"""The run's tokenizer: the user's, the model folder's, or one trained on the training documents.

Whatever it comes from, it ends up as a folder in the cache, named by content, that ``transformers.AutoTokenizer`` loads.
Only the ``tokenizers`` library is used; ``tokenizer.json`` is the truth.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data import tokenizer_train
from mgpu_pipe.data.cache import Progress, build_once, digest_of, no_progress, write_json
from mgpu_pipe.data.encode import EncoderSpec
from mgpu_pipe.data.sources import Source
from mgpu_pipe.errors import BadInputError, ConfigError, ModelFolderError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BPE_VERSION = 1
_LARGEST_UINT16_VOCABULARY = 1 << 16
_FILE, _CONFIG, _SPECIAL, _TEMPLATE = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
)
_COPIED = (_FILE, _CONFIG, _SPECIAL, _TEMPLATE, "chat_template.json", "added_tokens.json", "vocab.json", "merges.txt")
_USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[EOS]")


@dataclass(frozen=True)
class TokenizerInfo:
    """A tokenizer folder and what the data needs to know of it."""

    folder: Path
    digest: str
    """Hash of the folder's content."""
    vocab_size: int
    """Largest token id plus one."""
    eos_token_id: int


def model_vocab_size(model: ModelConfig) -> int | None:
    """The model's vocabulary size as configured or in its folder; None where neither says it."""
    configured = model.config.get("vocab_size")
    if configured is None and model.path:
        file = Path(model.path).expanduser() / "config.json"
        if file.is_file():
            settings = _json_file(file, ModelFolderError)
            nested = settings.get("text_config")
            configured = settings.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
    if configured is None:
        return None
    if not isinstance(configured, int) or isinstance(configured, bool) or configured < 1:
        raise ConfigError("model.config.vocab_size", configured, "use a whole number of at least 1")
    return configured


def check_tokenizer(config: RunConfig) -> None:
    """Refuse, without writing anything, a tokenizer that is missing, broken or does not fit the model.

    Raises:
        ConfigError, ModelFolderError: what is wrong.
    """
    template = _template_override(config)
    file = _existing_file(config)
    if file is None:
        _trained_vocab_size(config)
    else:
        tokenizer = _load(config, file)
        _check_fits(config, _vocab_size(tokenizer))
        _end_of_sequence(config, file.parent, tokenizer)
    if config.data.source == "chat_jsonl" and template is None and (file is None or not _chat_template(file.parent)):
        raise _no_template(config)


def resolve_tokenizer(
    config: RunConfig, source: Source | None, cache: Path, progress: Progress = no_progress
) -> TokenizerInfo:
    """The tokenizer that ``data.tokenizer`` names, as a folder in ``cache``.

    Args:
        source: the training documents, for ``auto``; None for ``data.source=synthetic``.

    Raises:
        ConfigError, ModelFolderError: it is missing, broken, larger than the model's vocabulary, or without an
            end-of-sequence token.
    """
    file = _existing_file(config)
    template = _template_override(config)
    if file is not None:
        info = _imported(config, file, template, cache)
    elif source is None:
        info = _built(cache, digest_of("numbers", _trained_vocab_size(config)),
                      lambda out: tokenizer_train.write_number_tokenizer(_trained_vocab_size(config), out))
    else:
        info = _trained(config, source, template, cache, progress)
    _check_fits(config, info.vocab_size)
    return info


def encoder_spec(config: RunConfig, info: TokenizerInfo, source: Source) -> EncoderSpec:
    """What encodes the documents of ``source``.

    Raises:
        ConfigError: conversations without a chat template.
    """
    template = None
    if source.kind == "chat":
        template = _chat_template(info.folder)
        if template is None:
            raise _no_template(config)
    return EncoderSpec(
        tokenizer_file=str(info.folder / _FILE),
        eos_token_id=info.eos_token_id,
        token_bytes=2 if info.vocab_size <= _LARGEST_UINT16_VOCABULARY else 4,
        chat_template=template,
        messages_column=config.data.messages_column,
        special_tokens=_special_tokens(info.folder),
        stop_tokens=_stop_tokens(info.folder),
    )


def _existing_file(config: RunConfig) -> Path | None:
    """The ``tokenizer.json`` to use, or None where one is to be made."""
    chosen = config.data.tokenizer
    if chosen != "auto":
        path = Path(chosen).expanduser()
        file = path / _FILE if path.is_dir() else path
        if not file.is_file():
            reason = f"the folder has no {_FILE}" if path.is_dir() else "no such file or folder"
            raise ConfigError("data.tokenizer", chosen, f"give a folder with a {_FILE}, such a file, or auto", reason)
        return file
    if not config.model.path:
        return None
    file = Path(config.model.path).expanduser() / _FILE
    if file.is_file():
        return file
    if config.data.source == "synthetic":
        return None
    raise ModelFolderError(
        f"model.path={config.model.path}: the folder has no {_FILE}; set data.tokenizer to the model's tokenizer"
    )


def _load(config: RunConfig, file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise _broken(config, file, str(error)) from error


def _broken(config: RunConfig, file: Path, reason: str) -> BadInputError:
    if config.data.tokenizer == "auto":
        return ModelFolderError(f"{file}: is not a tokenizer: {reason}")
    return ConfigError("data.tokenizer", config.data.tokenizer, "give a whole tokenizer folder",
                       f"{file} is not a tokenizer: {reason}")


def _vocab_size(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _check_fits(config: RunConfig, size: int) -> None:
    model = model_vocab_size(config.model)
    if model is None or size <= model:
        return
    if config.model.path and "vocab_size" not in config.model.config:
        raise ModelFolderError(
            f"model.path={config.model.path}: its vocabulary has {model} entries, but the tokenizer has {size}; "
            f"set data.tokenizer to the model's own"
        )
    raise ConfigError("model.config.vocab_size", model, f"use at least {size}", f"the tokenizer has {size} entries")


def _end_of_sequence(config: RunConfig, folder: Path, tokenizer: Tokenizer) -> tuple[str, int]:
    """The token that ends a document: as the folder says, else one of the usual names."""
    named = _special_tokens(folder).get("eos_token")
    for name in (named,) if named else _USUAL_ENDS:
        token_id = tokenizer.token_to_id(name)
        if token_id is not None:
            return name, token_id
    reason = f"its eos_token {named} is not in its vocabulary" if named else "it names no eos_token"
    raise ConfigError("data.tokenizer", config.data.tokenizer, f"set eos_token in its {_CONFIG}", reason)


def _built(cache: Path, name: str, build: Callable[[Path], None]) -> TokenizerInfo:
    """The cached tokenizer folder ``name``, filled by ``build(folder)`` where it is not there yet."""
    folder = cache / "tokenizers" / name

    def make(out: Path) -> Mapping[str, Any]:
        build(out)
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(out / _FILE))
        content = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}
        eos = tokenizer.token_to_id(_special_tokens(out)["eos_token"])
        return {"digest": digest_of(content), "vocab_size": _vocab_size(tokenizer), "eos_token_id": eos}

    manifest = build_once(folder, make)
    return TokenizerInfo(folder, manifest["digest"], manifest["vocab_size"], manifest["eos_token_id"])


def _imported(config: RunConfig, file: Path, template: str | None, cache: Path) -> TokenizerInfo:
    """A copy of the tokenizer in ``file``'s folder, completed so that it loads by itself."""
    source = {name: file.parent / name for name in _COPIED if (file.parent / name).is_file()}
    source[_FILE] = file
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(source.items())}

    def copy(out: Path) -> None:
        name, _ = _end_of_sequence(config, file.parent, _load(config, file))
        for target, path in source.items():
            shutil.copyfile(path, out / target)
        settings = _json_file(out / _CONFIG) if _CONFIG in source else {}
        settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        settings.setdefault("eos_token", name)
        if template is not None:
            settings.pop("chat_template", None)
            (out / "chat_template.json").unlink(missing_ok=True)
            (out / _TEMPLATE).write_text(template, encoding="utf-8")
        write_json(out / _CONFIG, settings)

    return _built(cache, digest_of("imported", hashes, template), copy)


def _trained(
    config: RunConfig, source: Source, template: str | None, cache: Path, progress: Progress
) -> TokenizerInfo:
    size = _trained_vocab_size(config)
    if source.kind == "chat" and template is None:
        raise _no_template(config)
    fraction = 0.0 if config.data.validation_paths else config.data.validation_fraction

    def pairs() -> Iterator[tuple[str, str]]:
        if template is None or source.kind == "text":
            yield from ((document.text, document.text) for document in source.documents())
            return
        from mgpu_pipe.data.chat import ChatTemplate

        end = tokenizer_train.END_OF_TEXT
        compiled = ChatTemplate(template, {"bos_token": end, "eos_token": end, "pad_token": end})
        for document in source.documents():
            yield document.text, compiled.conversation(document.text, document.origin, config.data.messages_column)[0]

    def train(out: Path) -> None:
        texts = tokenizer_train.training_texts(pairs(), pairs(), fraction, progress)
        tokenizer_train.train_bpe(texts, size, out)
        if template is not None:
            (out / _TEMPLATE).write_text(template, encoding="utf-8")

    return _built(cache, digest_of("bpe", _BPE_VERSION, source.identity, fraction, size, template), train)


def _trained_vocab_size(config: RunConfig) -> int:
    size = model_vocab_size(config.model)
    if size is None:
        raise ConfigError("model.config.vocab_size", None, "set it, or data.tokenizer",
                          "data.tokenizer=auto makes a tokenizer of the model's size")
    if config.data.source != "synthetic":
        tokenizer_train.check_bpe_size(size)
    elif size < 2:
        raise ConfigError("model.config.vocab_size", size, "use at least 2")
    return size


def _no_template(config: RunConfig) -> ConfigError:
    return ConfigError("data.chat_template", config.data.chat_template,
                       "give a Jinja file, or a data.tokenizer folder that has a chat template",
                       "data.source=chat_jsonl needs a chat template and the tokenizer has none")


def _template_override(config: RunConfig) -> str | None:
    """The text of ``data.chat_template``, compiled once to refuse what is not Jinja."""
    chosen = config.data.chat_template
    if chosen is None:
        return None
    try:
        text = Path(chosen).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("data.chat_template", chosen, "give a Jinja file", f"cannot be read: {error}") from error
    from jinja2 import TemplateSyntaxError

    from mgpu_pipe.data.chat import ChatTemplate

    try:
        ChatTemplate(text)
    except TemplateSyntaxError as error:
        raise ConfigError("data.chat_template", chosen, "correct the template",
                          f"line {error.lineno}: {error.message}") from error
    return text


def _chat_template(folder: Path) -> str | None:
    """The chat template of a tokenizer folder, in any of the three places where transformers keeps it."""
    if (folder / _TEMPLATE).is_file():
        return (folder / _TEMPLATE).read_text(encoding="utf-8")
    for name in ("chat_template.json", _CONFIG):
        if (folder / name).is_file():
            found = _json_file(folder / name).get("chat_template")
            if isinstance(found, list):
                found = next((entry["template"] for entry in found if entry.get("name") == "default"), None)
            if isinstance(found, str):
                return found
    return None


def _special_tokens(folder: Path) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and the like, as a tokenizer folder names them."""
    found: dict[str, str] = {}
    for name in (_SPECIAL, _CONFIG):
        settings = _json_file(folder / name) if (folder / name).is_file() else {}
        for key, value in settings.items():
            if isinstance(value, dict):
                value = value.get("content")
            if key.endswith("_token") and isinstance(value, str):
                found[key] = value
    return found


def _stop_tokens(folder: Path) -> tuple[str, ...]:
    added = _json_file(folder / _FILE).get("added_tokens") or []
    return tuple(entry["content"] for entry in added if entry.get("special"))


def _json_file(path: Path, error_class: type[BadInputError] | None = None) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"{path}: is not readable JSON: {error}"
        raise (error_class or ModelFolderError)(message) from error
    if not isinstance(value, dict):
        raise (error_class or ModelFolderError)(f"{path}: is not a JSON object")
    return value
