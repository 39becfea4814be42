"""MetaCLIP 2."""

from mgpu_pipe.families.family import FC, OUT_PROJ, Family

FAMILY = Family(modules={"MetaClip2Attention": OUT_PROJ, "MetaClip2MLP": FC}, reads_inside=("MetaClip2TextEmbeddings",))
