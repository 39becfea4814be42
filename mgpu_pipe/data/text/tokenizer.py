"""The run's tokenizer: the user's, the model folder's, or one trained on the training documents.

Whatever it comes from, it ends up as a folder in the cache, named by content, that ``transformers.AutoTokenizer``
loads. Only the ``tokenizers`` library is used; ``tokenizer.json`` is the truth.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.cache import Progress, build_once, digest_of, no_progress, write_json
from mgpu_pipe.data.text import tokenizer_train
from mgpu_pipe.data.text.chat_templates import SPECIAL, ChosenTemplate, chosen_template, compiled, no_template
from mgpu_pipe.data.text.documents import Source
from mgpu_pipe.data.text.encode import EncoderSpec
from mgpu_pipe.data.text.tokenizer_folder import (
    CONFIG,
    FILES,
    TEMPLATE,
    TOKENIZER,
    chat_template,
    existing_file,
    json_file,
    special_tokens,
    stop_tokens,
)
from mgpu_pipe.errors import BadInputError, ConfigError, ModelFolderError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from mgpu_pipe.data.text.chat import ChatTemplate

_BPE_VERSION = 2
CONVERSATIONS = ("chat", "preferences")
"""Kinds of sources that a chat template renders."""
_USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[EOS]", "[SEP]")


@dataclass(frozen=True)
class TokenizerInfo:
    """A tokenizer folder and what the data needs to know of it."""

    folder: Path
    digest: str
    """Hash of the folder's content."""
    vocab_size: int
    """Largest token id plus one."""
    eos_token_id: int


def model_field(model: ModelConfig, name: str) -> Any:
    """A field of the model's configuration as configured or in its folder; None where neither says it."""
    configured = model.config.get(name)
    if configured is None and isinstance(text := model.config.get("text_config"), Mapping):
        configured = text.get(name)
    if configured is None and model.path:
        file = local_folder(model.path) / "config.json"
        if file.is_file():
            settings = json_file(file)
            nested = settings.get("text_config")
            configured = settings.get(name, nested.get(name) if isinstance(nested, dict) else None)
    return configured


def model_vocab_size(model: ModelConfig) -> int | None:
    """The model's vocabulary size, see :func:`model_field`."""
    configured = model_field(model, "vocab_size")
    if configured is None:
        return None
    if not isinstance(configured, int) or isinstance(configured, bool) or configured < 1:
        raise ConfigError("model.config.vocab_size", configured, "use a whole number of at least 1")
    return configured


def resolve_tokenizer(
    config: RunConfig, sources: Sequence[tuple[RunConfig, Source]], cache: Path, progress: Progress = no_progress
) -> TokenizerInfo:
    """The tokenizer that ``data.tokenizer`` names, as a folder in ``cache``.

    Args:
        sources: the training documents, for ``auto``, each with the configuration that names them; none for
            ``data.source=synthetic``.

    Raises:
        ConfigError, ModelFolderError: it is missing, broken, larger than the model's vocabulary, or without an
            end-of-sequence token.
    """
    file = existing_file(config)
    template = chosen_template(config)
    if file is not None:
        info = _imported(config, file, template, cache)
    elif not sources:
        info = _built(
            cache,
            digest_of("numbers", _BPE_VERSION, _trained_vocab_size(config)),
            lambda out: tokenizer_train.write_number_tokenizer(_trained_vocab_size(config), out),
        )
    else:
        info = _trained(config, sources, template, cache, progress)
    _check_fits(config, info.vocab_size)
    return info


