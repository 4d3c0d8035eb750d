"""One pair from import to records: judged, timed, held against the floor, once for every dtype, precision and direction asked for."""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils._pytree import tree_flatten, tree_map

from judge import machine, timing
from judge.correctness import Case, Examination
from judge.guard import Guard
from judge.observe import GRADIENT, clone_all, random_like, unforeseen
from judge.pairs import RAISED, BuildFailed, CandidateRaised, Pair, Problem, last_line, load_new, raised_in
from judge.roof import Ceilings, Load, count_work

OK, WRONG, BUILD = "ok", "wrong", "build failed"
COMPILE_MODES = {"compile": None, "max-autotune": "max-autotune"}
BASELINES = ("eager", *COMPILE_MODES, "cudagraph")
# Contenders whose every call allocates what it needs; a CUDA graph holds its memory from capture on.
OWN_ALLOCATIONS = ("new", "eager", "compile")
ABOVE_FLOOR = "above 100% of the floor, whose bandwidth is copy_'s: a kernel that beats copy_ by a few percent, a size that stays in the caches, or an error"


DIRECTIONS = ("forward", "forward_recorded", "forward_backward")  # the last two by --backward


@dataclass
class Settings:
    load: Load
    baselines: list[str]
    seed: int
    seconds_each: float
    frozen: bool = False


@dataclass
class Entry:
    """A pair that will run: its Model is loaded, its batch chosen. `failure` says why the Model's file is of no use."""

    pair: Pair
    problem: Problem | None = None
    batch: int | None = None
    failure: str | None = None


@dataclass
class Run:
    """One record, as it goes into the JSON file."""

    model: str
    source_sha256: str
    device: str
    dtype: str
    precision: str
    direction: str
    seed: int
    batch: int | None
    frozen: bool = False  # with ModelNew's freeze_weight() called
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
    host_us: dict[str, float] = field(
        default_factory=dict
    )  # until a call has launched its work on a GPU; no part of `ms`
    rounds: int = 0
    speedup: dict[str, float] = field(default_factory=dict)
    speedup_ci: dict[str, list[float]] = field(default_factory=dict)
    verdict: dict[str, str] = field(default_factory=dict)  # FASTER, SLOWER or AMBIGUOUS than each, by the interval
    clocks: dict[str, dict | None] = field(default_factory=dict)  # `before` and `after` the timing, on a GPU
    interference: list[str] = field(default_factory=list)  # what says that something else ran meanwhile
    roof: dict = field(default_factory=dict)
    peak_memory: dict[str, int] = field(default_factory=dict)
    scaling: dict = field(default_factory=dict)  # over several processes, by judge.distributed

    def reject(self, reasons: list[str], status: str = WRONG) -> None:
        if reasons:
            self.status, self.ok = status, False
            self.reasons += [_without_paths(reason) for reason in reasons]


def _without_paths(text: str) -> str:
    """Records travel: they name files, not the folders of the machine that wrote them."""
    for folder in (Path(__file__).resolve().parent.parent, Path.home()):
        text = text.replace(f"{folder}/", "")
    return text


