"""Conversations: rendering by the tokenizer's own chat template, and which characters the assistant said.

The template is rendered as transformers' ``apply_chat_template`` renders it (the same Jinja settings, in a sandbox
that forbids changes to what it is given), so that training sees what generation will send. ``strftime_now`` is not
defined: a template that asks for the date falls back to its own fixed one, and data stays the same tomorrow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from mgpu_pipe.data.files import check_unicode, json_row
from mgpu_pipe.data.text.conversations import CLOSE, OPEN, as_parts, is_trained, messages_of
from mgpu_pipe.data.text.preference_row import preference_of
from mgpu_pipe.data.text.template_limits import LARGEST_VALUE, LimitedEnvironment, TemplateLimit, limited, reason
from mgpu_pipe.errors import BadInputError, DataError

Span = tuple[int, int]
TEXTS = ("content", "reasoning_content", "reasoning", "thinking", "name")
"""What of a message may be written."""
SEEN = "\ufdd2"
"""A Unicode noncharacter: shows whether a content is rendered."""
_TYPE = re.compile(r"""['"]type['"]|\.type\b""")
"""In a template that asks for the kind of a content's parts."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


class _GenerationTag(Extension):
    """``{% generation %} ... {% endgeneration %}``: a template's own mark of what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return OPEN + caller() + CLOSE


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


