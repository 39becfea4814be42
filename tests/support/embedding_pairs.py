"""Small pairs for embeddings, and with scores."""

from __future__ import annotations

import json
from pathlib import Path


def write_pairs(file: Path, number: int = 120) -> Path:
    """Writes rows of a query and a positive, of which some have one or two negatives."""
    rows = [
        {
            "query": f"question {at} of {at % 7}",
            "positive": f"answer {at} says {at * at}",
            "negative": [f"wrong {at}", f"bad {at}"][: at % 3],
        }
        for at in range(number)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def write_scored_pairs(file: Path, number: int = 120) -> Path:
    """Writes rows of two sentences that share some of three words, and the share as their score."""
    rows = []
    for at in range(number):
        first = [f"red{at % 5}", f"house{at % 7}", f"tree{at % 3}"]
        second = [*first[: at % 4], *(f"other{at + place}" for place in range(3 - at % 4))]
        rows.append({"sentence1": " ".join(first), "sentence2": " ".join(second), "score": at % 4 / 3})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file
