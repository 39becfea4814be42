"""Small GGUF files, written by the gguf package alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize

Tweak = Callable[[GGUFWriter], None]
WORDS = ["<|end|>", "<|user|>", *"abcdefgh", "Ġ", "ab", "cd", "abcd"]
MERGES = ["a b", "c d", "ab cd"]
ROWS, WIDTH, INNER, HEADS, KEYS = 48, 64, 96, 4, 2


def write_llama(
    path: Path, kind: str = "F32", tweak: Tweak | None = None, leave_out: str = "", pre: str = "gpt-2"
) -> Path:
    """A llama of one block with random weights of ``kind``, tied, and a byte-level tokenizer of 14 tokens."""
    random, writer = np.random.default_rng(0), GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(ROWS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*WORDS, *(f"[PAD{number}]" for number in range(len(WORDS), ROWS))])
    kinds = [TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(WORDS) - 2) + [TokenType.UNUSED] * (ROWS - len(WORDS))
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for message in messages %}<|user|>{{ message['content'] }}<|end|>{% endfor %}")
    if tweak is not None:
        tweak(writer)
    shapes = {
        "token_embd": (ROWS, WIDTH),
        "output_norm": (WIDTH,),
        "blk.0.attn_norm": (WIDTH,),
        "blk.0.attn_q": (WIDTH, WIDTH),
        "blk.0.attn_k": (KEYS * WIDTH // HEADS, WIDTH),
        "blk.0.attn_v": (KEYS * WIDTH // HEADS, WIDTH),
        "blk.0.attn_output": (WIDTH, WIDTH),
        "blk.0.ffn_norm": (WIDTH,),
        "blk.0.ffn_gate": (INNER, WIDTH),
        "blk.0.ffn_up": (INNER, WIDTH),
        "blk.0.ffn_down": (WIDTH, INNER),
    }
    for name, shape in shapes.items():
        if name == leave_out:
            continue
        values = random.normal(0, 0.3, shape).astype(np.float32)
        chosen = GGMLQuantizationType[kind] if len(shape) > 1 else GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
