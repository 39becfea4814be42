"""Small tokenizer folders of the kinds that join two texts differently."""

from __future__ import annotations

from pathlib import Path

WORDS = [f"w{number}" for number in range(40)]
PAIRS = {
    "bert": "[CLS] $A [SEP] $B:1 [SEP]:1",
    "roberta": "[CLS] $A [SEP] [SEP] $B [SEP]",
    "llama": "[CLS] $A [CLS]:1 $B:1",
}
SINGLE = {"bert": "[CLS] $A [SEP]", "roberta": "[CLS] $A [SEP]", "llama": "[CLS] $A", "first": "[CLS] $A"}
KINDS = ("bert", "roberta", "llama", "first", "plain")
"""``first`` adds one token for one text or two, ``plain`` none."""


def write_tokenizer(folder: Path, kind: str) -> Path:
    """Writes a tokenizer of the words of :data:`WORDS` that joins two texts like one of :data:`KINDS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind in SINGLE:
        pair = PAIRS.get(kind, "[CLS] $A $B:1")
        marks = [("[CLS]", 2), ("[SEP]", 3)]
        tokenizer.post_processor = processors.TemplateProcessing(single=SINGLE[kind], pair=pair, special_tokens=marks)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder
