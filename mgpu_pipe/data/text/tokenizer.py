"""The run's tokenizer: the user's, the model folder's, or one trained on the training documents.

It always becomes a folder in the cache, named by content, that ``transformers.AutoTokenizer`` loads. Only the
``tokenizers`` library is used; ``tokenizer.json`` is authoritative.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.hub import template_files
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.bad_samples import OR_SKIP
from mgpu_pipe.data.cache import Progress, build_once, digest_of, no_progress, write_json
from mgpu_pipe.data.model_field import model_field, model_vocab_size, trained_vocab_size
from mgpu_pipe.data.text import tokenizer_train
from mgpu_pipe.data.text.chat_templates import SPECIAL, ChosenTemplate, chosen_template, compile_template, no_template
from mgpu_pipe.data.text.conversations import EVERY_PLACE, LITERAL
from mgpu_pipe.data.text.document_encoder import EncoderSpec
from mgpu_pipe.data.text.documents import Source, Text
from mgpu_pipe.data.text.tokenizer_folder import (
    CONFIG,
    FILES,
    SPECIAL_TOKENS,
    TEMPLATE,
    TOKENIZER,
    chat_template,
    existing_file,
    json_file,
    json_object,
    list_templates,
    load_tokenizer_file,
    spare_tokens,
    special_tokens,
    stop_tokens,
)
from mgpu_pipe.data.text.tokenizer_record import REPLACE
from mgpu_pipe.errors import BadInputError, ConfigError, DataError, ModelFolderError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from mgpu_pipe.data.text.render_chat import ChatTemplate

_BPE_VERSION = 2
CONVERSATIONS = ("chat", "preferences", "unpaired")
"""Kinds of sources that a chat template renders."""
CONVERSATIONS_FORMAT = 2
"""Increased when equal rows give other texts, tokens or trained spans, so that caches are rebuilt."""
_USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[EOS]", "[SEP]")
"""Usual end tokens. A tokenizer that names no end token gets the only one that it has."""


@dataclass(frozen=True)
class TokenizerInfo:
    """A tokenizer folder and the facts that the data needs."""

    folder: Path
    digest: str
    """Hash of the folder's content."""
    vocab_size: int
    """Largest token id plus one."""
    eos_token_id: int


def resolve_tokenizer(
    model: ModelConfig,
    data: DataConfig,
    objective: ObjectiveConfig,
    sources: Sequence[tuple[DataConfig, Source]],
    cache: Path,
    progress: Progress = no_progress,
) -> TokenizerInfo:
    """Resolves ``data.tokenizer`` to a folder in ``cache``.

    Args:
        sources: the training documents, for ``auto``, each with the keys that name them; none for
            ``data.source=synthetic``.

    Raises:
        ConfigError, ModelFolderError: it is missing, broken, larger than the model's vocabulary, or without an
            end-of-sequence token.
    """
    file = existing_file(model, data)
    template, special = chosen_template(model, data), SPECIAL.get(str(data.chat_template), ())
    if file is not None:
        info = _import(model, data, file, template, cache)
    elif not sources:
        size = trained_vocab_size(model, data, objective, special)
        name = digest_of("numbers", _BPE_VERSION, size)
        info = _build_folder(cache, name, lambda out: tokenizer_train.write_number_tokenizer(size, out))
    else:
        size = trained_vocab_size(model, data, objective, special)
        info = _train_tokenizer(size, sources, template, cache, progress)
    _check_fits(model, data, objective, info)
    return info


