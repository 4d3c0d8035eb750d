"""The JSON file: the runs, and once the environment they ran in. No host names, no absolute paths."""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path

import torch

from judge import machine
from judge.roof import Ceilings
from judge.trial import Run


def environment(device: str, ceilings: Ceilings, command: list[str], root: Path, clocks_before: dict | None) -> dict:
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": _relative(command),
        "git": _git(root),
        "device": machine.device_name(device),
        "driver": _driver() if device == "cuda" else None,
        "clocks": {"before": clocks_before, "after": machine.clocks(device)},
        "copy_bandwidth": float(f"{ceilings.copy_bandwidth:.6g}"),
        "matrix_rate": {name: float(f"{rate:.6g}") for name, rate in ceilings.matrix_rate.items()},
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def _relative(command: list[str]) -> list[str]:
    return [Path(part).name if os.path.isabs(part) else part for part in command]


@functools.cache
def _driver() -> str | None:
    said = machine.query_gpu("driver_version")
    return said and said["driver_version"]


@functools.cache
def _git(root: Path) -> dict | None:
    """The revision, and whether the files differ from it; None outside a git checkout."""

    def ask(*question: str) -> str | None:
        try:
            answer = subprocess.run(["git", "-C", str(root), *question], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    revision = ask("rev-parse", "HEAD")
    return revision and {"revision": revision, "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}


def save(path: Path, runs: list[Run], surroundings: dict) -> None:
    document = {"runs": [asdict(run) for run in runs], "environment": surroundings}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def load(path: Path) -> tuple[list[Run], dict]:
    """The runs and the environment of a file that `save` wrote; keys of a later version are left aside."""
    document = json.loads(path.read_text())
    known = set(Run.__dataclass_fields__)
    runs = [Run(**{key: value for key, value in run.items() if key in known}) for run in document["runs"]]
    return runs, document["environment"]
