"""Keys of pairs of texts for embeddings, and of pairs with scores."""

from __future__ import annotations

from dataclasses import dataclass, field

from mgpu_pipe.config.identity import CONTENT
from mgpu_pipe.config.schema import DataConfig


@dataclass
class EmbeddingPairsConfig(DataConfig):
    query_column: str = field(default="query", metadata=CONTENT)
    """Name of the text that searches (embedding_pairs)."""
    positive_column: str = field(default="positive", metadata=CONTENT)
    """Name of the text to find, or of a list of them, each of which makes a sample (embedding_pairs)."""
    negative_column: str = field(default="negative", metadata=CONTENT)
    """Name of a text that the query is not to find, or of a list of them; rows may have none (embedding_pairs)."""
    scores_column: str | None = field(default=None, metadata=CONTENT)
    """Name of a teacher's scores of a row, a list: the positive's, then each negative's, of any range;
    null: no scores. For objective.loss=margin_mse and kl (embedding_pairs)."""
    query_prompt: str | None = field(default=None, metadata=CONTENT)
    """Text before every query, such as 'query: '; the exported folder has it too."""
    document_prompt: str | None = field(default=None, metadata=CONTENT)
    """Text before every positive and negative, such as 'passage: '; the exported folder has it too."""

    def sample_text(self) -> str:
        return f"texts of {self.seq_len} tokens, padded"

    def tokens(self) -> int:
        """Tokens of a query and a positive with padding."""
        return 2 * self.seq_len


@dataclass
class ScoredPairsConfig(DataConfig):
    sentence1_column: str = field(default="sentence1", metadata=CONTENT)
    """Name of the first sentence (scored_pairs)."""
    sentence2_column: str = field(default="sentence2", metadata=CONTENT)
    """Name of the second sentence (scored_pairs)."""
    score_column: str = field(default="score", metadata=CONTENT)
    """Name of the number that says how similar both are, of any range (scored_pairs)."""

    def sample_text(self) -> str:
        return f"sentences of {self.seq_len} tokens, padded"

    def tokens(self) -> int:
        """Tokens of both sentences with padding."""
        return 2 * self.seq_len