def encoder_spec(
    data: DataConfig,
    info: TokenizerInfo,
    source: Source,
    places: tuple[str, ...] = (),
    placeholders: tuple[str, ...] = (),
) -> EncoderSpec:
    """Settings that encode the documents of ``source``.

    Args:
        places, placeholders: see :class:`mgpu_pipe.data.text.render_chat.ChatTemplate`.

    Raises:
        ConfigError: conversations without a chat template.
    """
    template = None
    if source.kind in CONVERSATIONS:
        template = chat_template(info.folder)
        if template is None:
            raise no_template(data)
        compile_template(data, template, info.folder)
    return EncoderSpec(
        tokenizer_file=str(info.folder / TOKENIZER),
        eos_token_id=info.eos_token_id,
        vocab_size=info.vocab_size,
        chat_template=template,
        messages_column=data.messages_column,
        chat_format=data.format,
        special_tokens=special_tokens(info.folder),
        stop_tokens=stop_tokens(info.folder),
        places=places,
        placeholders=placeholders,
        pairs=source.kind == "pairs",
        preferences=source.kind == "preferences",
        unpaired=source.kind == "unpaired",
        groups=source.kind == "text_groups",
        skips_bad=data.on_bad_sample == "skip",
    )


def _load(data: DataConfig, file: Path, source: Path) -> Tokenizer:
    """Loads the tokenizer in ``file``, a copy of ``source``."""
    try:
        return load_tokenizer_file(file)
    except ModelFolderError as error:
        raise _tokenizer_error(data, source, str(error).removeprefix(f"{file}: is not a tokenizer: ")) from error


def _tokenizer_error(data: DataConfig, file: Path, reason: str) -> BadInputError:
    if data.tokenizer == "auto":
        return ModelFolderError(f"{file}: is not a tokenizer: {reason}")
    return ConfigError(
        "data.tokenizer", data.tokenizer, "give a whole tokenizer folder", f"{file} is not a tokenizer: {reason}"
    )


def _check_fits(model: ModelConfig, data: DataConfig, objective: ObjectiveConfig, info: TokenizerInfo) -> None:
    known, size = model_vocab_size(model), info.vocab_size
    reserved = objective.with_tokenizer(info.folder).reserved_ids()
    if known is None or size <= known - reserved:
        return
    if size <= known:
        reason = f"the tokenizer has no mask token, and uses all {size} ids of the model's vocabulary"
        fix = f"use model.config.vocab_size={size + reserved}, or give the id of a token that stands for a hidden one"
        raise ConfigError("objective.mask_token_id", "auto", fix, reason)
    if model.path and "vocab_size" not in model.config:
        if data.chat_template in SPECIAL:
            reason = f"the model has {known} rows, the tokenizer {size} entries with the template's tokens"
            fix = f"add model.config.vocab_size={size}, which gives the model new rows"
            raise ConfigError("data.chat_template", data.chat_template, fix, reason)
        raise ModelFolderError(
            f"model.path={model.path}: its vocabulary has {known} entries, but the tokenizer has {size}; "
            f"set data.tokenizer to the model's own, or add model.config.vocab_size={size}, which gives it new rows"
        )
    raise ConfigError("model.config.vocab_size", known, f"use at least {size}", f"the tokenizer has {size} entries")


def _end_of_sequence(model: ModelConfig, data: DataConfig, folder: Path, tokenizer: Tokenizer) -> tuple[str, int]:
    """The token that ends a document: the folder's, else the tokenizer's or the model's; or ConfigError."""
    special = special_tokens(folder)
    chosen, file = data.tokenizer, f"set eos_token in its {CONFIG}"
    named = special.get("eos_token")
    if named is not None:
        number = tokenizer.token_to_id(named)
        if number is None:
            reason = f"its eos_token {named} is not in its vocabulary"
            raise ConfigError("data.tokenizer", chosen, file, reason)
        return named, number
    known = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    plain, whole = (tokenizer.encode("a", add_special_tokens=add).ids for add in (False, True))
    if whole and whole[-1:] != plain[-1:] and whole[-1] in known:  # it ends each text: BERT's [SEP], T5's </s>
        return known[whole[-1]], whole[-1]
    ends = {*_USUAL_ENDS, *filter(None, [special.get("sep_token")])}
    there = {number: text for text in ends if (number := tokenizer.token_to_id(text)) is not None}
    said = model_field(model, "eos_token_id")
    for number in said if isinstance(said, list) else [said]:
        if isinstance(number, int) and (number in known or number in there):
            return known.get(number) or there[number], number
    usual = sorted((text, number) for number, text in there.items() if number in known or not there.keys() & known)
    if len(usual) == 1:
        return usual[0]
    reason = "it names no eos_token"
    if usual:
        reason += f", and {' and '.join(text for text, _ in usual)} may each end a text"
    raise ConfigError("data.tokenizer", chosen, file, reason)


