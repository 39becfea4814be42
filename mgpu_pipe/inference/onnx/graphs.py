"""Modules that become ONNX files: a model with named inputs, one output, and axes of any size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from mgpu_pipe.architectures.find import family_of
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.batch.texts import vectors_of
from mgpu_pipe.inference.onnx import FILE, PICTURE_FILE, TEXT_FILE
from mgpu_pipe.inference.open import StoredModel
from mgpu_pipe.inference.streamed_weights import Inputs, compute_logits
from mgpu_pipe.models.field_sizes import EXPERTS
from mgpu_pipe.models.fields import HEADLESS, class_of, picture_shape
from mgpu_pipe.models.speech import make_padding_invariant
from mgpu_pipe.objectives.text_vectors import pool

if TYPE_CHECKING:
    from mgpu_pipe.models.weights.sentence_modules import SentenceModules

TOKENS = {"input_ids": ("batch", "sequence"), "attention_mask": ("batch", "sequence")}
KIND_OF_CLASS = {
    "AutoModelForCausalLM": "texts",
    "AutoModelForMaskedLM": "texts",
    "AutoModelForSequenceClassification": "texts",
    HEADLESS: "vectors",
    "AutoModelForImageClassification": "pictures",
    "AutoModelForZeroShotImageClassification": "towers",
    "AutoModelForCTC": "sound",
}
"""What the file of a model of each of transformers' classes takes or makes."""
Axes = Mapping[str, tuple["str | int", ...]]


@dataclass(frozen=True)
class Graph:
    """A file's computation.

    Attributes:
        file: its name.
        axes: sizes of each input's dimensions by input; a word stands for any size.
        output: name of the output.
        module: computes the output, fp32, from the inputs, whose rows may be padded.
        plain: computes the output of one row from its inputs without padding and mask, by the model alone.
        by_place: name of the axis along which the output too has a value for each place; None for one value a row.
        pads_left: whether padding may also precede a text.
        facts: numbers that are written into the file as text, by name.
    """

    file: str
    axes: Axes
    output: str
    module: nn.Module
    plain: Callable[[Inputs], torch.Tensor]
    by_place: str | None = None
    pads_left: bool = False
    facts: Mapping[str, float] = field(default_factory=dict)


def kind_of(stored: StoredModel) -> str:
    """One of the values of :data:`KIND_OF_CLASS`.

    Raises:
        BadInputError: such a model is not written as ONNX.
    """
    config: Any = stored.model.config
    model_class = class_of([type(stored.model).__name__])
    text = config.get_text_config()
    fix = "use --format hf"
    if model_class not in KIND_OF_CLASS or config.is_encoder_decoder:
        name = type(stored.model).__name__
        raise BadInputError(f"--format=onnx: {name} would need a file for each part and a cache; {fix}")
    experts = [name for name in EXPERTS if (getattr(text, name, None) or 0) > 1]
    if experts:
        raise BadInputError(
            f"--format=onnx: {config.model_type} sends tokens to {getattr(text, experts[0])} experts, for which "
            f"torch.onnx has no operator; {fix}"
        )
    kind = KIND_OF_CLASS[model_class]
    needs = {"pictures": "pixel_values", "sound": "input_values", "texts": "input_ids", "vectors": "input_ids"}
    main_input = stored.model.main_input_name
    if kind in needs and main_input != needs[kind]:
        raise BadInputError(f"--format=onnx: {config.model_type} takes {main_input} instead of {needs[kind]}; {fix}")
    if kind == "vectors":
        vectors_of(stored.config, stored.source)
    return kind


def graphs_of(stored: StoredModel, model: Any) -> list[Graph]:
    """The files of ``stored``, whose weights are in ``model``. Changes ``model`` if it hears.

    Raises:
        BadInputError: such a model is not written as ONNX.
    """
    kind, config = kind_of(stored), model.config
    if kind == "pictures":
        axes: Axes = {"pixel_values": ("batch", *picture_shape(config))}
        return [Graph(FILE, axes, "logits", PictureModel(model), _plain_logits(model))]
    if kind == "sound":
        axes = {"input_values": ("batch", "samples"), "attention_mask": ("batch", "samples")}
        return [Graph(FILE, axes, "logits", SoundModel(model), _plain_logits(model), by_place="frames")]
    if kind == "towers":
        return _towers(model)
    if kind == "vectors":
        vectors = vectors_of(stored.config, stored.source)
        encoder = VectorModel(model.base_model, vectors)
        return [Graph(FILE, TOKENS, "sentence_embedding", encoder, _plain_vectors(model.base_model, vectors))]
    axes, by_place = TOKENS, "sequence"
    if class_of([type(model).__name__]) == "AutoModelForSequenceClassification":
        by_place = ""
        if getattr(config, "type_vocab_size", 0) > 1:
            axes = {**TOKENS, "token_type_ids": ("batch", "sequence")}
    text = TextModel(model)
    return [
        Graph(FILE, axes, "logits", text, _plain_logits(model), by_place or None, bool(by_place) and text.is_causal)
    ]


