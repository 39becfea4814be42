"""Data sources: files, plug-ins and demonstrations. A module is the source of its name, or the variants listed here."""

VARIANTS = {
    "compared_texts": ("embedding_pairs", "scored_pairs"),
    "labelled_recordings": (
        *("audio_list", "audio_folder", "labelled_audio_list", "tagged_audio_list"),
        "captioned_audio_list",
    ),
    "picture_sets": (
        *("image_folder", "image_list", "image_tar", "captioned_folder", "captions", "captioned_tar"),
        "picture_chats",
    ),
    "text_files": ("text_files", "stdlib_text"),
    "text_tables": (
        *("jsonl", "parquet", "labelled_jsonl", "pairs_jsonl"),
        *("chat_jsonl", "preferences_jsonl", "unpaired_jsonl"),
    ),
}
"""Names of the sources in ``SOURCES`` of a module."""
