"""Files with a few bytes changed, cut out or said twice, the same for a number in every run."""

from __future__ import annotations

import random
from collections.abc import Sequence

_WORDS = (b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0\0\0\x80", b"\xff\xff\xff\x7f")


def changed(files: Sequence[bytes], number: int) -> bytes:
    """One of the files, spoiled in one to sixteen places, half of them in its first bytes."""
    draw = random.Random(number)
    raw = bytearray(draw.choice(files))
    for _ in range(draw.choice([1, 2, 4, 16])):
        at = draw.randrange(min(len(raw), 600) if draw.random() < 0.5 else len(raw))
        match draw.randrange(6):
            case 0:
                raw[at] ^= 1 << draw.randrange(8)
            case 1:
                raw[at : at + 4] = draw.choice([*_WORDS, draw.randbytes(4)])
            case 2:
                del raw[at : at + draw.randrange(1, 64)]
            case 3:
                raw[at:at] = raw[at : at + draw.randrange(1, 64)]
            case 4:
                raw[at] = draw.randrange(256)
            case _ if draw.random() < 0.2:
                del raw[at + 1 :]
        raw = raw or bytearray(b"x")
    return bytes(raw)
