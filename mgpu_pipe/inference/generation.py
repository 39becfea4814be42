"""Continues prompts with a causal language model, or answers them with an encoder-decoder model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from mgpu_pipe.data.text.conversations import LITERAL
from mgpu_pipe.data.text.cut_texts import TurnEncoder
from mgpu_pipe.data.text.tokenizer_folder import check_tokenizer, follows_file, refuse_library_errors
from mgpu_pipe.errors import BadInputError, print_text
from mgpu_pipe.inference.sampling import RowSampling, Sampling, StopTexts
from mgpu_pipe.models.rotary import length_at_hand
from mgpu_pipe.models.weights.model_files import stored_end_tokens
from mgpu_pipe.system.local_files import is_file

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.generation.streamers import BaseStreamer
    from transformers.modeling_outputs import BaseModelOutput

    from mgpu_pipe.data.text.render_chat import ChatTemplate
    from mgpu_pipe.inference.visual_prompts import PromptVisuals


class AnswerStreamer(TextStreamer):
    """Prints each word of an answer once it is complete, without the prompt and special tokens.

    Args:
        lead: the chat template's text before an answer; it is not printed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, lead: str = "") -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._lead = lead

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            text, self._lead = text.removeprefix(self._lead), ""
        print_text(text, flush=True, end="\n" if stream_end else "")


Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a conversation."""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, with the ids of its ``tokenizer.json``, as training has them.

    Raises:
        BadInputError: transformers cannot load it.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    check_tokenizer(folder)
    with refuse_library_errors(f"{folder}: its tokenizer cannot be loaded"):
        if is_file(folder / "config.json"):
            loaded: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        if not is_file(folder / "config.json") or not follows_file(loaded, folder):
            loaded = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    tokenizer: PreTrainedTokenizerBase = loaded
    return tokenizer


def generate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | Path,
    prompts: Sequence[Prompt],
    *,
    chat: ChatTemplate | None = None,
    max_new_tokens: int = 64,
    temperature: float | None = None,
    top_k: int | None = 50,
    top_p: float | None = None,
    min_p: float | None = None,
    stop: Sequence[str] = (),
    seed: int = 0,
    together: bool = False,
    forward: Callable[..., Any] | None = None,
    streamer: BaseStreamer | None = None,
    batch_size: int = 1,
    visuals: PromptVisuals | None = None,
    tools: Sequence[list[Any] | None] | None = None,
    draft: PreTrainedModel | None = None,
) -> list[str]:
    """The continuation of each prompt without the prompt, or the output of an encoder-decoder model.

    Args:
        tokenizer: or its folder.
        prompts: texts, or with ``chat`` also conversations, lists of messages.
        chat: template of a chat model: a text is the user's message, and the answer ends with its turn.
        temperature: 0 always takes the likeliest token; None is 0 for an encoder-decoder model, else 0.8.
        top_k, top_p, min_p: draw among the likeliest only; None does not restrict.
        stop: texts before which an answer ends.
        seed: of the draws. Each prompt has its own stream; the process's random state does not change.
        together: the model is sharded over all processes, which all make this call.
        forward: replaces the model's forward pass; it gets whole texts, unless it keeps a cache (:func:`keeps_cache`).
        streamer: of transformers; gets the ids of the prompt and then each new id.
        batch_size: prompts of one forward pass, where temperature is 0.
        visuals, tools: the pictures and videos of each prompt, and the tools that ``chat`` offers in it.
        draft: proposes tokens that the model checks (:func:`.open.open_draft`); for temperature 0 and a batch of one.

    Raises:
        BadInputError: the model hears; a prompt fills its context, is refused by its template, or lacks pictures.
    """
    if model.main_input_name == "input_features":
        raise BadInputError(f"{type(model).__name__} hears recordings and continues no text; use mgpu-pipe eval")
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, Path) else tokenizer
    is_encoder_decoder = bool(model.config.is_encoder_decoder)
    if is_encoder_decoder and together:
        from mgpu_pipe.inference.parallel_run import EncoderDecoderForward

        forward = forward or EncoderDecoderForward(model)
    temperature = (0.0 if is_encoder_decoder else 0.8) if temperature is None else temperature
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, min_p, stop)
    device, end_ids = input_device(model), end_tokens(tokenizer, chat)
    lead = "" if chat is None else chat.lead()
    with generation_mode(model, forward):
        schemas = tools or [None] * len(prompts)
        token_ids = [encode(tokenizer, text, chat, schema) for text, schema in zip(prompts, schemas, strict=True)]
        token_ids = token_ids if visuals is None else [visuals.expand(ids) for ids in token_ids]
        continuations = []
        for first in range(0, len(token_ids), batch_size):
            batch = token_ids[first : first + batch_size]
            torch.manual_seed(seed + first)
            continuations += continue_batch(
                model,
                tokenizer,
                batch,
                sampling,
                end_ids,
                is_answer=chat is not None,
                together=together,
                use_cache=keeps_cache(forward),
                encoder_alone=forward is None,
                streamer=streamer,
                visual_inputs=None if visuals is None else visuals.inputs(batch, device),
                draft=draft,
                lead=lead,
            )
        return [answer.text.removeprefix(lead) for answer in continuations]


def keeps_cache(forward: Callable[..., Any] | None) -> bool:
    """Whether generation by ``forward``, or by the model's own forward pass, keeps keys and values of earlier tokens.

    A :class:`~mgpu_pipe.training.strategy.SamplingForward` says it; any other function takes whole texts.
    """
    return forward is None or bool(getattr(forward, "takes_cache", False))


def input_device(model: PreTrainedModel) -> torch.device:
    """The device that takes the model's inputs; weights on the disk are on none until their module runs."""
    hook = getattr(model, "_hf_hook", None)  # of accelerate
    return next(model.parameters()).device if hook is None else torch.device(hook.execution_device)


