"""The device under the run: its memory, its precision switches, its clocks, and what goes on record about it."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
PRECISIONS = ("highest", "high")
_THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@contextlib.contextmanager
def precision(level: str):
    """PyTorch's float32 switches, the same for all contenders: `highest` is strict float32, `high` allows TF32 everywhere."""
    before = (
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
    )
    _set_switches(level, level == "high", level == "high")
    try:
        yield
    finally:
        _set_switches(*before)


def _set_switches(matmul_precision: str, matmul_tf32: bool, cudnn_tf32: bool) -> None:
    torch.set_float32_matmul_precision(matmul_precision)
    torch.backends.cuda.matmul.allow_tf32 = matmul_tf32
    torch.backends.cudnn.allow_tf32 = cudnn_tf32


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def release(device: str) -> None:
    """Hands unused blocks back to the device, so that the next step starts from the same memory."""
    if device == "cuda" and not is_lost(device):
        torch.cuda.empty_cache()


def is_lost(device: str) -> bool:
    """Whether a kernel's fault has ended this process's use of the GPU: after an illegal access every later call fails."""
    try:
        synchronize(device)
    except RuntimeError:
        return True
    return False


def free_memory(device: str) -> int:
    if device == "cuda":
        idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + idle
    return min(_available_memory(), _memory_left_in_cgroup())


def _available_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _memory_left_in_cgroup() -> float:
    """A container's own limit, which /proc/meminfo does not know."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if limit == "max" else int(limit) - used


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0] if models else name
    return f"{name}, {torch.get_num_threads()} threads"


def query_gpu(*fields: str) -> dict[str, str] | None:
    """What nvidia-smi says of the GPU in use, or None where it cannot say."""
    said = _nvidia_smi(f"--query-gpu={','.join(fields)}")
    return dict(zip(fields, (value.strip() for value in said[0].split(",")))) if said else None


def _nvidia_smi(question: str) -> list[str]:
    """Its lines about the GPU in use; none where it cannot say."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", question, "--format=csv,noheader,nounits"]
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    if uuid is not None:
        command.append(f"--id=GPU-{uuid}")
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.split("\n")[:-1] if answer.returncode == 0 else []


def clocks(device: str) -> dict[str, str] | None:
    """Clocks in MHz, degrees Celsius, watts, and why the clocks are lower than they might be; None on a CPU."""
    if device != "cuda":
        return None
    why = _throttle_field()
    state = query_gpu("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", *why)
    if state and why:
        state["throttle"] = throttle_reasons(state.pop(why[0]))
    return state


@functools.cache
def _throttle_field() -> tuple[str, ...]:
    """What nvidia-smi calls the reasons: one name since driver 535, one before."""
    names = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
    return next(((name,) for name in names if query_gpu(name)), ())


def throttle_reasons(mask: str) -> str:
    """The names of the bits of nvidia-smi's mask that slow a busy GPU down; empty for none."""
    try:
        bits = int(mask, 16)
    except ValueError:  # "[N/A]", of a GPU that does not say
        return ""
    return ", ".join(name for bit, name in _THROTTLE_REASONS.items() if bits & bit)


def other_gpu_processes() -> int:
    """How many processes beside this one compute on the GPU in use. A container shows others' numbers, so they are only counted."""
    listed = [line for line in _nvidia_smi("--query-compute-apps=pid") if line.strip().isdigit()]
    return max(0, len(listed) - 1)
