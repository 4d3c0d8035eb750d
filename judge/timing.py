"""Timing contenders against each other.

All contenders take turns inside each round, in a new random order every time, so drift of clocks and temperature falls on all alike.
Before every call the cache is flushed, on a GPU for as long as the slowest host needs to launch a call: what is timed there is the GPU's
work, and the host's time is told apart. Between rounds the inputs are drawn anew, by seeds that nobody can foresee, so that nothing
remembered or made ahead helps. Every few rounds the weights move to other places in memory: one of two equal modules may be a little faster for as
long as they stay where they are. Medians over rounds; a speed-up is a ratio of medians, its interval a bootstrap over whole rounds, which keeps the
pairing, in blocks whose weights lay in the same places. What says that the rounds were disturbed (their spread, a drift) is said with the
result.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter  # taken now, before any candidate could replace it

import torch

Event = torch.cuda.Event

MIN_ROUNDS = 15
MAX_ROUNDS = 500
INSPECTED_ROUNDS = 3
INSPECTED_SHARE = 1 / 8
SECONDS_EACH = {"cuda": 1.0, "cpu": 1.5}  # a contender's share of the time budget; a tenth of it again is its warm-up
FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}
HOST_CALLS = 9
LONGEST_HIDDEN_US = 2000.0
BOOTSTRAP_DRAWS = 2000
WIDE_SPREAD, WIDE_DRIFT = 0.1, 0.05  # beyond these the rounds are said to have been disturbed
FASTER, SLOWER, AMBIGUOUS = "FASTER", "SLOWER", "AMBIGUOUS"


class Stopwatch:
    """Times one call: CUDA events around it on a GPU, the host's clock elsewhere. The result dies outside the timed window."""

    def __init__(self, device: str):
        self._cuda = device == "cuda"

    def __call__(self, call: Callable[[], object], look: Callable[[object], None] | None = None) -> float:
        """Milliseconds. `look` sees the result right behind the timed window, before anybody waits for the GPU."""
        if self._cuda:
            start, end = Event(enable_timing=True), Event(enable_timing=True)
            start.record()
            result = call()
            end.record()
            if look:
                look(result)
            torch.cuda.synchronize()  # not the event alone: what is left on other streams must not fall on whoever comes next
            elapsed = start.elapsed_time(end)
        else:
            begin = perf_counter()
            result = call()
            elapsed = 1e3 * (perf_counter() - begin)
            if look:
                look(result)
        del result
        return elapsed


class CacheFlush:
    """Overwrites a buffer of at least twice the last-level cache, whose lines it first makes equal: those to evict last would outlive it."""

    def __init__(self, device: str):
        size = FLUSH_BYTES[device]
        self._driver = None
        if device == "cuda":
            if torch.cuda.get_device_capability() >= (8, 0):  # older ones keep no line longer than others
                self._driver = ctypes.CDLL("libcuda.so.1")
            size = max(
                size, 2 * getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0)
            )
        self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self._times = 1

    def hide(self, host_us: float) -> None:
        """From now on as many times over as it takes for the host to launch, meanwhile, what takes it so long. A call that waits does not count."""
        stopwatch = Stopwatch("cuda")
        once_us = 1e3 * min(stopwatch(self._buffer.zero_) for _ in range(5))
        self._times = math.ceil(min(1.5 * host_us + 50, LONGEST_HIDDEN_US) / once_us)

    def __call__(self) -> None:
        if self._driver and (error := self._driver.cuCtxResetPersistingL2Cache()):
            raise RuntimeError(f"cuCtxResetPersistingL2Cache failed with error {error}")
        for _ in range(self._times):
            self._buffer.zero_()


