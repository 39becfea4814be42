"""Renders conversations by a chat template, and finds the assistant's characters.

It renders like transformers' ``apply_chat_template`` (the same Jinja settings, in a sandbox that forbids changes of the
input), so training sees what generation will send. The date is fixed, so that the data does not change with the day:
a template that asks whether ``strftime_now`` is defined uses its own date, any other one gets :data:`TODAY`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import date
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from mgpu_pipe.data.files import check_unicode, json_row
from mgpu_pipe.data.text.answer_finder import AnswerFinder, Rendered, Span, oddities
from mgpu_pipe.data.text.call_arguments import Form, form_taken, with_arguments
from mgpu_pipe.data.text.conversations import (
    CLOSE,
    EVERY_PLACE,
    LITERAL,
    MARKS,
    OPEN,
    PLACE,
    REASONING,
    SEEN,
    TOOLS,
    as_parts,
    columns_read,
    has_places,
    is_trained,
    joins_templates,
    messages_of,
    tools_of,
    unused_columns,
    write_literally,
)
from mgpu_pipe.data.text.notes import Notes
from mgpu_pipe.data.text.preference_rows import (
    preference_columns,
    preference_of,
    unpaired_columns,
    unpaired_of,
    unread_columns,
    usual_pair,
)
from mgpu_pipe.data.text.template_limits import LARGEST_VALUE, LimitedEnvironment, TemplateLimit, limit_template, reason
from mgpu_pipe.errors import BadInputError, DataError

_TYPE_OF_PART = re.compile(r"""['"]type['"]|\.type\b""")
"""Matches a template that reads the type of a content's parts."""
READ_FIELDS = frozenset(("role", "content", "tool_calls", "weight", *MARKS, *REASONING))
"""Fields of a message that this program reads; it names reasoning that a template leaves out as odd."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
_HAS_OWN_DATE = re.compile(r"strftime_now\s+is\s+(not\s+)?(un)?defined")
TRIAL_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"properties": {}}}}
TODAY = date(2026, 1, 1)
"""Date for templates that write today's and have none for programs without a clock (gpt-oss, Granite, Devstral)."""