def _build_folder(cache: Path, name: str, build: Callable[[Path], None]) -> TokenizerInfo:
    """Finds the cached tokenizer folder ``name``; ``build(folder)`` fills a new one."""
    folder = cache / "tokenizers" / name

    def make(out: Path) -> Mapping[str, Any]:
        build(out)
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(out / TOKENIZER))
        content = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}
        eos = tokenizer.token_to_id(special_tokens(out)["eos_token"])
        return {
            "digest": digest_of(content),
            "vocab_size": max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
            "eos_token_id": eos,
        }

    manifest = build_once(folder, make)
    return TokenizerInfo(folder, manifest["digest"], manifest["vocab_size"], manifest["eos_token_id"])


def _import(
    model: ModelConfig, data: DataConfig, file: Path, template: ChosenTemplate | None, cache: Path
) -> TokenizerInfo:
    """Copies the tokenizer of ``file``, completed to load alone; a template's missing tokens get the next free ids."""
    paths = {name: file.parent / name for name in (*FILES, *template_files(file.parent))}
    paths = {name: path for name, path in paths.items() if path.is_file()}
    paths[TOKENIZER] = file
    # Read once: the stored content is what was hashed, even if the files change meanwhile.
    try:
        contents = {name: path.read_bytes() for name, path in sorted(paths.items())}
    except OSError as error:
        raise _tokenizer_error(data, Path(error.filename or file), error.strerror or "cannot be read") from error
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    spare = _spare(model, data, file, template)

    def copy(out: Path) -> None:
        for name, content in contents.items():
            if name.endswith(".json"):
                try:
                    json_object(content, paths[name], name)
                except ModelFolderError as error:
                    reason = str(error).removeprefix(f"{paths[name]}: ").removesuffix(REPLACE)
                    raise _tokenizer_error(data, paths[name], reason) from error
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_bytes(content)
        _leave_out(out, spare)
        name, _ = _end_of_sequence(model, data, out, _load(data, out / TOKENIZER, file))
        settings = json_file(out / CONFIG) if CONFIG in contents else {}
        settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        if special_tokens(out).get("eos_token") is None:
            settings["eos_token"] = name
        list_templates(out, settings)
        if template is not None:
            settings.pop("chat_template", None)
            (out / "chat_template.json").unlink(missing_ok=True)
            (out / TEMPLATE).write_text(template.text, encoding="utf-8")
        write_json(out / CONFIG, settings)
        _add_tokens(data, file, out / TOKENIZER, () if template is None else template.special)

    spared = (sorted(spare),) if spare else ()
    return _build_folder(cache, digest_of("imported", hashes, *_template_parts(template), *spared), copy)


def _spare(model: ModelConfig, data: DataConfig, file: Path, template: ChosenTemplate | None) -> dict[int, str]:
    """:func:`spare_tokens` of the tokenizer in ``file`` for the run's model and template."""
    try:
        written = chat_template(file.parent) if template is None else template.text
        return spare_tokens(file, model_vocab_size(model), written)
    except ModelFolderError as error:
        raise _tokenizer_error(data, file, str(error).removeprefix(f"{file}: ").removesuffix(REPLACE)) from error


def _leave_out(folder: Path, tokens: Mapping[int, str]) -> None:
    """Removes added tokens from the files of a tokenizer folder."""
    for name in (TOKENIZER, CONFIG, SPECIAL_TOKENS) if tokens else ():
        if not (folder / name).is_file():
            continue
        content = json_file(folder / name)
        if content.get("pad_token") in tokens.values():
            del content["pad_token"]
        if isinstance(content.get("added_tokens"), list):
            content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] not in tokens]
        if isinstance(content.get("added_tokens_decoder"), dict):
            decoder = content["added_tokens_decoder"]
            content["added_tokens_decoder"] = {key: token for key, token in decoder.items() if int(key) not in tokens}
        write_json(folder / name, content)


