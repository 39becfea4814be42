"""Every shipped option composes and passes the preflight; the shipped architectures are the published ones."""

from __future__ import annotations

import pytest
import yaml

from mgpu_pipe.architectures.formulas.parameters import count_parameters
from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config import plugins
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.sections import list_groups
from mgpu_pipe.models.fields import config_fields, model_fields
from mgpu_pipe.system.conf_folders import conf_dir
from tests.support.sampling import one_in

OPTIONS = [(group, option.name) for group, options in list_groups().items() for option in options]
NEEDS_MORE = {
    *(("objective", name) for name in plugins.OBJECTIVES if name != "causal_lm"),
    ("model", "hf"),
    ("data", "text_files"),
    ("data", "jsonl"),
    ("data", "parquet"),
    ("data", "chat_jsonl"),
    ("data", "preferences_jsonl"),
    ("data", "spoken_preferences"),
    ("data", "unpaired_jsonl"),
    ("data", "spoken_unpaired"),
    ("data", "spoken_chat"),
    ("data", "mixture"),
    ("data", "rule_chat"),
    ("model", "bert_tiny"),
    ("model", "bert_small"),
    ("data", "labelled_jsonl"),
    ("model", "t5_tiny"),
    ("model", "t5_mini"),
    ("data", "number_words"),
    ("data", "pairs_jsonl"),
    ("model", "vit_tiny"),
    ("model", "vit_b16"),
    ("data", "digits"),
    ("experiment", "vit_digits"),  # needs scikit-learn
    ("experiment", "clip_digits"),
    ("experiment", "clip_vit_b32_ddp"),
    ("model", "clip_tiny"),
    ("model", "clip_vit_b32"),
    ("model", "clip_vit_l14"),
    ("model", "siglip2_base"),
    ("model", "vit_bert_tiny"),
    ("data", "captioned_digits"),
    ("experiment", "vlm_digits"),
    ("experiment", "vlm_digits_stage1"),
    ("model", "llava_tiny"),
    ("model", "llava15_7b"),
    ("model", "qwen25_vl_tiny"),
    ("model", "qwen25_vl_7b"),
    ("model", "qwen3_vl_tiny"),
    ("model", "smolvlm_tiny"),
    ("model", "paligemma_tiny"),
    ("model", "gemma3_tiny"),
    ("model", "gemma4_tiny"),
    ("model", "mistral3_tiny"),
    ("model", "internvl_tiny"),
    ("model", "llama4_tiny"),
    ("model", "phi4_multimodal_tiny"),
    ("model", "qwen35_tiny"),
    ("model", "qwen2_audio_tiny"),
    ("model", "voxtral_tiny"),
    ("model", "qwen25_omni_tiny"),
    ("data", "digit_questions"),
    ("data", "moving_shapes"),
    ("experiment", "video_shapes"),
    ("data", "picture_chats"),
    ("data", "captioned_folder"),
    ("data", "captions"),
    ("model", "whisper_tiny"),
    ("model", "whisper_small"),
    ("experiment", "whisper_spoken_digits"),
    ("model", "wav2vec2_tiny"),
    ("model", "wav2vec2_base"),
    ("data", "spoken_digits"),
    ("experiment", "wav2vec2_spoken_digits"),  # needs espeak-ng
    ("experiment", "wav2vec2_base_finetune"),
    ("data", "audio_list"),
    ("data", "audio_folder"),
    ("data", "labelled_audio_list"),
    ("data", "spoken_single_digits"),
    ("data", "spoken_digit_tags"),
    ("data", "spoken_questions"),
    ("experiment", "spoken_questions"),
    ("data", "tagged_audio_list"),
    ("data", "captioned_audio_list"),
    ("model", "ast_tiny"),
    ("experiment", "sound_digits"),
    ("data", "git_files"),
    ("data", "embedding_pairs"),
    ("experiment", "stdlib_rerank"),
    ("data", "stdlib_pairs"),
    ("data", "scored_pairs"),
    ("data", "sqlite"),
    ("data", "image_folder"),
    ("data/augment", "imagenet"),
    ("data", "image_list"),
    ("data", "image_tar"),
    ("data", "captioned_tar"),
    ("logger", "wandb"),
    ("logger", "mlflow"),
    ("precision", "fp8"),
    ("strategy", "zero3_nvme"),
    ("callbacks", "early_stopping"),
}
TINY = ("llama_tiny", "gpt2_tiny", "qwen3_tiny", "mixtral_tiny")

