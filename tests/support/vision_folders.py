"""Folders of vision-language models as their makers publish them, tiny: written by transformers' own classes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mgpu_pipe.models.fields import builder_of
from tests.support.canvas_of_maker import canvases_of_maker, mosaics_of_maker
from tests.support.real_folders import need_chat_templates

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CHATML = ("<|im_start|>", "<|im_end|>")
INTERNVL = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for content in message['content'] -%}
{%- if content['type'] == 'image' -%}{{- '<IMG_CONTEXT>\\n' -}}
{%- elif content['type'] == 'text' -%}{{- content['text'] -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


@dataclass(frozen=True)
class VisionFolder:
    """One family.

    Attributes:
        tokens: special tokens of its tokenizer.
        named: their names, without those of ends and padding.
        fields: its configuration, given the id of a token; ``vocab_size`` of its text is added.
        image, processor: settings of the image processor, and of the whole processor.
        template: its chat template, or the file's name in TRL's folder.
        expand: the text of a picture in place of the template's, given the processor's output for it.
    """

    tokens: tuple[str, ...]
    named: dict[str, str]
    fields: Callable[[Callable[[str], int]], dict[str, Any]]
    image: dict[str, Any]
    processor: dict[str, Any]
    template: str
    placeholder: str
    expand: Callable[[Any, int], str]


MISTRAL = """{{- bos_token -}}{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{- '[INST]' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for block in message['content'] -%}
{%- if block['type'] == 'text' -%}{{- block['text'] -}}
{%- elif block['type'] in ['image', 'image_url'] -%}{{- '[IMG]' -}}{%- endif -%}
{%- endfor -%}{%- endif -%}{{- '[/INST]' -}}
{%- elif message['content'] is string -%}{{- message['content'] + eos_token -}}
{%- else -%}{{- message['content'][0]['text'] + eos_token -}}{%- endif -%}
{%- endfor -%}"""


def qwen_fields(family: str, more: dict[str, Any], token: Callable[[str], int]) -> dict[str, Any]:
    """Fields of a Qwen-VL with these fields of its tower."""
    places = {
        **{"image_token_id": token("<|image_pad|>"), "video_token_id": token("<|video_pad|>")},
        **{"vision_start_token_id": token("<|vision_start|>"), "vision_end_token_id": token("<|vision_end|>")},
    }
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    vision = {"hidden_size": 32, "intermediate_size": 48, "depth": 2, "patch_size": 4, "out_hidden_size": 32}
    text = {name: value for name, value in TEXT.items() if name != "head_dim" or "qwen3" in family}
    if "_moe" in family:
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return {
        **places,
        "text_config": {**text, "model_type": f"{family}_text", "rope_parameters": rotary},
        "vision_config": {**vision, "model_type": f"{family}_vision", **more},
    }


def omni_fields(token: Callable[[str], int]) -> dict[str, Any]:
    """Fields of the thinker of a Qwen3-Omni."""
    fields = qwen_fields("qwen3_omni_moe", DEEPSTACK, token)
    fields["vision_config"]["model_type"] += "_encoder"
    audio = {"model_type": "qwen3_omni_moe_audio_encoder", "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2}
    audio |= {"encoder_attention_heads": 2, "encoder_ffn_dim": 48, "downsample_hidden_size": 8, "output_dim": 32}
    tokens = {
        f"audio_{kind}_id": token(f"<|audio_{name}|>") for kind, name in (("token", "pad"), ("start_token", "start"))
    }
    return {**fields, **tokens, "audio_config": audio}


OMNI = """{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{- part['text'] -}}
{%- elif part['type'] == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'audio' -%}{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}{%- endif -%}
{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
DEEPSTACK = {"num_heads": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}


def rows_of_places(down: int, across: int) -> str:
    return "[IMG_BREAK]".join(["[IMG]" * across] * down) + "[IMG_END]"


def squares(side: int, kind: str, **more: Any) -> dict[str, Any]:
    return {
        **{"image_processor_type": kind, "size": {"height": side, "width": side}},
        **{"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, **more},
    }


FOLDERS = {
    "gemma3": VisionFolder(
        tokens=("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        named={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        fields=lambda token: {
            **{"boi_token_index": token("<start_of_image>"), "eoi_token_index": token("<end_of_image>")},
            **{"image_token_index": token("<image_soft_token>"), "mm_tokens_per_image": 4},
            "text_config": {
                **{**TEXT, "model_type": "gemma3_text", "query_pre_attn_scalar": 8, "sliding_window": 16},
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": {
                **{**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
                **{"image_size": 16, "patch_size": 4},
            },
        },
        image=squares(16, "Gemma3ImageProcessor", image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=2),
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 4},
        template="gemma3.jinja",
        placeholder="<start_of_image>",
        expand=lambda made, _: f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n",
    ),
    "internvl": VisionFolder(
        tokens=(*CHATML, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        named={
            **{"start_image_token": "<img>", "end_image_token": "</img>"},
            **{"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"},
        },
        fields=lambda token: {
            **{"image_token_id": token("<IMG_CONTEXT>"), "image_seq_length": 4, "downsample_ratio": 0.5},
            "text_config": {**{key: value for key, value in TEXT.items() if key != "head_dim"}, "model_type": "qwen2"},
            "vision_config": {
                **{**TOWER, "model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]},
                **{"attention_bias": True, "use_qk_norm": False},
            },
        },
        image={
            **squares(16, "GotOcr2ImageProcessor", image_mean=MEAN, image_std=STD, resample=3),
            **{"crop_to_patches": False, "min_patches": 1, "max_patches": 6},
        },
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
        template=INTERNVL,
        placeholder="<IMG_CONTEXT>",
        expand=lambda made, index: f"<img>{'<IMG_CONTEXT>' * 4 * int(made['num_patches'][index])}</img>",
    ),
    "qwen3_5": VisionFolder(
        tokens=(*CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        named={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        fields=lambda token: {
            **{"image_token_id": token("<|image_pad|>"), "video_token_id": token("<|video_pad|>")},
            **{"vision_start_token_id": token("<|vision_start|>"), "vision_end_token_id": token("<|vision_end|>")},
            "text_config": {
                **{**TEXT, "model_type": "qwen3_5_text", "head_dim": 32},
                **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2},
                **{"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
                "rope_parameters": {
                    **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
                    **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
                },
            },
            "vision_config": {
                **{"model_type": "qwen3_5_vision", "hidden_size": 32, "intermediate_size": 48, "depth": 2},
                **{"num_heads": 4, "patch_size": 4, "out_hidden_size": 32, "num_position_embeddings": 16},
            },
        },
        image={
            **{"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 4, "merge_size": 2},
            **{"temporal_patch_size": 2, "size": {"shortest_edge": 256, "longest_edge": 1600}},
            **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        },
        processor={"processor_class": "Qwen3VLProcessor"},
        template="qwen3_5_nothink.jinja",
        placeholder="<|image_pad|>",
        expand=lambda made, index: "<|image_pad|>" * (int(made["image_grid_thw"][index].prod()) // 4),
    ),
}
FOLDERS["mistral3"] = VisionFolder(
    tokens=("[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    named={},
    fields=lambda token: {
        **{"image_token_index": token("[IMG]"), "spatial_merge_size": 2, "vision_feature_layer": -1},
        "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**TOWER, "model_type": "pixtral", "image_size": 32, "patch_size": 4},
    },
    image={
        **{"image_processor_type": "PixtralImageProcessorFast", "patch_size": 4, "size": {"longest_edge": 32}},
        **{"image_mean": MEAN, "image_std": STD, "resample": 3},
    },
    processor={"processor_class": "PixtralProcessor", "patch_size": 4, "spatial_merge_size": 2},
    template=MISTRAL,
    placeholder="[IMG]",
    expand=lambda made, index: rows_of_places(*(int(side) // 8 for side in made["image_sizes"][index])),
)
HEARING: dict[str, Any] = {
    **{"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 16, "sampling_rate": 16000},
    **{"frame_length": 320, "hop_length": 160, "fft_length": 512, "fft_overdrive": False, "input_scale_factor": 1.0},
    **{"min_frequency": 0.0, "max_frequency": 8000.0, "mel_floor": 0.001, "preemphasis": 0.0, "dither": 0.0},
    **{"preemphasis_htk_flavor": True, "per_bin_mean": None, "per_bin_stddev": None},
    **{"padding_side": "right", "padding_value": 0.0, "return_attention_mask": True},
}
"""Settings of Gemma 4's ears as published, of fewer bands."""
CLIPS = {"video_processor": {"video_processor_type": "Gemma4VideoProcessor", "max_soft_tokens": 70, "num_frames": 32}}
FOLDERS["gemma4"] = VisionFolder(
    tokens=(
        *("<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>", "<|channel>", "<channel|>", "<|think|>"),
        *("<|audio>", "<audio|>", "<|audio|>"),
    ),
    named={
        **{"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
        **{"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
    },
    fields=lambda token: {
        **{"boi_token_id": token("<|image>"), "eoi_token_id": token("<image|>")},
        **{"image_token_id": token("<|image|>"), "video_token_id": None, "audio_token_id": token("<|audio|>")},
        "audio_config": {
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 48},
            "subsampling_conv_channels": [16, 8],
        },
        "text_config": {
            **{**TEXT, "model_type": "gemma4_text", "sliding_window": 16, "hidden_size_per_layer_input": 0},
            **{"layer_types": ["sliding_attention", "full_attention"], "use_bidirectional_attention": "vision"},
            "global_head_dim": 16,
        },
        "vision_config": {
            **{**TOWER, "model_type": "gemma4_vision", "num_key_value_heads": 4, "head_dim": 8, "patch_size": 2},
            **{"pooling_kernel_size": 2, "position_embedding_size": 512, "standardize": True},
        },
    },
    image={
        **{"image_processor_type": "Gemma4ImageProcessor", "patch_size": 2, "pooling_kernel_size": 2},
        **{"max_soft_tokens": 70, "do_normalize": False, "resample": 3},
    },
    processor={"processor_class": "Gemma4Processor", "image_seq_length": 70, "feature_extractor": HEARING, **CLIPS},
    template="gemma4_v5.jinja",
    placeholder="<|image|>",
    expand=lambda made, index: f"<|image>{'<|image|>' * int(made['num_soft_tokens_per_image'][index])}<image|>",
)
LLAMA4 = """{{- bos_token -}}{%- for message in messages -%}
{{- '<|header_start|>' + message['role'] + '<|header_end|>\\n\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for content in message['content'] -%}
{%- if content['type'] == 'image' -%}{{- '<|image|>' -}}
{%- elif content['type'] == 'text' -%}{{- content['text'] -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|eot|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|header_start|>assistant<|header_end|>\\n\\n' -}}{%- endif -%}"""


def tiles_of_canvas(down: int, across: int) -> str:
    """Text of a picture on ``down`` by ``across`` tiles, as Llama 4's processor writes it."""
    each, text = "<|patch|>" * 4, "<|image_start|>"
    if down * across > 1:
        for _ in range(down):
            text += "<|tile_x_separator|>".join([each] * across) + "<|tile_y_separator|>"
    return f"{text}<|image|>{each}<|image_end|>"


FOLDERS["llama4"] = VisionFolder(
    tokens=(
        *("<|header_start|>", "<|header_end|>", "<|eot|>", "<|image_start|>", "<|image_end|>", "<|image|>"),
        *("<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    ),
    named={},
    fields=lambda token: {
        **{"boi_token_index": token("<|image_start|>"), "eoi_token_index": token("<|image_end|>")},
        "image_token_index": token("<|patch|>"),
        "text_config": {
            **{**TEXT, "model_type": "llama4_text", "intermediate_size_mlp": 48, "num_local_experts": 4},
            **{"interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "attention_chunk_size": 32},
        },
        "vision_config": {
            **{**TOWER, "model_type": "llama4_vision_model", "image_size": 16, "patch_size": 4},
            **{"intermediate_size": 128, "projector_input_dim": 32, "projector_output_dim": 32},
            "vision_output_dim": 32,
        },
    },
    image={
        **squares(16, "Llama4ImageProcessor", image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=2),
        **{"max_patches": 6, "resize_to_max_canvas": False},
    },
    processor={"processor_class": "Llama4Processor", "patch_size": 4, "pixel_shuffle_ratio": 0.5},
    template=LLAMA4,
    placeholder="<|image|>",
    expand=lambda made, index: tiles_of_canvas(*made["aspect_ratios"][index]),
)
PHI4 = """{%- for message in messages -%}{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- '<|image|>' -}}
{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}{%- endif -%}{{- '<|end|>' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""
FOLDERS["phi4_multimodal"] = VisionFolder(
    tokens=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|image|>", "<|audio|>"),
    named={"image_token": "<|image|>", "audio_token": "<|audio|>"},
    fields=lambda token: {
        **{**TEXT, "bos_token_id": None, "eos_token_id": token("<|end|>")},
        "vision_config": {
            **{**TOWER, "image_token_id": token("<|image|>"), "num_hidden_layers": 3},
            **{"image_size": 16, "crop_size": 16, "patch_size": 4},
        },
        "audio_config": {
            **{"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 4},
            **{"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8},
            **{"input_size": 8, "time_reduction": 2, "bias_max_distance": 16, "audio_token_id": token("<|audio|>")},
        },
    },
    image={
        **squares(16, "Phi4MultimodalImageProcessor", image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=3),
        **{"dynamic_hd": 6, "patch_size": 4},
    },
    processor={"processor_class": "Phi4MultimodalProcessor"},
    template=PHI4,
    placeholder="<|image|>",
    # The processor counts the whole picture's vectors as of tiles of 448 pixels.
    expand=lambda made, index: "<|image|>" * (made["num_img_tokens"][index] - 16 * 17 + 2 * 3),
)
for family, template, more in (
    (
        "qwen2_5_vl",
        "qwen2_5_vl.jinja",
        {
            **{"num_heads": 4, "window_size": 16, "fullatt_block_indexes": [1]},
            **{"hidden_act": "silu", "tokens_per_second": 2},
        },
    ),
    ("qwen3_vl", "qwen3_vl.jinja", DEEPSTACK),
    ("qwen3_vl_moe", "qwen3_vl.jinja", DEEPSTACK),
):
    FOLDERS[family] = replace(
        FOLDERS["qwen3_5"],
        fields=partial(qwen_fields, family, more),
        template=template,
        processor={"processor_class": "Qwen2_5_VLProcessor" if family == "qwen2_5_vl" else "Qwen3VLProcessor"},
    )
FOLDERS["qwen3_omni_moe_thinker"] = replace(
    FOLDERS["qwen3_5"],
    tokens=(*FOLDERS["qwen3_5"].tokens, "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
    named={**FOLDERS["qwen3_5"].named, "audio_token": "<|audio_pad|>"},
    fields=omni_fields,
    processor={
        "processor_class": "Qwen3OmniMoeProcessor",
        "feature_extractor": {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16},
    },
    template=OMNI,
)
PIL = {
    "qwen2_5_vl": "Qwen2VLImageProcessorPil",
    "qwen3_vl": "Qwen2VLImageProcessorPil",
    "qwen3_vl_moe": "Qwen2VLImageProcessorPil",
    "qwen3_omni_moe_thinker": "Qwen2VLImageProcessorPil",
    "mistral3": "PixtralImageProcessorPil",
    "gemma4": "Gemma4ImageProcessorPil",
    "gemma3": "Gemma3ImageProcessorPil",
    "internvl": "GotOcr2ImageProcessorPil",
    "qwen3_5": "Qwen2VLImageProcessorPil",
}
MAKERS = {"llama4": canvases_of_maker, "phi4_multimodal": mosaics_of_maker}
"""Processors that transformers has for torchvision alone."""
SEEING = "AutoModelForImageTextToText"
ALSO: dict[str, dict[str, Any]] = {"internvl": {"crop_to_patches": True}, "mistral3": {"patch_size": 8}}
"""Settings that a whole processor gives its image processor, whatever the folder says."""


def write_folder(family: str, out: Path) -> Path:
    """A folder of ``family`` with random weights, as its maker publishes it."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    known = FOLDERS[family]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    ends = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    words.add_special_tokens([*ends.values(), *known.tokens])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **ends, extra_special_tokens=known.named)
    named = known.template.endswith(".jinja")
    template = (need_chat_templates() / known.template).read_text(encoding="utf-8") if named else known.template
    tokenizer.chat_template = template
    tokenizer.save_pretrained(out)
    known_ids: Any = words.token_to_id
    fields = known.fields(known_ids)
    text = fields.get("text_config", fields)
    text |= {"vocab_size": words.get_vocab_size() + 3, "pad_token_id": words.token_to_id("<pad>")}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **fields)
    model = getattr(transformers, builder_of(family, SEEING)).from_config(config)
    for layers in (module.layers for name, module in model.named_modules() if name.endswith("img_processor.encoder")):
        for parameter in layers.parameters():  # of deviation 1, which rounding makes useless
            parameter.data.mul_(0.1)
    model.save_pretrained(out)
    (out / "preprocessor_config.json").write_text(json.dumps({**known.image, **known.processor}))
    (out / "processor_config.json").write_text(json.dumps(known.processor))
    return out


def prepared_by_maker(
    family: str, folder: Path, messages: list[dict[str, Any]], images: list[Any], prompt: bool = False
) -> dict[str, Any]:
    """The output of the maker's processor for a conversation: ``input_ids`` and the pictures' tensors.

    Args:
        prompt: an answer comes next.
    """
    import transformers

    known: VisionFolder = FOLDERS[family]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    made = dict[str, Any]()
    if images and family in MAKERS:
        made = MAKERS[family](images, json.loads((folder / "preprocessor_config.json").read_text()))
    elif images:
        processor = getattr(transformers, PIL[family]).from_pretrained(folder)
        made = dict(processor(images, return_tensors="pt", **ALSO.get(family, {})))
    first, *rest = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt).split(
        known.placeholder
    )
    text = first + "".join(known.expand(made, index) + part for index, part in enumerate(rest))
    return {"input_ids": tokenizer(text, add_special_tokens=False)["input_ids"], **made}


NO_INPUTS = ("aspect_ratios", "num_patches", "num_crops", "num_img_tokens", "num_soft_tokens_per_image")
TYPES = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), "mm_token_type_ids"),
    **{"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids", "qwen3_5": "mm_token_type_ids"},
}
"""Families whose models are told which tokens are pictures, and the argument."""


def model_inputs(family: str, made: dict[str, Any], is_picture: torch.Tensor) -> dict[str, Any]:
    """The model's arguments next to the token ids, from the output of :func:`prepared_by_maker`.

    Args:
        is_picture: which tokens are a picture's.
    """
    types = {TYPES[family]: is_picture.long()} if family in TYPES and made else {}
    return {**{name: value for name, value in made.items() if name not in NO_INPUTS}, **types}
