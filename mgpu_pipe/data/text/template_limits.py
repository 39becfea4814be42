"""Limits of time and memory for chat templates, which are untrusted programs.

Jinja's sandbox protects Python's internals and forbids long ranges; it limits neither time nor memory. So a template is
compiled and rendered under limits of processor time and of added memory. No signal interrupts a call of C code, so a
single operation that would exceed a limit is refused before it runs. The input of each call is weighed first: the cost
of every operation is linear in it, except :data:`_METHODS_OF_TWO_LENGTHS`.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.environment import Environment
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_environment

from mgpu_pipe.errors import BadInputError

SECONDS = 3.0
"""Processor time of a conversation, which usually takes a millisecond; longer conversations get more."""
CHARACTERS_A_SECOND = 10_000
MEMORY_BYTES = 1 << 30
LARGEST_VALUE = 16 << 20
"""Elements of a text or list, and bits of a number, that one operation may return."""
_LARGEST_NUMBER_BITS = 1 << 16


class TemplateLimit(TemplateError):
    """A template exceeds the limits of time or memory."""


MOST_READ = 4 * LARGEST_VALUE
"""Weight that one operation may read: characters of its texts, and :data:`_BYTES_AN_ELEMENT` for each element."""
_BYTES_AN_ELEMENT = 64
_MOST_COMPARED = 1 << 30
_METHODS_OF_TWO_LENGTHS = frozenset({"rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip"})
"""Methods of texts whose cost is the product of two lengths; others are linear (CPython 3.10)."""
_MOST_DIGITS = 1000
_WEIGHED = "weighed"
_CONTAINERS: Any = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which no operation reads or returns anything huge, constant folding included."""

    intercepted_binops = frozenset({"*", "**", "/", "//", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["sum"] = _sum
        self.filters["round"] = _rounding(self.filters["round"])
        self.filters["trim"] = _trimming(self.filters["trim"])
        tables: list[dict[str, Any]] = [self.filters, self.tests]
        for functions in tables:
            functions.update({name: _weighing(function) for name, function in functions.items()})
        self.filters[_WEIGHED] = _weigh

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parses a template and weighs every operand that is compared, hashed or written."""
        tree = super()._parse(source, name, filename)
        for compare in list(tree.find_all(nodes.Compare)):
            compare.expr = _wrap(compare.expr)
            for operand in compare.ops:
                operand.expr = _wrap(operand.expr)
        for pair in list(tree.find_all(nodes.Pair)):
            pair.key = _wrap(pair.key)
        several: list[Any] = [*tree.find_all(nodes.Output), *tree.find_all(nodes.Concat)]
        for written in several:
            written.nodes = [node if isinstance(node, nodes.TemplateData) else _wrap(node) for node in written.nodes]
        return tree.set_environment(self)  # type: ignore[return-value]

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, _weigh(argument))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a template's call after weighing it; Jinja's parameter names avoid the template's."""
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        measured = [_measure(value) for value in args]
        for value in (owner, *kwargs.values()):
            _weigh(value)
        if isinstance(owner, str) and name in _METHODS_OF_TWO_LENGTHS:
            _check_product(owner, *args, *kwargs.values())
        if name == "fromkeys":  # with equal hashes the cost is the square of their number
            raise TemplateLimit("calls fromkeys, which chat templates do without")
        return super().call(__context, __obj, *measured, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _weigh(left)
        _weigh(right)
        if operator == "**":
            numbers = isinstance(left, int) and isinstance(right, int)
            if numbers and abs(left) > 1 and left.bit_length() * abs(right) > _LARGEST_NUMBER_BITS:
                raise TemplateLimit(f"the power of {right} is too large")
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > _LARGEST_NUMBER_BITS:
                raise TemplateLimit("a product is too large")
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(value, "__len__") and len(value) * times > LARGEST_VALUE:
                    raise TemplateLimit(f"{len(value)} elements {times} times is too large")
        return super().call_binop(context, operator, left, right)


def _weigh(value: Any) -> Any:
    """``value``, if an operation may read it; TemplateLimit if it is too large, repeated elements included."""
    waiting: list[Any] = [value]
    weight = 0
    while waiting:
        item = waiting.pop()
        if isinstance(item, str | bytes):
            weight += len(item)
        elif isinstance(item, dict):
            weight += 2 * _BYTES_AN_ELEMENT * len(item)
            waiting += [*item.keys(), *item.values()] if weight <= MOST_READ else []
        elif isinstance(item, _CONTAINERS):
            weight += _BYTES_AN_ELEMENT * len(item)
            waiting += item if weight <= MOST_READ else []
        elif isinstance(item, int) and item.bit_length() > _LARGEST_NUMBER_BITS:
            raise TemplateLimit("a number is too large")
        if weight > MOST_READ:
            raise TemplateLimit(f"one operation reads more than {MOST_READ >> 20} Mi characters")
    return value


def _measure(value: Any) -> Any:
    """Weighs like :func:`_weigh`; weighs an iterator's values as they come."""
    if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        return _weigh_each(value)
    return _weigh(value)


def _weigh_each(values: Iterable[Any]) -> Iterator[Any]:
    left = MOST_READ
    for value in values:
        left -= _BYTES_AN_ELEMENT + (len(value) if hasattr(value, "__len__") else 0)
        if left < 0:
            raise TemplateLimit(f"one operation reads more than {MOST_READ >> 20} Mi characters")
        yield _weigh(value)


def _weighing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a filter or test to weigh its arguments first."""

    @functools.wraps(function)  # copies the marks by which Jinja passes the context
    def weighing(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_measure, args), **{name: _measure(value) for name, value in kwargs.items()})

    return weighing


def _wrap(node: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, _WEIGHED, [], [], None, None, lineno=node.lineno)


def _check_product(text: str, *others: Any) -> None:
    longest = max((len(other) for other in others if isinstance(other, str)), default=0)
    if len(text) * longest > _MOST_COMPARED:
        raise TemplateLimit(f"searches {len(text):,} characters for {longest:,}")


@pass_environment
def _sum(environment: Environment, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    """Jinja's filter ``sum``, one element at a time: summing lists costs the square of their number."""
    get = make_attrgetter(environment, attribute) if attribute is not None else None
    total = start
    for value in values:
        total = total + (get(value) if get is not None else value)
    return total


def _rounding(function: Callable[..., Any]) -> Callable[..., Any]:
    def rounding(value: float, precision: int = 0, method: str = "common") -> Any:
        if abs(precision) > _MOST_DIGITS:
            raise TemplateLimit(f"rounds to {precision} digits")
        return function(value, precision, method)

    return rounding


def _trimming(function: Callable[..., Any]) -> Callable[..., Any]:
    def trimming(value: Any, chars: str | None = None) -> Any:
        _check_product(str(value), chars)
        return function(value, chars)

    return trimming


def _is_called_by(frame: FrameType | None, block: FrameType) -> bool:
    """Whether the block of :func:`limit_template` called this frame's code, directly or not.

    Entry and exit of the block do not count.
    """
    if frame is block:
        return False
    while frame is not None and frame is not block and frame.f_globals is not vars(contextlib):
        frame = frame.f_back
    return frame is block


@contextlib.contextmanager
def limit_template(characters: int = 0) -> Iterator[None]:
    """Runs the block under the limits; only in the main thread, as signals require.

    Args:
        characters: size of the rendered input.

    Raises:
        TemplateError: for any error inside, except those that name a file or a key.
    """
    seconds = SECONDS + characters / CHARACTERS_A_SECOND

    block = sys._getframe(2)  # frame 1 is contextlib's

    def stop(number: int, frame: FrameType | None) -> None:
        # The timer repeats, so a signal may be passed over: an error while the block is left would keep the limits set.
        if _is_called_by(frame, block):
            raise TemplateLimit(f"takes more than {seconds:g} s")

    handler = signal.signal(signal.SIGPROF, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES + 64 * characters
        known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([most, *known]), hard))
        # again: Jinja's constant folding swallows exceptions
        signal.setitimer(signal.ITIMER_PROF, seconds, SECONDS)
        yield
    except (TemplateError, BadInputError):
        raise
    except RecursionError:
        raise TemplateLimit("calls itself without end, or is nested too deeply") from None
    except MemoryError:
        raise TemplateLimit(f"needs more than {MEMORY_BYTES >> 20} MiB of memory") from None
    except Exception as error:  # a template may raise any error of Python's operators and methods
        raise TemplateError(f"{type(error).__name__}: {error}") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, handler)


def reason(error: TemplateError) -> str:
    """Error of a template in one line."""
    text = " ".join(str(error.message or error).split()) or type(error).__name__
    text = text if len(text) <= 300 else f"{text[:300]} ..."
    return f"line {error.lineno}: {text}" if isinstance(error, TemplateSyntaxError) else text
