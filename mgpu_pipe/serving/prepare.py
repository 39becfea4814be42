"""Exports a run for an engine and records the run's greedy answers, in a process that ends before the engine starts.

As a program it takes one JSON object, the fields of :class:`Preparation`, and prints one: the answers or an error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mgpu_pipe.errors import BadInputError, MgpuError, one_line, print_line
from mgpu_pipe.import_path import python_module
from mgpu_pipe.system.child_process import bind_command

PROMPTS = ("The", "Once upon a time there was", "def main(", "How are you today?", "1, 2, 3,")
"""The prompts whose answers are compared."""
ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Preparation:
    """An export and the answers to record; paths are texts, so that it is JSON.

    Attributes:
        source: a run's, step's or model's folder.
        out: folder of the export; None exports nothing.
        format: ``hf`` or ``gguf``.
        answers: file of the recorded answers; None only prints them.
    """

    source: str
    frozen: str | None
    average: bool
    device: str
    out: str | None
    format: str
    dtype: str
    force: bool
    answers: str | None

    def run(self) -> dict[str, Any]:
        """Do it in its own process; returns ``{"is_chat": bool, "answers": [[prompt, answer], ...]}``.

        Raises:
            BadInputError: the run cannot be exported so, or generates no text.
            MgpuError: the export failed its check, or the process ended.
        """
        command = bind_command(python_module("mgpu_pipe.serving.prepare", json.dumps(asdict(self))))
        done = subprocess.run(command, capture_output=True, check=False)
        lines = done.stdout.decode(errors="replace").splitlines()
        try:
            result: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        except ValueError:
            result = {}
        if "error" in result:
            raise (BadInputError if result["is_bad_input"] else MgpuError)(result["error"])
        if "answers" not in result:
            last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            raise MgpuError(f"{self.source}: preparing it ended with {done.returncode}: {last}")
        return result


def prepare(wanted: Preparation) -> dict[str, Any]:
    """Export and answer, in this process."""
    from mgpu_pipe.inference.generation import generate_text
    from mgpu_pipe.inference.model_arguments import silence_transformers
    from mgpu_pipe.inference.open import load_run
    from mgpu_pipe.inference.visual_prompts import PromptVisuals

    silence_transformers()
    if wanted.out is not None:
        _export(wanted, Path(wanted.out))
    frozen = None if wanted.frozen is None else Path(wanted.frozen)
    run = load_run(wanted.source, wanted.device, frozen, wanted.average)
    chat = None if run.config is None else run.chat()
    limits: dict[str, Any] = {"max_new_tokens": ANSWER_TOKENS, "temperature": 0.0}
    visuals = PromptVisuals.from_files(run, [])  # some models take inputs next to every question
    texts = generate_text(run.model, run.tokenizer(), PROMPTS, chat=chat, visuals=visuals, **limits)
    result = {"is_chat": chat is not None, "answers": list(zip(PROMPTS, texts, strict=True))}
    if wanted.answers is not None:
        file = Path(wanted.answers)
        partial = file.with_name(f"{file.name}.partial")
        partial.write_text(json.dumps(result), encoding="utf-8")
        partial.rename(file)
    return result


def _export(wanted: Preparation, out: Path) -> None:
    from mgpu_pipe.inference.export_folder import export_folder
    from mgpu_pipe.inference.export_gguf import export_gguf
    from mgpu_pipe.inference.open import open_model

    frozen = None if wanted.frozen is None else Path(wanted.frozen)
    stored = open_model(wanted.source, frozen, wanted.average)
    if wanted.format == "gguf":
        export_gguf(stored, out, wanted.dtype, wanted.force)  # type: ignore[arg-type]
    else:
        export_folder(stored, out, wanted.dtype, wanted.force)  # type: ignore[arg-type]


if __name__ == "__main__":
    try:
        outcome = prepare(Preparation(**json.loads(sys.argv[1])))
    except MgpuError as error:
        outcome = {"error": one_line(error), "is_bad_input": isinstance(error, BadInputError)}
    print_line(json.dumps(outcome))
