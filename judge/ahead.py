"""Compiles the Models of a sweep before they are judged, in parallel processes.

torch.compile keeps on disk what it made, and the judge's own torch.compile of the same Model at the same shape finds it there. That is
code alone: choices by timing, made while others use the GPU, are not kept, so the judge's process times them for itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from pathlib import Path

import torch

from judge import machine, trial
from judge.correctness import Case
from judge.pairs import Problem


def compile_ahead(entries: list[trial.Entry], settings: trial.Settings) -> None:
    """In as many processes as there are cores, or fewer: each imports the compiler first. What fails here the judge compiles, and tells."""
    load = settings.load
    tasks = [
        (
            entry.pair.model_path,
            entry.problem.constants,
            entry.batch,
            load.device,
            dtype,
            level,
            backward,
            settings.seed,
        )
        for entry in entries
        for dtype in load.dtypes
        for level in load.precisions
        for backward in sorted({False, load.backward})
        if "compile" in settings.baselines and not entry.failure
    ]
    if tasks:
        with multiprocessing.get_context("spawn").Pool(
            min(-(-len(tasks) // 3), len(os.sched_getaffinity(0))), _be_alone
        ) as pool:
            pool.starmap(_compile, tasks, chunksize=1)


def _be_alone() -> None:
    """A process among many compiles without processes of its own, and under the names that the judge's process will look for."""
    sys.modules.pop(
        "__mp_main__", None
    )  # pickle, which makes these names, would say that PyTorch's constants are from there
    from torch._inductor import config

    config.compile_threads = 1
    if hasattr(config, "autotune_local_cache"):
        config.autotune_local_cache = False


def _compile(
    path: Path,
    constants: dict,
    batch: int | None,
    device: str,
    dtype: torch.dtype,
    level: str,
    backward: bool,
    seed: int,
) -> None:
    """One call, as the judge makes it to have the baseline compiled."""
    with contextlib.suppress(Exception):  # no room beside the others, say
        problem = Problem(path, constants)
        model = problem.make(problem.model_class, seed).to(device, dtype)
        inputs = problem.inputs(batch, device, dtype, seed)
        for x in inputs:
            if backward and isinstance(x, torch.Tensor):
                x.requires_grad_(x.is_floating_point())
        with machine.precision(level), torch.set_grad_enabled(backward):
            step = trial.step_of(model, inputs, Case(problem, None, device, dtype, level, backward, batch, seed))
            step(torch.compile(model, dynamic=False), model)
    torch._dynamo.reset()
    machine.release(device)