def encoder_spec(config: RunConfig, info: TokenizerInfo, source: Source) -> EncoderSpec:
    """What encodes the documents of ``source``.

    Raises:
        ConfigError: conversations without a chat template.
    """
    template = None
    if source.kind in CONVERSATIONS:
        template = chat_template(info.folder)
        if template is None:
            raise no_template(config)
        compiled(config, template, info.folder)
    return EncoderSpec(
        tokenizer_file=str(info.folder / TOKENIZER),
        eos_token_id=info.eos_token_id,
        vocab_size=info.vocab_size,
        chat_template=template,
        messages_column=config.data.messages_column,
        chat_format=config.data.format,
        special_tokens=special_tokens(info.folder),
        stop_tokens=stop_tokens(info.folder),
        pairs=source.kind == "pairs",
        preferences=source.kind == "preferences",
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
    return ConfigError(
        "data.tokenizer", config.data.tokenizer, "give a whole tokenizer folder", f"{file} is not a tokenizer: {reason}"
    )


def _vocab_size(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _check_fits(config: RunConfig, size: int) -> None:
    model = model_vocab_size(config.model)
    reserved = config.objective.reserved_ids()
    if model is None or size <= model - reserved:
        return
    if size <= model:
        reason = f"the tokenizer uses all {size} ids, and objective.name={config.objective.name} takes the last one"
        raise ConfigError("objective.mask_token_id", "auto", "give the tokenizer's mask token", reason)
    if config.model.path and "vocab_size" not in config.model.config:
        if config.data.chat_template in SPECIAL:
            reason = f"the model has {model} rows, the tokenizer {size} entries with the template's tokens"
            fix = f"add model.config.vocab_size={size}, which gives the model new rows"
            raise ConfigError("data.chat_template", config.data.chat_template, fix, reason)
        raise ModelFolderError(
            f"model.path={config.model.path}: its vocabulary has {model} entries, but the tokenizer has {size}; "
            f"set data.tokenizer to the model's own"
        )
    raise ConfigError("model.config.vocab_size", model, f"use at least {size}", f"the tokenizer has {size} entries")


def _end_of_sequence(config: RunConfig, folder: Path, tokenizer: Tokenizer) -> tuple[str, int]:
    """The token that ends a document: as the folder says, else one of the usual names."""
    named = special_tokens(folder).get("eos_token")
    for name in (named,) if named else _USUAL_ENDS:
        token_id = tokenizer.token_to_id(name)
        if token_id is not None:
            return name, token_id
    reason = f"its eos_token {named} is not in its vocabulary" if named else "it names no eos_token"
    raise ConfigError("data.tokenizer", config.data.tokenizer, f"set eos_token in its {CONFIG}", reason)


def _built(cache: Path, name: str, build: Callable[[Path], None]) -> TokenizerInfo:
    """The cached tokenizer folder ``name``, filled by ``build(folder)`` where it is not there yet."""
    folder = cache / "tokenizers" / name

    def make(out: Path) -> Mapping[str, Any]:
        build(out)
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(out / TOKENIZER))
        content = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}
        eos = tokenizer.token_to_id(special_tokens(out)["eos_token"])
        return {"digest": digest_of(content), "vocab_size": _vocab_size(tokenizer), "eos_token_id": eos}

    manifest = build_once(folder, make)
    return TokenizerInfo(folder, manifest["digest"], manifest["vocab_size"], manifest["eos_token_id"])


def _imported(config: RunConfig, file: Path, template: ChosenTemplate | None, cache: Path) -> TokenizerInfo:
    """A copy of the tokenizer in ``file``'s folder, completed so that it loads by itself and has the template's tokens.

    A token that it lacks gets the next free id.
    """
    paths = {name: file.parent / name for name in FILES if (file.parent / name).is_file()}
    paths[TOKENIZER] = file
    # Read once: what is kept under a hash is what was hashed, whatever happens to the files meanwhile.
    try:
        contents = {name: path.read_bytes() for name, path in sorted(paths.items())}
    except OSError as error:
        raise _broken(config, Path(error.filename or file), error.strerror or "cannot be read") from error
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}

    def copy(out: Path) -> None:
        for name, content in contents.items():
            (out / name).write_bytes(content)
        name, _ = _end_of_sequence(config, out, _load(config, out / TOKENIZER))
        settings = json_file(out / CONFIG) if CONFIG in contents else {}
        settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        settings.setdefault("eos_token", name)
        if template is not None:
            settings.pop("chat_template", None)
            (out / "chat_template.json").unlink(missing_ok=True)
            (out / TEMPLATE).write_text(template.text, encoding="utf-8")
        write_json(out / CONFIG, settings)
        _add_tokens(config, out / TOKENIZER, () if template is None else template.special)

    return _built(cache, digest_of("imported", hashes, *_of_template(template)), copy)


