"""Chinese CLIP: a tower like CLIP's for pictures, one like BERT for texts."""

from mgpu_pipe.architectures.family import FC, OUT_PROJ, Family

FAMILY = Family(
    modules={
        "ChineseCLIPVisionAttention": OUT_PROJ,
        "ChineseCLIPVisionMLP": FC,
        "ChineseCLIPTextSelfAttention": {"query": "column", "key": "column", "value": "column"},
        "ChineseCLIPTextSelfOutput": {"dense": "row"},
        "ChineseCLIPTextIntermediate": {"dense": "column"},
        "ChineseCLIPTextOutput": {"dense": "row"},
    }
)