class _GenerationTag(Extension):
    """The tag ``{% generation %} ... {% endgeneration %}`` with which a template marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return OPEN + caller() + CLOSE


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its reasoning in each field that templates read."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' filter ``tojson`` with its arguments."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@dataclass
class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja text.
        special_tokens: names for templates: ``bos_token``, ``eos_token``, ...
        stop_tokens: texts of the tokenizer's special tokens, which may end a turn.
        places: of the pictures, videos and recordings that the model takes.
        placeholders: the model's tokens of these inputs, which stay text in a message.

    Attributes:
        notes: about the conversations so far.
        arguments: the form of tool call arguments for the template; None for that of the row.

    Raises:
        jinja2.TemplateError: the template is not valid Jinja, or compiling it takes more than a template's limits.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    stop_tokens: Sequence[str] = ()
    places: Sequence[str] = EVERY_PLACE
    placeholders: Sequence[str] = ()

    def __post_init__(self) -> None:
        environment = LimitedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        if not _HAS_OWN_DATE.search(self.source):
            environment.globals["strftime_now"] = TODAY.strftime
        with limit_template():
            self._template = environment.from_string(self.source)
        self.notes = Notes()
        self._answers = AnswerFinder(self.render, self.special_tokens.get("eos_token", ""), self.stop_tokens)
        self._fields_in_source = frozenset(re.findall(r"\w+", self.source))
        self._marks_generation = bool(_GENERATION.search(self.source))
        self._takes_parts = self._takes_places = False
        self.arguments: Form | None = None
        reads_parts = bool(_TYPE_OF_PART.search(self.source))
        self._takes_parts = reads_parts and not self._writes(SEEN) and self._writes(as_parts(SEEN))
        # A template that takes texts as well (Gemma 3, Qwen-VL) writes its own token for a part that is a picture.
        self._takes_places = reads_parts and PLACE not in self.stop_tokens and self._writes(as_parts(f"{PLACE}{SEEN}"))
        if "tool_calls" in self.source:
            joins = joins_templates(self.source)
            self.arguments = form_taken(self._rendered_with_tools if joins else self._rendered_if_taken)

    @property
    def reads_parts(self) -> bool:
        """Whether contents with places become parts."""
        return self._takes_parts or self._takes_places

    def writes_after_turn(self) -> bool:
        """Whether the template writes words after the last answer's turn that nothing asks for."""
        try:
            with limit_template():
                return bool(self._answers.after_turn())
        except TemplateError:
            return False

    @property
    def odd(self) -> int:
        return self.notes.odd

    @property
    def first_odd(self) -> str:
        return self.notes.first_odd

    def render(self, messages: Sequence[Mapping[str, Any]], tools: object = None, prompt: bool = False) -> str:
        """Renders ``messages``; with ``prompt`` begins the assistant's turn. TemplateError if the template refuses."""
        return self._render_marked(messages, tools, prompt).replace(OPEN, "").replace(CLOSE, "")

    def _render_marked(self, messages: Sequence[Mapping[str, Any]], tools: object = None, prompt: bool = False) -> str:
        """Renders like :meth:`render`, with two marks around each of the template's ``generation`` blocks."""
        messages = [_with_reasoning(message) for message in messages]
        if self.arguments is not None:
            messages = with_arguments(messages, self.arguments)
        if self._takes_parts:
            messages = [{**message, "content": as_parts(message.get("content"), self.places)} for message in messages]
        elif self._takes_places:
            messages = [
                {**message, "content": as_parts(message["content"], self.places)}
                if has_places(message, self.places)
                else message
                for message in messages
            ]
        text = self._template.render(
            messages=messages, tools=tools, add_generation_prompt=prompt, **self.special_tokens
        )
        text = self._around_pictures(text)
        if len(text) > LARGEST_VALUE:
            raise TemplateLimit(f"gives {len(text):,} characters")
        return text

    def _around_pictures(self, text: str) -> str:
        """``text`` with the tokens that a processor writes around a picture, where the template writes only the first
        (Gemma 3). The tokens of the picture's places come later."""
        before, after = (self.special_tokens.get(name) for name in ("boi_token", "eoi_token"))
        return text.replace(before, f"\n\n{before}{after}\n\n") if before and after else text

    def _writes(self, content: object) -> bool:
        """Whether the template writes a message with this content, which contains :data:`SEEN`."""
        return SEEN in self._rendered_if_taken([{"role": "user", "content": content}])

    def _rendered_if_taken(self, messages: Sequence[Mapping[str, Any]], tools: object = None) -> str:
        """Renders trial messages; empty where the template refuses them."""
        try:
            with limit_template():
                return self.render(messages, tools)
        except Exception:  # the template may need other roles, or tools
            return ""

    def _rendered_with_tools(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return self._rendered_if_taken(messages, [TRIAL_TOOL])

    def conversation(
        self, line: str, origin: str, column: str, form: str = "auto", rendered_before: bool = False
    ) -> Rendered:
        """Renders one JSON line and finds the assistant's characters (:mod:`mgpu_pipe.data.text.answer_finder`).

        Args:
            column, form: see :func:`messages_of`.
            rendered_before: an earlier call stayed within the limits, so this call, in any thread, skips them.

        Raises:
            DataError: broken JSON, wrong messages, or messages that the template refuses; names file and line.
        """
        row = json_row(line, origin, column)
        messages = messages_of(row, origin, column, form)
        self.notes.add_unused(origin, unused_columns(row, columns_read(row, column, form)))
        return self._rendered_within_limits(messages, tools_of(row, origin), origin, len(line), rendered_before)

    def preference(self, line: str, origin: str, column: str, rendered_before: bool = False) -> list[Rendered]:
        """Renders the two conversations of a preference pair, the chosen one first; spans cover only the answers."""
        row = json_row(line, origin, column)
        both, tools = preference_of(row, origin, column), tools_of(usual_pair(row), origin)
        self.notes.add_unused(origin, unread_columns(row, preference_columns(column), both[0]))
        return [self._rendered_within_limits(messages, tools, origin, len(line), rendered_before) for messages in both]

    def with_label(self, line: str, origin: str, column: str, rendered_before: bool = False) -> tuple[Rendered, bool]:
        """Renders a conversation with a label, spans cover only the completion; and whether it is desirable."""
        row = json_row(line, origin, column)
        messages, desirable = unpaired_of(row, origin, column)
        self.notes.add_unused(origin, unread_columns(row, unpaired_columns(column), messages))
        rendered = self._rendered_within_limits(messages, tools_of(row, origin), origin, len(line), rendered_before)
        return rendered, desirable

    def _rendered_within_limits(
        self, messages: list[dict[str, Any]], tools: object, origin: str, size: int, rendered_before: bool
    ) -> Rendered:
        self.notes.add_unused(origin, self._unread_fields(messages, tools))
        for number, message in enumerate(messages, start=1):
            content = message["content"] or ""
            if LITERAL in content and not self.places:
                raise DataError(f"{origin}: message {number} contains a Unicode noncharacter (U+FDD3)")
            if any(token in content for token in self.placeholders):
                message["content"] = write_literally(content, self.placeholders)
        try:
            with nullcontext() if rendered_before else limit_template(size):
                return self._render(messages, tools, origin)
        except TemplateError as error:
            raise DataError(f"{origin}: the chat template refuses these messages: {reason(error)}") from error

    def _unread_fields(self, messages: Sequence[Mapping[str, Any]], tools: object) -> list[str]:
        """Fields of messages that neither this program nor the template reads (tools' answers aside), and ``tools``."""
        names = {name for message in messages if message["role"] != "tool" for name in message}
        unread = sorted(names - READ_FIELDS - self._fields_in_source)
        unread_tools = [TOOLS] if tools and TOOLS not in self._fields_in_source else []
        return [*unread_tools, *(f"{name} of messages" for name in unread)]

    def _render(self, messages: list[dict[str, Any]], tools: object, origin: str) -> Rendered:
        full = self._render_marked(messages, tools)
        check_unicode(full, origin)
        self._note(messages, full, origin)
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        trained = [index for index in answers if is_trained(messages[index])]
        for index in trained:
            self._check_said(full, messages, tools, index, origin)
        if self._marks_generation:
            text, marked = _marked_spans(full)
            if trained != answers:
                said = [self._answers.answer(text, messages, tools, index, origin)[0] for index in trained]
                marked = [span for span in marked if any(span[0] < end and start < span[1] for start, end in said)]
            chosen = [self._answers.until_the_end(text, span) for span in marked]
            starts = self._starts(text, messages, tools, answers)
            return Rendered(text, [span for span, _ in chosen], starts, bool(chosen) and chosen[-1][1])
        answer_of = {index: self._answers.answer(full, messages, tools, index, origin) for index in trained}
        others = self._starts(full, messages, tools, [index for index in answers if index not in answer_of])
        spans, ended = zip(*sorted(answer_of.values()), strict=True)
        return Rendered(full, list(spans), sorted([*others, *(start for start, _ in spans)]), ended[-1])

    def _starts(
        self, text: str, messages: Sequence[Mapping[str, Any]], tools: object, answers: Sequence[int]
    ) -> list[int]:
        """Sorted starts of the answers, without those that the template drops."""
        starts = []
        for index in answers:
            try:
                starts.append(self._answers.start(text, messages, tools, index))
            except TemplateLimit:
                raise
            except (DataError, TemplateError):
                continue
        return sorted(starts)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Renders ``messages`` for the assistant to answer; raises like :meth:`prompt_with_starts`."""
        return self.prompt_with_starts(messages)[0]

    def prompt_with_starts(self, messages: Sequence[Mapping[str, Any]], tools: object = None) -> tuple[str, list[int]]:
        """Renders ``messages`` to be answered, and the starts of earlier answers; BadInputError if refused."""
        try:
            with limit_template(sum(len(str(message.get("content"))) for message in messages)):
                text = self.render(messages, tools, prompt=True)
                said = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
                return text, self._starts(text, messages, tools, said)
        except TemplateError as error:
            raise BadInputError(f"the chat template refuses this conversation: {reason(error)}") from error

    def turn_end(self) -> str | None:
        """Special token that ends the assistant's turn; None where the template writes none."""
        try:
            with limit_template():
                return self._answers.turn_end()
        except TemplateError:
            return None

    def lead(self) -> str:
        """The spaces that the template itself writes between the generation prompt and an answer."""
        try:
            with limit_template():
                return self._answers.lead()
        except TemplateError:
            return ""

    def _note(self, messages: list[dict[str, Any]], full: str, origin: str) -> None:
        """Counts a conversation with oddities, and keeps the first one's reason."""
        why = next(oddities(messages, full, self.source), None)
        if why is not None:
            self.notes.add_odd(origin, why)

    def _check_said(self, full: str, messages: list[dict[str, Any]], tools: object, index: int, origin: str) -> None:
        """Refuses a template that drops the assistant's text."""
        content = (messages[index]["content"] or "").strip()
        if not content or content in full:
            return
        marked = [*messages[:index], {**messages[index], "content": SEEN}, *messages[index + 1 :]]
        if SEEN not in self.render(marked, tools):
            raise DataError(f"{origin}: the chat template hides what the assistant says in message {index + 1}")


def _marked_spans(marked: str) -> tuple[str, list[Span]]:
    """Splits a rendering with marks around the assistant's parts into text and spans."""
    text, spans, start = "", [], 0
    for part in re.split(f"([{OPEN}{CLOSE}])", marked):
        if part == OPEN:
            start = len(text)
        elif part == CLOSE:
            spans.append((start, len(text)))
        else:
            text += part
    return text, spans
