"""Data sources: files, plug-ins and demonstrations. A module is the source of its name, or the variants listed here."""

VARIANTS = {
    "compared_answers": ("preferences_jsonl", "unpaired_jsonl"),
    "compared_texts": ("embedding_pairs", "scored_pairs"),
    "text_rows": ("jsonl", "parquet"),
    "labelled_pictures": ("image_folder", "image_list", "image_tar", "captioned_folder", "captions", "captioned_tar"),
    "labelled_recordings": ("audio_list", "audio_folder", "labelled_audio_list", "tagged_audio_list"),
    "text_files": ("text_files", "stdlib_text"),
}
"""Names of the sources in ``SOURCES`` of a module."""
