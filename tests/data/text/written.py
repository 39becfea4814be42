"""Conversations drawn at random, and what each shipped template writes of them, written down anew: the oracle of the
tests of answers. Nothing here calls the templates or the code that finds answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
Piece = tuple[str, bool]
"""A text, and whether the assistant says it."""
BOS, EOS = "<s>", "</s>"
CONTENTS = (
    *("Hello", "PARIS", "4", "7 and 5", "Assistant: Hello", "the cat: it sees a dog.", "\nHello there"),
    *("\n\nthe house", "  two spaces", "Hello ", "a dog\n", "red\n\nblue\n", ": what?", " ", "", "."),
    "User: who\nAssistant: me",
)
UNICODE = (
    "\u00e9t\u00e9 \U0001f600",
    "\u4f60\u597d",
    "na\u00efve\u2026 \u2013 \u201cyes\u201d",
    " \U0001f468\u200d\U0001f469\u200d\U0001f467",
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"function": {"name": "add", "arguments": {"x": 1}}}


def drawn(name: str, seed: int, unicode: bool) -> dict[str, Any]:
    """A row of messages that template ``name`` takes; some answers are not trained."""
    random_ = random.Random(f"{name} {seed}")
    pool = (*CONTENTS, *UNICODE) if unicode else CONTENTS

    def content() -> str:
        chosen = random_.choice(pool)
        return chosen if random_.random() < 0.7 else f"{chosen}{random_.choice(pool)}"

    messages: list[Message] = []
    if random_.random() < 0.4:
        messages.append({"role": "system", "content": content()})
    alternate = name == "gemma3"
    calls = name in ("llama3", "qwen3") and random_.random() < 0.3
    for number in range(random_.randint(1, 7)):
        role = random_.choice(("user", "assistant"))
        if alternate or random_.random() < 0.6:
            role = ("user", "assistant")[number % 2]
        messages.append({"role": role, "content": content()})
        if role == "assistant" and calls and random_.random() < 0.5:
            messages[-1]["tool_calls"] = [CALL]
            messages.append({"role": "tool", "content": content()})
        if role == "assistant" and random_.random() < 0.15:
            messages[-1].update(random_.choice(({"train": False}, {"weight": 0})))
    if messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": content()})
    if not any(message["role"] == "assistant" and said(message) for message in messages):
        messages[-1] = {"role": "assistant", "content": content()}
    return {"messages": messages, **({"tools": [TOOL]} if calls else {})}


def said(message: Message) -> bool:
    return message.get("train", True) and message.get("weight", 1) != 0


def _chatml(messages: list[Message], tools: Any = None) -> list[Piece]:
    return _turns(messages, lambda role: f"<|im_start|>{role}\n", "<|im_end|>", "\n")


def _phi4(messages: list[Message], tools: Any = None) -> list[Piece]:
    return _turns(messages, lambda role: f"<|im_start|>{role}<|im_sep|>", "<|im_end|>", "")


def _default_system(messages: list[Message], tools: Any = None) -> list[Piece]:
    """As SmolLM2's: a system message of its own before a first turn of another."""
    own = [] if messages[0]["role"] == "system" else [("<|im_start|>system\nBe of help.<|im_end|>\n", False)]
    return [*own, *_chatml(messages)]


def _turns(messages: list[Message], header: Callable[[str], str], end: str, after: str) -> list[Piece]:
    pieces: list[Piece] = []
    for message in messages:
        pieces.append((header(message["role"]), False))
        pieces.append((message["content"] + end, message["role"] == "assistant" and said(message)))
        pieces.append((after, False))
    return pieces


def _plain(messages: list[Message], tools: Any = None) -> list[Piece]:
    pieces: list[Piece] = []
    for message in messages:
        if message["role"] == "assistant":
            pieces += [("Assistant:", False), (f" {message['content']}{EOS}", said(message)), ("\n", False)]
        else:
            pieces.append((f"{message['role'].capitalize()}: {message['content']}\n", False))
    return pieces


def _deepseek(messages: list[Message], tools: Any = None) -> list[Piece]:
    heads = {"system": "", "user": "<\uff5cUser\uff5c>", "assistant": "<\uff5cAssistant\uff5c>"}
    return [(BOS, False), *_ended(messages, heads)]


