"""Settings of a job that answers a file of prompts; without torch, for the command that starts its processes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from mgpu_pipe.checkpoint.left_out import weights_digest
from mgpu_pipe.checkpoint.manifest import read_manifest
from mgpu_pipe.config.paths import cache_folder
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.find_model import ModelSource
from mgpu_pipe.system.local_files import is_file

FREE = ("model", "input", "output", "on_bad_row", "frozen_weights", "device")
"""Settings that do not decide the answers; the contents of the files do."""
BATCH_SIZE = 32


@dataclass(frozen=True)
class BatchSettings:
    """Settings of a job.

    Attributes:
        model: folder of the step or the model.
        average: whether its weights are the average (``--weights ema``).
        on_bad_row: ``refuse`` or ``skip``.
        raw: whether a chat model continues the prompt as a text.
        device: as of ``--device``.
    """

    model: Path
    input: Path
    output: Path
    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int
    raw: bool
    batch_size: int
    on_bad_row: Literal["refuse", "skip"]
    average: bool
    frozen_weights: Path | None
    device: str

    def identity(self, source: ModelSource) -> dict[str, Any]:
        """All that decides the answers: settings, and digests of prompts and weights.

        Raises:
            BadInputError: the file of prompts cannot be read.
        """
        digest = hashlib.sha256()
        if not is_file(self.input):
            raise BadInputError(f"--input={self.input}: no such file; give a file of prompts, one JSON object a line")
        try:
            with self.input.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise BadInputError(f"--input={self.input}: cannot be read ({error.strerror})") from error
        if source.config is not None:
            weights = read_manifest(source.folder).root
        else:
            weights = weights_digest(source.folder, cache_folder(None))
        settings = {name: value for name, value in asdict(self).items() if name not in FREE}
        return {"file of prompts": digest.hexdigest(), "model": weights, **settings}

    def to_json(self) -> str:
        """The settings as text, for :meth:`from_json` in another process."""
        return json.dumps({name: str(v) if isinstance(v, Path) else v for name, v in asdict(self).items()})

    @classmethod
    def from_json(cls, text: str) -> BatchSettings:
        values = json.loads(text)
        for field in fields(cls):
            if "Path" in str(field.type) and values[field.name] is not None:
                values[field.name] = Path(values[field.name])
        return cls(**values)