class TextModel(nn.Module):
    """Logits of padded texts. Positions of a causal model count the tokens, so that padding may also come first."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        arguments = inspect.signature(model.forward).parameters
        self.is_causal = class_of([type(model).__name__]) == "AutoModelForCausalLM"
        self._counts = self.is_causal and "position_ids" in arguments
        self._without_cache = {"use_cache": False} if "use_cache" in arguments else {}

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        more = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        if self._counts:
            more["position_ids"] = (attention_mask.cumsum(1) - 1).clamp_min(0)
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **more, **self._without_cache)
        return cast(torch.Tensor, output.logits.float())


class VectorModel(nn.Module):
    """Vectors of padded texts, pooled and normalised as the run's."""

    def __init__(self, model: Any, vectors: SentenceModules) -> None:
        super().__init__()
        self.model, self._vectors = model, vectors

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        pooled = pool(hidden, attention_mask, self._vectors.pooling)
        return F.normalize(pooled, dim=-1) if self._vectors.normalize else pooled


class PictureModel(nn.Module):
    """Logits of a picture's classes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.model(pixel_values=pixel_values.to(self.model.dtype)).logits.float())


class SoundModel(nn.Module):
    """Logits of each frame's characters, which do not depend on the padding of the recording."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        make_padding_invariant(model)
        self.model = model

    def forward(self, input_values: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        values = input_values.to(self.model.dtype)
        return cast(torch.Tensor, self.model(input_values=values, attention_mask=attention_mask).logits.float())


class TextTower(nn.Module):
    """Vectors of texts, of length 1."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        masks = {} if attention_mask is None else {"attention_mask": attention_mask}
        return _unit_vectors(self.model.get_text_features(input_ids=input_ids, **masks))


class PictureTower(nn.Module):
    """Vectors of pictures, of length 1."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return _unit_vectors(self.model.get_image_features(pixel_values=pixel_values.to(self.model.dtype)))


def _unit_vectors(output: Any) -> torch.Tensor:
    features = output if isinstance(output, torch.Tensor) else output.pooler_output
    return F.normalize(features.float(), dim=-1)


def _towers(model: Any) -> list[Graph]:
    config, picture = model.config, torch.zeros(1, *picture_shape(model.config))
    token = torch.zeros(1, 1, dtype=torch.long)
    axes: Axes = TOKENS if family_of(config.model_type).caption_mask else {"input_ids": TOKENS["input_ids"]}
    bias = getattr(model, "logit_bias", None)
    facts = {"logit_scale": model.logit_scale.exp().item(), "logit_bias": 0.0 if bias is None else bias.item()}

    def text_vectors(inputs: Inputs) -> torch.Tensor:
        return cast(torch.Tensor, model(pixel_values=picture, **inputs).text_embeds[0])

    def picture_vectors(inputs: Inputs) -> torch.Tensor:
        return cast(torch.Tensor, model(input_ids=token, **inputs).image_embeds[0])

    return [
        Graph(TEXT_FILE, axes, "text_embeds", TextTower(model), text_vectors, facts=facts),
        Graph(
            PICTURE_FILE,
            {"pixel_values": ("batch", *picture_shape(config))},
            "image_embeds",
            PictureTower(model),
            picture_vectors,
            facts=facts,
        ),
    ]


def _plain_logits(model: Any) -> Callable[[Inputs], torch.Tensor]:
    def logits(inputs: Inputs) -> torch.Tensor:
        return compute_logits(model, inputs)[0]

    return logits


def _plain_vectors(model: Any, vectors: SentenceModules) -> Callable[[Inputs], torch.Tensor]:
    def vector(inputs: Inputs) -> torch.Tensor:
        states = model(**inputs).last_hidden_state[0]
        pooled = {"mean": states.mean(0), "cls": states[0], "last_token": states[-1]}[vectors.pooling]
        return pooled / pooled.norm() if vectors.normalize else cast(torch.Tensor, pooled)

    return vector
