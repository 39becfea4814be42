"""Notes for users about their documents: counts and first origins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mgpu_pipe.data.bad_samples import NAMED, Fault, report_bad_samples

NOTES = "notes"
"""Key in the manifest of a token store."""


@dataclass
class Notes:
    """Notes about some documents; all but the bad ones are about conversations.

    Attributes:
        odd: conversations with dropped parts, or turns other than question and answer.
        first_odd: the first of them: file, line, and why.
        crossed: those in which a token of the whole text would hold the end of a prompt and the start of an answer.
        first_crossed: the first of them: file and line.
        unused: columns that nothing reads, each with its first origin.
        bad: unusable documents, which are left out.
        first_bad: the first of them: origin and reason.
    """

    odd: int = 0
    first_odd: str = ""
    crossed: int = 0
    first_crossed: str = ""
    unused: dict[str, str] = field(default_factory=dict)
    bad: int = 0
    first_bad: list[tuple[str, str]] = field(default_factory=list)

    def add_odd(self, origin: str, why: str) -> None:
        self.odd += 1
        self.first_odd = self.first_odd or f"{origin}: {why}"

    def add_crossed(self, origin: str) -> None:
        self.crossed += 1
        self.first_crossed = self.first_crossed or origin

    def add_unused(self, origin: str, columns: Iterable[str]) -> None:
        for column in columns:
            self.unused.setdefault(column, origin)

    def add_bad(self, fault: Fault) -> None:
        self.bad += 1
        self.first_bad = [*self.first_bad, fault.name_and_reason()][:NAMED]

    def add(self, other: Notes) -> None:
        """Merges the notes of later documents."""
        self.odd, self.crossed = self.odd + other.odd, self.crossed + other.crossed
        self.first_odd = self.first_odd or other.first_odd
        self.first_crossed = self.first_crossed or other.first_crossed
        self.unused = {**other.unused, **self.unused}
        self.bad, self.first_bad = self.bad + other.bad, [*self.first_bad, *other.first_bad][:NAMED]

    def summary(self) -> str:
        """Summary in one line; empty without notes."""
        parts = []
        if self.unused:
            column, first = next(iter(self.unused.items()))
            names = ", ".join(sorted(self.unused))
            parts.append(f"columns that are not used: {names} (first: {column} at {first})")
        if self.crossed:
            parts.append(
                f"the chat template's generation prompt ends inside a token of the answer in {self.crossed:,} "
                f"conversations (first: {self.first_crossed}); training and generation cut the tokens there; let the "
                "template write the space with the answer, not with the prompt"
            )
        if self.odd:
            others = f"; {self.odd - 1:,} more conversations are odd" if self.odd > 1 else ""
            parts.append(self.first_odd + others)
        return "; ".join(parts)

    def none_usable(self) -> str:
        """Error text for a source of bad documents only; empty without bad ones."""
        if not self.bad:
            return ""
        named = "; ".join(f"{name} {why}" for name, why in self.first_bad)
        return f"none of the {self.bad:,} documents can be used: {named}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def notes_of(manifests: Iterable[Mapping[str, Any] | None]) -> Notes:
    """Merges the notes in the manifests of token stores."""
    notes = Notes()
    for manifest in manifests:
        if manifest is not None and manifest.get(NOTES):
            notes.add(Notes(**manifest[NOTES]))
    return notes


def report_bad(manifest: Mapping[str, Any], on_bad_sample: str, kind: tuple[str, str]) -> None:
    """Reports left out documents; DataError if there are some and ``on_bad_sample`` is ``stop``."""
    notes = notes_of([manifest])
    report_bad_samples(notes.first_bad, on_bad_sample, kind, notes.bad)
