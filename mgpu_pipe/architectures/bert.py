"""BERT."""

from mgpu_pipe.architectures.family import Family

FAMILY = Family(
    modules={
        "BertSelfAttention": {"query": "column", "key": "column", "value": "column"},
        "BertSelfOutput": {"dense": "row"},
        "BertIntermediate": {"dense": "column"},
        "BertOutput": {"dense": "row"},
    },
    stages=None,
)