def _of_template(template: ChosenTemplate | None) -> tuple[Any, ...]:
    """What a tokenizer's name in the cache depends on."""
    if template is None:
        return (None,)
    return (template.text, template.special) if template.special else (template.text,)


def _add_tokens(config: RunConfig, file: Path, special: Sequence[str]) -> None:
    tokenizer = _load(config, file)
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    if not known.issuperset(special):
        tokenizer.add_special_tokens(list(special))
        tokenizer.save(str(file))


def _trained(
    config: RunConfig,
    sources: Sequence[tuple[RunConfig, Source]],
    template: ChosenTemplate | None,
    cache: Path,
    progress: Progress,
) -> TokenizerInfo:
    size = _trained_vocab_size(config)
    for own, source in sources:
        if source.kind == "tokens":
            fix = "give the folder of the tokenizer that the ids come from"
            raise ConfigError("data.tokenizer", "auto", fix, f"data.source={source.name} gives token ids, not text")
        if source.kind in CONVERSATIONS and template is None:
            raise no_template(own)
    special = () if template is None else template.special
    kept = [0.0 if own.data.validation_paths else own.data.validation_fraction for own, _ in sources]

    def train(out: Path) -> None:
        texts = []
        for (own, source), fraction in zip(sources, kept, strict=True):
            chat = compiled(own, template.text) if template and source.kind in CONVERSATIONS else None
            once, twice = (_keyed_texts(own, source, chat, special, again) for again in (False, True))
            texts.append(tokenizer_train.training_texts(once, twice, fraction, progress))
        tokenizer_train.train_bpe(chain.from_iterable(texts), size, out, special)
        if template is not None:
            (out / TEMPLATE).write_text(template.text, encoding="utf-8")

    identity: tuple[Any, ...] = ([[source.identity, share] for (_, source), share in zip(sources, kept, strict=True)],)
    if len(sources) == 1:
        identity = (sources[0][1].identity, kept[0])
    return _built(cache, digest_of("bpe", _BPE_VERSION, *identity, size, *_of_template(template)), train)


def _keyed_texts(
    config: RunConfig, source: Source, chat: ChatTemplate | None, special: Sequence[str], again: bool
) -> Iterator[tuple[str | bytes, str]]:
    """What the held-out split goes by, and the text, of every document.

    Args:
        again: the documents were gone through before; the tokenizers library asks in a thread of its own, where the
            limits of a template do not hold.
    """
    if chat is None:
        for document in source.documents():
            both = document.text if document.target is None else f"{document.text}\n{document.target}"
            yield document.split_key, both
        return
    for document in source.documents():
        given = (document.text, document.origin, config.data.messages_column)
        if source.kind == "preferences":
            texts = [text for text, _ in chat.preference(*given, rendered_before=again)]
        else:
            texts = [chat.conversation(*given, config.data.format, rendered_before=again)[0]]
        text = "\n".join(texts)
        for token in special:
            text = text.replace(token, " ")
        yield document.split_key, text


def _trained_vocab_size(config: RunConfig) -> int:
    size = model_vocab_size(config.model)
    if size is None:
        raise ConfigError(
            "model.config.vocab_size",
            None,
            "set it, or data.tokenizer",
            "data.tokenizer=auto makes a tokenizer of the model's size",
        )
    if config.data.source != "synthetic":
        tokenizer_train.check_bpe_size(size, SPECIAL.get(str(config.data.chat_template), ()))
    elif size < 2:
        raise ConfigError("model.config.vocab_size", size, "use at least 2")
    return size - config.objective.reserved_ids()
