"""lm-eval's tasks on a run's model.

The model is lm-eval's own ``hf`` model, whose forward passes and requests the processes share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.generation import generation_mode, keeps_cache
from mgpu_pipe.inference.harness.harness_settings import HarnessSettings
from mgpu_pipe.parallel.rank_exchange import exchange_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class HarnessModel(HFLM):
    """lm-eval's ``hf`` model over a model that other processes may hold parts of.

    Args:
        share, shares: the requests at ``share``, ``share + shares``, ... are this process's.
        forward: see :class:`mgpu_pipe.inference.parallel_run.ParallelRun`.
        batch_size: requests in a forward pass.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        share: int = 0,
        shares: int = 1,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every model that is not a name
        with _ties_kept(model):
            super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        self._share, self._shares, self._whole_forward = share, shares, forward

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the likeliest. A collective call."""
        results = self._share_requests(super().loglikelihood, requests, disable_tqdm)
        return [(float(value), bool(is_greedy)) for value, is_greedy in results]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text. A collective call."""
        return self._share_requests(super().loglikelihood_rolling, requests, disable_tqdm)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuation of each text, up to its stop words. A collective call."""
        return self._share_requests(super().generate_until, requests, disable_tqdm)

    def _share_requests(
        self, method: Callable[..., list[Any]], requests: Sequence[Any], disable_tqdm: bool
    ) -> list[Any]:
        """The results of all requests; this process computes its share."""
        part = list(requests[self._share :: self._shares])
        results = method(part, disable_tqdm=disable_tqdm or self._share > 0) if part else []
        if self._shares == 1:
            return results
        merged: list[Any] = [None] * len(requests)
        for share, values in exchange_json([self._share, results], None):
            merged[share :: self._shares] = values
        return merged

    def _model_call(
        self, inps: torch.Tensor, attn_mask: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._whole_forward is None:
            logits: torch.Tensor = super()._model_call(inps, attn_mask, labels)
        else:
            with torch.no_grad():
                logits = self._whole_forward(input_ids=inps, logits_to_keep=0).logits
        return logits

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        if self._whole_forward is None:
            ids: torch.Tensor = super()._model_generate(context, max_length, stop, **generation_kwargs)
            return ids
        if not generation_kwargs.get("temperature"):
            generation_kwargs = {**generation_kwargs, "do_sample": False, "temperature": None}
        criteria = stop_sequences_criteria(self.tokenizer, stop, context.shape[1], context.shape[0])
        with generation_mode(self.model, self._whole_forward):
            ids = self.model.generate(
                input_ids=context,
                max_length=max_length,
                stopping_criteria=criteria,
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=keeps_cache(self._whole_forward),
                **generation_kwargs,
            )
        return ids


@contextmanager
def _ties_kept(model: PreTrainedModel) -> Iterator[None]:
    """A context in which nothing ties weights again, which split parameters do not survive."""
    model.__dict__["tie_weights"] = lambda *_, **__: None
    try:
        yield
    finally:
        del model.__dict__["tie_weights"]


def measure_tasks(settings: HarnessSettings, model: Any) -> dict[str, Any]:
    """The harness's results of all tasks: ``results``, ``samples``, ``versions`` and more. A collective call.

    The harness gives them to rank 0; other ranks get none.

    Args:
        model: a :class:`mgpu_pipe.inference.harness.model.HarnessModel`.

    Raises:
        BadInputError: there is no such task, or its data is not on this machine.
    """
    from lm_eval import evaluator, utils

    if not settings.runs_code:
        utils.env = _sandbox(utils.env)
    manager = index_tasks(settings)
    unknown = [name for name in settings.tasks if not manager.match_tasks([name])]
    if unknown:
        raise BadInputError(f"--harness={unknown[0]}: no such task; name one of lm-eval, or give --harness-path FOLDER")
    try:
        results: dict[str, Any] | None = evaluator.simple_evaluate(
            model=model,
            tasks=list(settings.tasks),
            task_manager=manager,
            num_fewshot=settings.few_shot,
            limit=settings.limit,
            bootstrap_iters=0,
        )
    except (ConnectionError, FileNotFoundError) as error:
        reason = " ".join(str(error).split())[:300]
        fix = "give tasks of local files by --harness-path, or set HF_HUB_OFFLINE=0 and HF_DATASETS_OFFLINE=0"
        raise BadInputError(f"--harness: the data of a task is not on this machine ({reason}); {fix}") from error
    return results or {}


def index_tasks(settings: HarnessSettings) -> Any:
    """An lm-eval ``TaskManager`` of the given folders' tasks, and of lm-eval's own thousands only where these are
    needed: reading them takes seconds."""
    from lm_eval.tasks import TaskManager

    if settings.paths:
        manager = TaskManager(include_path=settings.paths, include_defaults=False)
        if {*settings.tasks} <= {*manager.all_subtasks}:  # a group may name tasks of lm-eval's
            return manager
    return TaskManager(include_path=settings.paths or None)


def _sandbox(environment: Any) -> Any:
    """A copy of lm-eval's environment of templates in which a template cannot run code."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    sandbox = ImmutableSandboxedEnvironment(
        loader=environment.loader,
        undefined=environment.undefined,
        keep_trailing_newline=environment.keep_trailing_newline,
    )
    sandbox.filters.update(environment.filters)
    return sandbox