def _template_parts(template: ChosenTemplate | None) -> tuple[Any, ...]:
    """Parts of a cached tokenizer's name that come from the template."""
    if template is None:
        return (None,)
    return (template.text, template.special) if template.special else (template.text,)


def _add_tokens(data: DataConfig, source: Path, file: Path, special: Sequence[str]) -> None:
    tokenizer = _load(data, file, source)
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    if not known.issuperset(special):
        tokenizer.add_special_tokens(list(special))
        tokenizer.save(str(file))


def _train_tokenizer(
    size: int,
    sources: Sequence[tuple[DataConfig, Source]],
    template: ChosenTemplate | None,
    cache: Path,
    progress: Progress,
) -> TokenizerInfo:
    """Trains a byte-level BPE of ``size`` entries on the training texts of ``sources``, or finds it in the cache.

    Raises:
        ConfigError: a source gives token ids, or conversations without a template.
    """
    for data, source in sources:
        if source.kind == "tokens":
            fix = "give the folder of the tokenizer that the ids come from"
            raise ConfigError("data.tokenizer", "auto", fix, f"data.source={source.name} gives token ids, not text")
        if source.kind in CONVERSATIONS and template is None:
            raise no_template(data)
    special = () if template is None else template.special
    fractions = [0.0 if data.validation_paths else data.validation_fraction for data, _ in sources]

    def train(out: Path) -> None:
        texts = []
        for (data, source), fraction in zip(sources, fractions, strict=True):
            places = [place for place in EVERY_PLACE if place in special]
            is_chat = template is not None and source.kind in CONVERSATIONS
            chat = compile_template(data, template.text, places=places) if template and is_chat else None
            once, twice = (_keyed_texts(data, source, chat, special, again) for again in (False, True))
            texts.append(tokenizer_train.training_texts(once, twice, fraction, progress))
        tokenizer_train.train_bpe(chain.from_iterable(texts), size, out, special)
        if template is not None:
            (out / TEMPLATE).write_text(template.text, encoding="utf-8")

    identity: tuple[Any, ...] = (
        [[source.identity, share] for (_, source), share in zip(sources, fractions, strict=True)],
    )
    if len(sources) == 1:
        identity = (sources[0][1].identity, fractions[0])
    if any(source.kind in CONVERSATIONS for _, source in sources):
        identity = (*identity, CONVERSATIONS_FORMAT)
    return _build_folder(cache, digest_of("bpe", _BPE_VERSION, *identity, size, *_template_parts(template)), train)


def _keyed_texts(
    data: DataConfig, source: Source, chat: ChatTemplate | None, special: Sequence[str], again: bool
) -> Iterator[tuple[Text | bytes, Text]]:
    """Yields (key of the held-out split, text) of documents; ``again`` in the library's thread, without a template's
    limits."""
    whole = (document for document in source.documents() if document.fault is None)
    if chat is None:
        for document in whole:
            body = document.body if document.target is None else f"{document.text}\n{document.target}"
            yield document.split_key, "\n".join(json.loads(str(body))) if source.kind == "text_groups" else body
        return
    for document in whole:
        arguments = (document.text, document.origin, data.messages_column)
        try:
            if source.kind == "preferences":
                texts = [both.text for both in chat.preference(*arguments, rendered_before=again)]
            elif source.kind == "unpaired":
                texts = [chat.with_label(*arguments, rendered_before=again)[0].text]
            else:
                texts = [chat.conversation(*arguments, data.format, rendered_before=again)[0]]
        except DataError as error:
            if data.on_bad_sample == "skip":
                continue
            raise DataError(f"{error}{OR_SKIP}") from error
        text = "\n".join(texts).replace(LITERAL, "")
        for token in special:
            text = text.replace(token, " ")
        yield document.split_key, text