@contextmanager
def generation_mode(model: PreTrainedModel, forward: Callable[..., Any] | None = None) -> Iterator[None]:
    """Evaluation without gradients, by ``forward`` if given; the mode and the random state come back."""
    was_training, device = model.training, input_device(model)
    model.eval()
    try:
        with (
            length_at_hand(model),
            torch.no_grad(),
            _forward_in_place(model, forward),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        ):
            yield
    finally:
        model.train(was_training)


def source_ids(inputs: torch.Tensor) -> BaseModelOutput:
    """Token ids instead of an encoder's result, for :class:`.parallel_run.EncoderDecoderForward`."""
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(inputs[..., None].float())


@contextmanager
def _forward_in_place(model: PreTrainedModel, forward: Callable[..., Any] | None) -> Iterator[None]:
    """Make ``model(...)`` call ``forward``; during that call ``model(...)`` is the original forward pass."""
    if forward is None:
        yield
        return
    original = model.__dict__.get("forward")

    def restore() -> None:
        model.__dict__.pop("forward")
        if original is not None:
            model.__dict__["forward"] = original

    @wraps(model.forward)  # generate() looks for the arguments that it takes
    def replacement(*args: Any, **kwargs: Any) -> Any:
        restore()
        try:
            return forward(*args, **kwargs)
        finally:
            model.__dict__["forward"] = replacement

    model.__dict__["forward"] = replacement
    try:
        yield
    finally:
        restore()


@dataclass(frozen=True)
class Answer:
    """A continuation, without its prompt.

    Attributes:
        num_tokens: its new tokens, without the one that ended it.
        is_ended: whether an end token ended it, and not the limit of tokens.
    """

    text: str
    num_tokens: int
    is_ended: bool


def continue_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    token_ids: list[list[int]],
    sampling: Sampling,
    end_ids: list[int],
    *,
    is_answer: bool,
    row_seeds: Sequence[int] | None = None,
    together: bool = False,
    use_cache: bool = True,
    encoder_alone: bool = True,
    streamer: BaseStreamer | None = None,
    visual_inputs: Mapping[str, torch.Tensor] | None = None,
    draft: PreTrainedModel | None = None,
    lead: str = "",
) -> list[Answer]:
    """The continuations of prompts that go through the model together, inside :func:`generation_mode`.

    Args:
        end_ids: tokens that end a text.
        is_answer: whether a continuation stands by itself.
        row_seeds: of each prompt; None draws from the process's random state.
        together, draft: see :func:`generate_text`.
        encoder_alone: whether an encoder may run without its decoder; else the forward pass is
            :class:`.parallel_run.EncoderDecoderForward`.
        lead: see :class:`.sampling.StopTexts`.

    Raises:
        BadInputError: the longest prompt fills the model's context, or a prompt holds a token without a row.
    """
    is_encoder_decoder, end = bool(model.config.is_encoder_decoder), tokenizer.eos_token_id
    if is_encoder_decoder and end is not None:
        # Sources end like this in training.
        token_ids = [ids if ids[-1] == end else [*ids, int(end)] for ids in token_ids]
    if visual_inputs is None:
        for ids in token_ids:
            require_rows(model, tokenizer, ids)
    longest, filler = max(map(len, token_ids)), end if end is not None else 0
    start = 1 if is_encoder_decoder else longest
    processors = []
    if row_seeds is not None and sampling.temperature > 0:
        processors = [RowSampling(sampling, row_seeds, start)]
        sampling = replace(sampling, temperature=0.0)
    settings = _generation_config(model, sampling, longest, end_ids, filler, use_cache)
    if draft is not None:
        _require_context(draft, longest + settings.max_new_tokens)
    stops = StopTexts(tokenizer, sampling.stop, start, lead)
    inputs, mask = _padded_left(token_ids, filler, input_device(model))
    encoded = {} if encoder_alone or not is_encoder_decoder else {"encoder_outputs": source_ids(inputs)}
    output = model.generate(  # type: ignore[operator]
        inputs,
        generation_config=settings,
        attention_mask=mask.long(),
        synced_gpus=together,
        streamer=streamer,
        logits_processor=processors,
        stopping_criteria=[stops] if sampling.stop else None,
        assistant_model=draft,
        **encoded,
        **(visual_inputs or {}),
    )
    answers = []
    for ids, row in zip(token_ids, output[:, start:].tolist(), strict=True):
        new = _cut_at_end(row, end_ids)
        if is_encoder_decoder:
            text = str(tokenizer.decode(row, skip_special_tokens=True))
        else:
            text = decode_answer(tokenizer, ids, new, is_answer)
        answers.append(Answer(stops.cut(text), len(new), len(new) < len(row) or stops.cut(text) != text))
    return answers


