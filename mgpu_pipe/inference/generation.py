"""Continues prompts with a causal language model, or answers them with an encoder-decoder model."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mgpu_pipe.data.text.tokenizer_folder import chat_of, check_tokenizer, json_file
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.models.rotary import length_at_hand
from mgpu_pipe.models.save import GENERATION

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer
    from transformers.modeling_outputs import BaseModelOutput

    from mgpu_pipe.data.text.chat import ChatTemplate
    from mgpu_pipe.inference.sight import Sight

Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a conversation."""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that a folder keeps.

    Raises:
        BadInputError: transformers cannot load it.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    check_tokenizer(folder)
    try:
        if (folder / "config.json").is_file():
            loaded: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        else:
            loaded = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the libraries raise nothing narrower
        raise BadInputError(f"{folder}: its tokenizer cannot be loaded ({' '.join(str(error).split())})") from error
    tokenizer: PreTrainedTokenizerBase = loaded
    return tokenizer


def without_controls(text: str) -> str:
    """``text`` without control characters but line breaks and tabs: a terminal would follow what a model writes."""
    return "".join("\ufffd" if unicodedata.category(one) == "Cc" and one not in "\n\t" else one for one in text)


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
    seed: int = 0,
    together: bool = False,
    forward: Callable[..., Any] | None = None,
    streamer: BaseStreamer | None = None,
    batch_size: int = 1,
    sight: Sight | None = None,
) -> list[str]:
    """The continuation of each prompt, without the prompt; of an encoder-decoder model, what it writes for it.

    Args:
        tokenizer: or the folder that keeps it.
        prompts: texts, or with ``chat`` also conversations, lists of messages.
        chat: of a model that answers: a text is what the user says, and the answer ends where its turn does.
        temperature: 0 always takes the likeliest token; None is 0 for an encoder-decoder model, else 0.8.
        top_k, top_p: draw among the likeliest only; None does not restrict.
        seed: of the draws; each prompt has its own stream, so its continuation does not depend on the others. The
            process's random state is left as it was.
        together: the model is sharded over all processes, which all make this call: none ends a prompt before the
            others do.
        forward: takes the place of the model's forward pass, over the whole text so far for each new token.
        streamer: of transformers; is given the ids of the prompt and then each new one.
        batch_size: prompts that are continued together, where temperature is 0.
        sight: the pictures of each prompt.

    Raises:
        BadInputError: a model of speech; a prompt that fills the model's context, that the chat template refuses, or
            that has not as many places as pictures.
    """
    if model.main_input_name == "input_features":
        raise BadInputError(f"{type(model).__name__} hears recordings and continues no text: use mgpu-pipe eval")
    if isinstance(tokenizer, Path):
        tokenizer = load_tokenizer(tokenizer)
    answers = bool(model.config.is_encoder_decoder)
    if answers and together:  # parts of a sharded model cannot be called by themselves
        forward = forward or partial(_whole_forward, model)
    if temperature is None:
        temperature = 0.0 if answers else 0.8
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    ends = end_tokens(tokenizer, chat)
    try:
        devices = [device] if device.type == "cuda" else []
        with (
            length_at_hand(model),
            torch.no_grad(),
            _forward_in_place(model, forward),
            torch.random.fork_rng(devices=devices),
        ):
            many = [encode(tokenizer, prompt, chat) for prompt in prompts]
            many = many if sight is None else [sight.expanded(ids) for ids in many]
            made = [
                _continue(
                    model,
                    tokenizer,
                    many[number : number + batch_size],
                    max_new_tokens,
                    temperature,
                    top_k,
                    top_p,
                    seed + number,
                    together,
                    use_cache=forward is None,
                    ends=ends,
                    alone=chat is not None,
                    streamer=streamer,
                    seen={} if sight is None else sight.inputs(many[number : number + batch_size], device),
                )
                for number in range(0, len(many), batch_size)
            ]
            return [text for texts in made for text in texts]
    finally:
        model.train(was_training)


def _whole_forward(model: PreTrainedModel, encoder_outputs: BaseModelOutput, **inputs: Any) -> Any:
    """Encoder and decoder for each new token; in the place of the encoder's output stand the ids of the source."""
    ids = encoder_outputs.last_hidden_state
    assert ids is not None
    return model(**{**inputs, "input_ids": ids[..., 0].long()})