def judge_pair(entry: Entry, settings: Settings, ceilings: Ceilings, say: Callable[[str], None]) -> list[Run]:
    """All records of one pair. Never raises for what a pair does wrong."""
    load = settings.load
    directions = DIRECTIONS if load.backward else DIRECTIONS[:1]
    ways = [(dtype, level, direction) for dtype in load.dtypes for level in load.precisions for direction in directions]
    runs = [
        Run(
            model=entry.pair.name,
            source_sha256=entry.pair.source_sha256(),
            device=load.device,
            dtype=machine.DTYPE_NAMES[dtype],
            precision=level,
            direction=direction,
            seed=settings.seed,
            batch=entry.batch,
            constants=entry.problem.constants if entry.problem else {},
        )
        for dtype, level, direction in ways
    ]

    def reject_all(reasons: list[str], status: str = WRONG) -> list[Run]:
        for run in runs:
            run.reject(reasons, status)
        return runs

    if entry.failure:
        return reject_all([entry.failure])
    guard, compiler = Guard(entry.problem), CompilerSettings(settings.baselines)
    say(f"importing {entry.pair.new_path.name}")
    try:
        new_class, import_seconds = load_new(entry.pair.new_path)
    except BuildFailed as failed:
        return reject_all([f"build failed: {failed}"], BUILD)
    except CandidateRaised as raised:
        return reject_all([f"raised {raised} at import"])
    finally:
        meddling = guard.check()
    if meddling:
        return reject_all([f"the candidate {complaint}" for complaint in meddling])

    for run, (dtype, level, direction) in zip(runs, ways):
        run.import_seconds = round(import_seconds, 3)
        run.frozen = settings.frozen and hasattr(new_class, "freeze_weight")
        backward, recorded = direction == "forward_backward", direction == "forward_recorded"
        case = Case(
            entry.problem,
            new_class,
            load.device,
            dtype,
            level,
            backward,
            entry.batch,
            settings.seed,
            run.frozen,
            recorded,
        )
        prefix = f"{run.dtype} {run.precision} {run.direction}" + ("" if run.batch is None else f", batch {run.batch}")
        with machine.precision(level):
            _judge_way(run, case, settings, compiler, ceilings, lambda text, prefix=prefix: say(f"{prefix}: {text}"))
        machine.release(load.device)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
    return runs


class CompilerSettings:
    """torch.compile's settings before a candidate's file is loaded, where it is among the baselines; it is to be its rival as it was then."""

    def __init__(self, baselines: list[str]):
        self._saved = []
        if set(baselines) & set(COMPILE_MODES):
            with contextlib.suppress(Exception):  # a PyTorch that cannot compile here says so when it is asked to
                import torch._dynamo
                import torch._inductor.config

                self._saved = [
                    (config, self._settings(config)) for config in (torch._dynamo.config, torch._inductor.config)
                ]

    @staticmethod
    def _settings(config) -> dict:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of settings that PyTorch is about to drop
            values = {name: getattr(config, name, ...) for name in config._config}
        return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str, type(None)))}

    def put_back(self) -> None:
        for config, saved in self._saved:
            now = self._settings(config)
            for name in saved:
                if now.get(name, ...) != saved[name]:
                    setattr(config, name, saved[name])


def _judge_way(
    run: Run, case: Case, settings: Settings, compiler: CompilerSettings, ceilings: Ceilings, say: Callable[[str], None]
) -> None:
    """Right? How fast? How far from the limit? A wrong answer's speed has no meaning and is not measured."""
    guard, examination = Guard(case.problem), Examination(case, say)
    try:
        verdict = examination.run()
        run.shapes = [list(x.shape) for x in examination.inputs if isinstance(x, torch.Tensor)]
        run.reject(verdict.reasons + [f"the candidate {complaint}" for complaint in guard.check()])
        for name, errors in verdict.errors.items():
            if name.startswith(GRADIENT):
                run.gradient_error[name[len(GRADIENT) :]] = errors.as_dict(case.dtype)
        run.error = _worst(
            [errors.as_dict(case.dtype) for name, errors in verdict.errors.items() if not name.startswith(GRADIENT)]
        )
        if run.ok:
            known = len(verdict.reasons)
            _time(run, case, settings, compiler, examination, say)
            run.reject(verdict.reasons[known:] + [f"the candidate {complaint}" for complaint in guard.check()])
        run.notes += verdict.notes
    except CandidateRaised as raised:
        run.reject([f"raised {raised}"])
    except BuildFailed as failed:
        run.reject([f"build failed: {failed}"], BUILD)
    except RAISED as error:  # the other pairs still run
        whose = "raised" if raised_in(case.new_class, error) else "the Model itself raised"
        run.reject([f"{whose} {last_line(error)}"])
    if run.ok:
        _set_roof(run, case, ceilings, say)


