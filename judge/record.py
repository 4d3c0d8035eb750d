"""What is told: one Result a row, the table, the JSON file with the machine and its state."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import shutil
import statistics
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import torch

from judge import bench, roofline
from judge.source import BUILD, DTYPES, Problem, last_line
from judge.worker import Rejected

OK, WRONG = "ok", "wrong"
# As contenders are called here, in the order of the table's columns. The candidate's CUDA graph is no rival of its own.
NAMES = {"new": "new", "cudagraph": "new_cudagraph", "eager": "eager", "compile": "compile"}
NAMES["max-autotune"] = "max-autotune"
SHORT = {"forward": "fwd", "forward_recorded": "fwd recorded", "forward_backward": "fwd+bwd"}
THROTTLE = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "thermal slowdown", 0x40: "thermal slowdown"}
ABOVE_FLOOR = "above 100% of the floor, whose bandwidth is that of a copy"


@dataclass
class Result:
    """One record, as it goes into the JSON file."""

    model: str
    source_sha256: str
    device: str
    dtype: str
    precision: str
    direction: str
    seed: int
    batch: int | None = None
    constants: dict = field(default_factory=dict)  # of the Model's file, where a sweep replaced them
    status: str = OK
    ok: bool = True
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shapes: list = field(default_factory=list)
    import_seconds: float | None = None
    error: dict = field(default_factory=dict)
    gradient_error: dict = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)
    spread: dict[str, list[float]] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)  # to launch a call's work on a GPU; no part of `ms`
    rounds: int = 0
    calls: int = 0  # of each contender in a round
    speedup: dict[str, float] = field(default_factory=dict)
    speedup_ci: dict[str, list[float]] = field(default_factory=dict)
    verdict: dict[str, str] = field(default_factory=dict)  # FASTER, SLOWER or AMBIGUOUS than each, by the interval
    clocks: dict[str, dict | None] = field(default_factory=dict)  # `before` and `after` the timing, on a GPU
    interference: list[str] = field(default_factory=list)  # what says that something else ran meanwhile
    roof: dict = field(default_factory=dict)
    peak_memory: dict[str, int] = field(default_factory=dict)

    def reject(self, rejected: Rejected) -> None:
        """What was timed before the reason was found has no meaning."""
        self.status, self.ok = BUILD if rejected.kind == BUILD else WRONG, False
        self.ms, self.speedup, self.speedup_ci, self.verdict, self.roof = {}, {}, {}, {}, {}
        for reason in rejected.args:  # records travel: they name files, not the folders of the machine that wrote them
            for folder in (Path(__file__).resolve().parent.parent, Path.home()):
                reason = reason.replace(f"{folder}/", "")
            self.reasons += [reason] if reason not in self.reasons else []

    def set_times(self, samples: bench.Samples, baselines: tuple[str, ...]) -> None:
        self.rounds, self.calls = len(samples.ms["new"]), samples.calls
        for role in ["new", *(role for role in samples.ms if role in baselines)]:
            name, values = NAMES[role], samples.ms[role]
            self.ms[name] = tidy(statistics.median(values))
            self.spread[name] = [tidy(q) for q in bench.quartiles(values)]
            if self.device == "cuda":
                self.host_us[name] = tidy(samples.ready[role]["host_us"])
                if role in ("new", "eager", "compile"):  # the others hold memory of their own from capture on
                    self.peak_memory[name] = samples.ready[role]["peak"]
            if not name.startswith("new"):
                ratio, (low, high) = bench.speedup(samples, name, self.device)
                self.speedup[name], self.speedup_ci[name] = tidy(ratio), [tidy(low), tidy(high)]
                self.verdict[name] = bench.verdict(low, high, bool(self.interference))
        if self.host_us and self.host_us["new"] > 1e3 * self.ms["new"]:
            times = ", ".join(f"{name} {us:.0f}" for name, us in self.host_us.items())
            self.notes.append(f"the host takes longer to launch a call than the GPU for its work, in us: {times}")

    def set_roof(self, ceilings: roofline.Ceilings, problem: Problem) -> None:
        """How far from the limit; raises Rejected for a time that is not possible."""
        try:
            backward = self.direction == "forward_backward"
            work = roofline.count_work(problem, self.batch, DTYPES[self.dtype], backward)
        except Exception as error:
            self.notes.append(f"no floor: the Model does not run on the meta device: {last_line(error)}")
            return
        floor = ceilings.floor_ms(work, self.dtype, self.precision)
        if floor > self.ms["new"]:  # the machine may be faster now than it was
            ceilings.measure()
            floor = ceilings.floor_ms(work, self.dtype, self.precision)
        share, cached = floor / self.ms["new"], work.bytes <= 2 * roofline.cache_bytes(self.device)
        if share > roofline.IMPOSSIBLE[self.device] and not cached:
            least = f"what this machine was measured to reach allows {floor:.4g} ms or more"
            raise Rejected(f"takes {self.ms['new']:.4g} ms, which is not possible: {least}")
        self.roof = {"bytes": work.bytes, "flops": work.flops, "floor_ms": tidy(floor), "percent": tidy(100 * share)}
        self.notes += [ABOVE_FLOOR] if share > 1 else []

    def set_errors(self, errors: dict, dtype: torch.dtype) -> None:
        """Of several outputs the largest of each figure, and each gradient's.

        In float64 nothing is more exact: what is known is the distance to the Model.
        """
        mark = "gradient of "
        for name, found in errors.items():
            figures = {}
            for kind, (new, eager, _) in found.figures().items():
                figures |= {f"new_{kind}": new, f"eager_{kind}": None if dtype == torch.float64 else eager}
            if not name.startswith(mark):
                known = {key: value for key, value in figures.items() if value is not None}
                self.error = figures | {key: max(value, self.error.get(key, value)) for key, value in known.items()}
            elif self.direction == "forward_backward":
                self.gradient_error[name.removeprefix(mark)] = figures

    def way(self) -> str:
        shape = [f"b{self.batch}"] if self.batch is not None else []
        replaced = {name: value for name, value in self.constants.items() if isinstance(value, int)}
        shape += [f"{name} {value}" for name, value in replaced.items() if name != "batch_size"]
        return " ".join([self.device, self.dtype, self.precision, SHORT[self.direction], *shape])


def tidy(value: float) -> float:
    """Six digits: more than any clock here has."""
    return float(f"{value:.6g}")


class Table:
    """Prints a row as soon as it is there; the widths are those that usual figures need."""

    def __init__(self, baselines: tuple[str, ...]):
        self.timed, self.remarks = [NAMES[role] for role in NAMES if role in ("new", *baselines)], []
        self.rivals = [name for name in self.timed if not name.startswith("new")]
        self.widths = [29, 36, 6, *(max(9, len(name) + 3) for name in self.timed), *(30 for _ in self.rivals), 9, 17]
        columns = [*(f"{name} ms" for name in self.timed), *(f"x {name} [95%]" for name in self.rivals)]
        self._print("model", "run", "result", *columns, "of floor", "error new / eager")

    def row(self, run: Result) -> None:
        cells = [run.model, run.way(), {OK: "ok", WRONG: "WRONG", BUILD: "BUILD"}[run.status]]
        times = [run.ms.get(name) for name in self.timed]
        cells += ["-" if ms is None else f"{ms:.4g}" if ms < 1000 else f"{ms:.0f}" for ms in times]
        for name in self.rivals:
            low, high = run.speedup_ci.get(name, (0, 0))
            shown = name in run.speedup and f"{run.speedup[name]:.2f} [{low:.2f}, {high:.2f}] {run.verdict[name]}"
            cells.append(shown or "-")
        cells.append(f"{run.roof['percent']:.0f}%{' (!)' * (ABOVE_FLOOR in run.notes)}" if run.roof else "-")
        errors = [run.error.get(key) for key in ("new_max", "eager_max")]
        self._print(*cells, " / ".join("-" if error is None else f"{error:.1e}" for error in errors))
        said = [*run.reasons, *run.notes, *(f"timed under interference: {sign}" for sign in run.interference)]
        self.remarks += [f"{run.model} ({run.way()}): {remark}" for remark in said]

    def end(self) -> None:
        if self.remarks:
            print("", *dict.fromkeys(self.remarks), sep="\n", flush=True)

    def _print(self, *cells: str) -> None:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, self.widths)).rstrip(), flush=True)


def environment(device: str, ceilings, command: list[str], root: Path, clocks_before: dict | None) -> dict:
    revision = _said("git", "-C", str(root), "rev-parse", "HEAD")
    changed = _said("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": [Path(part).name if os.path.isabs(part) else part for part in command],
        "git": {"revision": revision[0], "dirty": bool(changed)} if revision else None,
        "device": device_name(device),
        "driver": query_gpu("driver_version").get("driver_version") if device == "cuda" else None,
        "clocks": {"before": clocks_before, "after": clocks(device)},
        "copy_bandwidth": tidy(ceilings.copy_bandwidth),
        "matrix_rate": {name: tidy(rate) for name, rate in ceilings.matrix_rate.items()},
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def _said(*command: str) -> list[str]:
    """What a command says, in lines; nothing where it is not to be had or fails."""
    if not shutil.which(command[0]):
        return []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


@functools.cache
def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def query_gpu(*fields: str) -> dict[str, str]:
    """What nvidia-smi says of the GPU in use; nothing where it cannot say."""
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"
    said = _said("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", gpu)
    return dict(zip(fields, (value.strip() for value in said[0].split(",")))) if said else {}


def clocks(device: str) -> dict[str, str] | None:
    """Clocks in MHz, degrees Celsius, watts, and why the clocks are lower than they might be; None on a CPU."""
    if device != "cuda":
        return None
    throttle = "clocks_event_reasons.active"
    state = query_gpu("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", throttle)
    return state | {"throttle": throttle_reasons(state.pop(throttle, ""))}


def throttle_reasons(mask: str) -> str:
    """The names of the bits of nvidia-smi's mask that slow a busy GPU down; empty for none."""
    bits = int(mask, 16) if mask.startswith("0x") else 0
    return ", ".join(dict.fromkeys(name for bit, name in THROTTLE.items() if bits & bit))
