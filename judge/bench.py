"""How fast? All contenders take turns in rounds, in a random order, each in its own process, the others stopped.

A turn is a call to warm up, on old inputs, and then a few calls, each on new inputs of its own and behind a flush of
the cache, timed by the worker's own clock (events on a GPU); then one of the answers, drawn when they are all there, is
handed over. The judge's clock runs over all but the first call. What a turn takes beyond the sum that the worker
claims is the same for all, so a candidate that takes more than eager there claims too little, and is rejected.
"""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import time
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.utils._pytree import tree_leaves

from judge.check import Case, blank, inspect, secret
from judge.worker import Rejected, Request, answers_of, settle

MIN_ROUNDS, MAX_ROUNDS = 15, 400
MOST_SLOTS, SLOT_BYTES = 8, 1 << 30  # of the calls in a turn, each with inputs of its own
MOST_KEPT, KEPT_BYTES = 8, 4 << 30  # of the timed answers that are looked at
LONGEST_TURN_MS = 50.0
CPU_FLUSHES, LONGEST_FLUSH_US = 1, 4000.0  # before each timed call; on a GPU as many as outlast the call's launch
WIDE_SPREAD, WIDE_DRIFT = 0.1, 0.05  # beyond these the rounds are said to have been disturbed
# Two processes with the same module differ by as much: where memory lies makes one the faster for as long as it lives.
PROCESSES_DIFFER = {"cuda": 0.005, "cpu": 0.02}
# What a turn takes beyond its claims may exceed eager's by a share of the claims, a share of eager's (flushes mostly,
# which were seen to differ by 2.2% in two processes), and milliseconds: on a CPU, a time slice of its scheduler.
HIDDEN_SHARE, FLUSH_SHARE, HIDDEN_MS = 0.1, 0.03, {"cuda": 0.05, "cpu": 4.0}
FASTER, SLOWER, AMBIGUOUS = "FASTER", "SLOWER", "AMBIGUOUS"


@dataclass
class Samples:
    """By contender, a figure a round: milliseconds of a call, and of a turn beyond what its calls claim."""

    ms: dict[str, list[float]] = field(default_factory=dict)
    beyond: dict[str, list[float]] = field(default_factory=dict)
    ready: dict[str, dict] = field(default_factory=dict)  # what each said before the rounds
    calls: int = 1  # of a turn