def _worst(errors: list[dict]) -> dict:
    """Of several outputs, the largest of each figure."""
    if not errors:
        return {}
    return {key: None if errors[0][key] is None else max(each[key] for each in errors) for key in errors[0]}


def _time(
    run: Run,
    case: Case,
    settings: Settings,
    compiler: CompilerSettings,
    examination: Examination,
    say: Callable[[str], None],
) -> None:
    inputs = clone_all(examination.inputs)
    if case.backward or case.recorded:
        for x in inputs:
            if isinstance(x, torch.Tensor):
                x.requires_grad_(x.is_floating_point())

    def renew(factor: float) -> None:
        with torch.no_grad():
            for x, drawn in zip(
                inputs, case.problem.inputs(case.batch, case.device, case.dtype, unforeseen.getrandbits(31))
            ):
                if isinstance(x, torch.Tensor):
                    x.copy_(drawn)
                    if x.is_floating_point():
                        x.mul_(factor)  # for a file whose inputs are always the same

    def inspect(result) -> None:
        examination.while_timed(
            result, lambda: step_of(examination.model, inputs, case)(examination.model, examination.model)
        )

    with torch.set_grad_enabled(case.backward or case.recorded):
        contenders = _contenders(run, case, settings, compiler, examination, inputs, say)
        say(f"timing {', '.join(contenders)}")
        clocks_before = machine.clocks(case.device)
        move = (
            None if "new_cudagraph" in contenders else examination.move
        )  # a captured graph knows the addresses that were
        samples = timing.measure(contenders, renew, case.device, settings.seconds_each, settings.seed, inspect, move)
        if case.device == "cuda":
            run.clocks = {"before": clocks_before, "after": machine.clocks(case.device)}
        run.interference = [*samples.interference(), *_foreign_load(run)]
        if case.device == "cuda":
            run.peak_memory = {
                name: timing.peak_memory(contenders[name]) for name in contenders if name in OWN_ALLOCATIONS
            }
    examination.after_timing(inputs)

    run.rounds = len(samples.ms["new"])
    run.host_us = {name: _tidy(us) for name, us in samples.host_us.items()}
    for name in contenders:
        run.ms[name] = _tidy(samples.median(name))
        run.spread[name] = [_tidy(q) for q in samples.spread(name)]
    if run.host_us and run.host_us["new"] > 1e3 * run.ms["new"]:
        times = ", ".join(f"{name} {us:.0f}" for name, us in run.host_us.items())
        run.notes.append(
            f"the host takes longer to launch a call than the GPU for its work; the host's microseconds: {times}"
        )
    for name in contenders:
        if not name.startswith("new"):
            run.speedup[name] = _tidy(samples.speedup("new", over=name))
            run.speedup_ci[name] = [_tidy(q) for q in samples.speedup_interval("new", over=name, seed=settings.seed)]
            run.verdict[name] = timing.verdict(run.speedup_ci[name])


def _foreign_load(run: Run) -> list[str]:
    """What the GPU itself says of others on it, and of clocks held down."""
    if run.device != "cuda":
        return []
    others = machine.other_gpu_processes()
    signs = [f"{others} other processes compute on this GPU"] if others else []
    throttle = (run.clocks["after"] or {}).get("throttle")
    return signs + ([f"the GPU's clocks are held down: {throttle}"] if throttle else [])


