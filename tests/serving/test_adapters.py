"""Adapters that a server chooses by name. Oracle: the peft package's own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.serving.server.answerer import with_adapter
from tests.models.test_peft_folder import made_by_peft
from tests.serving.servers import serving, train_run
from tests.support.command import mgpu
from tests.support.needs import need_openai, need_server

IDS = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", [{"modules_to_save": None}, {"use_dora": True}], ids=["lora", "dora and a head"])
def test_models_with_adapters_share_weights_and_compute_as_pefts(tmp_path: Path, options: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    folder, adapter, theirs = made_by_peft(tmp_path, **options)
    base: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        plain = base(input_ids=IDS).logits
        first, second = with_adapter(base, adapter), with_adapter(base, adapter)
        for model in (first, second):
            torch.testing.assert_close(model(input_ids=IDS).logits, theirs(input_ids=IDS).logits, rtol=1e-5, atol=1e-6)
        assert torch.equal(base(input_ids=IDS).logits, plain) and not torch.allclose(first(input_ids=IDS).logits, plain)
    pairs = zip(base.parameters(), first.get_submodule("model").parameters(), strict=False)
    assert next(iter(pairs))[0] is first.get_parameter("model.embed_tokens.weight"), "no second copy of the weights"


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    from mgpu_pipe.models.build import build_meta, materialise
    from tests.models.tiny import tiny_model, write_folder

    _, adapter, _ = made_by_peft(tmp_path)
    wider = materialise(build_meta(tiny_model("llama", tie_word_embeddings=False, hidden_size=96)), 5, "cpu")
    write_folder(wider, tmp_path / "wider")
    with pytest.raises(ConfigError, match="give the model that it was trained on"):
        with_adapter(wider, adapter)


def _write_adapters(folder: Path, out: Path) -> dict[str, Any]:
    """Two adapters of the model in ``folder``, written into ``out`` by their names; peft's models."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    theirs = {}
    for seed, (name, targets) in enumerate({"polite": ["q_proj", "v_proj"], "rude": ["down_proj"]}.items()):
        base = AutoModelForCausalLM.from_pretrained(folder)
        model: Any = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(std=0.2)
        model.save_pretrained(str(out / name))
        theirs[name] = model.eval()
    return theirs


@pytest.mark.slow
def test_openais_client_chooses_the_model_or_an_adapter(tmp_path: Path) -> None:
    need_server()
    need_openai()
    import openai
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cache = tmp_path / "cache"
    train_run(tmp_path, cache)
    mgpu(cache, tmp_path, "export", "run", "--out", "out")
    models: dict[str, Any] = _write_adapters(tmp_path / "out", tmp_path)
    models["talk"] = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    question = [{"role": "user", "content": "Is 5 even?"}]
    ids: Any = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    words = ["--adapter", "polite=polite", "--adapter", f"rude={tmp_path / 'rude'}"]
    with serving(cache, tmp_path, "run", *words) as server:
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key=server.token, max_retries=0)
        assert [model.id for model in client.models.list()] == ["talk", "polite", "rude"]
        told = {}
        for name in ("polite", "talk", "rude", "polite"):
            chat: Any = {"model": name, "messages": question, "temperature": 0, "max_tokens": 16}
            answer = client.chat.completions.create(**chat)
            assert answer.model == name
            written = models[name].generate(**ids, max_new_tokens=16, do_sample=False)[0][ids["input_ids"].shape[1] :]
            told[name] = answer.choices[0].message.content
            assert told[name] == tokenizer.decode(written, skip_special_tokens=True)
            pieces = client.chat.completions.create(**chat, stream=True)
            assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == told[name]
        assert len(set(told.values())) == 3
        with pytest.raises(openai.NotFoundError, match="use 'talk', 'polite', 'rude'"):
            client.completions.create(model="kind", prompt="Is")
    said = mgpu(cache, tmp_path, "serve", "run", "--port", "0", "--adapter", "talk=polite", code=2)
    assert "the name talk is taken" in said
