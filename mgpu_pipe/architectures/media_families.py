"""Table of the families of pictures and sound, by ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mgpu_pipe.architectures.family import FC, LINEAR_FC, OUT_PROJ, QKV, QKV_PROJ, Family, Role, Sight, Style
from mgpu_pipe.architectures.text_families import TEXT_FAMILIES

WAVES: tuple[Role, ...] = ("waveform_encoder", "sound_classifier")
"""Roles of every tested encoder of waveforms: a recording's result does not depend on the lengths of the
others in its micro-batch."""
_HEARD: Mapping[str, tuple[str, ...]] = {"audio": ("last_hidden_state",)}
_O_PROJ: Mapping[str, Style] = {**QKV, "o_proj": "row"}
_GATED: Mapping[str, Style] = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
_LAST: Mapping[str, tuple[str, ...]] = {"vision": ("last_hidden_state",)}
_POOLED: Mapping[str, tuple[str, ...]] = {"vision": ("pooler_output",)}
_DEEP: Mapping[str, tuple[str, ...]] = {"vision": ("pooler_output", "deepstack_features")}
_OWN: Mapping[str, Family] = {
    # AltCLIP: a tower like CLIP's for pictures, one like RoBERTa for texts.
    "altclip": Family(
        modules={
            "AltCLIPAttention": OUT_PROJ,
            "AltCLIPMLP": FC,
            "AltRobertaSelfAttention": {"query": "column", "key": "column", "value": "column"},
            "AltRobertaSelfOutput": {"dense": "row"},
            "AltRobertaIntermediate": {"dense": "column"},
            "AltRobertaOutput": {"dense": "row"},
        },
        roles=("two_towers",),
        caption_mask=True,
    ),
    "audio-spectrogram-transformer": Family(
        modules={"ASTAttention": _O_PROJ, "ASTMLP": FC}, roles=("sound_classifier",)
    ),
    # Chinese CLIP: a tower like CLIP's for pictures, one like BERT for texts.
    "chinese_clip": Family(
        modules={
            "ChineseCLIPVisionAttention": OUT_PROJ,
            "ChineseCLIPVisionMLP": FC,
            "ChineseCLIPTextSelfAttention": {"query": "column", "key": "column", "value": "column"},
            "ChineseCLIPTextSelfOutput": {"dense": "row"},
            "ChineseCLIPTextIntermediate": {"dense": "column"},
            "ChineseCLIPTextOutput": {"dense": "row"},
        },
        roles=("two_towers",),
        caption_mask=True,
    ),
    # CLAP: a tower of shifted windows over spectrograms, which no plan cuts, one like RoBERTa for texts.
    "clap": Family(stages=None, tensor=False, roles=("sound_and_text",), caption_mask=True),
    "clip": Family(
        modules={"CLIPAttention": OUT_PROJ, "CLIPMLP": FC},
        reads_inside=("CLIPTextEmbeddings",),
        roles=("two_towers", "picture_classifier"),
    ),
    "clipseg": Family(
        modules={"CLIPSegAttention": OUT_PROJ, "CLIPSegMLP": FC},
        reads_inside=("CLIPSegTextEmbeddings",),
        roles=("two_towers",),
    ),
    # Gemma 4: its tower's layers lie inside of others that clip, which tensor parallelism does not cut right.
    "gemma4": Family(stages=None, tensor=False, sight=Sight("pooled", both_ways="pictures"), recordings="frames"),
    "idefics3": Family(
        modules={"Idefics3VisionAttention": OUT_PROJ, "Idefics3VisionMLP": FC},
        width_is_heads=True,
        tower_outputs=_LAST,
        sight=Sight("parts"),
    ),
    "internvl": Family(
        tensor_if=({"vision_config.use_qk_norm": False},),  # its norms look at all heads together
        modules={
            "InternVLVisionAttention": {**QKV, "projection_layer": "row"},
            "InternVLVisionMLP": FC,
            "InternVLMultiModalProjector": {"linear_1": "column", "linear_2": "row"},
        },
        tower_outputs=_LAST,
        sight=Sight("tiles"),
    ),
    "llama4": Family(
        modules={"Llama4VisionAttention": _O_PROJ, "Llama4VisionMLP": FC, "Llama4VisionMLP2": FC},
        tower_outputs=_LAST,
        sight=Sight("canvas", opener="<|image|>"),
    ),
    "llava": Family(
        modules={"LlavaMultiModalProjector": {"linear_1": "column", "linear_2": "row"}},
        tower_outputs={"vision": ("hidden_states",)},
        sight=Sight(cacheable=True),
    ),
    "metaclip_2": Family(
        modules={"MetaClip2Attention": OUT_PROJ, "MetaClip2MLP": FC},
        reads_inside=("MetaClip2TextEmbeddings",),
        roles=("two_towers", "picture_classifier"),
    ),
    "mistral3": Family(
        modules={
            "PixtralAttention": _O_PROJ,
            "PixtralMLP": _GATED,
            "Mistral3MultiModalProjector": {"linear_1": "column", "linear_2": "row"},
        },
        sight=Sight("rows"),
    ),
    # The thinker of Qwen 2.5 Omni, which sees, and hears recordings in chunks.
    "qwen2_5_omni_thinker": Family(
        modules={
            "Qwen2_5OmniAudioAttention": OUT_PROJ,
            "Qwen2_5OmniAudioEncoderLayer": FC,
            "Qwen2_5OmniVisionAttention": {"q": "column", "k": "column", "v": "column", "proj": "row"},
            "Qwen2_5OmniMLP": _GATED,
        },
        width_is_heads=True,
        projector=("merger",),
        tower_outputs=_POOLED,
        sight=Sight("grid"),
        recordings="chunks",
    ),
    "qwen2_audio": Family(
        modules={"Qwen2AudioAttention": OUT_PROJ, "Qwen2AudioEncoderLayer": FC},
        reads_weights={"Qwen2AudioEncoder": "embed_positions"},
        tower_outputs=_HEARD,
        recordings="window",
    ),
    # Qwen 2.5 VL.
    "qwen2_5_vl": Family(
        modules={"Qwen2_5_VLVisionAttention": {"qkv": "qkv", "proj": "row"}, "Qwen2_5_VLMLP": _GATED},
        width_is_heads=True,
        projector=("merger",),
        tower_outputs=_POOLED,
        sight=Sight("grid", videos="axis"),
    ),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe"),
        Family(
            modules={
                f"Qwen3_5{kind}Vision{module}": styles
                for kind in ("", "Moe")
                for module, styles in (("Attention", QKV_PROJ), ("MLP", LINEAR_FC), ("PatchMerger", LINEAR_FC))
            },
            projector=("merger",),
            tower_outputs=_POOLED,
            sight=Sight("grid", videos="text"),
        ),
    ),
    # The thinker of Qwen 3 Omni, which sees, and hears each second of a recording alone.
    "qwen3_omni_moe_thinker": Family(
        modules={
            "Qwen3OmniMoeThinkerTextAttention": _O_PROJ,
            "Qwen3OmniMoeThinkerTextMLP": _GATED,
            "Qwen3OmniMoeAudioAttention": OUT_PROJ,
            "Qwen3OmniMoeAudioEncoderLayer": FC,
            "Qwen3OmniMoeVisionAttention": QKV_PROJ,
            "Qwen3OmniMoeVisionMLP": LINEAR_FC,
        },
        width_is_heads=True,
        projector=("merger", "merger_list"),
        tower_outputs=_DEEP,
        sight=Sight("grid"),
        recordings="seconds",
    ),
    # Phi-4 multimodal, trained on texts and pictures. Its queries, keys and values of all heads are one matrix.
    "phi4_multimodal": Family(
        packing="positions",
        stages=None,
        modules={
            "Phi4MultimodalAttention": {"qkv_proj": "qkv", "o_proj": "row"},
            "Phi4MultimodalMLP": {"gate_up_proj": "packed", "down_proj": "row"},
            "Phi4MultimodalVisionAttention": OUT_PROJ,
            "Phi4MultimodalVisionMLP": FC,
        },
        language=("embed_tokens", "layers", "norm"),
        untrained=("audio_embed",),
        runs_by_picture=True,
        sight=Sight("mosaic"),
    ),
    # Qwen 3 VL.
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe"),
        Family(
            modules={
                f"Qwen3VL{kind}{module}": styles
                for kind in ("", "Moe")
                for module, styles in (
                    ("TextAttention", _O_PROJ),
                    ("TextMLP", _GATED),
                    ("VisionAttention", QKV_PROJ),
                    ("VisionMLP", LINEAR_FC),
                    ("VisionPatchMerger", LINEAR_FC),
                )
            },
            projector=("merger", "deepstack_merger_list"),
            tower_outputs=_DEEP,
            sight=Sight("grid", videos="text"),
        ),
    ),
    "siglip": Family(
        modules={"SiglipAttention": OUT_PROJ, "SiglipMLP": FC},
        reads_inside=("SiglipTextEmbeddings",),
        roles=("two_towers", "picture_classifier"),
    ),
    "smolvlm": Family(
        modules={"SmolVLMVisionAttention": OUT_PROJ, "SmolVLMVisionMLP": FC},
        width_is_heads=True,
        tower_outputs=_LAST,
        sight=Sight("parts"),
    ),
    "vit": Family(modules={"ViTAttention": _O_PROJ, "ViTMLP": FC}, roles=("picture_classifier", "picture_tower")),
    "voxtral": Family(
        modules={
            "VoxtralAttention": OUT_PROJ,
            "VoxtralEncoderLayer": FC,
            "VoxtralMultiModalProjector": {"linear_1": "column", "linear_2": "row"},
        },
        reads_weights={"VoxtralEncoder": "embed_positions"},
        tower_outputs=_HEARD,
        recordings="silence",
    ),
    "wav2vec2": Family(
        modules={
            "Wav2Vec2Attention": OUT_PROJ,
            "Wav2Vec2FeedForward": {"intermediate_dense": "column", "output_dense": "row"},
        },
        roles=WAVES,
    ),
    "whisper": Family(
        modules={"WhisperAttention": OUT_PROJ, "WhisperEncoderLayer": FC, "WhisperDecoderLayer": FC},
        roles=("sound_classifier", "transcriber"),
    ),
}

_TOWER: tuple[Role, ...] = ("picture_tower", "chat_tower")

MEDIA_FAMILIES: Mapping[str, Family] = {
    **_OWN,
    **{name: replace(_OWN[name], tower_outputs=_POOLED) for name in ("clip", "metaclip_2", "siglip")},
    "clip_text_model": replace(_OWN["clip"], roles=()),
    "clip_vision_model": replace(_OWN["clip"], roles=_TOWER),
    "siglip_text_model": replace(_OWN["siglip"], roles=()),
    "siglip_vision_model": replace(_OWN["siglip"], roles=_TOWER, has_summary=False),
    **dict.fromkeys(("idefics3_vision", "smolvlm_vision"), Family(has_summary=False)),
    "gemma3": Family(
        modules=_OWN["siglip"].modules, tower_outputs=_LAST, sight=Sight(both_ways="pictures", opener="boi_token_index")
    ),
    "paligemma": Family(modules=_OWN["siglip"].modules, tower_outputs=_LAST, sight=Sight(both_ways="questions")),
    # two towers of any kinds, one for pictures and one for texts (Zhai et al. 2022, "LiT", arXiv:2111.07991)
    "vision-text-dual-encoder": Family(
        modules={**_OWN["vit"].modules, **_OWN["siglip"].modules, **TEXT_FAMILIES["bert"].modules},
        roles=("two_towers",),
        caption_mask=True,
    ),
    # their classifiers use no batch statistics
    **dict.fromkeys(
        ("beit", "convnext", "convnextv2", "data2vec-vision", "dinov2_with_registers", "focalnet", "hiera", "ijepa")
        + ("pvt_v2", "swin", "swinv2", "vit_msn"),
        Family(roles=("picture_classifier",)),
    ),
    "dinov2": Family(roles=("picture_classifier", "picture_tower")),
    **dict.fromkeys(("hubert", "unispeech", "unispeech-sat", "wavlm"), Family(roles=WAVES)),
}
"""Families of pictures and sound."""