class Ring:
    """The inputs of one turn, drawn anew for each round, and where the answers go."""

    def __init__(self, case: Case, direction: str):
        self.case, self.request = case, Request("while it was timed", direction, strict=True, timed=True)
        inputs = case.inputs(0)
        (expected,) = answers_of(copy.deepcopy(case.model), [inputs], self.request)
        self.answers = case.room(expected)
        size = sum(x.nbytes for x in self.answers)
        nbytes = size + sum(x.nbytes for x in tree_leaves(inputs) if isinstance(x, torch.Tensor))
        count = max(1, min(MOST_SLOTS, SLOT_BYTES // max(1, nbytes)))
        self.slots, self.draws, self.kept = [case.share(inputs) for _ in range(count)], [None] * count, []
        self.most_kept = max(1, min(MOST_KEPT, KEPT_BYTES // max(1, size)))
        state = case.share(dict(case.model.state_dict()))
        self.ready = {"request": self.request, "state": state, "ring": self.slots, "answers": self.answers}
        settle(case.device)  # what others read is written

    def renew(self, calls: int) -> None:
        """New inputs for so many calls, by seeds that nobody foresees; scaled, in case a file ignores seeds."""
        for i, slot in enumerate(self.slots[:calls]):
            factor = secret.uniform(0.9, 1.0)
            self.draws[i] = partial(self.case.inputs, secret.getrandbits(31), lambda x, factor=factor: x.mul_(factor))
            for new, x in zip(tree_leaves(self.draws[i]()), tree_leaves(slot)):
                if isinstance(x, torch.Tensor) and x.numel():
                    x.untyped_storage().copy_(new.untyped_storage())

    def take_turn(self, name: str, samples: Samples, flushes: int) -> None:
        """A turn of one contender. Of its answers one is handed over, drawn when they are all there."""
        worker = self.case.workers[name]
        for x in self.answers:
            blank(x)
        if self.case.device == "cuda":  # no `settle`: the driver clears memory that is given back, in the next turns
            torch.cuda.synchronize()
        try:
            worker.ask("warm_up")
        except Rejected as failed:
            if failed.kind != "memory":
                raise
            settle(self.case.device)
            for each in self.case.workers.values():  # after any such request a process gives unused memory back
                each.ask("wait")
            worker.ask("warm_up")
        claimed = worker.ask("time", count=samples.calls, flushes=flushes)["ms"]
        start = worker.asked
        index = secret.randrange(samples.calls)
        reply = worker.ask("answer", index=index)
        taken = 1e3 * (worker.answered - start)
        if len(claimed) != samples.calls or not all(isinstance(ms, float) and 0 < ms < math.inf for ms in claimed):
            raise Rejected(f"claims the times {claimed} for {samples.calls} calls")
        samples.ms[name].append(statistics.median(claimed))
        samples.beyond[name].append(taken - sum(claimed))
        if name == "new":  # kept: a copy, and how to draw its inputs again; drops one if there are many
            if len(self.kept) == self.most_kept:
                self.kept.pop(secret.randrange(self.most_kept))
            self.kept.append((reply["forms"], [x.clone() for x in self.answers], self.draws[index]))


def measure(case: Case, direction: str, seconds: float) -> Samples:
    """Rounds of all of the case's contenders, and then a look at the answers that were kept.

    In the end, since that takes memory and time: what was allocated anew in between was seen to run 10% slower for the
    rest of the rounds.
    """
    ring = Ring(case, direction)
    try:
        samples = take_rounds(case, ring, seconds)
    finally:
        for worker in case.workers.values():  # the Model in float64 takes much memory, and so may who comes next
            with contextlib.suppress(Rejected):
                worker.ask("rest")
    kept, request = ring.kept, ring.request
    del ring
    for forms, given, draw in kept:
        (expected,) = answers_of(copy.deepcopy(case.model), [draw()], request)
        inspect(case, request, expected, forms, given, draw, case.model)
        settle(case.device)
    return samples


def take_rounds(case: Case, ring: Ring, seconds: float) -> Samples:
    """MIN_ROUNDS to MAX_ROUNDS, until the time is up; a baseline that fails leaves them, with a note."""
    samples = Samples()
    for name, worker in list(case.workers.items()):
        try:
            samples.ready[name] = worker.ask("ready", seconds=seconds / 10, **ring.ready)
        except Rejected as failed:
            case.drop(name, failed)
    samples.ms, samples.beyond = ({name: [] for name in case.workers} for _ in range(2))
    ms, host_us = ([each[what] for each in samples.ready.values()] for what in ("ms", "host_us"))
    # Not by the candidate's clock: one that claims less would hide its time behind longer flushes.
    flush_ms = min((each["flush_ms"] for name, each in samples.ready.items() if name != "new"), default=1.0)
    samples.calls = max(1, min(len(ring.slots), int(LONGEST_TURN_MS / max(ms))))
    # A process that was stopped takes several times as long to launch its first call: the flush is to outlast that.
    launch_us = min(5 * max(host_us) + 1000, LONGEST_FLUSH_US)
    flushes = math.ceil(launch_us / (1e3 * flush_ms)) if case.device == "cuda" else CPU_FLUSHES
    deadline = time.perf_counter() + seconds * len(case.workers)
    for turn in range(MAX_ROUNDS):
        if turn >= MIN_ROUNDS and time.perf_counter() > deadline:
            break
        ring.renew(samples.calls)
        for name in secret.sample(list(case.workers), len(case.workers)):
            try:
                ring.take_turn(name, samples, flushes)
            except Rejected as failed:
                case.drop(name, failed)
                del samples.ms[name], samples.beyond[name]
    return samples


def hidden_time(samples: Samples, device: str) -> str | None:
    """Says where the candidate's turns take longer than its own clock claims, by more than eager's do: its clock or an
    answer is not what it seems. Three quarters of its turns must exceed three quarters of eager's by what is allowed,
    or its lower quartile eager's by three times as much: what else runs makes turns longer, never shorter. Once this
    may be a disturbance; who calls measures again.
    """
    claimed = samples.calls * statistics.median(samples.ms["new"])
    new, eager = (statistics.quantiles(samples.beyond[name], n=4) for name in ("new", "eager"))
    allowed = HIDDEN_SHARE * claimed + FLUSH_SHARE * eager[1] + HIDDEN_MS[device]
    if max(new[0] - eager[2], (new[0] - eager[0]) / 3) <= allowed:
        return None
    seen = f"in which the judge's clock sees {new[1] - eager[1]:.3f} ms more than in eager's turns"
    return f"its own clock says {claimed:.3f} ms for the calls of a turn, {seen}"


def interval(values: list[float]) -> list[float]:
    """95% interval of the median, by the sign test: values lie below it as heads fall, here in the normal limit."""
    ordered, n = sorted(values), len(values)
    k = max(0, int((n - 1.96 * n**0.5 - 1) / 2))
    return [ordered[k], ordered[n - 1 - k]]


def speedup(samples: Samples, over: str, device: str) -> tuple[float, list[float]]:
    """The median of the rounds' ratios and its interval, widened by what two processes with the same module differ."""
    ratios = [theirs / mine for mine, theirs in zip(samples.ms["new"], samples.ms[over])]
    low, high = interval(ratios)
    return statistics.median(ratios), [low * (1 - PROCESSES_DIFFER[device]), high * (1 + PROCESSES_DIFFER[device])]


def verdict(low: float, high: float, disturbed: bool) -> str:
    """What the interval allows to say; where the rounds were disturbed, only if it says so by far."""
    margin = max(0.1, high - low) if disturbed else 0.0
    return FASTER if low > 1 + margin else SLOWER if high < 1 - margin else AMBIGUOUS


def interference(samples: Samples) -> list[str]:
    """Signs that something else ran meanwhile: rounds that spread, or that grew longer or shorter all together."""
    found = []
    for name, values in samples.ms.items():
        low, _, high = statistics.quantiles(values, n=4)
        if (share := (high - low) / statistics.median(values)) > WIDE_SPREAD:
            found.append(f"the middle half of {name}'s times spans {100 * share:.0f}% of their median")
    relative = [[ms / statistics.median(values) for ms in values] for values in samples.ms.values()]
    rounds = [statistics.fmean(times) for times in zip(*relative)]
    third = len(rounds) // 3
    drift = statistics.median(rounds[-third:]) / statistics.median(rounds[:third]) - 1
    if abs(drift) > WIDE_DRIFT:
        found.append(f"the last third of the rounds took {1 + drift:.2f} of the time of the first")
    return found
