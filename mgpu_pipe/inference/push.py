"""Puts an exported folder on the Hugging Face Hub, with the token that ``huggingface_hub`` finds."""

from __future__ import annotations

from pathlib import Path

from mgpu_pipe.config.hub import HubName, asking, hub_name
from mgpu_pipe.errors import ConfigError

KEY = "--push"
REPLACED = ["model*.safetensors", "model.safetensors.index.json", "pytorch_model*", "tokenizer*"]
"""Files of an earlier push that this one may lack; a library that finds two models takes the wrong one."""


def push_target(text: str) -> HubName:
    """The repository that ``--push`` names, once the Hub has said that it knows who asks.

    Raises:
        ConfigError: no name, no token, one that the Hub does not know, or no Hub.
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
    """Upload ``folder`` as one commit, to a repository that is created if it does not exist; the commit's address.

    Args:
        private: of a repository that is made now; one that is there stays as it is.

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
