"""Keys of ``launch.type=slurm``: the resources of a job."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Literal

from mgpu_pipe.config.schema import Auto, LaunchConfig
from mgpu_pipe.errors import ConfigError

TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>\d{1,2})(?::(?P<seconds>\d{1,2}))?")
MEMORY = re.compile(r"\d+[KMGTkmgt]?[Bb]?|all")
KEYS = {
    **dict.fromkeys(("--nodes", "-N"), "trainer.num_nodes"),
    **dict.fromkeys(("--ntasks", "-n", "--ntasks-per-node"), "trainer.devices and launch.tasks"),
    **dict.fromkeys(("--time", "-t"), "launch.time"),
    "--signal": "launch.warning_s",
}
"""Options of sbatch that contradict keys, and those keys."""
RESERVED = ("--array", "-a", "--output", "-o", "--comment")
"""Options of sbatch that this program needs to find its jobs."""


@dataclass
class SlurmConfig(LaunchConfig):
    partition: str | None = None
    """Partition; null takes the cluster's default one."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    time: str | None = None
    """Time limit, [days-]hours:minutes[:seconds], in quotes in a file; null takes the partition's default."""
    warning_s: int = field(default=120, metadata={"at_least": 1})
    """Seconds before the time limit at which SLURM signals the run to save and exit."""
    gpus: int | Auto = field(default="auto", metadata={"at_least": 0})
    """GPUs a node; auto: trainer.devices with trainer.accelerator=cuda, else none."""
    gpu_type: str | None = None
    """Type of the GPUs, as the cluster names it."""
    cpus: int | None = field(default=None, metadata={"at_least": 1})
    """CPU cores a worker; null leaves it to the cluster."""
    memory: str | None = None
    """Memory a node as SLURM writes it, e.g. 64G; all: what the node has."""
    constraint: str | None = None
    """Features that nodes must have."""
    nodelist: str | None = None
    """Nodes that must be among those of the job."""
    exclude: str | None = None
    """Nodes that it must not get."""
    exclusive: bool = False
    """Whole nodes, shared with nobody."""
    reservation: str | None = None
    """Reservation to run in."""
    array_limit: int | None = field(default=None, metadata={"at_least": 1})
    """Points of a sweep that run at the same time; null sets no limit."""
    max_restarts_without_progress: int = field(default=2, metadata={"at_least": 0})
    """Times in a row that a crashed, killed or timed out run is queued again though it saved no further step."""
    tasks: Literal["node", "gpu"] = "node"
    """A task of srun is a node, which starts and watches its workers; or a GPU (a worker)."""
    setup: list[str] = field(default_factory=list)
    """Lines of the job's shell before the run, e.g. [module load cuda]."""
    sbatch: list[str] = field(default_factory=list)
    """More options of sbatch, e.g. ['--mail-type=END']."""
    srun: list[str] = field(default_factory=list)
    """More options of srun, e.g. ['--mpi=none']."""
    container: str | None = None
    """Image that the workers run in."""
    container_by: Literal["pyxis", "apptainer"] = "apptainer"
    """Runtime of launch.container: srun's plug-in pyxis (enroot), or the program apptainer."""
    container_mounts: list[str] = field(default_factory=list)
    """Folders of the nodes to mount in the container, as from:to, besides the run's and the working folder."""
    python: str | None = None
    """Interpreter on the nodes; null: the one that submits, in a container python3."""

    def errors(self) -> list[ConfigError]:
        """Errors of keys that do not fit into a batch script or contradict each other."""
        errors: list[ConfigError] = []
        for key_field in fields(self):
            value = getattr(self, key_field.name)
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and not text.isprintable():
                    fix = "write one line without control characters; a list has an entry for each line"
                    errors.append(ConfigError(f"launch.{key_field.name}", repr(text), fix))
        for option in (*self.sbatch, *self.srun):
            if not option.startswith("-"):
                key = "launch.sbatch" if option in self.sbatch else "launch.srun"
                errors.append(ConfigError(key, option, "write an option, such as --mail-type=END"))
        for option in self.sbatch:
            name = option.partition("=")[0] if option.startswith("--") else option[:2]
            if name in KEYS:
                errors.append(ConfigError("launch.sbatch", option, f"leave it out; use {KEYS[name]}"))
            elif name in RESERVED:
                fix = "leave it out"
                errors.append(ConfigError("launch.sbatch", option, fix, "mgpu-pipe jobs finds the run by it"))
        limit = self.limit_s()
        if limit is not None and limit <= self.warning_s:
            fix = f"use more than {self.warning_s} s, or a smaller launch.warning_s"
            reason = "SLURM would warn the run as soon as it starts"
            errors.append(ConfigError("launch.time", self.time, fix, reason))
        elif self.time is not None and limit is None:
            errors.append(ConfigError("launch.time", self.time, "use [days-]hours:minutes[:seconds], such as 12:00:00"))
        if self.memory is not None and not MEMORY.fullmatch(self.memory):
            errors.append(ConfigError("launch.memory", self.memory, "use a size, such as 64G, or all"))
        return errors

    def whole_time(self) -> str | None:
        """The time limit with all its parts, because SLURM reads ``12:30`` as minutes and seconds."""
        limit = self.limit_s()
        if limit is None:
            return None
        minutes, seconds = divmod(limit, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours // 24}-{hours % 24:02}:{minutes:02}:{seconds:02}"

    def limit_s(self) -> int | None:
        """The time limit in seconds; None without one, or if it cannot be read."""
        match = TIME.fullmatch(self.time or "")
        if match is None:
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
