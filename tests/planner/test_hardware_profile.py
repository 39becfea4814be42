"""Shipped hardware profiles are read whole; nonsense is refused in one line with its fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mgpu_pipe.architectures.formulas.flops import known_gpu_peak
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.planning.hardware_profile import FOLDER, load_profile, networks, profile_names

PEAKS = {"h100": "H100", "h200": "H200", "b200": "B200", "a100_40": "A100", "a100_80": "A100", "rtx4090": "RTX 4090"}
"""Names by which NVIDIA's driver knows the GPUs of the table of peaks."""


@pytest.mark.parametrize("name", profile_names())
def test_a_shipped_profile_is_whole(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name and profile.source and profile.description
    assert profile.hardware.network == networks()[profile.network] * 1e9
    if name in PEAKS:
        assert profile.hardware.peak == known_gpu_peak(f"NVIDIA {PEAKS[name]}", "bf16")
        assert profile.hardware_for("fp32").peak == known_gpu_peak(f"NVIDIA {PEAKS[name]}", "fp32")
    assert all(getattr(profile.all_constants, word) == value for word, value in profile.constants.items())


def test_fp32_without_its_peak_is_refused(tmp_path: Path) -> None:
    content = yaml.safe_load((FOLDER / "h100.yaml").read_text())
    del content["fp32_tflops"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    profile = load_profile(str(tmp_path / "mine.yaml"))
    assert profile.hardware_for("fp32", uses_tf32=True).peak == profile.hardware.peak / 2
    with pytest.raises(ConfigError, match=r"^precision\.name=fp32: mine has no fp32_tflops; add it"):
        profile.hardware_for("fp32")


def test_another_network_is_taken() -> None:
    assert load_profile("h100", "ethernet_1x100").hardware.network == 12.5e9
    with pytest.raises(ConfigError, match=r"^plan\.network=ethernet_2x100: .*did you mean ethernet_1x100"):
        load_profile("h100", "ethernet_2x100")


@pytest.mark.parametrize(
    ("name", "said"),
    [("h1000", "did you mean h100"), ("A100-80", "did you mean a100_80"), ("mi300", "use one of a100_40")],
)
def test_hardware_without_a_profile_names_the_nearest(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_profile(name)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory_gib": -1}, "memory_gib=-1.0"),
        ({"memory_gib": True}, "memory_gib=True"),
        ({"memory_gib": 79_600}, "memory_gib=79600 is no number above 0 and up to 16,384; write"),
        ({"bf16_tflops": 989_400}, "bf16_tflops=989400"),
        ({"bf16_tflops": "fast"}, "bf16_tflops='fast'"),
        ({"memory_gb_s": float("nan")}, "memory_gb_s=nan"),
        ({"link_gb_s": None}, "link_gb_s is missing"),
        ({"gpus_per_node": 2.5}, "whole numbers"),
        ({"float8_tflops": 10}, "below bf16_tflops"),
        ({"network": "string"}, "network=string is unknown"),
        ({"lnk_gb_s": 3}, "did you mean link_gb_s"),
        ({"constants": [1]}, "constants is no mapping"),
        ({"constants": {"gem": 0.5}}, "did you mean gemm"),
        ({"constants": {"gemm": 0}}, "constants.gemm=0"),
        ({"source": 3}, "source=3 is no text"),
        ({"memory_gib": int("9" * 400)}, "memory_gib=9999"),
        ({"source": ["long"] * 10_000}, "source=['long'"),
        ({"x" * 10_000: 3}, "is no key of a profile"),
    ],
)
def test_nonsense_in_a_profile_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    content = {**yaml.safe_load((FOLDER / "h100.yaml").read_text()), **changes}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as error:
        load_profile(str(file))
    message = str(error.value)
    assert said.removesuffix(".0") in message.replace("-1.0", "-1") and "\n" not in message
    assert len(message) < 2000


NESTED = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}]\n" for old, new in zip("abcde", "bcdef", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]",
        "a: [",
        "3",
        "source: 2020-13-45",
        "[" * 3000,
        NESTED,
        f"watts: 0x{'f' * 9000}",
        "watts: " + "9" * 5000,
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"^plan\.hardware=") as error:
        load_profile(str(file))
    assert len(str(error.value)) < 1000
    with pytest.raises(ConfigError, match="there is no such file"):
        load_profile(str(tmp_path / "none.yaml"))


def test_a_profile_of_the_users_is_taken(tmp_path: Path) -> None:
    content = yaml.safe_load((FOLDER / "h100.yaml").read_text())
    content.update(memory_gib=96, network_gb_s=50, constants={"gemm": 0.7})
    del content["network"]
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(content))
    profile = load_profile(str(file))
    assert (profile.name, profile.memory_bytes, profile.hardware.network) == ("mine", 96 << 30, 50e9)
    assert profile.all_constants.gemm == 0.7
