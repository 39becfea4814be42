"""Names that no model of the family can have are told by its source. Oracle: the names of the models themselves."""

from __future__ import annotations

import pytest
from torch import nn

from mgpu_pipe.checks.parameter_names import name_errors
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.models.fields import MODEL_CLASSES, model_types
from tests.support.sampling import one_in

MODELS = (
    "llama",
    "gpt2",
    "bert",
    "clip",
    "llava",
    "mixtral",
    "qwen25_vl",
    "smolvlm",
    "t5",
    "vit",
    "wav2vec2",
    "whisper",
    *("gemma3", "gemma4", "internvl", "llama4", "mistral3", "paligemma", "qwen3", "qwen35", "qwen3_vl", "vit_bert"),
    *("phi4_multimodal", "qwen2_audio", "qwen25_omni", "voxtral"),
)
LORA = ("peft=lora", "data=synthetic")


def lines(*overrides: str) -> list[str]:
    config, _ = compose(overrides)
    return [str(error) for error in name_errors(config.model, config.optimizer, config.peft)]


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(8, MODELS))
def test_no_name_of_a_model_is_refused(name: str) -> None:
    config, _ = compose([f"model={name}_tiny", "peft=lora"])
    kind = next(kind for kind in MODEL_CLASSES if config.model.type in model_types(kind))
    model = build_meta(config.model, kind)
    config.model.freeze = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    config.model.freeze += [f"*{name[3:-3]}*" for name in config.model.freeze]
    config.peft.targets = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    config.peft.targets += [name.rpartition(".")[2] for name in config.peft.targets]
    assert name_errors(config.model, config.optimizer, config.peft) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("peft=lora peft.targets=[nosuch]", "use names such as down_proj, gate_proj, k_proj, "),
        ("peft=lora peft.targets=[q_porj]", "did you mean q_proj? or use names such as"),
        ("peft=lora peft.targets=[*q_porj*]", "peft.targets=*q_porj*: matches nothing in the model; did you mean *q_"),
        ("peft=lora peft.train_also=[*nomr*]", "peft.train_also=*nomr*: matches no parameter of the model"),
        ("model.freeze=[nosuch]", "model.freeze=nosuch: matches no parameter of the model; use patterns of parameter"),
        ("model.freeze=[model.embed_token.*]", "did you mean model.embed_tokens.*?"),
        ("model.freeze=[embed_tokens]", "embed_tokens is not a parameter name; did you mean *embed_tokens*?"),
        ("optimizer.groups.a.parameters=[nosuch.*]", "optimizer.groups.a.parameters=nosuch.*: matches no parameter"),
    ],
)
def test_a_name_that_the_source_does_not_hold_is_refused(overrides: str, said: str) -> None:
    (line,) = lines("model=llama_tiny", *overrides.split())
    assert said in line


@pytest.mark.parametrize(
    "overrides",
    [
        "peft=lora peft.targets=[all-linear]",
        "model=mixtral_tiny peft=lora peft.targets=[experts,model.layers.0.*]",
        "model=llava_tiny model.freeze=[vision]",
        "model.freeze=['model.layers.[01].*','*norm*']",
    ],
)
def test_what_a_model_may_have_is_left_to_the_model(overrides: str) -> None:
    assert lines("model=llama_tiny", *overrides.split()) == []
