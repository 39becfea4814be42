"""The command ``mgpu-pipe``: verbs, completion, errors as one line."""
