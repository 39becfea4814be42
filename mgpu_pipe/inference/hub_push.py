"""Uploads a model to the Hub."""

from __future__ import annotations

from pathlib import Path

from mgpu_pipe.config.hub import HubName, asking, hub_name
from mgpu_pipe.errors import ConfigError

KEY = "--push"
REPLACED = ["model*.safetensors", "model.safetensors.index.json", "pytorch_model*", "tokenizer*"]
"""Files of an earlier push that this one deletes; a library that finds two models loads the wrong one."""


def push_target(text: str) -> HubName:
    """The repository that ``--push`` names, after the Hub has accepted the user's token.

    Raises:
        ConfigError: the name is wrong, the token is missing or unknown, or the Hub cannot be reached.
    """
    name = hub_name(f"{text}@main")
    if name is None or name.revision != "main":
        raise ConfigError(KEY, text, "give <org>/<name>")
    name = HubName("model", text, None)
    with asking(name, KEY):
        from huggingface_hub import HfApi

        HfApi().whoami()
    return name


def push_folder(folder: Path, name: HubName, private: bool, message: str) -> str:
    """Upload ``folder`` as one commit and return its address; creates the repository if it does not exist.

    Args:
        private: of a new repository; an existing one keeps its visibility.

    Raises:
        ConfigError: this account may not write there, or the Hub cannot be reached.
    """
    with asking(name, KEY):
        from huggingface_hub import HfApi

        hub = HfApi()
        hub.create_repo(name.repository, private=private or None, exist_ok=True)
        done = hub.upload_folder(
            repo_id=name.repository, folder_path=folder, commit_message=message, delete_patterns=REPLACED
        )
        return str(done.commit_url)
