"""Samples of a trained model, and samples and evaluation tasks during training.

A sample is an output for a configured prompt, or for a held-out picture or recording.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mgpu_pipe.config.objective import description
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import DataConfig, EvalConfig, ObjectiveConfig, RunConfig
from mgpu_pipe.data.audio.prepare_audio import PreparedSpeech
from mgpu_pipe.data.audio.prepare_labelled import PreparedLabelledSounds, PreparedTaggedSounds
from mgpu_pipe.data.images.prepare_captions import PreparedCaptions
from mgpu_pipe.data.images.prepare_chats import PreparedPictureChats
from mgpu_pipe.data.images.prepare_images import PreparedImages
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.data.text.tokenizer_folder import chat_of
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.audio_samples import recording_samples
from mgpu_pipe.inference.evaluate import classify_texts
from mgpu_pipe.inference.generation import generate_text, load_tokenizer
from mgpu_pipe.inference.picture_samples import answer_samples, picture_samples, retrieval_samples
from mgpu_pipe.inference.tasks import TaskResult, measure, rows_of
from mgpu_pipe.inference.tasks.judge import Judge
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.runs.record import append_samples, cut_samples_after
from mgpu_pipe.training.attempt import Inference
from mgpu_pipe.training.strategy import EngineStrategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Sample = dict[str, str]
SHOWN = (
    *(PreparedImages.kind, PreparedCaptions.kind, PreparedPictureChats.kind),
    *(PreparedSpeech.kind, PreparedLabelledSounds.kind, PreparedTaggedSounds.kind),
)


def shows_samples(objective: ObjectiveConfig) -> bool:
    """Whether the run makes samples: of prompts, or of held-out pictures or recordings."""
    return bool(objective.prompts()[0]) or description(objective.name).samples in SHOWN


def make_samples(
    config: RunConfig,
    model: PreTrainedModel,
    tokenizer_folder: Path | None,
    prepared: Prepared,
    *,
    together: bool = False,
    forward: Callable[..., Any] | None = None,
) -> list[Sample]:
    """Each of ``objective.prompts()`` with its continuation, or with its answer after an arrow. Runs on pictures show
    held-out pictures with their class, caption or answers, and runs on sound show recordings with transcripts or
    classes.

    Args:
        together: the model is sharded and all processes make this call.
        forward: replaces the model's forward pass; see :meth:`EngineStrategy.sampling_forward`.
    """
    prompts, length = config.objective.prompts()
    if prepared.kind in SHOWN:
        if not prepared.validation_samples:
            return []
        held_out = prepared.open(config, "validation")
        if isinstance(prepared, PreparedCaptions):
            return retrieval_samples(config.model, config.data, prepared, held_out, model)
        if isinstance(prepared, PreparedImages):
            return picture_samples(config.model, config.data, prepared, held_out, model)
        if isinstance(prepared, PreparedPictureChats):
            return answer_samples(prepared, held_out, model, forward)
        assert isinstance(prepared, PreparedSpeech | PreparedLabelledSounds)
        return recording_samples(config, prepared, held_out, model)
    if not prompts or tokenizer_folder is None:
        return []
    kind, joint = description(config.objective.name).samples, " \u2192 "
    if kind == "labelled_text":
        texts = classify_texts(model, tokenizer_folder, prompts, config.data.seq_len)
    else:
        chat = chat_of(tokenizer_folder, ()) if config.data.holds_conversations() else None
        joint = "" if kind == "packed_text" and chat is None else joint
        texts = generate_text(
            model,
            tokenizer_folder,
            prompts,
            chat=chat,
            max_new_tokens=length,
            seed=config.seed,
            together=together,
            forward=forward,
        )
    return [{"prompt": prompt, "text": f"{joint}{text}"} for prompt, text in zip(prompts, texts, strict=True)]


class RunTasks:
    """The run's tasks; a collective call measures them all under the run's strategy.

    Attributes:
        results: of the last call, by the task's name.
    """

    def __init__(
        self, tasks: EvalConfig, data: DataConfig, prepared: Prepared, objective: Objective, strategy: EngineStrategy
    ) -> None:
        folder = prepared.tokenizer_folder
        if folder is None:
            raise BadInputError(f"eval.tasks: data.source={data.source} has no tokenizer; leave the tasks out")
        self._tasks = tasks.tasks
        self._rows = {name: rows_of(task, name, data.text_column) for name, task in self._tasks.items()}
        self._judge = Judge(objective, load_tokenizer(folder), chat_of(folder), data.seq_len, strategy)
        self.results: dict[str, TaskResult] = {}

    def __call__(self) -> dict[str, float]:
        """The tasks' figures, by metric."""
        for name, task in self._tasks.items():
            self.results[name] = measure(self._rows[name], task, self._judge)
        return {f"val/{name}": result.value for name, result in self.results.items()}

    def summary_values(self) -> dict[str, Any]:
        """The fields of ``summary.json`` for each task."""
        return {name: {"counted": result.denominator, "shown": result.samples} for name, result in self.results.items()}


def build_sampler(
    config: RunConfig,
    paths: RunPaths,
    prepared: Prepared,
    model: PreTrainedModel,
    strategy: EngineStrategy,
    start_step: int,
) -> Callable[[int], list[Sample]] | None:
    """A function that makes and writes samples at every n-th step; None where the run wants none."""
    every, folder = config.trainer.sample_every_n_steps, prepared.tokenizer_folder
    if dist.get_rank() == 0:
        cut_samples_after(paths.samples, start_step)
    if every is None or folder is None:
        return None

    def sample(step: int) -> list[Sample]:
        is_whole = strategy.holds_whole_model
        if step % every == 0 and (dist.get_rank() == 0 or not is_whole):
            forward = strategy.sampling_forward()
            # compiling for the samples' shapes would change the compiled training step
            with torch.compiler.set_stance("force_eager"):
                samples = make_samples(config, model, folder, prepared, together=not is_whole, forward=forward)
            strategy.free_gathered()
            if dist.get_rank() == 0:
                append_samples(paths.samples, step, samples)
            return samples
        return []

    return sample


INFERENCE = Inference(build_sampler, RunTasks)
"""The inference hooks that a worker passes to :func:`mgpu_pipe.training.train.train`."""