def _generation_config(
    model: PreTrainedModel, sampling: Sampling, longest: int, end_ids: list[int], filler: int, use_cache: bool
) -> GenerationConfig:
    """Settings of a batch whose prompts have up to ``longest`` tokens; BadInputError if they fill the context."""
    from transformers import GenerationConfig

    is_encoder_decoder, room = bool(model.config.is_encoder_decoder), sampling.max_new_tokens
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and not is_encoder_decoder:
        room = min(room, context - longest)
    if room < 1:
        raise BadInputError(f"prompt of {longest} tokens: the model's context is {context}; give a shorter prompt")
    return GenerationConfig(
        max_new_tokens=room,
        eos_token_id=end_ids or None,
        pad_token_id=filler,
        use_cache=use_cache,
        **({"decoder_start_token_id": model.config.decoder_start_token_id} if is_encoder_decoder else {}),
        **sampling.settings(),
    )


def require_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> None:
    """Refuses a prompt with a token that the model has no row for (BadInputError), as published tokenizers have."""
    rows = getattr(model.config.get_text_config(), "vocab_size", None)
    beyond = next((number for number in ids if isinstance(rows, int) and number >= rows), None)
    if beyond is not None:
        text = tokenizer.convert_ids_to_tokens(beyond)
        raise BadInputError(f"prompt with {text!r}: the model has no row for this token; leave it out of the prompt")


def _require_context(draft: PreTrainedModel, length: int) -> None:
    """Refuse a draft model whose context is shorter than a text of ``length`` tokens."""
    context = getattr(draft.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and context < length:
        raise BadInputError(
            f"--draft: its context is {context}, a prompt and its answer take up to {length}; lower --max-new-tokens"
        )


def _padded_left(token_ids: list[list[int]], filler: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose last token is the prompt's last, and their mask; both of shape ``(prompts, longest)``."""
    longest = max(map(len, token_ids))
    padding = [longest - len(ids) for ids in token_ids]
    rows = [[filler] * missing + ids for missing, ids in zip(padding, token_ids, strict=True)]
    mask = torch.arange(longest, device=device) >= torch.tensor(padding, device=device)[:, None]
    return torch.tensor(rows, device=device), mask


def _cut_at_end(ids: list[int], end_ids: list[int]) -> list[int]:
    """``ids`` up to the first end token; the padding after it comes from longer texts of the batch."""
    return ids[: next((position for position, token in enumerate(ids) if token in end_ids), len(ids))]


def decode_answer(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], new_ids: Sequence[int], is_answer: bool
) -> str:
    """The text of new tokens after a prompt's tokens ``ids``; ``is_answer`` as in :func:`continue_batch`."""
    if is_answer:
        return str(tokenizer.decode(list(new_ids), skip_special_tokens=True))
    prompt = str(tokenizer.decode(list(ids), skip_special_tokens=True))
    text = str(tokenizer.decode([*ids, *new_ids], skip_special_tokens=True))
    # Decoding only the new tokens would lose the space before their first word.
    if text.startswith(prompt):
        return text[len(prompt) :]
    return str(tokenizer.decode(list(new_ids), skip_special_tokens=True))


def end_tokens(tokenizer: PreTrainedTokenizerBase, chat: ChatTemplate | None) -> list[int]:
    """The ids that end a text, a turn of the chat template, or an answer by ``generation_config.json`` next to it."""
    names = [tokenizer.eos_token, None if chat is None else chat.turn_end()]
    ids: Any = tokenizer.convert_tokens_to_ids([name for name in names if name is not None])
    return list(dict.fromkeys([*stored_end_tokens(Path(tokenizer.name_or_path)), *ids]))


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, chat: ChatTemplate | None, tools: list[Any] | None = None
) -> list[int]:
    """Token ids of the prompt; an empty one becomes the token that begins a document.

    Args:
        tools: that the template offers the model, as JSON schemas.
    """
    if chat is not None:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text, starts = chat.prompt_with_starts(messages, tools)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:  # a tokenizer without tokenizer.json; training never uses one
            return list(tokenizer(text.replace(LITERAL, ""), add_special_tokens=False)["input_ids"])
        return TurnEncoder(backend).encode(text, starts).ids
    ids: list[int] = list(tokenizer(str(prompt).replace(LITERAL, ""))["input_ids"])
    if ids:
        return ids
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise BadInputError("empty prompt: the tokenizer has no token that begins a text; give a prompt")
    return [int(start)]
