"""Whisper."""

from mgpu_pipe.families.family import FC, OUT_PROJ, Family

FAMILY = Family(modules={"WhisperAttention": OUT_PROJ, "WhisperEncoderLayer": FC, "WhisperDecoderLayer": FC})
