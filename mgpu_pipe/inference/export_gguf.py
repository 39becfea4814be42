"""Writes a run's weights as a GGUF file with a Modelfile, and checks the file before the final rename."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save

from mgpu_pipe.data.text.render_chat import ChatTemplate
from mgpu_pipe.data.text.tokenizer_folder import TOKENIZER, chat_of, load_tokenizer_file, special_tokens, token_texts
from mgpu_pipe.errors import BadInputError, MgpuError
from mgpu_pipe.import_path import python_module
from mgpu_pipe.inference.accuracy import Accuracy, measure_accuracies
from mgpu_pipe.inference.check_gguf import LIBRARY_VARIABLE, SAMPLE, find_library, quantise
from mgpu_pipe.inference.export_folder import check_target, copy_tokenizer, put_in_place, working_folder
from mgpu_pipe.inference.gguf import FILE
from mgpu_pipe.inference.gguf.file import GgufFile
from mgpu_pipe.inference.gguf.gguf_tokenizer import describe_tokenizer
from mgpu_pipe.inference.gguf.model_metadata import frequency_divisors, metadata_of
from mgpu_pipe.inference.gguf.write import KINDS, GgufDtype, GgufLayout, file_bytes, lay_out, rounded_reader, write_gguf
from mgpu_pipe.inference.import_weights import open_gguf
from mgpu_pipe.inference.model_card import write_card
from mgpu_pipe.inference.model_folder import merge_stored
from mgpu_pipe.inference.open import ReadTensor, StoredModel
from mgpu_pipe.inference.streamed_weights import probe, streamed_logits
from mgpu_pipe.models.weights.model_files import generation_settings, write_configuration
from mgpu_pipe.system.child_process import bind_command


@dataclass(frozen=True)
class GgufReport:
    """Figures of a finished export.

    Attributes:
        nbytes: of the file.
        accuracies: of fp32 and the file's type, or of all types.
        readers: differences of the readers that were tried, by name, relative to the largest logit.
        note: about the Modelfile; may be empty.
    """

    nbytes: int
    accuracies: tuple[Accuracy, ...]
    readers: dict[str, float]
    note: str


def export_gguf(
    stored: StoredModel, out: Path, dtype: GgufDtype | Literal["q4_k"], force: bool = False, compare: bool = False
) -> GgufReport:
    """Write the folder ``out`` with a GGUF file and a Modelfile; an existing one stays until the new one is checked.

    This process holds one weight at a time, and computes the expected logits block by block. A fresh process reads the
    file and compares them, by transformers' reader and by llama.cpp's library where these can.

    Args:
        force: replace an existing model folder.
        compare: measure all types, and not only fp32 and ``dtype``.

    Raises:
        BadInputError: ``out`` must not be replaced, or the family or its tokenizer has no place in such a file.
        MgpuError: the file does not give the same logits, or cannot be written.
    """
    if dtype == "q4_k":
        _require_library()
    check_target(out, force)
    stored = merge_stored(stored)
    layout = lay_out(stored.model)
    metadata = metadata_of(stored.model.config)  # without a name: llama.cpp treats some names' tokens differently
    with working_folder(out) as partial, working_folder(out, ".tokenizer") as scratch:
        check_target(out, force)
        try:
            write_configuration(stored.model, scratch, torch.float32, stored.maker)
            copy_tokenizer(stored, scratch)
            tokens = describe_tokenizer(
                scratch if stored.tokenizer_folder is not None else None, stored.model.config.vocab_size
            )
            context = metadata[f"{layout.family.architecture}.context_length"]
            note = write_modelfile(scratch, FILE, partial, context, tokens["tokenizer.ggml.add_bos_token"])
            entries = {**metadata, **tokens}
            rounded = _write(stored, layout, dtype, partial / FILE, scratch, entries, frequency_divisors(stored.model))
            kinds: Iterable[GgufDtype] = KINDS if compare else ("fp32",)
            dtypes: dict[str, tuple[int, ReadTensor]] = {name: _round(stored, layout, name) for name in kinds}
            dtypes[dtype] = rounded
            readers = _check(stored, rounded[1], dtype, partial / FILE, scratch)
            accuracies = tuple(measure_accuracies(stored, dtypes))
            nbytes = (partial / FILE).stat().st_size
            write_card(stored, partial, out.name, dtype, "gguf")
            put_in_place(partial, out)
        except OSError as error:
            raise MgpuError(f"--out={out}: writing failed ({error}); free some space and try again") from error
    return GgufReport(nbytes, accuracies, readers, note)


def _require_library() -> Path:
    """The folder of llama.cpp's library, or BadInputError."""
    folder = find_library()
    if folder is None:
        fix = f"pip install llama-cpp-python, or name its folder by {LIBRARY_VARIABLE}; or run llama-quantize on fp16"
        raise BadInputError(f"--dtype=q4_k: needs llama.cpp's library; {fix}")
    return folder


