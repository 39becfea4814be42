"""Opens a draft model: a smaller one that proposes tokens, several of which the model checks in one forward pass.

Source: Leviathan et al. 2023, https://arxiv.org/abs/2211.17192. Tokens are the model's own greedy choices.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.find_model import find_model
from mgpu_pipe.inference.generation import input_device
from mgpu_pipe.inference.open import LoadedRun, load_run
from mgpu_pipe.system.compat.transformers_private import is_stateful

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def open_draft(folder: Path, run: LoadedRun) -> PreTrainedModel:
    """The draft model of a run's, step's or model's folder, on the device that takes the model's inputs.

    Raises:
        BadInputError: one of the two models does not continue texts or cannot take tokens back, or they have different
            tokens.
    """
    if next(run.model.parameters()).is_meta:  # transformers sends the proposed tokens there
        raise BadInputError(
            f"--draft={folder}: the first weights of {run.source} are on the disk; place them elsewhere"
        )
    draft = load_run(find_model(folder), input_device(run.model))
    for model, place in ((run.model, run.source), (draft.model, draft.source)):
        name = type(model).__name__
        is_text = model.can_generate() and not model.config.is_encoder_decoder and model.main_input_name == "input_ids"
        if not is_text or getattr(model.config, "image_token_id", None) is not None:
            raise BadInputError(f"--draft={folder}: {place} is a {name}; drafts are for causal language models alone")
        if is_stateful(model):
            raise BadInputError(f"--draft={folder}: the state of a {name} takes no token back; leave --draft out")
    sizes = [int(model.config.get_text_config().vocab_size) for model in (draft.model, run.model)]
    if sizes[0] != sizes[1] or draft.tokenizer().get_vocab() != run.tokenizer().get_vocab():
        raise BadInputError(
            f"--draft={folder}: has other tokens ({sizes[0]}) than {run.source} ({sizes[1]}); give a model with the "
            "same tokenizer"
        )
    return draft.model
