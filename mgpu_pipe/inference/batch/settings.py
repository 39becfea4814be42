"""Settings of jobs that answer or encode a file; without torch, for the command that starts their processes."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from mgpu_pipe.checkpoint.left_out import weights_digest
from mgpu_pipe.checkpoint.manifest import read_manifest
from mgpu_pipe.config.paths import cache_folder
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.batch.job_folder import JobFolder, LineFolder
from mgpu_pipe.inference.find_model import ModelSource
from mgpu_pipe.system.local_files import is_file, sha256_of

FREE = ("model", "input", "output", "on_bad_row", "frozen_weights", "device", "rows")
"""Settings that do not decide what is computed; the contents of the files do."""
BATCH_SIZE = 32


@dataclass(frozen=True)
class JobSettings(ABC):
    """Settings of every job.

    Attributes:
        model: folder of the step or the model.
        batch_size: rows in a forward pass.
        average: whether its weights are the average (``--weights ema``).
        device: see ``--device``.
    """

    model: Path
    input: Path
    output: Path
    batch_size: int
    average: bool
    frozen_weights: Path | None
    device: str

    @abstractmethod
    def folder(self) -> JobFolder:
        """The folder of the unfinished job."""

    def identity(self, source: ModelSource) -> dict[str, Any]:
        """All that decides what is computed: settings, and digests of input and weights.

        Raises:
            BadInputError: the input cannot be read.
        """
        require_input(self.input)
        try:
            digest = sha256_of(self.input)
        except OSError as error:
            raise BadInputError(
                f"--input={self.input}: cannot be read ({error.strerror}); change its permissions"
            ) from error
        if source.config is not None:
            weights = read_manifest(source.folder).root
        else:
            weights = weights_digest(source.folder, cache_folder(None))
        settings = {name: value for name, value in asdict(self).items() if name not in FREE}
        return {"input": digest, "model": weights, **settings}

    def to_json(self) -> str:
        """The settings as text, for :meth:`from_json` in another process and working folder."""
        values = {
            name: str(value.absolute()) if isinstance(value, Path) else value for name, value in asdict(self).items()
        }
        return json.dumps({"kind": type(self).__name__, **values})

    @staticmethod
    def from_json(text: str) -> JobSettings:
        values = json.loads(text)
        kinds: dict[str, type[JobSettings]] = {
            kind.__name__: kind for kind in (AnswerSettings, EncodeSettings, ScoreSettings)
        }
        kind = kinds[values.pop("kind")]
        for field in fields(kind):
            if "Path" in str(field.type) and values[field.name] is not None:
                values[field.name] = Path(values[field.name])
        return kind(**values)


def require_input(path: Path) -> None:
    """Raise BadInputError for an input that is not there."""
    if not is_file(path):
        raise BadInputError(f"--input={path}: no such file; give a file with a row for each text or prompt")


@dataclass(frozen=True)
class AnswerSettings(JobSettings):
    """Settings of a job that answers prompts.

    Attributes:
        on_bad_row: ``refuse`` or ``skip``.
        raw: whether a chat model continues the prompt as a text.
        stop: texts that end an answer, see :class:`.sampling.StopTexts`.
    """

    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int
    raw: bool
    on_bad_row: Literal["refuse", "skip"]
    min_p: float | None = None
    stop: list[str] | None = None

    def folder(self) -> LineFolder:
        return LineFolder(self.output)


@dataclass(frozen=True)
class EncodeSettings(JobSettings):
    """Settings of a job that encodes texts.

    Attributes:
        column: of the texts.
        prompt: text before every text.
        size: numbers of a vector.
        rows: of the input.
    """

    column: str
    prompt: str
    size: int
    rows: int

    def folder(self) -> JobFolder:
        from mgpu_pipe.inference.batch.job_folder import VectorFolder

        return VectorFolder(self.output, self.size)


@dataclass(frozen=True)
class ScoreSettings(JobSettings):
    """Settings of a job that scores documents.

    Attributes:
        rows: of the input.
    """

    rows: int

    def folder(self) -> LineFolder:
        return LineFolder(self.output)