@dataclass
class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja text.
        special_tokens: what templates may name: ``bos_token``, ``eos_token``, ...
        stop_tokens: texts of the tokenizer's special tokens, which may end a turn.

    Attributes:
        odd: conversations of which something is left out, or that are not question and answer by turns.
        first_odd: the first of them: file, line, and why.

    Raises:
        jinja2.TemplateError: the template is not valid Jinja, or compiling it takes more than a template's limits.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    stop_tokens: Sequence[str] = ()

    def __post_init__(self) -> None:
        environment = LimitedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        with limited():
            self._template = environment.from_string(self.source)
        self.odd, self.first_odd = 0, ""
        self._marks_generation = bool(_GENERATION.search(self.source))
        self._takes_parts = False
        self._takes_parts = bool(_TYPE.search(self.source)) and not self._writes(SEEN) and self._writes(as_parts(SEEN))

    def render(self, messages: Sequence[Mapping[str, Any]], tools: object = None, prompt: bool = False) -> str:
        """The text of ``messages``; with ``prompt``, followed by the beginning of an assistant's turn.

        Raises:
            TemplateError: the template refuses these messages.
            Exception: whatever else it does wrong; see ``template_limits.limited``.
        """
        if self._takes_parts:
            messages = [{**message, "content": as_parts(message.get("content"))} for message in messages]
        text = self._template.render(
            messages=messages, tools=tools, add_generation_prompt=prompt, **self.special_tokens
        )
        if len(text) > LARGEST_VALUE:
            raise TemplateLimit(f"gives {len(text):,} characters")
        return text

    def _writes(self, content: object) -> bool:
        """Whether a message with this content, which holds :data:`SEEN`, is written."""
        try:
            with limited():
                return SEEN in self.render([{"role": "user", "content": content}])
        except Exception:  # it may want other roles, or tools
            return False

    def conversation(
        self, line: str, origin: str, column: str, form: str = "auto", rendered_before: bool = False
    ) -> tuple[str, list[Span]]:
        """The text of one JSON line and the character spans ``[start, end)`` that the assistant said.

        A span holds all that the template adds for the assistant's message after the generation prompt, the end of
        its turn included. Where a template renders a message differently once others follow (some drop earlier
        reasoning), a span is the message's content as rendered, and a special token right behind it.

        Args:
            column, form: as of :func:`messages_of`.
            rendered_before: within the limits, which this call, in whatever thread, does without.

        Raises:
            DataError: broken JSON, wrong messages, or messages that the template refuses; names file and line.
        """
        row = json_row(line, origin, column)
        messages = messages_of(row, origin, column, form)
        return self._spans_within_limits(messages, row, origin, len(line), rendered_before)

    def preference(
        self, line: str, origin: str, column: str, rendered_before: bool = False
    ) -> list[tuple[str, list[Span]]]:
        """The same of the two conversations of a preference pair, the chosen one first; spans are of the answers alone.

        Args:
            column: as of :func:`preference_of`.
        """
        row = json_row(line, origin, column)
        both = preference_of(row, origin, column)
        return [self._spans_within_limits(one, row, origin, len(line), rendered_before) for one in both]

    def _spans_within_limits(
        self, messages: list[dict[str, Any]], row: Mapping[str, Any], origin: str, size: int, rendered_before: bool
    ) -> tuple[str, list[Span]]:
        try:
            with nullcontext() if rendered_before else limited(size):
                return self._with_spans(messages, row.get("tools"), origin)
        except TemplateError as error:
            raise DataError(f"{origin}: the chat template refuses these messages: {reason(error)}") from error

    def _with_spans(self, messages: list[dict[str, Any]], tools: object, origin: str) -> tuple[str, list[Span]]:
        full = self.render(messages, tools)
        check_unicode(full, origin)
        self._note(messages, full, origin)
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        trained = [index for index in answers if is_trained(messages[index])]
        for index in trained:
            self._check_said(full, messages, tools, index, origin)
        if self._marks_generation:
            text, marked = _marked_spans(full)
            if trained == answers:
                return text, marked
            if len(marked) != len(answers):
                raise DataError(f"{origin}: train or weight of a message: the chat template marks other parts than it")
            return text, [span for span, index in zip(marked, answers, strict=True) if index in trained]
        spans = [
            self._turn(full, messages, tools, index) or self._content(full, messages, tools, index, origin)
            for index in trained
        ]
        return full, sorted(spans)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of ``messages`` that the assistant is to answer.

        Raises:
            BadInputError: the template refuses them.
        """
        try:
            with limited(sum(len(str(message.get("content"))) for message in messages)):
                return self.render(messages, prompt=True)
        except TemplateError as error:
            raise BadInputError(f"the chat template refuses this conversation: {reason(error)}") from error

    def turn_end(self) -> str | None:
        """The special token that ends what the assistant says; None where the template writes none."""
        asked = [{"role": "user", "content": "."}, {"role": "assistant", "content": OPEN}]
        try:
            with limited():
                behind = self.render(asked).partition(OPEN)[2].lstrip()
        except TemplateError:
            return None
        ends = [token for token in self.stop_tokens if token and behind.startswith(token)]
        return max(ends, key=len, default=None)

    def _note(self, messages: list[dict[str, Any]], full: str, origin: str) -> None:
        """Count a conversation that is not trained on as it stands, and keep why of the first."""
        why = next(_oddities(messages, full), None)
        if why is not None:
            self.odd += 1
            self.first_odd = self.first_odd or f"{origin}: {why}"

    def _check_said(self, full: str, messages: list[dict[str, Any]], tools: object, index: int, origin: str) -> None:
        """Refuse a template that hides what the assistant says."""
        content = (messages[index]["content"] or "").strip()
        if not content or content in full:
            return
        marked = [*messages[:index], {**messages[index], "content": SEEN}, *messages[index + 1 :]]
        if SEEN not in self.render(marked, tools):
            raise DataError(f"{origin}: the chat template hides what the assistant says in message {index + 1}")

    def _turn(self, full: str, messages: list[dict[str, Any]], tools: object, index: int) -> Span | None:
        """The span of message ``index`` if the rendering up to it is a prefix of ``full``."""
        try:
            after = self.render(messages[: index + 1], tools)
            plain = self.render(messages[:index], tools)
            before = self.render(messages[:index], tools, prompt=True)
        except (TemplateLimit, MemoryError, RecursionError):
            raise
        except Exception:  # a part of a conversation may be what the template cannot take
            return None
        if not (full.startswith(after) and after.startswith(plain)):
            return None
        start = _common_prefix(before, after)
        return (start, len(after)) if len(plain) <= start < len(after) else None

    def _content(self, full: str, messages: list[dict[str, Any]], tools: object, index: int, origin: str) -> Span:
        """The span of message ``index`` by comparing with a rendering in which its content is another."""
        other = [dict(message) for message in messages]
        other[index]["content"] = OPEN
        other[index].pop("tool_calls", None)  # calls stand behind the content, and are what is said as well
        changed = self.render(other, tools)
        if changed.count(OPEN) != 1:
            raise DataError(f"{origin}: the chat template does not render the content of message {index + 1} once")
        start = _common_prefix(full, changed)
        tail = changed[changed.index(OPEN) + 1 :]
        if not full.endswith(tail):
            raise DataError(f"{origin}: the chat template renders message {index + 1} in a way that hides its end")
        end = max(start, len(full) - len(tail))
        stop = next((token for token in self.stop_tokens if token and full.startswith(token, end)), "")
        return start, len(full) if index == len(messages) - 1 else end + len(stop)


def _oddities(messages: list[dict[str, Any]], full: str) -> Iterator[str]:
    """What of a conversation is told: parts that the template leaves out, and turns that nobody would expect."""
    plain = full.replace(OPEN, "").replace(CLOSE, "")
    for number, message in enumerate(messages, start=1):
        for name in TEXTS if message["role"] != "tool" else ():
            text = message.get(name)
            if isinstance(text, str) and text.strip() not in plain:
                yield f"the chat template leaves out (a part of) {name} of message {number}"
    roles = [message["role"] for message in messages]
    for number, (role, following) in enumerate(pairwise(roles), start=1):
        if role == following == "user":
            yield f"messages {number} and {number + 1} are both the user's"
    if roles[-1] == "user":
        yield "the last message is the user's: nobody answers it"


def _common_prefix(one: str, other: str) -> int:
    """How many characters two strings share at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # halving: comparing slices costs a hundredth of comparing characters
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _marked_spans(marked: str) -> tuple[str, list[Span]]:
    """Text and spans of a rendering whose assistant parts stand between the two marks."""
    text, spans, start = "", [], 0
    for part in re.split(f"([{OPEN}{CLOSE}])", marked):
        if part == OPEN:
            start = len(text)
        elif part == CLOSE:
            spans.append((start, len(text)))
        else:
            text += part
    return text, spans
