"""What is recorded: one Result a shape, dtype and direction; the JSON file with the machine and its state."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import statistics
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import torch

from judge import bench, roofline
from judge.check import Case
from judge.gates import Errors
from judge.source import BUILD, last_line
from judge.worker import Rejected

DROP_IN, RIGHT, WRONG, UNJUDGED = "drop-in", "right", "wrong", "not judged"  # and BUILD


@dataclass
class Result:
    """One record, as it goes into the JSON file."""

    direction: str
    model: str
    source_sha256: str  # of the file's code
    device: str
    dtype: str
    precision: str
    seed: int
    constants: dict  # of the Model's file, where a sweep or its sizes for a CPU replaced them
    kernels_sha256: str = ""  # of the file's CUDA and C++ strings alone
    batch: int | None = None
    status: str = DROP_IN
    ok: bool = True  # as good as --require wants it
    reasons: list[str] = field(default_factory=list)  # why it is wrong
    no_dropin: list[str] = field(default_factory=list)  # why it is right and yet no drop-in
    notes: list[str] = field(default_factory=list)
    shapes: list = field(default_factory=list)
    import_seconds: float | None = None
    error: dict = field(default_factory=dict)
    gradient_error: dict = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)
    spread: dict[str, list[float]] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)  # to launch a call on a GPU; up to 4 ms no part of `ms`
    rounds: int = 0
    calls: int = 0  # of each contender in a round
    speedup: dict[str, float] = field(default_factory=dict)
    speedup_ci: dict[str, list[float]] = field(default_factory=dict)
    verdict: dict[str, str] = field(default_factory=dict)  # FASTER, SLOWER or AMBIGUOUS than each: bench.verdict
    clocks: dict[str, dict | None] = field(default_factory=dict)  # `before` and `after` the timing, on a GPU
    interference: list[str] = field(default_factory=list)  # signs of it: times that spread or drift, clocks held down
    roof: dict = field(default_factory=dict)
    peak_memory: dict[str, int] = field(default_factory=dict)

    def reject(self, error: Rejected) -> None:
        """What was timed before the reason was found has no meaning. Records travel: files lose their folders."""
        self.status, self.ok = {BUILD: BUILD, "model": UNJUDGED}.get(error.kind, WRONG), False
        self.no_dropin = []
        for name in ("ms", "spread", "host_us", "peak_memory", "speedup", "speedup_ci", "verdict", "roof"):
            setattr(self, name, {})
        self.reasons += map(without_folders, error.args)

    def lack(self, reasons: list[str], required: str) -> None:
        """Why what is right is no drop-in; whether that is what was required."""
        if self.reasons:
            return
        self.no_dropin = together(self.no_dropin + [without_folders(reason) for reason in reasons])
        self.status = RIGHT if self.no_dropin else DROP_IN
        self.ok = self.status == DROP_IN or required == RIGHT

    def set_figures(self, samples: bench.Samples, errors: dict[str, Errors]) -> None:
        """Times, and errors: of the outputs the largest of each figure. In float64 the Model counts as exact."""
        self.rounds, self.calls = len(samples.ms["new"]), samples.calls
        for name, values in samples.ms.items():
            self.ms[name], self.spread[name] = statistics.median(values), statistics.quantiles(values, n=4)[::2]
            if self.device == "cuda":
                self.host_us[name] = samples.ready[name]["host_us"]
                self.peak_memory[name] = samples.ready[name]["peak"]
            if name != "new":
                self.speedup[name], self.speedup_ci[name] = bench.speedup(samples, name, self.device)
                self.verdict[name] = bench.verdict(*self.speedup_ci[name], bool(self.interference))
        if samples.ready["new"]["plain"]:
            self.notes.append("plain path: PyTorch's operators alone ran in this call, none of the file's own")
        if self.host_us and self.host_us["new"] > 1e3 * self.ms["new"]:
            times = ", ".join(f"{name} {us:.0f}" for name, us in self.host_us.items())
            self.notes.append(f"the host takes longer to launch a call than the GPU for its work, in us: {times}")
        for name, found in errors.items():
            kinds = found.figures().items()
            figures = {f"{whose}_{kind}": value for kind, each in kinds for whose, value in zip(("new", "eager"), each)}
            if name.startswith("gradient of "):
                self.gradient_error[name.removeprefix("gradient of ")] = figures
            else:
                self.error = {key: max(value, self.error.get(key, value)) for key, value in figures.items()}

    def set_roof(self, ceilings: roofline.Ceilings, case: Case, samples: bench.Samples) -> None:
        """How far from the limit; raises Rejected for a time that is not possible."""
        try:
            backward = self.direction == "forward_backward"
            nbytes, flops = roofline.count_work(case.problem, case.batch, case.dtype, backward)
        except Exception as error:
            self.notes.append(f"no floor: the Model does not run on the meta device: {last_line(error)}")
            return
        work = self.dtype, self.precision
        ms, floor = self.ms["new"], ceilings.floor_ms(nbytes, flops, *work)
        if floor > min(self.ms.values()):  # the machine may be faster now than it was
            ceilings.measure()
            floor = ceilings.floor_ms(nbytes, flops, *work)
        holds = floor if nbytes > 2 * roofline.cache_bytes(self.device) else ceilings.floor_ms(0, flops, *work)
        new, eager = (holds > self.ms[name] * roofline.IMPOSSIBLE[self.device] for name in ("new", "eager"))
        least = f"what this machine was measured to reach allows {holds:.4g} ms or more"
        if not new and not eager:
            self.roof = {"bytes": nbytes, "flops": flops, "floor_ms": floor, "percent": 100 * floor / ms}
            return
        if eager:
            why = f"{least}, but eager takes less: it does not read all that it is given"
        elif case.constant:
            why = "the Model's answer is the same whatever it is given"
        elif ceilings.floor_ms(nbytes, 0, *work) < ms and statistics.median(bench.by_the_judges_clock(samples)) < holds:
            why = f"{least} for the Model's matrix products; it does without some of them"
        else:
            raise Rejected(f"takes {ms:.4g} ms, which is not possible: {least}")
        self.notes.append(f"no floor: {why}")


def without_folders(text: str) -> str:
    return re.sub(r"(?<![\w.:/])/[^\s'\"]*/", "", text)


def together(reasons: list[str]) -> list[str]:
    """Each once; of batches that are refused in the same words, but for numbers, one reason lists all."""
    found: dict[str, tuple[str, set[int]]] = {}
    for reason in reasons:
        batches, said = re.fullmatch(r"(?:refuses batch(?:es)? ([\d, ]+): )?(.*)", reason, re.DOTALL).groups(default="")
        alike = re.sub(r"\d+", "", said) if batches else said
        found.setdefault(alike, (said, set()))[1].update(map(int, re.findall(r"\d+", batches)))
    refuses = lambda n: f"refuses batch{'es' * (len(n) > 1)} {str(sorted(n))[1:-1]}: " if n else ""  # noqa: E731
    return [refuses(batches) + said for said, batches in found.values()]


def remarks(path: Path, device: str) -> list[str]:
    """What a verdict of this file on this device leaves open: code of it that is not compiled or does not run here."""
    text = path.read_text(errors="replace")
    needs = re.search(r'^NEEDS = "sm_(\d+)"', text, re.MULTILINE)  # all that the file's own kernels run on
    if needs and (device == "cpu" or torch.cuda.get_device_capability() != divmod(int(needs[1]), 10)):
        return [f"plain path: no sm_{needs[1]} here, so the Model's own layers ran, and none of the file's kernels"]
    if "__global__" in text and not torch.cuda.is_available():
        return ["its CUDA was not compiled here, only its C++: PyTorch sees no GPU"]
    return []


def environment(device: str, ceilings: roofline.Ceilings, command: list[str], root: Path, before: dict | None) -> dict:
    """The machine and its state, `before` being that of its clocks when the run began."""
    revision = said_by("git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    after = clocks(device)
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": [Path(part).name if os.path.isabs(part) else part for part in command],
        "git": {"revision": revision.removesuffix("-dirty"), "dirty": revision.endswith("-dirty")},
        "device": device_name(device),
        "driver": (after or {}).get("driver_version"),
        "clocks": {"before": before, "after": after},
        "copy_bandwidth": ceilings.copy_bandwidth,
        "matrix_rate": ceilings.matrix_rate,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST"),  # what the files were compiled for, if set
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def said_by(*command: str) -> str:
    """What a command says; nothing where it is not to be had or fails."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    named = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{named[1] if named else platform.machine()}, {torch.get_num_threads()} threads"


def clocks(device: str) -> dict[str, str] | None:
    """MHz, degrees Celsius, watts, and what holds the clocks down, `throttle`; None on a CPU."""
    if device == "cpu":
        return None
    asked = ["driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw"]
    asked += [f"clocks_event_reasons.{what}" for what in ("sw_power_cap", "sw_thermal_slowdown", "hw_slowdown")]
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"
    said = said_by("nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader,nounits", gpu)
    state = dict(zip(asked, said.split(", "))) if said else {}
    return state | {"throttle": ", ".join(name.partition(".")[2] for name, value in state.items() if value == "Active")}
