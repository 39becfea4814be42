"""Limits of a chat template, which is a program that somebody else wrote.

Jinja's sandbox keeps a template from Python's internals and from long ranges, not from filling memory or the day. So
it is compiled and rendered under a limit of processor time and of memory that it may add, and what would take either in
one operation, where no limit reaches it, is refused before it is computed.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mgpu_pipe.errors import BadInputError

SECONDS = 3.0
"""Processor time of one conversation, which takes a millisecond; longer ones get more."""
CHARACTERS_A_SECOND = 10_000
MEMORY_BYTES = 1 << 30
LARGEST_VALUE = 16 << 20
"""Elements of a text or list, and bits of a number, that one operation may give."""
_LARGEST_NUMBER_BITS = 1 << 16


class TemplateLimit(TemplateError):
    """A template took more time or memory than a chat template can need."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, in which ``*`` and ``**`` give nothing huge; also not while constants are folded."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            numbers = isinstance(left, int) and isinstance(right, int)
            if numbers and abs(left) > 1 and left.bit_length() * right > _LARGEST_NUMBER_BITS:
                raise TemplateLimit(f"the power of {right} is too large")
        elif isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > _LARGEST_NUMBER_BITS:
                raise TemplateLimit("a product is too large")
        else:
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(value, "__len__") and len(value) * times > LARGEST_VALUE:
                    raise TemplateLimit(f"{len(value)} elements {times} times is too large")
        return super().call_binop(context, operator, left, right)


@contextmanager
def limited(characters: int = 0) -> Iterator[None]:
    """Run what is inside under the limits; in the main thread, as signals ask.

    Args:
        characters: size of what is rendered.

    Raises:
        TemplateError: whatever goes wrong inside, but for what names a file or a key itself.
    """
    seconds = SECONDS + characters / CHARACTERS_A_SECOND

    def stop(number: int, frame: FrameType | None) -> None:
        raise TemplateLimit(f"takes more than {seconds:g} s")

    handler = signal.signal(signal.SIGPROF, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES + 64 * characters
        known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([most, *known]), hard))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        yield
    except (TemplateError, BadInputError):
        raise
    except RecursionError:
        raise TemplateLimit("calls itself without end, or is nested too deeply") from None
    except MemoryError:
        raise TemplateLimit(f"needs more than {MEMORY_BYTES >> 20} MiB of memory") from None
    except Exception as error:  # a template may raise whatever Python's operators and methods do
        raise TemplateError(f"{type(error).__name__}: {error}") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, handler)


def reason(error: TemplateError) -> str:
    """What is wrong with a template, in one line."""
    text = " ".join(str(error.message or error).split()) or type(error).__name__
    text = text if len(text) <= 300 else f"{text[:300]} ..."
    return f"line {error.lineno}: {text}" if isinstance(error, TemplateSyntaxError) else text
