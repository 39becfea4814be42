"""Network interfaces that NCCL and gloo are configured to use."""

from __future__ import annotations

import os
import socket

INTERFACES = {"cuda": "NCCL_SOCKET_IFNAME", "cpu": "GLOO_SOCKET_IFNAME"}
"""Environment variable of NCCL and of gloo."""


def configured_interfaces(device_type: str) -> list[str] | None:
    """This machine's interfaces that the variable selects, as NCCL reads it; gloo accepts whole names only.

    None if the variable is not set.
    """
    selection = os.environ.get(INTERFACES[device_type], "")
    if not selection:
        return None
    there = [name for _, name in socket.if_nameindex()]
    if device_type == "cpu":
        return [name for name in there if name in selection.split(",")]
    all_but, whole = selection.startswith("^"), selection.lstrip("^").startswith("=")
    names = tuple(selection.lstrip("^=").split(","))
    return [name for name in there if (name in names if whole else name.startswith(names)) != all_but]
