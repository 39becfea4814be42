"""Description of a model family: everything that transformers' own description lacks.

A family without an entry in a table has the defaults of :class:`Family` and transformers' plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

Style = Literal["column", "row", "packed", "qkv", "grouped", "per_head", "own_heads", "once", "experts"]
"""Styles of tensor parallelism for a module. ``column`` and ``row`` parallel; ``packed``: columns of several fused
matrices; ``qkv``: columns of all queries, then all keys, then all values; ``grouped``: columns of the queries, keys and
values of one key-value head after another; ``per_head``: an argument with a value per head, batch and heads in one dim;
``own_heads``: whole on every rank, each applies it to its heads; ``once``: whole on every rank, each adds its share;
``experts``: a module that calls cut experts."""
COLUMNS = ("column", "packed", "qkv", "grouped")
"""Styles that cut outputs."""

Packing = Literal["positions", "axes", "mask", "none"]
"""Separation of documents in one row: positions that restart, from which transformers builds the mask
(``masking_utils.find_packed_sequence_indices``) if it gets no attention mask and no cache; such positions before
positions along three axes; a mask as input; or none (state space layers, convolutions, positions that are no input)."""
FLASH = ("flash_attention_2", "flash_attention_3")
"""Attention implementations without a mask."""


@dataclass(frozen=True)
class Stages:
    """Names of the modules in a base model that a pipeline distributes.

    The output head is the model's ``get_output_embeddings()``.

    Attributes:
        embedding: token embeddings.
        layers: list of repeated blocks, which pass on only hidden states.
        norm: norm after the last block; None if it stays in every stage, e.g. without parameters and used twice.
        added: other embeddings, added to the token embeddings (learned positions).
        after_embedding: modules between the embeddings and the first block.
        tuples: whether a block returns a tuple, hidden states first.
        path: path of the module with all of these in the base model; empty for the base model.
    """

    embedding: str = "embed_tokens"
    layers: str = "layers"
    norm: str | None = "norm"
    added: tuple[str, ...] = ()
    after_embedding: tuple[str, ...] = ()
    tuples: bool = False
    path: str = ""


@dataclass(frozen=True)
class SequencePlan:
    """Range of sequence parallelism: from the embeddings, which are only scaled or added to, to the norm."""

    blocks: str = "layers"
    norm: str = "norm"
    addends: tuple[str, ...] = ()
    """Embeddings that are added to the token embeddings."""


@dataclass(frozen=True)
class Sizes:
    """Traits that decide the exact number of parameters of a decoder's layers, next to standard fields.

    Attributes:
        qkv_bias: whether queries, keys and values have biases; a name is the field that says so.
        out_bias: the same for the attention's output.
        mlp_bias: the same for the feed-forward layer.
        norm_bias: whether norms have biases.
        norms: norms over the model's width in a layer.
        head_norms: whether queries and keys of a head are normed; ``all``: those of all heads together.
        sinks: whether each head has a score that no token gets.
        expert_bias: whether experts and their router have biases.
        learned_positions: whether there is a table of positions.
        gated: whether the feed-forward layer has a third matrix, a gate.
        inner: field with the feed-forward width; null means four times the model's.
        expert_width: field with the width of one expert; empty: no experts.
    """

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    norm_bias: bool = False
    norms: int = 2
    head_norms: bool | Literal["all"] = False
    sinks: bool = False
    expert_bias: bool = False
    learned_positions: bool = False
    gated: bool = True
    inner: str = "intermediate_size"
    expert_width: str = ""


Role = Literal[
    "text_encoder",
    "text_vectors",
    "text_to_text",
    "picture_classifier",
    "two_towers",
    "picture_tower",
    "text_tower",
    "chat_tower",
    "waveform_encoder",
    "sound_classifier",
    "sound_and_text",
    "transcriber",
    "token_matcher",
]
"""Roles that only tested families have. ``two_towers``: pictures and captions, of which a ``picture_tower`` and a
``text_tower`` may be of other families; ``chat_tower``: the vision tower of a language model; ``token_matcher``: its
attention can start on equal tokens (``objective.match_tokens``)."""


Recordings = Literal["", "window", "silence", "chunks", "seconds", "frames"]
"""What an encoder reads of a recording: a ``window`` with silence after it, which gets tokens too (``silence``) or not,
``chunks`` of the recording alone, its ``seconds`` alone, the last with silence after it, or all of its ``frames``, if
the model's configuration has such an encoder."""


