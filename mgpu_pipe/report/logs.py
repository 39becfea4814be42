"""Reads the last lines of a run's logs and the warnings near their end, with secrets hidden."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import printable
from mgpu_pipe.system.local_files import NotPlainError, read_end

SECRET_KEY = re.compile(r"(^|[._-])(api_?key|secret|passw(or)?d|(auth|access|hf)_token|credentials?)$", re.IGNORECASE)
HIDDEN = "(hidden)"


def redact_tree(values: Any, key: str = "") -> Any:
    """A copy of nested mappings and lists with secrets hidden; list items may be overrides."""
    if isinstance(values, dict):
        return {name: redact_tree(value, str(name)) for name, value in values.items()}
    if isinstance(values, list):
        return [redact_override(value) if isinstance(value, str) else redact_tree(value, key) for value in values]
    return HIDDEN if SECRET_KEY.search(key) and _is_written_out(values) else values


def redact_override(text: str) -> str:
    """``key=value`` with the value hidden if the key names a secret; other texts stay."""
    key, separator, value = text.partition("=")
    return f"{key}={HIDDEN}" if separator and SECRET_KEY.search(key) and _is_written_out(value) else text


def _hide_value(match: re.Match[str]) -> str:
    key, separator, value = re.split(r"([=:]\s*)", match[0], maxsplit=1)
    return f"{key}{separator}{HIDDEN}" if SECRET_KEY.search(key.strip("'\"")) and _is_written_out(value) else match[0]


def _is_written_out(value: object) -> bool:
    return value not in (None, "", "null") and not str(value).strip("'\"").startswith("${")


READ_BYTES = 1 << 19
"""Bytes to read at the end of each log."""
MOST_LOGS = 64
SHOWN_LINES = 40
MOST_WARNINGS = 20
LONGEST_LINE = 500
PROGRESS = re.compile(r"step [\d,]+/")
WARNING = re.compile(r"warning", re.IGNORECASE)
ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07?)")


@dataclass
class Logs:
    """Last lines and warnings of the ranks' logs.

    Attributes:
        ends: name and last lines of the logs of rank 0 and of the rank that failed first.
        warnings: each distinct warning, with the ranks that logged it and how often.
    """

    ends: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)


def read_logs(paths: RunPaths, failed_rank: int | None, problems: list[str]) -> Logs:
    """The logs of the first ranks and of ``failed_rank``; adds unreadable files to ``problems``."""
    logs = Logs()
    ranks: dict[str, list[int]] = {}
    for rank in dict.fromkeys([*range(MOST_LOGS), *([] if failed_rank is None else [failed_rank])]):
        path = paths.rank_log(rank)
        try:
            content = read_end(path, READ_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            continue
        except (OSError, NotPlainError) as error:
            problems.append(f"{path.name}: {getattr(error, 'strerror', None) or error}")
            continue
        lines = [_clean(line) for line in content.splitlines()]
        if rank in (0, failed_rank):
            logs.ends.append((path.name, "\n".join(lines[-SHOWN_LINES:])))
        for line in lines:
            if WARNING.search(line) and not PROGRESS.match(line):
                ranks.setdefault(line.strip(), []).append(rank)
    logs.warnings = [(line, _count_ranks(ranks_of_line)) for line, ranks_of_line in list(ranks.items())[:MOST_WARNINGS]]
    return logs


def _clean(line: str) -> str:
    """A line as a terminal shows it in the end, without control sequences and secrets."""
    plain = printable(ESCAPE.sub("", line.rpartition("\r")[2]))[:LONGEST_LINE]
    return re.sub(r"[^\s=:]+[=:]\s*\S+", _hide_value, plain)  # in a command or a configuration


def _count_ranks(ranks: list[int]) -> str:
    distinct = sorted(set(ranks))
    who = f"rank {distinct[0]}" if len(distinct) == 1 else f"{len(distinct)} ranks"
    return who if len(ranks) == 1 else f"{who}, {len(ranks)} times"
