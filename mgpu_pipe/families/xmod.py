"""X-MOD."""

from mgpu_pipe.families.family import Family

FAMILY = Family(needs={"default_language": "give the language of the text, e.g. en_XX"})
