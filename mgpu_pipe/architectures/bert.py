"""BERT and the families that give its modules other names."""

from collections.abc import Mapping

from mgpu_pipe.architectures.family import Family, Style


def styles_of(prefix: str) -> dict[str, Mapping[str, Style]]:
    """Styles of BERT's modules, whose classes begin with ``prefix``."""
    return {
        f"{prefix}SelfAttention": {"query": "column", "key": "column", "value": "column"},
        f"{prefix}SelfOutput": {"dense": "row"},
        f"{prefix}Intermediate": {"dense": "column"},
        f"{prefix}Output": {"dense": "row"},
    }


FAMILY = Family(modules=styles_of("Bert"), stages=None)
