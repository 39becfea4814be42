"""The network interfaces that the ranks were told to use. No torch."""

from __future__ import annotations

import os
import socket

INTERFACES = {"cuda": "NCCL_SOCKET_IFNAME", "cpu": "GLOO_SOCKET_IFNAME"}
"""The variable that NCCL, and gloo, read."""


def told_interfaces(device_type: str) -> list[str] | None:
    """Those of this machine that the variable means, as NCCL reads it; gloo takes whole names alone.

    None where nothing is told.
    """
    told = os.environ.get(INTERFACES[device_type], "")
    if not told:
        return None
    there = [name for _, name in socket.if_nameindex()]
    if device_type == "cpu":
        return [name for name in there if name in told.split(",")]
    all_but, whole = told.startswith("^"), told.lstrip("^").startswith("=")
    names = tuple(told.lstrip("^=").split(","))
    return [name for name in there if (name in names if whole else name.startswith(names)) != all_but]
