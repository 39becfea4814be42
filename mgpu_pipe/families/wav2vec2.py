"""wav2vec 2.0."""

from mgpu_pipe.families.family import OUT_PROJ, Family

FAMILY = Family(
    modules={
        "Wav2Vec2Attention": OUT_PROJ,
        "Wav2Vec2FeedForward": {"intermediate_dense": "column", "output_dense": "row"},
    }
)