@contextmanager
def _forward_in_place(model: PreTrainedModel, forward: Callable[..., Any] | None) -> Iterator[None]:
    """Let ``model(...)`` call ``forward``, inside which it is the model's own again."""
    if forward is None:
        yield
        return
    own = model.__dict__.get("forward")

    def take_back() -> None:
        model.__dict__.pop("forward")
        if own is not None:
            model.__dict__["forward"] = own

    @wraps(model.forward)  # generate() looks for the arguments that it takes
    def given(*args: Any, **kwargs: Any) -> Any:
        take_back()
        try:
            return forward(*args, **kwargs)
        finally:
            model.__dict__["forward"] = given

    model.__dict__["forward"] = given
    try:
        yield
    finally:
        take_back()


def _continue(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    many: list[list[int]],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    together: bool,
    use_cache: bool,
    ends: list[int],
    alone: bool,
    streamer: BaseStreamer | None,
    seen: Mapping[str, torch.Tensor],
) -> list[str]:
    from transformers import GenerationConfig
    from transformers.modeling_outputs import BaseModelOutput

    answers, end = bool(model.config.is_encoder_decoder), tokenizer.eos_token_id
    if answers and end is not None:
        many = [ids if ids[-1] == end else [*ids, int(end)] for ids in many]  # as sources are trained on
    longest = max(map(len, many))
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = max_new_tokens if context is None or answers else min(max_new_tokens, context - longest)
    if room < 1:
        raise BadInputError(f"prompt of {longest} tokens: the model's context is {context}; give a shorter prompt")
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": top_p or 1.0}
    settings = GenerationConfig(
        max_new_tokens=room,
        eos_token_id=ends or None,
        pad_token_id=end if end is not None else 0,
        use_cache=use_cache,
        **({"decoder_start_token_id": model.config.decoder_start_token_id} if answers else {}),
        **sampling,
    )
    torch.manual_seed(seed)
    device = next(model.parameters()).device
    # Shorter prompts begin later: positions tell the model where, and what comes next stands last in every row.
    padding = [longest - len(ids) for ids in many]
    filler = settings.pad_token_id
    given = torch.tensor([[filler] * missing + ids for missing, ids in zip(padding, many, strict=True)], device=device)
    mask = torch.arange(longest, device=device) >= torch.tensor(padding, device=device)[:, None]
    encoded = {"encoder_outputs": BaseModelOutput(given[..., None].float())} if answers and not use_cache else {}
    made = model.generate(  # type: ignore[operator]
        given,
        generation_config=settings,
        attention_mask=mask.long(),
        synced_gpus=together,
        streamer=streamer,
        **encoded,
        **seen,
    )
    if answers:
        return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in made]
    new = [_to_the_end(row[longest:], ends) for row in made.tolist()]
    return [_text_of(tokenizer, ids, row, alone) for ids, row in zip(many, new, strict=True)]


def _to_the_end(made: list[int], ends: list[int]) -> list[int]:
    """Without what stands behind the end of a text while others of its batch go on."""
    return made[: next((at for at, one in enumerate(made) if one in ends), len(made))]


def _text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int], made: list[int], alone: bool) -> str:
    if alone:
        return str(tokenizer.decode(made, skip_special_tokens=True))
    shown = str(tokenizer.decode(ids, skip_special_tokens=True))
    text = str(tokenizer.decode([*ids, *made], skip_special_tokens=True))
    # Decoding the new tokens alone would lose the space that many tokenizers put before a word.
    if text.startswith(shown):
        return text[len(shown) :]
    return str(tokenizer.decode(made, skip_special_tokens=True))


def end_tokens(tokenizer: PreTrainedTokenizerBase, chat: ChatTemplate | None) -> list[int]:
    """The ids that end a text: of the tokenizer's end, and of the end of a turn."""
    names = [tokenizer.eos_token, None if chat is None else chat.turn_end()]
    ids = tokenizer.convert_tokens_to_ids([name for name in names if name is not None])
    assert isinstance(ids, list)
    return list(dict.fromkeys(ids))


def stop_at_turns(folder: Path) -> None:
    """Have ``generate`` of transformers stop at the end of a turn, as the model folder's chat template writes it."""
    file = folder / GENERATION
    chat = chat_of(folder)
    if chat is None or not file.is_file():
        return
    content = json_file(file)
    before = content.get("eos_token_id")
    ends = [*(before if isinstance(before, list) else [before]), *end_tokens(load_tokenizer(folder), chat)]
    content["eos_token_id"] = list(dict.fromkeys(one for one in ends if one is not None))
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, chat: ChatTemplate | None) -> list[int]:
    """Token ids of the prompt; an empty one begins like a document, after the token that ends the one before."""
    if chat is not None:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return list(tokenizer(chat.prompt(messages), add_special_tokens=False)["input_ids"])
    ids: list[int] = list(tokenizer(prompt)["input_ids"])
    if ids:
        return ids
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise BadInputError("empty prompt: the tokenizer has no token that begins a text; give a prompt")
    return [int(start)]
