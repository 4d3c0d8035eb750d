"""How fast? All contenders take turns in rounds, in a random order, each in its own process, the others stopped.

A turn is a call to warm up, on old inputs, and then a few calls, each a request of its own. The judge writes new
inputs and incoming gradients and, on a CPU, flushes the cache while the contender is stopped; resumes it and starts its
clock; the contender makes the call, behind a flush on a GPU, and times it by its own clock (events on a GPU). Then the
judge spoils the inputs, so that an answer computed from now on is wrong, and the contender hands its answer over,
whether or not it was drawn to be looked at. What a turn takes beyond the sum that the contender claims is the same for
all, so a candidate that takes more than eager there claims too little, and is rejected.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from judge.answers import OF_AN_INPUT, How, Request, bytes_of, normal_like, places_of, same_bits, tensors_of
from judge.check import Case, blank, inspect, of_the_model
from judge.gates import are_close
from judge.requests import Inputs, secret
from judge.source import reseed
from judge.worker import FLUSH_BYTES, Rejected, settle

MIN_ROUNDS, MAX_ROUNDS = 15, 400
SEARCHED = 5  # one round of so many is searched for processes that go on
MOST_CALLS, CALLS_BYTES = 8, 1 << 30  # of a turn, and of their inputs, which are drawn before the round
MOST_KEPT, KEPT_BYTES = 8, 2 << 30  # of the timed answers that are looked at, of the candidate's and of eager's each
SPOILT, FACTOR = 1024, 512.0  # elements of an input that are overwritten after a call, floats by others so much larger
SAMPLED, TRIED = 64, 3  # elements of an answer that are held against the last one's; other integers that are tried
LONGEST_TURN_MS = 50.0
CPU_FLUSHES, LONGEST_FLUSH_US = 1, 4000.0  # before each timed call; on a GPU as many as outlast the call's launch
WIDE_SPREAD, WIDE_DRIFT = 0.1, 0.05  # beyond these the rounds are said to have been disturbed
# Two processes with the same module differ by as much: where memory lies makes one the faster for as long as it lives.
PROCESSES_DIFFER = {"cuda": 0.005, "cpu": 0.02}
# What a turn takes beyond its claims may exceed eager's by a share of the claims, a share of eager's (flushes mostly,
# which were seen to differ by 2.2% in two processes), and milliseconds: of a turn on a GPU, of each call on a CPU.
HIDDEN_SHARE, FLUSH_SHARE, HIDDEN_MS = 0.1, 0.03, 0.05
MANY_PROCESSES = 8  # a candidate with more takes milliseconds to resume, see by_the_judges_clock
ATTEMPTS, MORE_ROUNDS = 3, 4  # of timing, until one finds nothing wrong; each has so many times the rounds before
ESCAPED = "starts a process in a group of its own, which goes on while others are timed"
# PyTorch 2.8 does not index float8, and no PyTorch on a GPU unsigned integers of more than a byte.
INDEXED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
INDEXED |= {dtype: torch.uint8 for name, dtype in vars(torch).items() if name.startswith("float8_")}
FASTER, SLOWER, AMBIGUOUS = "FASTER", "SLOWER", "AMBIGUOUS"


def rank_of(pid: int) -> tuple:
    """What decides when a process runs: its priority, its scheduler and, unless OpenMP sets them, its cores. Of a
    process that has ended: the judge's."""
    with contextlib.suppress(ProcessLookupError):
        cores = os.sched_getaffinity(pid) if not BINDS else None
        return os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid), cores
    return RANK


# Of so many bytes: PyTorch writes no places of unsigned integers, and 2.8 reads none of float8.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BINDS = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"} & os.environ.keys()
RANK = rank_of(0)  # of the judge, and so of all that it starts


@dataclass
class Samples:
    """By contender, a figure a round: milliseconds of a call, and of a turn beyond what its calls claim."""

    ms: dict[str, list[float]] = field(default_factory=dict)
    beyond: dict[str, list[float]] = field(default_factory=dict)
    stand_in: list[float] = field(default_factory=list)  # as `beyond`, of turns that `stand_in` takes
    ready: dict[str, dict] = field(default_factory=dict)  # what each said before the rounds
    calls: int = 1  # of a turn


