"""Hardware profiles: a YAML file of a kind of GPU, its links and its network, with its source.

Shipped profiles stand in ``profiles/``; a path ending in ``.yaml`` names one of the user's. Constants of the formulas
(see :class:`mgpu_pipe.planning.work.Constants`) that a profile leaves out have their priors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from mgpu_pipe.config.suggest import choose_from, nearest
from mgpu_pipe.errors import ConfigError, one_line
from mgpu_pipe.planning.work import Constants, Hardware, constant_names
from mgpu_pipe.system.local_files import MAX_CONFIG_BYTES, NotPlainError, expand_home, parse_yaml, read_bytes, shorten

FOLDER = Path(__file__).parent / "profiles"
NETWORKS = "networks"
GIGA, TERA, GIB = 1e9, 1e12, 1 << 30
TEXTS = ("name", "description", "source", "network", "accelerator")
ACCELERATORS = ("cuda", "cpu")
LARGEST: dict[str, float] = {
    "memory_gib": 1 << 14,
    "bf16_tflops": 1e5,
    "fp32_tflops": 1e5,
    "float8_tflops": 2e5,
    "memory_gb_s": 1e5,
    "link_gb_s": 2e4,
    "gpus_per_node": 4096,
}
"""Limits of figures in their units, ten times those of any device or more; a larger figure is of another unit."""
LARGEST_OTHER = 1e6


@dataclass(frozen=True)
class HardwareProfile:
    """Figures of one GPU, or one CPU process, and of its node."""

    name: str
    description: str
    source: str
    memory_gib: float
    bf16_tflops: float
    """Dense, with fp32 accumulation; of a CPU, fp32."""
    memory_gb_s: float
    multiprocessors: float
    link_gb_s: float
    """GB/s that a GPU sends to others of its node, in one direction."""
    network: str
    """A name of ``profiles/networks.yaml``."""
    gpus_per_node: float
    host_memory_gib: float
    """Main memory of a node."""
    accelerator: str = "cuda"
    """``cpu`` for processes of a CPU, which share the memory of their node."""
    float8_tflops: float = 0.0
    """0 without float8 units."""
    fp32_tflops: float = 0.0
    """Without TF32, which has half of ``bf16_tflops``; 0 is unknown."""
    network_gb_s: float = 0.0
    """GB/s that a node sends; 0 is that of ``network``."""
    pcie_gb_s: float = 32.0
    """GB/s between a GPU and its host, in one direction; PCIe 4.0 x16."""
    host_memory_gb_s: float = 200.0
    """GB/s of a node's main memory; assumed: eight channels of DDR4-3200."""
    disk_gb_s: float = 6.0
    """GB/s of a node's NVMe disk; assumed: a drive over PCIe 4.0 x4."""
    watts: float = 0.0
    """Power of a GPU under load; 0 is unknown."""
    dollars_per_hour: float = 0.0
    """Price of a GPU; 0 is unknown."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Constants that were fitted to measured runs."""

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def hardware(self) -> Hardware:
        """The figures in bytes and FLOPs a second."""
        return Hardware(
            peak=self.bf16_tflops * TERA,
            float8_peak=(self.float8_tflops or self.bf16_tflops) * TERA,
            bandwidth=self.memory_gb_s * GIGA,
            multiprocessors=self.multiprocessors,
            link=self.link_gb_s * GIGA,
            network=(self.network_gb_s or networks()[self.network]) * GIGA,
            gpus_per_node=self.gpus_per_node,
            pcie=self.pcie_gb_s * GIGA,
            host_bandwidth=self.host_memory_gb_s * GIGA,
            disk=self.disk_gb_s * GIGA,
        )

    def hardware_for(self, precision: str, uses_tf32: bool = False) -> Hardware:
        """The figures for a precision of :class:`mgpu_pipe.config.schema.PrecisionConfig`.

        Raises:
            ConfigError: there are no float8 units, or the profile has no ``fp32_tflops``.
        """
        if precision == "fp8" and not self.float8_tflops:
            raise ConfigError("precision.name", "fp8", "use precision=bf16", f"{self.name} has no float8 units")
        if precision != "fp32":
            return self.hardware
        if uses_tf32:
            return replace(self.hardware, peak=self.bf16_tflops * TERA / 2)
        if not self.fp32_tflops:
            fix = "add it to the profile, or use precision=bf16"
            raise ConfigError("precision.name", "fp32", fix, f"{self.name} has no fp32_tflops")
        return replace(self.hardware, peak=self.fp32_tflops * TERA)

    @property
    def all_constants(self) -> Constants:
        """The constants, the prior's where the profile has none."""
        return replace(Constants(), **self.constants)


GPU_NAMES = (
    (r"\bB200", "b200"),
    (r"\bH200(?! NVL)", "h200"),
    (r"\bH100(?! (PCIe|NVL))", "h100"),
    (r"A100.*80GB", "a100_80"),
    (r"A100.*40GB", "a100_40"),
    (r"RTX 5090(?! (D|Laptop))", "rtx5090"),
    (r"RTX 4090(?! (D|Laptop))", "rtx4090"),
)
"""Profiles of GPUs by their ``torch.cuda.get_device_name``."""


def profile_of_gpu(name: str) -> str | None:
    """Finds the profile of a GPU by its driver's name; None for an unknown GPU or a MIG instance."""
    if re.search(r"\bMIG\b", name):
        return None
    return next((profile for pattern, profile in GPU_NAMES if re.search(pattern, name)), None)


