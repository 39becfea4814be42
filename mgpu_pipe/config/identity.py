"""Role of a key in the identity of a run, which its field states: ``field(default=..., metadata=FREE)``.

========  ========================  ===========================================================
identity  in the mathematics hash   a resume with another value
========  ========================  ===========================================================
FIXED     yes                       is refused
CONTENT   yes                       compares what the key leads to: the data's digest, the model
NOTICE    yes                       uses the new value and prints a notice
RECORDED  no                        uses the new value and prints a notice
FREE      no                        uses the new value silently
========  ========================  ===========================================================

A field without one has that of its section. A section whose fields state none is one value in the hash, so stating one
there changes the hashes of runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

METADATA = "identity"
"""Name of the entry in a field's metadata."""


class Identity(Enum):
    """Role of a key in the identity of a run; the module's table explains each."""

    FIXED = "fixed"
    CONTENT = "content"
    NOTICE = "notice"
    RECORDED = "recorded"
    FREE = "free"


FIXED, CONTENT, NOTICE, RECORDED, FREE = (
    *({METADATA: Identity.FIXED}, {METADATA: Identity.CONTENT}, {METADATA: Identity.NOTICE}),
    *({METADATA: Identity.RECORDED}, {METADATA: Identity.FREE}),
)
HASHED = (Identity.FIXED, Identity.CONTENT, Identity.NOTICE)


def stated_identity(metadata: Mapping[str, object]) -> Identity | None:
    """Identity that a field's metadata states; None where it states none."""
    identity = metadata.get(METADATA)
    assert identity is None or isinstance(identity, Identity)
    return identity