# Millions of parameters as their authors give them, on the model cards.
PUBLISHED = {
    "gpt2_124m": 124.4,
    "llama32_1b": 1236,
    "llama3_8b": 8030,
    "llama3_70b": 70554,
    "qwen3_8b": 8191,
    "qwen3_30b_a3b": 30532,
    "mixtral_8x7b": 46703,
    "mistral_7b": 7248,
    "gemma3_1b": 999.9,
    "gpt_oss_20b": 20915,
}


@pytest.mark.parametrize(("group", "option"), one_in(4, [each for each in OPTIONS if each[0] != "hydra/launcher"]))
def test_every_option_composes(group: str, option: str) -> None:
    words = ["data=image_folder", f"+{group}={option}"] if group == "data/augment" else [f"{group}={option}"]
    config, _ = compose(words)
    if (group, option) not in NEEDS_MORE:
        preflight(config, elsewhere=True)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_says_what_it_is(group: str, option: str) -> None:
    (found,) = [item for item in list_groups(group)[group] if item.name == option]
    assert len(found.description) > 5


def test_every_group_has_one_default_but_the_experiments_and_groups_in_groups() -> None:
    for group, options in list_groups().items():
        assert sum(option.is_default for option in options) == int(group != "experiment" and "/" not in group), group


def test_a_group_is_listed_with_the_groups_in_it() -> None:
    names = list(list_groups())
    assert names.index("data/augment") == names.index("data") + 1
    assert names[-1] == "hydra/launcher"
    assert list(list_groups("data")) == ["data", "data/augment"]
    assert [option.name for option in list_groups("data/augment")["data/augment"]] == ["imagenet"]


def size_of(config: RunConfig) -> int:
    """Parameters of the model."""
    count = count_parameters(model_fields(config.model))
    assert count is not None
    return count.total


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_have_the_promised_shape(name: str) -> None:
    config, _ = compose([f"model={name}"])
    fields = model_fields(config.model)
    assert size_of(config) < 1_000_000
    assert (fields["num_hidden_layers"], fields["num_attention_heads"], fields["vocab_size"]) == (4, 8, 1024)
    assert fields["max_position_embeddings"] >= 1024
    if name != "gpt2_tiny":
        assert fields["num_key_value_heads"] == 4
    if name == "mixtral_tiny":
        assert fields["num_local_experts"] == 8


def test_the_quickstarts_model_has_5_to_15_million_parameters() -> None:
    config, _ = compose(["experiment=quickstart"])
    assert 5e6 < size_of(config) < 15e6


@pytest.mark.parametrize(("name", "millions"), PUBLISHED.items())
def test_published_architectures_have_their_published_size(name: str, millions: float) -> None:
    config, _ = compose([f"model={name}"])
    assert size_of(config) / 1e6 == pytest.approx(millions, rel=1e-3)


@pytest.mark.parametrize("name", [option for group, option in OPTIONS if group == "model" and option != "hf"])
def test_no_shipped_model_has_dropout(name: str) -> None:
    content = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text())["config"]
    for part in [content[key] for key in content if key.endswith("_config")] or [content]:
        dropouts = {key: value for key, value in part.items() if "drop" in key}
        known = config_fields(part["model_type"]) if "model_type" in part else None
        assert dropouts or (known and not any("drop" in field for field in known)), "unless it can have none"
        assert set(dropouts.values()) <= {0.0}


@pytest.mark.parametrize("name", [option for group, option in OPTIONS if group == "experiment"])
def test_an_experiment_opens_with_the_command_that_runs_it(name: str) -> None:
    lines = (conf_dir() / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1] == f"# mgpu-pipe experiment={name}"


def test_the_quickstart_takes_two_processes_on_cpu() -> None:
    config, _ = compose(["experiment=quickstart", "trainer.accelerator=cpu"])
    assert config.trainer.devices == 2
    assert compose(["experiment=quickstart", "trainer.accelerator=cpu", "strategy=single"])[0].trainer.devices == 1


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_default_batch_suits_the_usual_process_counts(devices: int) -> None:
    config, _ = compose(["strategy=ddp", f"trainer.devices={devices}", "trainer.accelerator=cpu"])
    preflight(config)