def profile_names() -> list[str]:
    """Names of the shipped profiles."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml") if file.stem != NETWORKS)


@lru_cache(maxsize=1)
def networks() -> dict[str, float]:
    """GB/s that a node sends, by the network's name."""
    content: dict[str, float] = yaml.safe_load((FOLDER / f"{NETWORKS}.yaml").read_text(encoding="utf-8"))
    return content


def load_profile(name: str, network: str | None = None) -> HardwareProfile:
    """A shipped profile by its name, or one of the user's by its path.

    Args:
        network: another network than the profile's.

    Raises:
        ConfigError: no such profile, or one with nonsense.
    """
    key, is_path = "plan.hardware", name.endswith((".yaml", ".yml"))
    if not is_path and name not in profile_names():
        plain = re.sub(r"[^a-z0-9]", "", name.lower())
        close = nearest(plain, profile_names())
        fix = choose_from(close or name, profile_names()) if close != name else ""
        raise ConfigError(key, name, f"{fix}, or give the path of a profile of yours, <file>.yaml", "no such hardware")
    file = expand_home(name) if is_path else FOLDER / f"{name}.yaml"
    profile = _profile(yaml_of(file, name, key), name, key)
    if network is not None:
        if network not in networks():
            raise ConfigError("plan.network", network, choose_from(network, networks()), "no such network")
        profile = replace(profile, network=network, network_gb_s=0.0)
    return profile


def yaml_of(file: Path, name: str, key: str) -> Any:
    """Content of a stranger's YAML file, ``name`` in the value of ``key``; ConfigError if it is none."""
    try:
        return _parse(read_bytes(file, MAX_CONFIG_BYTES), name, key)
    except FileNotFoundError:
        raise ConfigError(key, name, "check the path", "there is no such file") from None
    except NotPlainError as error:
        raise ConfigError(key, name, "copy the profile to its own file", str(error)) from None


def read_profile(text: str, name: str, key: str) -> HardwareProfile:
    """The profile of a YAML ``text`` of the file ``name``; ConfigError for nonsense."""
    return _profile(_parse(text, name, key), name, key)


def _parse(text: bytes | str, name: str, key: str) -> Any:
    try:
        return parse_yaml(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(key, name, "correct the file", f"is no YAML: {shorten(one_line(error))}") from None


def _key_text(word: object) -> str:
    """A key for an error message."""
    return shorten(word) if isinstance(word, str) else _value_text(word)


def _value_text(value: object) -> str:
    """A value for an error message."""
    try:
        return shorten(repr(value))
    except ValueError:  # a whole number of thousands of digits
        return "<a very long number>"


def _profile(content: Any, name: str, key: str) -> HardwareProfile:
    """The profile of a file's content; ConfigError for wrong keys or figures."""

    def refuse(reason: str, fix: str) -> ConfigError:
        return ConfigError(key, name, fix, reason)

    if not isinstance(content, dict):
        raise refuse("the profile has no keys", "write it like mgpu_pipe/planning/profiles/h100.yaml")
    known = {entry.name: entry for entry in fields(HardwareProfile) if entry.name != "name"}
    for word in content:
        if word not in known:
            raise refuse(f"{_key_text(word)} is no key of a profile", choose_from(_key_text(word), known))
    for word, entry in known.items():
        required = entry.default is MISSING and entry.default_factory is MISSING
        if required and content.get(word) is None and not (word == "network" and "network_gb_s" in content):
            raise refuse(f"{word} is missing", f"add {word}")
    values: dict[str, Any] = {"network": "", **content}
    for word, value in values.items():
        if word in TEXTS:
            if not isinstance(value, str):
                raise refuse(f"{word}={_value_text(value)} is no text", "write a text")
        elif word != "constants":
            values[word] = _positive(word, value, refuse)
    values["constants"] = _constants(values.get("constants") or {}, refuse)
    profile = HardwareProfile(name=Path(name).stem, **values)
    if not profile.network_gb_s and profile.network not in networks():
        text = shorten(profile.network)
        raise refuse(f"network={text} is unknown", choose_from(text, networks()))
    if profile.accelerator not in ACCELERATORS:
        text = shorten(profile.accelerator)
        raise refuse(f"accelerator={text} is unknown", choose_from(text, ACCELERATORS))
    if profile.gpus_per_node % 1 or profile.multiprocessors % 1:
        raise refuse("gpus_per_node and multiprocessors are counts", "write whole numbers")
    if 0 < profile.float8_tflops < profile.bf16_tflops:
        raise refuse("float8_tflops is below bf16_tflops", "leave it out if there are no float8 units")
    return profile


def _positive(word: str, value: Any, refuse: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    largest = LARGEST.get(word, LARGEST_OTHER)
    if not is_number or not 0 < value <= largest:  # also not NaN
        fix = "write the data sheet's figure, in the unit of the key"
        raise refuse(f"{word}={_value_text(value)} is no number above 0 and up to {largest:,.0f}", fix)
    return float(value)


def _constants(content: Any, refuse: Any) -> dict[str, float]:
    if not isinstance(content, dict):
        raise refuse(
            "constants is no mapping", f"write lines of <constant>: <number>, of {', '.join(constant_names())}"
        )
    for word in content:
        if word not in constant_names():
            raise refuse(f"constants.{_key_text(word)} is no constant", choose_from(_key_text(word), constant_names()))
    return {word: _positive(f"constants.{word}", value, refuse) for word, value in content.items()}