def _round(stored: StoredModel, layout: GgufLayout, dtype: GgufDtype) -> tuple[int, ReadTensor]:
    """Bytes of all tensors of a file of ``dtype``, and a reader of the weights as it rounds them."""
    return file_bytes(layout, dtype), rounded_reader(layout, stored.read, dtype)


def _write(
    stored: StoredModel,
    layout: GgufLayout,
    dtype: GgufDtype | Literal["q4_k"],
    file: Path,
    scratch: Path,
    metadata: Mapping[str, Any],
    divisors: Mapping[str, torch.Tensor],
) -> tuple[int, ReadTensor]:
    """Write ``file``; returns the same as :func:`_round`. llama.cpp's library makes q4_k of a file in fp32."""
    if dtype != "q4_k":
        write_gguf(layout, stored.read, file, dtype, metadata, divisors)
        return _round(stored, layout, dtype)
    write_gguf(layout, stored.read, scratch / FILE, "fp32", metadata, divisors)
    quantise(_require_library(), scratch / FILE, file)
    again = scratch / "again"
    again.mkdir()
    return sum(entry.nbytes for entry in GgufFile(file).tensors.values()), open_gguf(file, again).read


def _check(stored: StoredModel, read: ReadTensor, dtype: str, file: Path, tokenizer: Path) -> dict[str, float]:
    """Compare a fresh process's logits and token ids of the file with the run's: differences by reader."""
    inputs = probe(stored.model)
    rounded = streamed_logits(stored.model, read, inputs, torch.float32)
    sample = torch.tensor(load_tokenizer_file(tokenizer / TOKENIZER).encode(SAMPLE).ids)
    done = subprocess.run(
        bind_command(python_module("mgpu_pipe.inference.check_gguf", str(file.absolute()), dtype)),
        input=save({"input_ids": inputs["input_ids"], "logits": rounded.contiguous(), "sample": sample}),
        capture_output=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    if done.returncode:
        problem = _problem(done.stderr.decode(errors="replace"), file)
        raise MgpuError(f"the GGUF file failed its check and was removed: {problem}")
    differences: dict[str, float] = json.loads(done.stdout.decode().splitlines()[-1])
    return differences


def _problem(messages: str, file: Path) -> str:
    """The last line of ``messages``; of an error about ``file`` without its name and its fix, which the user lacks."""
    last = (messages.strip().splitlines() or ["no message"])[-1]
    _, is_about_file, problem = last.partition(f"--from={file.absolute()}: ")
    return problem.rpartition("; ")[0] or problem if is_about_file else last


ROLES = ("system", "user", "assistant")
MARK = "\u2983content\u2984"
"""Stands for a turn's text while the parts of a template around it are sought."""
PARAMETERS = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "repetition_penalty": "repeat_penalty"}
"""Ollama's names of generation settings."""


