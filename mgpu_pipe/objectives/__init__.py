"""Objectives: what is minimised, and how a micro-batch gives its sum of losses."""

FILES = {
    "causal_lm": ("text_keys.CAUSAL_LM", "causal_lm.CausalLMObjective"),
    "contrastive": ("picture_keys.CONTRASTIVE", "contrastive.ContrastiveObjective"),
    "cpo": ("preference_keys.CPO", "preference_pairs.CPOObjective"),
    "ctc": ("transcript_keys.CTC", "ctc.CTCObjective"),
    "distill": ("distill_keys.DISTILL", "distill.DistillObjective"),
    "dpo": ("preference_keys.DPO", "dpo.DPOObjective"),
    "image_classification": ("class_keys.IMAGE_CLASSIFICATION", "image_classification.ImageClassificationObjective"),
    "kto": ("preference_keys.KTO", "kto.KTOObjective"),
    "masked_lm": ("text_keys.MASKED_LM", "masked_lm.MaskedLMObjective"),
    "orpo": ("preference_keys.ORPO", "preference_pairs.ORPOObjective"),
    "reranker": ("vector_keys.RERANKER", "reranker.RerankerObjective"),
    "reward": ("preference_keys.REWARD", "reward.RewardObjective"),
    "seq2seq": ("text_keys.SEQ2SEQ", "seq2seq.Seq2SeqObjective"),
    "sequence_classification": (
        "class_keys.SEQUENCE_CLASSIFICATION",
        "sequence_classification.SequenceClassificationObjective",
    ),
    "simpo": ("preference_keys.SIMPO", "preference_pairs.SimPOObjective"),
    "sound_classification": ("class_keys.SOUND_CLASSIFICATION", "sound_classification.SoundClassificationObjective"),
    "sound_contrastive": ("picture_keys.SOUND_CONTRASTIVE", "sound_contrastive.SoundContrastiveObjective"),
    "sound_tagging": ("class_keys.SOUND_TAGGING", "sound_classification.SoundTaggingObjective"),
    "speech_seq2seq": ("transcript_keys.SPEECH_SEQ2SEQ", "seq2seq.SpeechSeq2SeqObjective"),
    "text_embedding": ("vector_keys.TEXT_EMBEDDING", "text_embedding.TextEmbeddingObjective"),
    "text_similarity": ("vector_keys.TEXT_SIMILARITY", "text_vectors.TextSimilarityObjective"),
    "vision_language": ("picture_keys.VISION_LANGUAGE", "vision_language.VisionLanguageObjective"),
}
"""By ``objective.name``, in files of this folder: the description, which needs no torch, and the class."""