@dataclass
class Samples:
    """Milliseconds by contender; the i-th sample of each comes from the i-th round. On a GPU also the host's microseconds a call."""

    ms: dict[str, list[float]] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)
    block: int = 0  # rounds between two moves of the weights

    def median(self, name: str) -> float:
        return _quantile(self.ms[name], 0.5)

    def spread(self, name: str) -> list[float]:
        """The quartiles around the median."""
        return [_quantile(self.ms[name], 0.25), _quantile(self.ms[name], 0.75)]

    def speedup(self, of: str, over: str) -> float:
        return self.median(over) / self.median(of)

    def interference(self) -> list[str]:
        """What says that something else ran meanwhile: rounds that spread, or that grew longer or shorter all together."""
        found = []
        for name in self.ms:
            low, high = self.spread(name)
            if high - low > WIDE_SPREAD * self.median(name):
                found.append(
                    f"the middle half of {name}'s times spans {100 * (high - low) / self.median(name):.0f}% of their median"
                )
        # A round counts as the mean of its times, each relative to its contender's median.
        relative = [[ms / self.median(name) for ms in times] for name, times in self.ms.items()]
        rounds = [sum(times) / len(times) for times in zip(*relative)]
        third = len(rounds) // 3
        if third:
            drift = _quantile(rounds[-third:], 0.5) / _quantile(rounds[:third], 0.5) - 1
            if abs(drift) > WIDE_DRIFT:
                found.append(
                    f"the last third of the rounds took {100 * abs(drift):.0f}% {'longer' if drift > 0 else 'less'} than the first"
                )
        return found

    def speedup_interval(self, of: str, over: str, seed: int) -> list[float]:
        """95% interval of `speedup`, by bootstrap over the rounds, in blocks: what disturbs one round often disturbs the next, and until they
        move, weights lie well or badly for all.

        Its ends are the 0.5% and 99.5% quantiles. For few rounds, and for rounds that depend on each other, a bootstrap is too sure of
        itself: with these quantiles equal contenders come out as equal in 95 of 100 runs or more, which is what the 95% promises.
        """
        rows = torch.tensor([self.ms[of], self.ms[over]], dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        rounds = rows.shape[1]
        block = self.block or rounds_a_block(rounds)
        blocks = -(-rounds // block)
        starts = block * torch.randint(blocks, (BOOTSTRAP_DRAWS, blocks, 1), generator=generator)
        drawn = rows[:, (starts + torch.arange(block)).flatten(1)[:, :rounds] % rounds]
        medians = drawn.median(
            dim=2
        ).values  # four times as quick as quantile(0.5), and of an even number the lower of the middle two
        ratios = medians[1] / medians[0]
        return ratios.quantile(torch.tensor([0.005, 0.995], dtype=torch.float64)).tolist()


def rounds_a_block(rounds: float) -> int:
    return int(rounds ** (1 / 3))


def verdict(interval: list[float]) -> str:
    """What a speed-up's interval allows to say."""
    low, high = interval
    return FASTER if low > 1 else SLOWER if high < 1 else AMBIGUOUS


def _quantile(values: list[float], q: float) -> float:
    return torch.tensor(values, dtype=torch.float64).quantile(q).item()


def warm_up(call: Callable[[], object], seconds: float, device: str) -> None:
    """Runs until the time is up, three times at least: module load, handle creation and clock ramps stay out of the samples."""
    stopwatch = Stopwatch(device)
    begin, calls = perf_counter(), 0
    while calls < 3 or perf_counter() - begin < seconds:
        stopwatch(call)
        calls += 1


def host_us(call: Callable[[], object]) -> float:
    """Microseconds until a call has launched its work on an idle GPU: the median of a few."""
    times = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        begin = perf_counter()
        result = call()
        times.append(1e6 * (perf_counter() - begin))
        del result
    return _quantile(times, 0.5)


def measure(
    contenders: dict[str, Callable[[], object]],
    renew: Callable[[float], None],
    device: str,
    seconds_each: float,
    seed: int,
    inspect: Callable[[object], None] | None = None,
    move: Callable[[], None] | None = None,
) -> Samples:
    """Times all contenders in interleaved rounds. `renew(f)` gives the inputs new values, scaled by f, between rounds.

    `move` gives the weights other places in memory, between blocks of rounds; the calls right behind it, which may have to find that out, are
    not timed.

    `inspect` sees what `new` gave in some of the rounds, INSPECTED_ROUNDS at least. Which ones is drawn when the answer is there, so that no
    call can know; such a round gives no samples, as what comes after an inspection is not what comes after a call.
    """
    stopwatch, flush, order = Stopwatch(device), CacheFlush(device), random.Random(seed)
    unforeseen = random.SystemRandom()
    inspected: list[int] = []
    for call in contenders.values():
        warm_up(call, seconds_each / 10, device)

    samples = Samples({name: [] for name in contenders})
    if device == "cuda":
        samples.host_us = {name: host_us(call) for name, call in contenders.items()}
        flush.hide(max(samples.host_us.values()))

    def one_round(look: Callable[[object], None] | None = None) -> dict[str, float]:
        taken = {}
        for name in order.sample(sorted(contenders), len(contenders)):
            flush()
            taken[name] = stopwatch(contenders[name], look if name == "new" else None)
        return taken

    if move:
        begin = perf_counter()
        one_round()
        foreseen = seconds_each * len(contenders) / (perf_counter() - begin)
        samples.block = rounds_a_block(max(MIN_ROUNDS, min(MAX_ROUNDS, foreseen)))
    deadline = perf_counter() + seconds_each * len(contenders)
    to_move = 0
    for turn in itertools.count():
        done = turn - len(inspected)
        enough = done >= MIN_ROUNDS and (perf_counter() > deadline or done >= MAX_ROUNDS)
        if enough and (not inspect or len(inspected) >= INSPECTED_ROUNDS):
            break
        if move and done == to_move:
            move()
            for call in contenders.values():
                stopwatch(call)
            to_move += samples.block

        def look(result, turn=turn):
            if inspect and unforeseen.random() < INSPECTED_SHARE:
                inspected.append(turn)
                inspect(result)

        renew(unforeseen.uniform(0.9, 1.0))
        taken = one_round(look)
        if turn not in inspected:
            for name, ms in taken.items():
                samples.ms[name].append(ms)
    return samples


def peak_memory(call: Callable[[], object]) -> int:
    """Bytes of GPU memory one call takes above what was in use before it, its outputs included."""
    with torch.enable_grad():  # autograd's thread keeps the gradients of its last task until it has another
        one = torch.ones((), device="cuda", requires_grad=True)
        torch.autograd.grad(one.clone(), one)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def in_cuda_graph(call: Callable[[], object]) -> tuple[Callable[[], None], object]:
    """The call captured in a CUDA graph: its replay, and the output every replay overwrites."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph.replay, output