def write_modelfile(folder: Path, file: str, out: Path, context: int, adds_first: bool) -> str:
    """Write ``Modelfile`` into ``out`` and return a note about what it lacks, or an empty string.

    Args:
        folder: with tokenizer and generation settings.
        file: name of the GGUF file next to it.
        context: most tokens of the model.
        adds_first: whether the file says that the first token comes before each text.
    """
    settings = generation_settings(folder) or {}
    chat, lines, note = chat_of(folder), [f"FROM ./{file}"], ""
    first = special_tokens(folder).get("bos_token", "") if adds_first else ""
    template = "{{ .Prompt }}" if chat is None else go_template(chat, first)
    if template is None:
        note = "its chat template has more than turns; Ollama reads the one in the file, or give it a TEMPLATE"
    else:
        lines.append(f'TEMPLATE """{template}"""')
    lines += [f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}" for text in _stops(folder, settings)]
    lines.append(f"PARAMETER num_ctx {context}")
    if settings.get("do_sample"):
        numbers = {key: settings[key] for key in PARAMETERS if type(settings.get(key)) in (int, float)}
        lines += [f"PARAMETER {PARAMETERS[key]} {number}" for key, number in numbers.items()]
    else:
        lines.append("PARAMETER temperature 0")
    (out / "Modelfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return note


def _stops(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Texts of the tokens that end an answer."""
    ends, texts = settings.get("eos_token_id"), token_texts(folder / TOKENIZER)
    named = [texts[end] for end in (ends if isinstance(ends, list) else [ends]) if end in texts]
    return named or [text for name, text in special_tokens(folder).items() if name == "eos_token"]


def go_template(chat: ChatTemplate, first: str) -> str | None:
    """The chat template in the language of Ollama's; None where turns are not joined as they are.

    Args:
        first: text of the token that Ollama puts first by itself.
    """
    try:
        around = {role: _around(chat, ROLES[:number], role, first) for number, role in enumerate(ROLES)}
        turns = [_turn(role, f"{role} {number}") for number, role in enumerate([*ROLES, "user"])]
        joined = "".join(before + turn["content"] + after for turn in turns for before, after in [around[turn["role"]]])
        rendered = _render(chat, turns, first, True)
        alone = _render(chat, turns[1:2], first, True)
    except Exception:  # a template may refuse roles by any error
        return None
    opening, user = rendered.removeprefix(joined), "user 1".join(around["user"])
    default = alone.removesuffix(user + opening)
    if rendered != joined + opening or alone != default + user + opening:
        return None
    if '"""' in rendered + alone or "{{" in rendered + alone:
        return None
    cases = "{{ else ".join(
        f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}' for role, (before, after) in around.items()
    )
    start = f"{{{{ if not .System }}}}{default}{{{{ end }}}}" if default else ""
    return f"{start}{{{{ range .Messages }}}}{{{{ {cases}{{{{ end }}}}{{{{ end }}}}{opening}"


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _render(chat: ChatTemplate, turns: list[dict[str, str]], first: str, prompt: bool = False) -> str:
    """The text of ``turns`` without the token that comes first by itself."""
    text = chat.render(turns, prompt=prompt)
    return text.removeprefix(first) if first else text


def _around(chat: ChatTemplate, earlier: Sequence[str], role: str, first: str) -> tuple[str, str]:
    """Text before and after the content of a turn of ``role``, after turns of ``earlier`` roles."""
    before = [_turn(name, "hello") for name in earlier]
    after = [] if earlier else [_turn("user", "hello")]
    head = _render(chat, before, first) if before else ""
    rendered = _render(chat, [*before, _turn(role, MARK), *after], first)
    if not rendered.startswith(head):
        raise ValueError("a turn depends on the next")
    start, _, end = rendered[len(head) :].partition(MARK)
    if after:
        longer = _render(chat, [_turn(role, MARK), *after, _turn("assistant", "hello")], first)
        start, _, end = longer.partition(MARK)
        end = end[: end.index("hello")].removesuffix(_around(chat, ("system",), "user", first)[0])
    return start, end