@dataclass(frozen=True)
class Sight:
    """How the text of a vision-language model contains pictures.

    Attributes:
        pictures: ``one_size``: pictures of the tower's size; ``parts``: parts of one size and the whole picture after
            them; ``tiles``: as many tiles of one size as fit the picture's shape, and the whole picture after them;
            ``canvas``: tiles with black next to the picture, a token after each, and the whole picture after them;
            ``mosaic``: tiles with white next to the picture, of which only the picture's patches are seen, and the
            whole picture after them;
            ``grid``: native size, positions along three axes; ``rows``: native size, a token after each row of places;
            ``pooled``: native size, the average of several patches for each place.
        videos: time of a video's frames: an ``axis`` of positions, or ``text`` before each frame; empty: no videos.
        both_ways: what is read bidirectionally: each picture, or pictures and text before an answer (``questions``).
            Such rows hold one conversation.
        opener: field, or text, of the token that the chat template writes for a picture, if not that of its places.
            The family's processor adds these, and what stands around them.
        cacheable: whether the tower's output can be kept.
    """

    pictures: Literal["one_size", "parts", "tiles", "canvas", "mosaic", "grid", "rows", "pooled"] = "one_size"
    videos: Literal["", "axis", "text"] = ""
    both_ways: Literal["", "pictures", "questions"] = ""
    opener: str = ""
    cacheable: bool = False


@dataclass(frozen=True)
class Family:
    """One family of models. Every entry was tested and matches one process.

    Attributes:
        packing: separation of documents in one row.
        unpacked_with: boolean of the configuration that makes packing impossible.
        token_mask: whether it takes a mask of tokens by tokens, which separates documents where tokens see both ways.
        own_attention: whether it does not look up its attention function by name, so that it cannot be replaced.
        stages: stages of a pipeline; ``brought``: transformers' plan; None: it cannot be cut into stages.
        tensor: whether tensor parallelism can cut it.
        tensor_if: alternatives of field values that tensor parallelism needs.
        modules: styles of the children of a module, by the module's class, if transformers has no plan. They hold
            wherever that class is part of a larger model.
        sequence: range of sequence parallelism; None: not supported.
        experts: field with the number of experts, packed in one module of the family's ``ep_plan``; empty: expert
            parallelism is not supported.
        softmax_routers: whether routers take the softmax of their logits; others balance by a bias or sigmoid scores.
        width_is_heads: whether the default head size is hidden_size / num_attention_heads.
        needs: fields without a default that a forward pass needs, with the fix for each.
        heads_together: heads whose queries, keys and values are grouped in a fused projection.
        causal: False if every token sees all others, whatever the configuration says.
        bidirectional: whether ``model.bidirectional=true`` lets every token of a decoder see those after it.
        mixes_tokens: boolean of the configuration under which tokens of a micro-batch are mixed.
        sizes: traits for the exact number of parameters; None: unknown.
        reads_inside: classes of modules that read the shapes of their children's weights, which ZeRO-3 gathers.
        reads_weights: classes of modules that compute with the weight of a child instead of calling it, with its name;
            ZeRO-3 gathers it.
        runs_by_picture: whether a module runs once for each picture, so that ranks of ZeRO-3 would not gather alike.
        projector: names of modules in a tower that lie between it and the language model.
        language: names of the modules in the base model that are its language part, if that has no configuration.
        untrained: names of modules that no objective runs; they are frozen.
        tower_outputs: fields of a tower's output that the rest of the model reads, by part; with them the tower can
            stay whole under tensor parallelism (``strategy.parts``). Of ``hidden_states`` those of the layers in
            ``vision_feature_layer``.
        roles: roles in which it was tested, of those that need a test.
        sight: how the model's text contains pictures; None: it sees none.
        recordings: what its encoder reads of a recording; empty: it hears none.
        has_summary: whether a vision tower's first vector is a summary of the picture and not a patch.
        caption_mask: whether the text tower is bidirectional and needs a mask of each caption.
        causal_if: boolean of the configuration without which tokens see later ones.
        classifies: whether its sequence classifier reads only the tokens of a padded row.
    """

    packing: Packing = "none"
    unpacked_with: str = ""
    token_mask: bool = True
    own_attention: bool = False
    stages: Stages | Literal["brought"] | None = "brought"
    tensor: bool = True
    tensor_if: tuple[Mapping[str, object], ...] = ()
    modules: Mapping[str, Mapping[str, Style]] = field(default_factory=dict)
    sequence: SequencePlan | None = None
    experts: str = ""
    softmax_routers: bool = False
    width_is_heads: bool = False
    needs: Mapping[str, str] = field(default_factory=dict)
    heads_together: int = 1
    causal: bool = True
    bidirectional: bool = False
    mixes_tokens: str = ""
    sizes: Sizes | None = None
    reads_inside: tuple[str, ...] = ()
    reads_weights: Mapping[str, str] = field(default_factory=dict)
    runs_by_picture: bool = False
    projector: tuple[str, ...] = ()
    language: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
    tower_outputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    roles: tuple[Role, ...] = ()
    sight: Sight | None = None
    recordings: Recordings = ""
    has_summary: bool = True
    caption_mask: bool = False
    causal_if: str = ""
    classifies: bool = True

    @property
    def context(self) -> bool:
        """Whether context parallelism works: positions are an input and attention can be replaced."""
        return self.packing == "positions" and not self.own_attention


