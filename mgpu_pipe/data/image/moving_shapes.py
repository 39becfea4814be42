"""Short clips of a shape that moves, drawn by rule, and the question which way it moves. No torch.

A shape leaves on one side and comes in on the other, and begins anywhere: no frame alone tells its way. Background,
brightness, size, speed and beginning are drawn by a generator of this module's, the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.image.digit_questions import Question, question
from mgpu_pipe.data.text.conversations import VIDEO

CLIPS, FRAMES, SIDE = 1500, 6, 16
SECONDS = 0.5
"""From one frame to the next."""
WAYS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Down and across."""
SHAPES: dict[str, Callable[[NDArray[np.int64], NDArray[np.int64], int], NDArray[np.bool_]]] = {
    "square": lambda down, across, size: (down >= 0) & (across >= 0),
    "frame": lambda down, across, size: (down % (size - 1) == 0) | (across % (size - 1) == 0),
    "cross": lambda down, across, size: (down == size // 2) | (across == size // 2),
}
"""Which pixels of a box of so many belong to a shape."""
ASKED = ("Which way does the {} move?", "Where does the {} go?")


def moving_shapes() -> tuple[NDArray[np.uint8], list[Question]]:
    """The frames of all clips, ``(CLIPS * FRAMES, SIDE, SIDE)``, and a question about each."""
    random, ways, shapes = np.random.default_rng(16), list(WAYS), list(SHAPES)
    frames, questions = np.empty((CLIPS, FRAMES, SIDE, SIDE), np.uint8), []
    for number in range(CLIPS):
        way, shape = ways[number % len(ways)], shapes[int(random.integers(len(shapes)))]
        size, speed = int(random.integers(4, 7)), int(random.integers(1, 3))
        still = random.integers(0, 64, (SIDE, SIDE))
        down, across = np.mgrid[:size, :size]
        still_shape = np.zeros((SIDE, SIDE), bool)
        still_shape[:size, :size] = SHAPES[shape](down, across, size)
        begin, bright = random.integers(0, SIDE, 2), int(random.integers(128, 256))
        for at in range(FRAMES):
            moved = np.roll(still_shape, begin + at * speed * np.array(WAYS[way]), (0, 1))
            frames[number, at] = np.where(moved, bright, still)
        asked = ASKED[int(random.integers(len(ASKED)))].format(shape)
        questions.append(question(f"{VIDEO}{asked}", f"{way.capitalize()}.", (number,), f"clip {number}"))
    return frames.reshape(-1, SIDE, SIDE), questions
