"""Small pairs for embeddings."""

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
