"""AltCLIP: a tower like CLIP's for pictures, one like RoBERTa for texts."""

from mgpu_pipe.architectures.family import FC, OUT_PROJ, Family

FAMILY = Family(
    modules={
        "AltCLIPAttention": OUT_PROJ,
        "AltCLIPMLP": FC,
        "AltRobertaSelfAttention": {"query": "column", "key": "column", "value": "column"},
        "AltRobertaSelfOutput": {"dense": "row"},
        "AltRobertaIntermediate": {"dense": "column"},
        "AltRobertaOutput": {"dense": "row"},
    }
)
