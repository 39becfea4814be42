"""Finds the assistant's characters in a rendered conversation, turn by turn.

An answer begins where the generation prompt ends, so that training and generation give the model the same tokens
before it. It ends with the token that ends the turn. Text of the template after that token (ChatML's line break) or
before the prompt (a default system message) is not part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from mgpu_pipe.data.text.conversations import CLOSE, MARKS, OPEN, SEEN, is_trained
from mgpu_pipe.data.text.foreign_messages import KNOWN_ROLES
from mgpu_pipe.data.text.template_limits import TemplateLimit
from mgpu_pipe.errors import DataError

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
TEXTS = ("content", "reasoning_content", "reasoning", "thinking", "name")
"""Fields of a message that a template may write."""
_QUESTION = {"role": "user", "content": "."}


class Render(Protocol):
    """Renders messages as one text; with ``prompt``, followed by the beginning of an assistant's turn."""

    def __call__(self, messages: Messages, tools: object = None, prompt: bool = False) -> str: ...


class Rendered(NamedTuple):
    """A conversation as text.

    Attributes:
        text: all of it.
        spans: the characters ``[start, end)`` that the loss counts, sorted and disjoint.
        starts: where each answer begins, trained or not; generation prompts end there.
        ended: the last span holds the token that ends its turn.
    """

    text: str
    spans: list[Span]
    starts: list[int]
    ended: bool


@dataclass
class AnswerFinder:
    """Finds answers in the renderings of one template.

    Args:
        render: the template.
        eos_token: text of the tokenizer's end of text; empty without one.
        special_tokens: texts of all of the tokenizer's special tokens, which may end a turn.
    """

    render: Render
    eos_token: str = ""
    special_tokens: Sequence[str] = ()
    _prompt: str | None = field(default=None, init=False)
    _end: str | None = field(default=None, init=False)
    _more: str | None = field(default=None, init=False)

    def turn_end(self) -> str | None:
        """Special token that ends the assistant's turn; None where the template writes none."""
        behind = self._render_answer().partition(SEEN)[2].lstrip()
        ends = [token for token in self.special_tokens if token and behind.startswith(token)]
        return max(ends, key=len, default=None)

    def lead(self) -> str:
        """Spaces that the template writes between the generation prompt and an answer."""
        question, prompt = self.render([_QUESTION]), self.generation_prompt()
        written = self._render_answer().partition(SEEN)[0].removeprefix(question)
        lead = written.removeprefix(prompt) if prompt and written.startswith(prompt) else ""
        return lead if lead.isspace() else ""

    def generation_prompt(self) -> str:
        """Generation prompt of the template; empty where it writes none."""
        if self._prompt is None:
            try:
                question, prompt = self.render([_QUESTION]), self.render([_QUESTION], prompt=True)
            except (TemplateLimit, MemoryError, RecursionError):
                raise
            except Exception:  # the template may want other messages
                question, prompt = "", ""
            self._prompt = prompt.removeprefix(question) if prompt.startswith(question) else ""
        return self._prompt

    def answer(self, full: str, messages: Messages, tools: object, index: int, origin: str) -> tuple[Span, bool]:
        """Span of message ``index`` in ``full``, and if the token that ends it is in; DataError if it is hidden."""
        start, after, tail = self._begin(full, messages, tools, index, origin)
        if after is not None:
            end = len(after)
        elif not full.endswith(tail):
            raise DataError(f"{origin}: the chat template renders message {index + 1} in a way that hides its end")
        elif index == len(messages) - 1:
            end = len(full)
        else:
            end = max(start, len(full) - len(tail))
            end += len(next((token for token in self.special_tokens if token and full.startswith(token, end)), ""))
        span, ended = self.until_the_end(full, (start, max(start, end)))
        if not ended and self.eos_token and full.startswith(self.eos_token, end):  # all turns but the last
            return (start, end + len(self.eos_token)), True
        return span, ended

    def start(self, full: str, messages: Messages, tools: object, index: int) -> int:
        """Start of message ``index`` in ``full``, after any generation prompt; raises like :meth:`answer`."""
        return self._begin(full, messages, tools, index, "")[0]

    def _begin(
        self, full: str, messages: Messages, tools: object, index: int, origin: str
    ) -> tuple[int, str | None, str]:
        """Finds the start of message ``index`` in ``full``. Also returns the conversation up to its end, or None where
        ``full`` does not begin with it, and then the text after its content."""
        plain = self._part(messages[:index], tools) if index else None
        prompt, before = self.generation_prompt(), None
        if plain is not None:
            before = self._part(messages[:index], tools, prompt=True)
            if before is not None and before.startswith(plain):
                prompt = before.removeprefix(plain)
            else:
                plain = before = None
        after: str | None = self._part(messages[: index + 1], tools)
        if after is not None and not full.startswith(after):
            after = None  # the template writes an answer differently when others follow
        if after is not None and before is not None and after.startswith(before) and len(before) < len(after):
            return len(before), after, ""
        # The first turn, before which a template may write a default system message; or a generation prompt that is
        # longer than the text before an answer.
        visible = messages if after is None else messages[: index + 1]
        head, marks, tail = self._mark(visible, tools, index).partition(SEEN)
        if not marks or SEEN in tail:
            if after is None or before is None or plain is None or not after.startswith(plain):
                raise DataError(f"{origin}: the chat template does not render the content of message {index + 1} once")
            return common_prefix(before, after), after, ""
        start = self._header_end(head, plain, prompt)
        return (start if full.startswith(head[:start]) else common_prefix(full, head)), after, tail

    def until_the_end(self, full: str, span: Span) -> tuple[Span, bool]:
        """Cuts ``span`` after the token that ends the turn; returns also whether there is such a token."""
        start, end = span
        if (more := self.after_turn()) and full.endswith(more, start, end):
            end -= len(more)
        last = position = start + len(full[start:end].rstrip())
        usual: int | None = None
        while token := self._special_before(full, start, position):
            usual = position if token in (self._turn_end(), self.eos_token) else usual
            position = start + len(full[start : position - len(token)].rstrip())
        if usual is not None:
            return (start, usual), True
        if position < last:
            return (start, last), self._turn_end() is not None
        return span, False

    def _special_before(self, full: str, start: int, end: int) -> str:
        return max(
            (token for token in self.special_tokens if token and full.endswith(token, start, end)), key=len, default=""
        )

    def _turn_end(self) -> str | None:
        if self._end is None:
            try:
                self._end = self.turn_end() or ""
            except (TemplateLimit, MemoryError, RecursionError):
                raise
            except Exception:  # the template may want other messages
                self._end = ""
        return self._end or None

    def after_turn(self) -> str:
        """Words that the template writes after the last answer's turn even where nothing asks for them, such as the
        header of the next answer (Llama 3's first template)."""
        if self._more is None:
            end = self._turn_end()
            more = self._render_answer().partition(SEEN)[2].partition(end)[2] if end else ""
            words = re.sub("|".join(map(re.escape, filter(None, self.special_tokens))), "", more) if more else ""
            self._more = more if words.strip() else ""
        return self._more

    def _render_answer(self) -> str:
        return self.render([_QUESTION, {"role": "assistant", "content": SEEN}])

    def _part(self, messages: Messages, tools: object, prompt: bool = False) -> str | None:
        try:
            return self.render(messages, tools, prompt)
        except (TemplateLimit, MemoryError, RecursionError):
            raise
        except Exception:  # the template may refuse a part of a conversation
            return None

    def _mark(self, messages: Messages, tools: object, index: int) -> str:
        """Renders the conversation with a mark instead of the content of message ``index``."""
        other = [dict(message) for message in messages]
        other[index]["content"] = SEEN
        other[index].pop("tool_calls", None)  # tool calls follow the content and belong to the answer
        return self.render(other, tools)

    def _header_end(self, head: str, plain: str | None, prompt: str | None) -> int:
        """Start of an answer in ``head``, after ``plain``, the conversation before it, and ``prompt``, the
        template's."""
        begin = len(plain) if plain is not None and head.startswith(plain) else 0
        prompt = self.generation_prompt() if prompt is None else prompt
        for header in filter(None, (prompt, prompt.lstrip(), prompt.strip())):  # other spaces where it only asks
            if (start := head.rfind(header, begin)) >= 0:
                return start + len(header)
        return begin + common_prefix(head[begin:], prompt) if begin else len(head)


READ = frozenset({"role", "content", *MARKS, "weight", "tool_calls", "tool_call_id", "id", *TEXTS})
"""Fields of a message that this program reads, and those that only tell messages and calls apart."""


def oddities(messages: Messages, full: str, template: str) -> Iterator[str]:
    """Describes parts that the program, or the ``template`` by its words, drops, and unusual turns."""
    plain = full.replace(OPEN, "").replace(CLOSE, "")
    for number, message in enumerate(messages, start=1):
        for name in message.keys() - READ:
            if message[name] is not None and str(name) not in template:
                hint = "; train=false leaves a message out of the loss" if isinstance(message[name], bool) else ""
                yield f"nothing reads the field {name!r} of message {number}{hint}"
        empty = not message.get("content") and not message.get("tool_calls")
        if message["role"] == "assistant" and empty and is_trained(message):
            yield f"message {number} is an answer without content: its end alone is trained"
        for name in TEXTS if message["role"] != "tool" else ():
            text = message.get(name)
            if isinstance(text, str) and text.strip() not in plain:
                yield f"the chat template leaves out (a part of) {name} of message {number}"
    roles = [message["role"] for message in messages]
    for number, role in enumerate(roles, start=1):
        if role not in KNOWN_ROLES:
            yield f"message {number} has the role {role!r}, not the assistant's: it is not trained"
    for number, (role, following) in enumerate(pairwise(roles), start=1):
        if role == following == "user":
            yield f"messages {number} and {number + 1} are both the user's"
    if roles[-1] == "user":
        yield "the last message is the user's: no answer follows"


def common_prefix(text: str, other: str) -> int:
    """Length of the common prefix of two strings."""
    low, high = 0, min(len(text), len(other))
    while low < high:  # bisection: comparing slices costs a hundredth of comparing characters
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
