"""What a run's logs end with, and the warnings in them. Only the end of a long log is read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.plain_files import NotPlainError, read_end
from mgpu_pipe.report import redact
from mgpu_pipe.report.rows import printable

READ_BYTES = 1 << 19
"""Of each log, from its end."""
MOST_LOGS = 64
SHOWN_LINES = 40
MOST_WARNINGS = 20
LONGEST_LINE = 500
PROGRESS = re.compile(r"step [\d,]+/")
WARNING = re.compile(r"warning", re.IGNORECASE)
ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07?)")


@dataclass
class Logs:
    """Of the ranks' logs.

    Attributes:
        ends: a log's name and its last lines: rank 0's, and that of the rank that failed first.
        warnings: each distinct one, and which ranks gave it how often.
    """

    ends: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)


def read_logs(paths: RunPaths, failed_rank: int | None, problems: list[str]) -> Logs:
    """The logs of the first ranks and of ``failed_rank``; what cannot be read is added to ``problems``."""
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
    logs.warnings = [(line, _by(found)) for line, found in list(ranks.items())[:MOST_WARNINGS]]
    return logs


def _clean(line: str) -> str:
    """A line as a terminal would show it at last, without what steers one, and without secrets."""
    return redact.line(printable(ESCAPE.sub("", line.rpartition("\r")[2]))[:LONGEST_LINE])


def _by(ranks: list[int]) -> str:
    several = sorted(set(ranks))
    who = f"rank {several[0]}" if len(several) == 1 else f"{len(several)} ranks"
    return who if len(ranks) == 1 else f"{who}, {len(ranks)} times"