def _mistral(messages: list[Message], tools: Any = None) -> list[Piece]:
    pieces: list[Piece] = [(BOS, False)]
    for message in messages:
        if message["role"] == "assistant":
            pieces.append((message["content"] + EOS, said(message)))
        else:
            mark = "SYSTEM_PROMPT" if message["role"] == "system" else "INST"
            pieces.append((f"[{mark}]{message['content']}[/{mark}]", False))
    return pieces


def _paligemma(messages: list[Message], tools: Any = None) -> list[Piece]:
    return _ended(messages, {"system": BOS, "user": BOS, "assistant": ""}, "\n")


def _ended(messages: list[Message], heads: dict[str, str], after: str = "") -> list[Piece]:
    pieces: list[Piece] = []
    for message in messages:
        pieces.append((heads[message["role"]], False))
        if message["role"] == "assistant":
            pieces.append((message["content"] + EOS, said(message)))
        else:
            pieces.append((message["content"] + after, False))
    return pieces


def _gemma3(messages: list[Message], tools: Any = None) -> list[Piece]:
    system = ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"] + "\n\n", messages[1:]
    pieces: list[Piece] = [(BOS, False)]
    for number, message in enumerate(messages):
        name = "model" if message["role"] == "assistant" else "user"
        pieces.append((f"<start_of_turn>{name}\n{'' if number else system}", False))
        trained = name == "model" and said(message)
        pieces += [(message["content"].strip() + "<end_of_turn>", trained), ("\n", False)]
    return pieces


def _llama3(messages: list[Message], tools: Any = None) -> list[Piece]:
    def header(role: str) -> Piece:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n", False

    system = messages[0]["content"].strip() if messages[0]["role"] == "system" else ""
    if tools:
        asked = 'You can call these functions. To call one, answer with JSON alone: {"name": <its name>, "parameters": '
        parts = [system] if system else []
        parts += [asked + "<its arguments>}.", *(json.dumps(tool, indent=4) for tool in tools)]
        system = "\n\n".join(parts)
    pieces: list[Piece] = [(BOS, False)]
    if system:
        pieces += [header("system"), (system + "<|eot_id|>", False)]
    for number, message in enumerate(messages):
        if number == 0 and message["role"] == "system":
            continue
        text = message["content"].strip()
        if message.get("tool_calls"):
            text += '{"name": "add", "parameters": {"x": 1}}'
        role = "ipython" if message["role"] == "tool" else message["role"]
        pieces += [header(role), (text + "<|eot_id|>", role == "assistant" and said(message))]
    return pieces


def _qwen3(messages: list[Message], tools: Any = None) -> list[Piece]:
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    if tools:
        system += "\n\n" if system else ""
        system += "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        system += "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
        system += "".join("\n" + json.dumps(tool) for tool in tools)
        system += "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        system += '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
        system += "<args-json-object>}\n</tool_call>"
    pieces: list[Piece] = [(f"<|im_start|>system\n{system}<|im_end|>\n", False)] if system else []
    for number, message in enumerate(messages):
        role, text = message["role"], message["content"]
        if number == 0 and role == "system":
            continue
        if role == "tool":  # results that stand together are one turn
            first, last = messages[number - 1]["role"] != "tool", messages[number + 1 : number + 2]
            pieces.append(("<|im_start|>user" if first else "", False))
            pieces.append((f"\n<tool_response>\n{text}\n</tool_response>", False))
            pieces.append(("" if last and last[0]["role"] == "tool" else "<|im_end|>\n", False))
            continue
        if role == "assistant":
            if 0 < number == len(messages) - 1:
                text = "<think>\n\n</think>\n\n" + text.lstrip("\n")
            if message.get("tool_calls"):
                text += "\n" if message["content"] else ""
                text += '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
        pieces += [(f"<|im_start|>{role}\n", False), (f"{text}<|im_end|>", role == "assistant" and said(message))]
        pieces.append(("\n", False))
    return pieces


WRITERS: dict[str, Callable[..., list[Piece]]] = {
    "chatml": _chatml,
    "deepseek": _deepseek,
    "gemma3": _gemma3,
    "llama3": _llama3,
    "mistral": _mistral,
    "paligemma": _paligemma,
    "phi4": _phi4,
    "plain": _plain,
    "qwen3": _qwen3,
    "default system": _default_system,
}
"""Of each template, the pieces that it writes of messages."""