def _contenders(
    run: Run,
    case: Case,
    settings: Settings,
    compiler: CompilerSettings,
    examination: Examination,
    inputs: list,
    say: Callable[[str], None],
) -> dict[str, Callable[[], object]]:
    """A call for each contender that works here; why another does not is noted."""
    model, new = examination.model, examination.new
    step = step_of(model, inputs, case)

    def new_call():
        try:
            return step(new, new)
        except RAISED as error:
            raise CandidateRaised(f"{last_line(error)} while being timed") from error

    contenders: dict[str, Callable[[], object]] = {"new": new_call}
    for name in settings.baselines:
        if name == "eager":
            contenders[name] = lambda: step(model, model)
        elif name in COMPILE_MODES:
            say(f"compiling the Model ({name})")
            compiler.put_back()
            owner = model
            try:
                if name == "max-autotune":  # it replays CUDA graphs, and would copy inputs that may move; these do not
                    owner = copy.deepcopy(model)  # and whose weights stay where they are
                    for x in inputs:
                        if isinstance(x, torch.Tensor):
                            torch._dynamo.mark_static_address(x)
                compiled = torch.compile(owner, mode=COMPILE_MODES[name], dynamic=False)
                step(compiled, owner)
                contenders[name] = lambda compiled=compiled, owner=owner: step(compiled, owner)
            except Exception as error:
                run.notes.append(_without_paths(f"no {name} baseline: {last_line(error)}"))
        elif case.device != "cuda":
            run.notes.append("no new_cudagraph: there are no CUDA graphs on a CPU")
        else:
            say("capturing ModelNew in a CUDA graph")
            try:
                contenders["new_cudagraph"] = _captured(new_call, examination)
            except Exception as error:
                run.notes.append(_without_paths(f"no new_cudagraph: {last_line(error)}"))
    return contenders


def step_of(model: torch.nn.Module, inputs: list, case: Case) -> Callable[[torch.nn.Module, torch.nn.Module], object]:
    """What is timed: a forward pass, or that and the gradients of inputs and of `owner`'s parameters for random incoming ones."""
    wanted_inputs = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    if case.recorded:  # a forward pass that autograd records, as in training and in KernelBench's own timing
        return lambda module, owner: tree_map(
            lambda x: x.detach() if isinstance(x, torch.Tensor) else x, module(*inputs)
        )
    if not case.backward or not (wanted_inputs or any(p.requires_grad for p in model.parameters())):
        return lambda module, owner: module(*inputs)
    incoming = random_like(_differentiable(model(*inputs)), case.seed)

    def forward_backward(module: torch.nn.Module, owner: torch.nn.Module):
        roots = _differentiable(module(*inputs))
        wanted = [*wanted_inputs, *(p for p in owner.parameters() if p.requires_grad)]
        return torch.autograd.grad(roots, wanted, incoming, allow_unused=True)

    return forward_backward


def _differentiable(result) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _captured(call: Callable[[], object], examination: Examination) -> Callable[[], object]:
    replay, output = timing.in_cuda_graph(call)
    replay()
    for replayed, expected in zip(tree_flatten(output)[0], tree_flatten(call())[0]):
        if isinstance(expected, torch.Tensor) and not examination.close(GRADIENT, replayed, expected):
            raise RuntimeError("its replay gives another answer")
    return replay


def _set_roof(run: Run, case: Case, ceilings: Ceilings, say: Callable[[str], None]) -> None:
    try:
        work = count_work(case.problem, case.batch, case.dtype, case.backward)
    except Exception as error:
        run.notes.append(f"no floor: the Model does not run on the meta device: {last_line(error)}")
        return
    run.roof = {"bytes": work.bytes, "flops": work.flops}
    update_floor(run, ceilings)
    if run.roof["percent"] > 100:
        say("above 100% of the floor: measuring the ceilings again")
        ceilings.measure()
        update_floor(run, ceilings)
    if run.roof["percent"] > 100:
        run.notes.append(ABOVE_FLOOR)


def update_floor(run: Run, ceilings: Ceilings) -> None:
    """The floor and how near the candidate is, by the ceilings as they stand now."""
    if run.roof:
        floor = ceilings.floor_ms(run.roof["bytes"], run.roof["flops"], machine.DTYPES[run.dtype], run.precision)
        run.roof.update(floor_ms=_tidy(floor), percent=_tidy(100 * floor / run.ms["new"]))


def _tidy(value: float) -> float:
    """Six digits: more than any clock here has."""
    return float(f"{value:.6g}")
