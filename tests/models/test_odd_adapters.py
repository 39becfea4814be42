"""Folders of adapters that are none: every one is an error of one line. Made by hand, by field and by byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
from torch import nn

from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.models.adapters.lora import add_adapters
from mgpu_pipe.models.adapters.peft_folder import check_peft_folder
from mgpu_pipe.models.build import build_meta
from tests.models.tiny import tiny_model

KEYS = PeftConfig(name="lora", r=4, alpha=8.0, targets=["q_proj"])
SETTINGS = {
    **{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "lora_dropout": 0.0},
    **{"bias": "none", "use_dora": False, "use_rslora": False, "init_lora_weights": True, "modules_to_save": None},
    **{"base_model_name_or_path": "base"},
}
WRONG = (None, "x", -1.5, [[1]], {"a": "b"}, 10**400, "a\0b", [], True, "\ud800")
NO_SETTINGS = ("[]", "3", "null", "", "[" * 5000, "NaN", "{", '{"r": 4, "r": 5', "\ufeff{}", '{"peft_type": ["LORA"]}')


@pytest.fixture(scope="module")
def model() -> nn.Module:
    built = build_meta(tiny_model("llama"))
    add_adapters(built, KEYS)
    return built


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, module in model.named_modules():
        if name.endswith("q_proj"):
            weight = module.weight
            found[f"base_model.model.{name}.lora_A.weight"] = torch.zeros(4, weight.shape[1])
            found[f"base_model.model.{name}.lora_B.weight"] = torch.zeros(weight.shape[0], 4)
    return found


def odd_settings() -> Iterator[str]:
    yield from NO_SETTINGS
    for key in SETTINGS:
        yield from (json.dumps({**SETTINGS, key: value}) for value in WRONG)
    yield from (json.dumps({name: SETTINGS[name] for name in SETTINGS if name != left_out}) for left_out in SETTINGS)


def refused_in_a_line(folder: Path, model: nn.Module) -> bool:
    """Whether the folder is refused; anything but a line fails."""
    try:
        check_peft_folder(PeftConfig(**{**vars(KEYS), "init_from": str(folder)}), model)
    except BadInputError as error:
        assert "\n" not in str(error) and len(str(error)) < 4000, str(error)[:300]
        return True
    return False


def test_no_settings_are_a_stack(tmp_path: Path, model: nn.Module) -> None:
    save_file(tensors(model), tmp_path / "adapter_model.safetensors")
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(SETTINGS))
    assert not refused_in_a_line(tmp_path, model)
    odd = list(odd_settings())
    assert len(odd) >= 100
    for number, text in enumerate(odd):
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        assert refused_in_a_line(tmp_path, model) or number >= len(NO_SETTINGS), text[:80]


def test_no_file_of_adapters_is_a_stack(tmp_path: Path, model: nn.Module) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(SETTINGS))
    file, whole = tmp_path / "adapter_model.safetensors", save(tensors(model))
    header = int.from_bytes(whole[:8], "little")
    odd = [whole[:size] for size in (0, 1, 7, 8, 9, header, header + 8, len(whole) - 1)]
    odd += [b"\xff" * 8 + whole[8:], whole[:8] + b"[]" + whole[10:], whole[:8] + b"\xff" * header + whole[8 + header :]]
    odd += [b"PK\x03\x04", b"{}", whole.replace(b"F32", b"F99"), whole.replace(b'"shape":[', b'"shape":[-')]
    odd += [whole.replace(b"lora_A", b"lora_X"), whole.replace(b"q_proj", b"\xff_proj"), save({})]
    for content in odd:
        file.write_bytes(content)
        assert refused_in_a_line(tmp_path, model), content[:60]
    file.unlink()
    file.mkdir()
    assert refused_in_a_line(tmp_path, model)
