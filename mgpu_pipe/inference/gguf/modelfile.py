"""Writes the Modelfile that Ollama needs to take a GGUF file.

Source: https://github.com/ollama/ollama/blob/main/docs/modelfile.mdx.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mgpu_pipe.data.text.render_chat import ChatTemplate
from mgpu_pipe.data.text.tokenizer_folder import TOKENIZER, chat_of, special_tokens, token_texts
from mgpu_pipe.models.weights.model_files import generation_settings

ROLES = ("system", "user", "assistant")
MARK = "\u2983content\u2984"
"""Stands for a turn's text while the parts of a template around it are sought."""
PARAMETERS = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "repetition_penalty": "repeat_penalty"}
"""Ollama's names of generation settings."""


def write_modelfile(folder: Path, file: str, out: Path, context: int, adds_first: bool) -> str:
    """Write ``Modelfile`` into ``out`` and return a note about what it lacks, or an empty string.

    Args:
        folder: with tokenizer and generation settings.
        file: name of the GGUF file next to it.
        context: most tokens of the model.
        adds_first: whether the file says that the first token comes before each text.
    """
    settings = generation_settings(folder) or {}
    chat, lines, note = chat_of(folder), [f"FROM ./{file}"], ""
    first = special_tokens(folder).get("bos_token", "") if adds_first else ""
    template = "{{ .Prompt }}" if chat is None else go_template(chat, first)
    if template is None:
        note = "its chat template has more than turns; Ollama reads the one in the file, or give it a TEMPLATE"
    else:
        lines.append(f"TEMPLATE {_quoted(template)}")
    lines += [f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}" for text in _stops(folder, settings)]
    lines.append(f"PARAMETER num_ctx {context}")
    if settings.get("do_sample"):
        numbers = {key: settings[key] for key in PARAMETERS if type(settings.get(key)) in (int, float)}
        lines += [f"PARAMETER {PARAMETERS[key]} {number}" for key, number in numbers.items()]
    else:
        lines.append("PARAMETER temperature 0")
    (out / "Modelfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return note


def _quoted(text: str) -> str:
    """``text`` in the three quotes of a Modelfile."""
    return f'"""{text}"""'


def _stops(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Texts of the tokens that end an answer."""
    ends, texts = settings.get("eos_token_id"), token_texts(folder / TOKENIZER)
    named = [texts[end] for end in (ends if isinstance(ends, list) else [ends]) if end in texts]
    return named or [text for name, text in special_tokens(folder).items() if name == "eos_token"]


def go_template(chat: ChatTemplate, first: str) -> str | None:
    """The chat template in the language of Ollama's; None where turns are not joined as they are.

    Args:
        first: text of the token that Ollama puts first by itself.
    """
    try:
        around = {role: _around(chat, ROLES[:number], role, first) for number, role in enumerate(ROLES)}
        turns = [_turn(role, f"{role} {number}") for number, role in enumerate([*ROLES, "user"])]
        joined = "".join(before + turn["content"] + after for turn in turns for before, after in [around[turn["role"]]])
        rendered = _render(chat, turns, first, True)
        alone = _render(chat, turns[1:2], first, True)
    except Exception:  # a template may refuse roles by any error
        return None
    opening, user = rendered.removeprefix(joined), "user 1".join(around["user"])
    default = alone.removesuffix(user + opening)
    if rendered != joined + opening or alone != default + user + opening:
        return None
    if '"""' in rendered + alone or "{{" in rendered + alone:
        return None
    cases = "{{ else ".join(
        f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}' for role, (before, after) in around.items()
    )
    start = f"{{{{ if not .System }}}}{default}{{{{ end }}}}" if default else ""
    return f"{start}{{{{ range .Messages }}}}{{{{ {cases}{{{{ end }}}}{{{{ end }}}}{opening}"


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _render(chat: ChatTemplate, turns: list[dict[str, str]], first: str, prompt: bool = False) -> str:
    """The text of ``turns`` without the token that comes first by itself."""
    text = chat.render(turns, prompt=prompt)
    return text.removeprefix(first) if first else text


def _around(chat: ChatTemplate, earlier: Sequence[str], role: str, first: str) -> tuple[str, str]:
    """Text before and after the content of a turn of ``role``, after turns of ``earlier`` roles."""
    before = [_turn(name, "hello") for name in earlier]
    after = [] if earlier else [_turn("user", "hello")]
    head = _render(chat, before, first) if before else ""
    rendered = _render(chat, [*before, _turn(role, MARK), *after], first)
    if not rendered.startswith(head):
        raise ValueError("a turn depends on the next")
    start, _, end = rendered[len(head) :].partition(MARK)
    if after:
        longer = _render(chat, [_turn(role, MARK), *after, _turn("assistant", "hello")], first)
        start, _, end = longer.partition(MARK)
        end = end[: end.index("hello")].removesuffix(_around(chat, ("system",), "user", first)[0])
    return start, end
