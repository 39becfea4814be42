"""Texts of measured numbers, for tables and pages: counts, figures, times and sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

MISSING = "\u2013"
"""An en dash: not measured."""
TIMES = "\u00d7"


def count(number: float) -> str:
    """A count with at most one decimal: ``950``, ``12.3k``, ``7.9M``, ``1.2B``, ``3T``."""
    sign, size = ("-" if number < 0 else ""), abs(number)
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= scale * 0.99995:
            return f"{sign}{size / scale:.1f}".removesuffix(".0") + unit
    return f"{sign}{size:.1f}".removesuffix(".0")


def figure(number: float, digits: int = 4) -> str:
    """A measured number with ``digits`` significant digits: ``3.412``, ``1,245``, ``3e-04``; a dash for NaN."""
    if math.isnan(number):
        return MISSING
    if math.isinf(number):
        return "∞" if number > 0 else "-∞"
    if number and not 1e-3 <= abs(number) < 1e7:
        mantissa, exponent = f"{number:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    decimals = digits if not number else max(0, digits - 1 - math.floor(math.log10(abs(number))))
    text = f"{number:,.{decimals}f}"
    return text if number == 0 or "." not in text else text.rstrip("0").rstrip(".") or "0"


def capitalize(text: str) -> str:
    """``text`` with a capital first letter; the others stay, as in NDCG."""
    return text[:1].upper() + text[1:]


def fix_decimals(number: float, decimals: int) -> str:
    """A number with exactly ``decimals`` decimals, for columns to compare; a dash for NaN."""
    return f"{number:,.{decimals}f}" if math.isfinite(number) else figure(number)


def metric(number: float, percent: bool = False) -> str:
    """A metric's value: a share as a percentage; larger values have fewer decimals."""
    if percent and math.isfinite(number):
        return f"{100 * number:.2f}%"
    return fix_decimals(number, 2 if number < 100 else 1 if number < 1000 else 0)


def duration(seconds: float) -> str:
    """``8.4 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 d 4 h``; a dash for NaN."""
    if math.isnan(seconds):
        return MISSING
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    total = round(seconds)
    for unit, rest, size, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if total >= size:
            return f"{total // size} {unit} {total % size // part} {rest}"
    return f"{total} s"


def seconds(value: float) -> str:
    """The time of a part of a step: ``1.51 s``, ``141 ms``, ``0.749 ms``."""
    if value == 0:
        return "0 s"
    return f"{figure(value, 3)} s" if not 0 < value < 0.0995 else f"{figure(1000 * value, 3)} ms"


def gibibytes(size: float) -> str:
    """A size given in GiB: ``68 KiB``, ``612 MiB`` or ``12.40 GiB``."""
    if math.isnan(size):
        return MISSING
    if size >= 1:
        return f"{size:.2f} GiB"
    return f"{size * 2**10:.0f} MiB" if size >= 2**-10 else f"{size * 2**20:.0f} KiB"


def plain(value: object) -> str:
    """Any value of a JSON or YAML file as one line of text."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return figure(value, 6) if value else "0"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={plain(item)}" for key, item in value.items()) or MISSING
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(plain(item) for item in value) or MISSING
    return str(value)
