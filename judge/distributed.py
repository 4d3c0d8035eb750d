"""One pair over several processes: torchrun --nproc-per-node=N harness.py NAME ...

The batch is split. Each process, a rank, judges ModelNew by all gates at its share of the batch, with seeds of its own, on a GPU of its own
or on the CPU. Then take turns: all ranks together, each at its share; and rank 0 alone, at its share and at the whole batch, while the others
wait. Together it takes as long as the slowest rank does.

    efficiency = ms of a share alone / ms together         what working at the same time, and averaging gradients, costs
    speed-up   = ms of the whole batch alone / ms together  what another GPU gains; the smaller share may fill a GPU less well

A backward pass runs under DistributedDataParallel: the gradients of the parameters are averaged over the ranks within the time.
Wrong on one rank is wrong. A rank that dies takes the others with it: torchrun ends them, or their next word with it fails. Only rank 0
prints and records.
"""

from __future__ import annotations

import datetime
import importlib
import os
import pickle
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import distributed as dist

from judge import machine, timing, trial
from judge.pairs import load_new
from judge.roof import Ceilings

PATIENCE = datetime.timedelta(minutes=10)  # for a rank that builds or compiles; one that hangs longer is given up
MAX_ROUNDS = 20
CALLS = 5  # in a row, in each round


class CannotSplit(Exception):
    """This batch, or this machine, does not do for so many processes."""


def launched() -> bool:
    """Whether torchrun started this process, as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank() -> int:
    return int(os.environ.get("RANK", "0")) if launched() else 0


def join(device: str) -> None:
    """Takes a GPU, meets the other ranks, and leaves speaking to rank 0. Of torchrun's several processes alone."""
    if not launched():
        return
    if rank() > 0:
        sys.stdout = open(os.devnull, "w")
    if device == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise CannotSplit(f"--nproc-per-node: more processes than the {torch.cuda.device_count()} GPUs here")
        torch.cuda.set_device(local)
    # Some of its functions have the group at their import for a default, and would keep it, and gloo's threads, beyond `leave`: a thread that
    # lets go of a tensor while the interpreter ends aborts the process.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("gloo", timeout=PATIENCE)


def leave() -> None:
    """Waits for all: torchrun ends the other ranks as soon as one has failed, and rank 0 may still be printing."""
    if dist.is_available() and dist.is_initialized():
        _meet()
        dist.destroy_process_group()


def agreed(value):
    """Rank 0's value, everywhere: what is chosen by measuring may differ between ranks."""
    return _gathered(value)[0] if launched() else value


def judge_pair(
    entry: trial.Entry, settings: trial.Settings, ceilings: Ceilings, say: Callable[[str], None]
) -> list[trial.Run]:
    """`trial.judge_pair` on every rank at its share, the same verdict on all, and the scaling of what is right."""
    ranks, whole = dist.get_world_size(), entry.batch
    if entry.failure is None and (whole is None or whole < ranks):
        what = "a fixed batch" if whole is None else f"batch {whole}"
        raise CannotSplit(f"{entry.pair.name}: {what} cannot be split over {ranks} processes")
    share = entry.batch and whole // ranks + (rank() < whole % ranks)
    own = replace(settings, seed=settings.seed + 1000 * rank())
    say(f"{ranks} processes, batch {share} on this one")
    runs = trial.judge_pair(replace(entry, batch=share), own, ceilings, say)
    verdicts = _gathered([(run.status, run.reasons) for run in runs])
    for run, *found in zip(runs, *verdicts):
        run.status, run.ok, run.reasons = trial.OK, True, []
        for number, (status, reasons) in enumerate(found):
            if status != trial.OK:
                run.reject([f"rank {number}: {reason}" for reason in reasons], status)
        if run.ok:
            say(f"{run.dtype} {run.precision} {run.direction}: timing {ranks} processes together, and one alone")
            with machine.precision(run.precision):
                run.scaling = _scaling(run, entry, share, own)
            machine.release(run.device)
    return runs


def _scaling(run: trial.Run, entry: trial.Entry, share: int, settings: trial.Settings) -> dict:
    new_class, _ = load_new(entry.pair.new_path)
    new = entry.problem.make(new_class, settings.seed).to(device=run.device, dtype=machine.DTYPES[run.dtype])
    if run.frozen:
        new.freeze_weight()
    backward = run.direction == "forward_backward"

    def step(module: torch.nn.Module, batch: int) -> Callable[[], object]:
        inputs = entry.problem.inputs(batch, run.device, machine.DTYPES[run.dtype], settings.seed)
        if not backward:
            return torch.no_grad()(lambda: module(*inputs))
        leaves = [x.requires_grad_() for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
        incoming = trial.random_like(trial._differentiable(new(*inputs)), settings.seed)

        def forward_backward():
            for leaf in (*leaves, *new.parameters()):
                leaf.grad = None
            torch.autograd.backward(trial._differentiable(module(*inputs)), incoming)

        return forward_backward

    together = step(_averaging(new, run.device) if backward else new, share)
    alone = [step(new, batch) for batch in (share, entry.batch)] if rank() == 0 else []
    stopwatch, flush = timing.Stopwatch(run.device), timing.CacheFlush(run.device)
    if run.device == "cuda":
        flush.hide(
            max(_gathered(max(map(timing.host_us, [together, *alone]))))
        )  # as long on all: they wait for each other

    def timed(call: Callable[[], object]) -> float:
        """The median of a few calls in a row: the first find a processor, and a GPU, that had been waiting for the other ranks."""
        ms = []
        for _ in range(CALLS):
            flush()
            ms.append(stopwatch(call))
        return statistics.median(ms)

    def turn() -> list[float]:
        """Milliseconds of each rank in its share, then of rank 0 alone in its share and in the whole batch."""
        _meet()
        return _gathered(timed(together)) + agreed([timed(call) for call in alone])

    for _ in range(2):
        last = turn()
    rounds = max(timing.MIN_ROUNDS, min(MAX_ROUNDS, int(1e3 * settings.seconds_each / (CALLS * last[-1]))))
    turns = [turn() for _ in range(rounds)]
    *each, share_alone, whole_alone = map(statistics.median, zip(*turns))
    slowest = statistics.median(max(ms[:-2]) for ms in turns)
    sizes = _gathered(share)
    return {
        "processes": len(each),
        "batch": entry.batch,
        "ms": slowest,
        "ms_share_alone": share_alone,
        "ms_whole_alone": whole_alone,
        "samples_per_second": 1e3 * entry.batch / slowest,
        "samples_per_second_each": [1e3 * size / ms for size, ms in zip(sizes, each)],
        "speedup": whole_alone / slowest,
        "efficiency": share_alone / slowest,
    }


def _averaging(module: torch.nn.Module, device: str) -> torch.nn.Module:
    """The module under DistributedDataParallel, if it has anything to average."""
    if not any(p.requires_grad for p in module.parameters()):
        return module
    group = dist.new_group(backend="nccl" if device == "cuda" else "gloo", timeout=PATIENCE)
    return torch.nn.parallel.DistributedDataParallel(module, process_group=group)


def _gathered(value) -> list:
    """Every rank's value, in the order of ranks. PyTorch's own way for objects needs numpy, which nothing else here does."""
    own = torch.tensor(list(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([own.numel()]))
    longest = max(map(int, sizes))
    padded = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(padded, torch.nn.functional.pad(own, (0, longest - own.numel())))
    return [pickle.loads(bytes(part[: int(size)].tolist())) for part, size in zip(padded, sizes)]


def _meet() -> None:
    dist.all_reduce(torch.zeros(1))  # a barrier over gloo, whatever the device
