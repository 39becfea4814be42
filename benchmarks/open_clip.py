"""Files of open_clip's package without what it depends on: torchvision breaks transformers next to the CPU's torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

OPEN_CLIP = "open_clip_torch==3.3.0"


def download_open_clip(folder: str) -> Path:
    """Unpacks open_clip's wheel into ``folder``, which is returned."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, OPEN_CLIP]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return Path(folder)


def load_file(file: Path) -> ModuleType:
    """The module of one file; what it imports from ``open_clip`` itself is None."""
    package = ModuleType("open_clip")
    vars(package)["__getattr__"] = lambda name: None
    sys.modules["open_clip"] = package
    sys.path.insert(0, str(file.parents[1]))
    try:
        spec = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(file.parents[1]))
        del sys.modules["open_clip"]