FC: Mapping[str, Style] = {"fc1": "column", "fc2": "row"}
QKV: Mapping[str, Style] = {"q_proj": "column", "k_proj": "column", "v_proj": "column"}
LINEAR_FC: Mapping[str, Style] = {"linear_fc1": "column", "linear_fc2": "row"}
QKV_PROJ: Mapping[str, Style] = {"qkv": "qkv", "proj": "row"}
OUT_PROJ: Mapping[str, Style] = {**QKV, "out_proj": "row"}
"""Styles of the encoders' attention."""


CONFIGS = {"vision": "vision_config", "audio": "audio_config", "language": "text_config"}
"""Parts with their own configuration, and its field."""
PROJECTOR = "projector"
"""Part between the towers."""
PARTS = (*CONFIGS, PROJECTOR)


def parts_in(fields: Mapping[str, Any]) -> list[str]:
    """Parts of a model with these configuration fields; none for a model of one piece."""
    towers = [part for part, name in CONFIGS.items() if isinstance(fields.get(name), Mapping)]
    if len(towers) > 1 and "language" not in towers:  # its fields are the model's (Phi-4 multimodal)
        towers.append("language")
    return [*towers[:-1], PROJECTOR, towers[-1]] if len(towers) > 1 else []


FRAMES_A_POSITION = 2
"""Frames of a spectrogram per position of Whisper's encoder: its second convolution has stride 2."""


FEWEST_FRAMES = 7
"""Fewest frames of a recording in a conversation: transformers takes a single token for an old form of its texts."""


def sound_tokens(frames: Any) -> Any:
    """Tokens of a recording's spectrogram frames, a number or an array; Qwen2-Audio halves them twice
    (arXiv:2407.10759)."""
    return ((frames - 1) // 2 - 1) // 2 + 1


SECOND, TOKENS_A_SECOND = 100, 13
"""Spectrogram frames that Qwen3-Omni's convolutions read alone, and the tokens of so many."""


def second_tokens(frames: Any) -> Any:
    """Tokens of a recording of these spectrogram frames, which three convolutions halve in each second (Qwen3-Omni)."""
    return frames // SECOND * TOKENS_A_SECOND + (frames % SECOND + 7) // 8


def frame_tokens(frames: Any) -> Any:
    """Tokens of a recording of these spectrogram frames, which two convolutions halve (Gemma 4)."""
    return (frames + 3) // 4


@dataclass(frozen=True)
class Frames:
    """Convolutions of a waveform encoder: width and stride of each."""

    kernels: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Frames:
        return cls(tuple(fields["conv_kernel"]), tuple(fields["conv_stride"]))

    def num_frames(self, samples: Any, layers: int | None = None) -> Any:
        """Frames after the first ``layers`` convolutions, default all; for a number or an array of ``samples``."""
        for kernel, stride in zip(self.kernels[:layers], self.strides[:layers], strict=True):
            samples = (samples - kernel) // stride + 1
        return samples

    def fault(self, numbers: Sequence[int], samples: int) -> str | None:
        """Reason why CTC cannot learn a transcript, which needs a blank between equal characters (Graves et al. 2006),
        or None."""
        needed = len(numbers) + sum(first == second for first, second in pairwise(numbers))
        there = self.num_frames(samples)
        return None if needed <= there else f"has a text that needs {needed} frames; the recording has {there}"

    def min_samples(self, frames: int) -> int:
        """Fewest samples that give ``frames``."""
        for kernel, stride in zip(reversed(self.kernels), reversed(self.strides), strict=True):
            frames = (frames - 1) * stride + kernel
        return frames