def place_of(turn: int, most: int) -> int | None:
    """Which of `most` places the answer of a turn, counted from 1, is kept in, if any: at every time each answer so far
    is as likely to be kept as any other."""
    place = turn - 1 if turn <= most else secret.randrange(turn)
    return place if place < most else None


def scale_each(x: torch.Tensor) -> torch.Tensor:
    """Each number by a factor of its own: who remembers an answer may scale it where all have the same."""
    return x.mul_(torch.rand_like(x).mul_(0.1).add_(0.9))


class Ring:
    """The inputs of the calls of a round, the memory where a contender finds those of one, and that of its answer."""

    def __init__(self, case: Case, direction: str):
        self.case = case
        self.request = Request("while it was timed", direction, both_gates=True)
        old = case.inputs(0)
        with of_the_model(case.precision):
            (expected,) = case.answers(copy.deepcopy(case.model), [old], self.request)
        if any(did.startswith("writes") for did in expected.did):
            self.request = replace(self.request, how=How.RESTORED)
        self.answers = case.room(expected)
        outputs = zip(expected.leaves.values(), expected.forms) if direction == "forward_backward" else []
        roots = [x for x, (_, _, recorded) in outputs if recorded.startswith("True") and x.numel()]
        self.roots = [x.new_zeros(()).expand(x.shape) for x in roots]  # their shapes and dtypes, without their memory
        self.incoming = case.share([normal_like(x, self.request) for x in self.roots])
        nbytes = bytes_of([old, self.incoming])
        self.most_calls = max(1, min(MOST_CALLS, CALLS_BYTES // max(1, nbytes)))
        self.slot = case.share(old)
        # Numbers and the like that each draw may make anew: a contender is told them once, so all calls have these.
        self.fixed = [None if isinstance(x, torch.Tensor) else x for x in tree_leaves(old)]
        self.seeds, self.draws, self.fresh = [], [], []
        self.written, self.are_written = [], False  # what was last given; whether a contender wrote into it
        self.keeps = nbytes <= CALLS_BYTES  # what is given in a round; otherwise it is drawn again for each contender
        self.old = old if self.keeps else []
        self.varies = set()  # which inputs, the same in all draws, are others in each timed call
        self.varies = self.can_vary()
        self.most_kept = max(1, min(MOST_KEPT, KEPT_BYTES // max(1, bytes_of(self.answers))))
        self.kept = {"new": [], "eager": []}  # the answers that are looked at in the end
        self.odd = []  # and those of the candidate's that look like its answer to the call before, or unlike eager's
        sizes = [x.numel() for x in self.answers]
        chosen = [torch.tensor([secret.randrange(n) for _ in range(min(n, SAMPLED))]) for n in sizes]
        self.places = [places.long().to(x.device) for places, x in zip(chosen, self.answers)]
        self.sampled = {}  # what the round's answers have in these places, by role
        self.differs = False  # whether one of the candidate's was unlike eager's: from then on eager's come first
        self.last = []  # what the candidate's last answer had in these places
        self.spoils = OF_AN_INPUT not in " ".join(expected.did + case.no_dropin)
        self.spoilt = []  # see `draw_spoilt`
        self.searches = False  # whether this round is one of those in which what goes on is looked for
        self.buffer = torch.empty(FLUSH_BYTES["cpu"] if case.device == "cpu" else 0, dtype=torch.uint8)
        self.state = case.state(case.model)
        del old, expected, outputs, roots  # gigabytes, which others need
        settle(case.device)  # what others read is written

    def release(self) -> None:
        """Its memory, when all is timed: kept answers hold it by their `draw`, and float64's answers need the room."""
        del self.slot, self.incoming, self.answers, self.old, self.fresh, self.written, self.spoilt

    def hand_out(self, name: str, seconds: float) -> dict:
        """Gives a contender what is timed, which may make it compile."""
        own = self.case.own if name == "new" or self.case.own == {} else None  # all give the same gradients
        given = {"own": own, "state": self.state, "given": (self.slot, self.incoming), "answers": self.answers}
        return self.case.workers[name].ask("ready", request=self.request, seconds=seconds, **given)

    def renew(self, calls: int) -> None:
        """New inputs for so many calls, by seeds that nobody foresees."""
        self.seeds, self.sampled = [secret.getrandbits(31) for _ in range(calls)], {"new": [], "eager": []}
        self.draws = [partial(self.draw, seed, secret.uniform(0.9, 1.0)) for seed in self.seeds]
        self.fresh = [self.drawn(i) for i in range(calls)] if self.keeps else []

    def draw(self, seed: int, factor: float) -> list:
        """Inputs that are scaled, so that none is known; others, where all draws are the same."""
        leaves, form = tree_flatten(self.case.inputs(seed))
        leaves = [x if isinstance(x, torch.Tensor) else fixed for x, fixed in zip(leaves, self.fixed)]
        drawn = tree_unflatten(leaves, form)
        for i, (x, known) in enumerate(zip(tensors_of(drawn), self.case.inputs_are)):
            if i in self.varies:
                reseed(seed)
                known.changed(x, scale_each if known.free() else Inputs.other_integers)
            elif known.free() and x.numel():
                x.mul_(factor)
        return drawn

    def can_vary(self) -> set[int]:
        """Which inputs that are the same in all draws may be others: if the Model takes them."""
        if not self.keeps:
            return set()
        pairs = enumerate(zip(*(tensors_of(self.case.inputs(seed)) for seed in (0, 1))))
        same = {i for i, pair in pairs if same_bits(*pair)}
        shapes = [x.shape for x in self.answers]
        for self.varies in (same, {i for i in same if not self.case.inputs_are[i].free()}):
            with contextlib.suppress(Rejected), of_the_model(self.case.precision):
                others = (self.draw(seed, 1.0) for seed in range(TRIED * bool(self.varies)))
                answers = [self.case.answers(copy.deepcopy(self.case.model), [each], self.request) for each in others]
                if all([x.shape for x in found.tensors().values()] == shapes for (found,) in answers):
                    return self.varies
        return set()

    def given(self, i: int) -> tuple[list, list]:
        """The inputs of a call and the gradients that come in."""
        return self.fresh[i] if self.keeps else self.drawn(i)

    def drawn(self, i: int) -> tuple[list, list]:
        request = replace(self.request, seed=self.seeds[i])
        return self.draws[i](), [normal_like(x, request) for x in self.roots]

    def write(self, inputs: list, incoming: list) -> None:
        """While the contender is stopped: what a call is given, and on a CPU a flush of the cache."""
        slots = tensors_of([self.slot, self.incoming])
        for memory, places, _, before in self.spoilt:
            memory[places] = before
        if not secret.randrange(len(self.seeds) or 1):  # once a turn, since it takes time
            self.are_written |= not all(map(same_bits, self.written, slots))
        given = tensors_of([inputs, incoming])
        self.written = given if self.keeps and How.RESTORED not in self.request.how else []
        for new, x in zip(given, slots):
            if x.numel():
                x.untyped_storage().copy_(new.untyped_storage())
        for x in self.answers:
            blank(x)
        self.spoilt = self.draw_spoilt()
        if self.case.device == "cuda":  # no `settle`: the driver clears memory that is given back, in the next turns
            torch.cuda.synchronize()
        else:
            for _ in range(CPU_FLUSHES):
                self.buffer.zero_()

    def draw_spoilt(self) -> list[tuple]:
        """For each input its memory, the places in it that are spoilt after the call, what is written there (values of
        other places, which are as valid, floats many times as large), and what is there before."""
        spoilt, generator = [], torch.Generator().manual_seed(secret.getrandbits(63))
        for x in tensors_of(self.slot) if self.spoils else []:
            inexact = x.is_floating_point() or x.is_complex()
            bits = x.dtype if inexact and x.dtype.itemsize > 1 else BITS[x.dtype.itemsize]
            memory = torch.empty(0, dtype=bits, device=x.device).set_(x.untyped_storage())
            if n := memory.numel():
                places, others = torch.randint(n, (2, min(n, SPOILT)), generator=generator).to(x.device)
                values = memory[others]
                values = values * FACTOR if values.is_floating_point() else values
                spoilt.append((memory, places, values, memory[places]))
        return spoilt

    def spoil(self) -> None:
        for memory, places, values, _ in self.spoilt:
            memory[places] = values
        if self.case.device == "cuda":
            torch.cuda.synchronize()

    def warm_up(self, name: str) -> None:
        worker = self.case.workers[name]
        self.write(self.old or self.case.inputs(0), [])
        try:
            worker.ask("warm_up")
        except Rejected as failed:
            if failed.kind != "memory":
                raise
            settle(self.case.device)
            for each in self.case.workers.values():  # after any such request a process gives unused memory back
                each.ask("wait")
            worker.ask("warm_up")

    def search(self) -> None:
        """Raises Rejected where something of the candidate's goes on while it is stopped."""
        if self.searches and self.case.workers["new"].strays():
            raise Rejected(ESCAPED)

    def call(self, name: str, i: int, flushes: int, waits: float | None = None, searched=False) -> tuple[dict, float]:
        """A call of a turn: the contender's reply, and the milliseconds that it took beyond what it claims."""
        worker = self.case.workers[name]
        self.write(*self.given(i))
        if searched:  # who computes while inputs are written may end with the turn
            self.search()
        reply = worker.ask("time", flushes=flushes, seed=self.seeds[i], waits=waits)
        begin = worker.asked
        self.spoil()
        worker.ask("hand_over")
        return reply, 1e3 * (worker.answered - begin) - reply["ms"]

    def take_turn(self, name: str, samples: Samples, flushes: int) -> list[float]:
        """A turn of one contender; the milliseconds that it claims for each call."""
        kept = self.kept.get(name)
        self.warm_up(name)
        place = None if kept is None else place_of(len(samples.ms[name]) + 1, self.most_kept)  # drawn before the calls
        looked_at, searched = (secret.randrange(samples.calls) for _ in range(2))
        claimed, beyond = [], 0.0
        for i in range(samples.calls):
            reply, more = self.call(name, i, flushes, searched=name == "new" and i == searched)
            if not 0 < reply["ms"] < math.inf:
                raise Rejected(f"claims that a call took {reply['ms']} milliseconds")
            claimed.append(reply["ms"])
            beyond += more
            is_odd = self.is_odd(name, i) and len(self.odd) < self.most_kept
            if place is not None and i == looked_at or is_odd:
                given = [x.clone() for x in places_of(reply["forms"], self.answers)]
                answer = reply["forms"], given, self.draws[i], self.seeds[i]
                if is_odd:
                    self.odd.append(answer)
                else:
                    kept[place : place + 1] = [answer]
        samples.ms[name].append(sum(claimed) / len(claimed))
        samples.beyond[name].append(beyond)
        return claimed

    def is_odd(self, name: str, i: int) -> bool:
        """Whether an answer of the candidate's has what its last one had, wherever it was sampled; or, there, another
        than eager's, if that had its turn first."""
        values = [x.view(INDEXED.get(x.dtype, x.dtype)) for x in self.answers]
        found = [x.reshape(-1)[places] for x, places in zip(values, self.places)]
        if name not in self.sampled:
            return False
        self.sampled[name].append(found)
        before, self.last = self.last, found if name == "new" else self.last
        if name == "new" and before and all(map(same_bits, found, before)):
            return True
        other = self.sampled["eager" if name == "new" else "new"]
        pairs = zip(found, other[i]) if len(other) > i else []
        is_unlike = not all(are_close(mine, theirs, self.case.tolerance(theirs), 1.0) for mine, theirs in pairs)
        self.differs |= is_unlike
        return is_unlike and name == "new"

    def stand_in(self, claimed: list[float], samples: Samples, flushes: int) -> None:
        """A turn of eager's process in which the GPU waits for as long as the candidate has claimed, call by call.

        On a busy machine another process often takes the core while the host waits for the end of a call. Behind a
        short call such a pause is seen as time that was not claimed. In a long call it is not: the host runs again
        before the call ends. So a fast candidate is compared with calls that are as short as its own.
        """
        self.warm_up("eager")
        samples.stand_in.append(sum(self.call("eager", i, flushes, ms)[1] for i, ms in enumerate(claimed)))


def measure(case: Case, direction: str, seconds: float, least: int = 1) -> Samples:
    """Rounds of all of the case's contenders, `least` times MIN_ROUNDS or more; then a look at the kept answers.

    In the end, since that takes memory and time: what was allocated anew in between was seen to run 10% slower for the
    rest of the rounds.
    """
    ring = Ring(case, direction)
    try:
        samples, flushes = get_ready(case, ring, seconds)
        rounds(case, ring, seconds, samples, flushes, least)
    finally:
        for worker in case.workers.values():  # the Model in float64 takes much memory, and so may who comes next
            with contextlib.suppress(Rejected):
                worker.ask("rest")
    if ring.are_written:
        raise Rejected("writes its inputs while it is timed")
    for name, x in case.model.state_dict().items():
        if isinstance(x, torch.Tensor) and not same_bits(x, ring.state[name].to(x.device)):
            raise Rejected(f"writes the memory in which the judge hands out {name}")
    kept, request = ring.kept, ring.request
    kept["new"] += ring.odd
    ring.release()
    settle(case.device)
    for name, answers in kept.items():
        while answers:  # none is held when it has been looked at
            look_at(case, request, name, *answers.pop())
            settle(case.device)
    return samples


def look_at(case: Case, request: Request, name: str, forms: list, given: list, draw: Callable, seed: int) -> None:
    """Raises Rejected where a timed answer is wrong."""
    request = replace(request, seed=seed)
    with of_the_model(case.precision):
        (expected,) = case.answers(copy.deepcopy(case.model), [draw()], request)
    judged = case if name == "new" else replace(case, errors={})  # eager's errors do not count
    try:
        inspect(judged, request, expected, forms, given, draw, case.model)
    except Rejected as found:
        raise found if name == "new" else Rejected(f"eager's timed answers are not the Model's: {found}") from found


def get_ready(case: Case, ring: Ring, seconds: float) -> tuple[Samples, int]:
    """Each contender is given what is timed, which may make it compile; how often a GPU's cache is flushed."""
    samples = Samples()
    for name in list(case.workers):
        try:
            samples.ready[name] = ring.hand_out(name, seconds / 10)
        except Rejected as failed:
            case.drop(name, failed)
    samples.ms, samples.beyond = ({name: [] for name in case.workers} for _ in range(2))
    ms, host_us = ([each[what] for each in samples.ready.values()] for what in ("ms", "host_us"))
    # Not by the candidate's clock: one that claims less would hide its time behind longer flushes.
    flush_ms = min((each["flush_ms"] for name, each in samples.ready.items() if name != "new"), default=1.0)
    samples.calls = max(1, min(ring.most_calls, int(LONGEST_TURN_MS / max(ms))))
    # A process that was stopped takes several times as long to launch its first call: the flush is to outlast that.
    launch_us = min(5 * max(host_us) + 1000, LONGEST_FLUSH_US)
    return samples, math.ceil(launch_us / (1e3 * flush_ms)) if case.device == "cuda" else 0


def rounds(case: Case, ring: Ring, seconds: float, samples: Samples, flushes: int, least: int) -> None:
    """`least` times MIN_ROUNDS to MAX_ROUNDS, until the time is up; a baseline that fails leaves them, with a note."""
    deadline, spot = time.perf_counter() + seconds * len(case.workers), 0
    for turn in range(MAX_ROUNDS):
        if turn >= least * MIN_ROUNDS and time.perf_counter() > deadline:
            break
        ring.renew(samples.calls)
        if turn % SEARCHED == 0:  # a helper may come late and end early
            spot = turn + secret.randrange(SEARCHED)
        ring.searches = turn == spot
        names = secret.sample(list(case.workers), len(case.workers))
        if ring.differs:  # eager first, so that each answer can be compared with its own
            names.sort(key=lambda name: name != "eager")
        for name in names:
            try:
                claimed = ring.take_turn(name, samples, flushes)
                if name == "new":
                    look_at_ranks(case)
                    ring.search()
                if name == "new" and least > 1 and case.device == "cuda":  # something was found before
                    ring.stand_in(claimed, samples, flushes)
            except Rejected as failed:
                case.drop(name, failed)
                del samples.ms[name], samples.beyond[name]


def look_at_ranks(case: Case) -> None:
    """Raises Rejected where the candidate changed them: after each of its turns, since it might change them back."""
    mine = rank_of(case.workers["new"].pid)[:2]  # it may bind itself to cores
    others = [os.getpid(), *(worker.pid for name, worker in case.workers.items() if name != "new")]
    if case.device == "cpu":  # all their threads
        others = [int(path.name) for pid in others for path in Path(f"/proc/{pid}/task").glob("*")]
    if mine != RANK[:2] or any(rank_of(each) != RANK for each in others):
        raise Rejected("changes the priority or the cores of a process")


def hidden_time(samples: Samples, device: str) -> str | None:
    """Says where the candidate's turns take longer than its own clock claims, by more than eager's do: its clock or an
    answer is not what it seems. Looked at are the turns whose claims are the smaller half, the candidate's and eager's:
    they decide the median. Three quarters of them must exceed three quarters of eager's by what is allowed, or the
    lower quartile eager's by three times as much: what else runs makes turns longer, never shorter. Where the stand-in
    took turns, they are looked at in place of eager's.

    Once this may be a disturbance: then all are timed again in new processes (ATTEMPTS), in 4 and 16 times the rounds,
    and the rounds that count are those of a timing in which nothing is found. Who hides time in some timings alone is
    caught or gains nothing. Noise does not come back, the less so the more rounds there are: of eager against itself,
    where turns spread evenly between 39 and 121 ms, all three timings find something once in 100 000 times.
    """
    new = statistics.quantiles(of_the_fast(samples, "new"), n=4)
    eager = statistics.quantiles(samples.stand_in or of_the_fast(samples, "eager"), n=4)
    claimed = samples.calls * statistics.median(samples.ms["new"])
    if max(new[0] - eager[2], (new[0] - eager[0]) / 3) <= HIDDEN_SHARE * claimed + unseen_ms(samples, device):
        return None
    seen = f"in which the judge's clock sees {new[1] - eager[1]:.3f} ms more than in eager's turns"
    return f"its own clock says {claimed:.3f} ms for the calls of a turn, {seen}"


def unseen_ms(samples: Samples, device: str) -> float:
    """So much of each turn may be hidden however short its calls are."""
    eager = statistics.quantiles(samples.stand_in or of_the_fast(samples, "eager"), n=4)
    return FLUSH_SHARE * eager[1] + HIDDEN_MS * (samples.calls if device == "cpu" else 1)


def may_hide_its_gain(samples: Samples, device: str) -> bool:
    """Not asked of a gain so small that another timing may not see it again."""
    mine, eager = (samples.calls * statistics.median(samples.ms[name]) for name in ("new", "eager"))
    return mine < 0.8 * eager and eager < mine + unseen_ms(samples, device)


def is_overloaded() -> bool:
    """Whether over twice as many threads wanted to run in the last minute as there are cores. Then an honest
    candidate's turns may wait for milliseconds, in all attempts. By the judge's clock who hides time gains nothing."""
    return os.getloadavg()[0] > 2 * len(os.sched_getaffinity(0)) + 1


def by_the_judges_clock(samples: Samples) -> list[float]:
    """A call's time in each round: what the candidate claims, and what its turn takes longer than eager's turns.

    It stands for the claims of a candidate that has more than MANY_PROCESSES. They may only wait, but whoever resumes
    200 of them waits for a core for milliseconds, in which the candidate's own process might as well work unseen.
    """
    eager = statistics.median(samples.beyond["eager"])
    turns = zip(samples.ms["new"], samples.beyond["new"])
    return [ms + max(0.0, beyond - eager) / samples.calls for ms, beyond in turns]


def of_the_fast(samples: Samples, name: str) -> list[float]:
    middle = statistics.median(samples.ms[name])
    return [beyond for ms, beyond in zip(samples.ms[name], samples.beyond[name]) if ms <= middle]


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
    wide = []
    for name, values in samples.ms.items():
        low, _, high = statistics.quantiles(values, n=4)
        if (share := (high - low) / statistics.median(values)) > WIDE_SPREAD:
            wide.append(f"{'ModelNew' if name == 'new' else name} {100 * share:.0f}%")
    found = [f"the middle half of the times spans, in percent of their median: {', '.join(wide)}"] if wide else []
    relative = [[ms / statistics.median(values) for ms in values] for values in samples.ms.values()]
    rounds = [statistics.fmean(times) for times in zip(*relative)]
    third = len(rounds) // 3
    drift = statistics.median(rounds[-third:]) / statistics.median(rounds[:third]) - 1
    if abs(drift) > WIDE_DRIFT:
        found.append(f"the last third of the rounds took {1 + drift:.2f} times as long as the first third")
    return found
