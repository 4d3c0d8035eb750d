"""Is a ModelNew right? The two gates of `compare`, and the hygiene around them.

The same seed gives the same weights; weights and inputs are drawn anew for every seed (a fresh norm has weight 1 and bias 0: ignoring
them would go unseen); outputs have the Model's type, dtype, shape, stride and device; NaN appears where the Model has it; inputs and
state stay as they were; the answer is the same on every call, in either order, on another stream, after other inputs, and complete when
the call returns; other values, layouts and batch sizes get theirs. Some of the answers given while the clock runs are held against the
Model's too, and which ones is drawn after they were given. Freed and fresh memory is full of NaN whenever the candidate runs, so an element
that nobody wrote shows.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.utils._pytree import tree_flatten

from judge.compare import TOLERANCE, Errors, compare, first_changed, is_constant, same_bits, same_form
from judge.machine import synchronize
from judge.observe import (
    GRADIENT,
    behaviour,
    by_name,
    clone_all,
    expanded_like,
    named_outputs,
    observe,
    perturb,
    poisoned,
    random_like,
    relocate,
    repeated_like,
    snapshot,
    spread_out,
    transposed,
)
from judge.pairs import RAISED, BuildFailed, CandidateRaised, Problem, build_failure, last_line, to_device

SEEDS = 3
MOST_SEEDS = 16  # where gate 2 is not met by few seeds: the largest of a few values is luck, on both sides
LATE = "the answer changes after the call has returned: work goes on elsewhere"
LATE_SECONDS = 2e-3  # how long a thread gets to give itself away by finishing an answer that was already returned
BUFFERS = 8  # a candidate that writes its answers into as many in turns is found out
REST_SECONDS, BUSY = 0.05, 0.1  # who takes more than this part of a core while nobody calls is not at rest


@dataclass
class Case:
    """One examination: this candidate, in this way."""

    problem: Problem
    new_class: type
    device: str
    dtype: torch.dtype
    precision: str
    backward: bool
    batch: int | None
    seed: int
    frozen: bool = False  # ModelNew's freeze_weight() is called after every change of weights
    recorded: bool = False  # timed with gradients recorded, and judged as a forward pass


@dataclass
class Verdict:
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: dict[str, Errors] = field(default_factory=dict)


class Examination:
    """Judges one candidate in one way. `run` before timing, `after_timing` behind it; `verdict` collects what was found."""

    def __init__(self, case: Case, say: Callable[[str], None]):
        self.case = case
        self.say = say
        self.verdict = Verdict()
        self.model: torch.nn.Module | None = None
        self._behaviour: list[tuple] = []  # of the Model, as it was made
        self._weights: dict[str, torch.Tensor] = {}  # of the Model, as they were drawn
        self._apart: dict[str, Errors] = {}  # the distances between timed answers and the Model's
        self.new: torch.nn.Module | None = None
        self.inputs: list = []
        self.answer: dict[str, object] = {}
        self.answer_seed = (
            case.seed
        )  # the last of the seeds: its weights, inputs and answer are kept for the later checks
        self.later_seed = case.seed + MOST_SEEDS
        self.tolerance = TOLERANCE[case.dtype][case.precision]

    def run(self) -> Verdict:
        """Each step adds its reasons; one that finds any ends the examination, as later ones would only echo it. Raises BuildFailed."""
        steps = (
            self._same_start,
            self._seeds,
            self._no_stale_answers,
            self._moved_weights,
            self._other_values,
            self._nan_in_nan_out,
            self._other_grad_mode,
            self._other_stream,
        )
        try:
            for step in steps:
                step()
                if self.verdict.reasons:
                    break
        except CandidateRaised as raised:
            message = build_failure(raised.__cause__)  # of a file that compiles where it is first called
            if message:
                raise BuildFailed(message) from raised
            self._wrong(f"raised {raised}")
        self._same_model()
        return self.verdict

    def while_timed(self, result, expected: Callable[[], object]) -> None:
        """The answer that one timed call has just given: complete, and the Model's for the same inputs. How far from it is kept."""
        given = tree_flatten(result)[0]
        if self._changes_later(given):
            self._wrong(LATE)
        names = [
            name for name in self.answer if name != "structure" and name.startswith(GRADIENT) == self.case.backward
        ]
        for name, mine, theirs in itertools.zip_longest(names, given, tree_flatten(expected())[0]):
            alike = same_form(name, mine, theirs) is None
            if alike and isinstance(theirs, torch.Tensor):
                if theirs.is_floating_point():
                    alike = self.close(name, mine, theirs, self._apart.setdefault(name, Errors()))
                else:
                    alike = torch.equal(mine, theirs)
            if not alike:
                self._wrong("gives another answer than the Model's while being timed")

    def after_timing(self, timed_inputs: list) -> None:
        """The accuracy of the timed answers; they had new inputs in every round: the answer to the last, the old one to the old.

        And what a compiler may make anew for: other layouts, other batches.
        """
        for name, apart in self._apart.items():
            if self.case.dtype != torch.float64 and apart.are_beyond(self.verdict.errors[name], self.case.dtype):
                self._wrong(f"{name} is less accurate while being timed")
        try:
            expected = observe(self.model, timed_inputs, self.case.backward, self.case.seed)
            self._judge("after timing", self._candidate(timed_inputs, self.case.seed), expected, None, {})
            del expected
            self._expect_answer(
                self._candidate(self.inputs, self.answer_seed), "the answer after timing is not the one before it"
            )
            self._other_layouts()
            self._other_batches()
        except CandidateRaised as raised:
            self._wrong(f"raised {raised} after timing")
        self._same_model()
        self._at_rest()

    def _wrong(self, reason: str) -> None:
        if reason not in self.verdict.reasons:
            self.verdict.reasons.append(reason)

    def _fresh_inputs(self, seed: int) -> list:
        case = self.case
        return case.problem.inputs(case.batch, case.device, case.dtype, seed)

    def _candidate(
        self, inputs: list, seed: int, forward_only: bool = False, incoming: Callable = random_like
    ) -> dict[str, object]:
        """What ModelNew gives. Whatever it raises is the candidate's fault and no one else's."""
        try:
            seen = observe(self.new, inputs, self.case.backward and not forward_only, seed, incoming)
            if self._changes_later(list(seen.values())):
                self._wrong(LATE)
            return seen
        except RAISED as error:
            raise CandidateRaised(last_line(error)) from error

    def _changes_later(self, given: list) -> bool:
        """Whether anything writes into the answer after the call has returned: a copy of it as it is now, and again when all is quiet."""
        copies = clone_all(given)  # on a GPU behind the call in its own stream, so work on another one shows
        time.sleep(LATE_SECONDS)
        synchronize(self.case.device)
        return not all(
            same_bits(x.detach(), copied.detach()) for x, copied in zip(given, copies) if isinstance(x, torch.Tensor)
        )

    def _same_model(self) -> None:
        """The Model that answers are held against is the one that was made: nobody gave it another forward, a hook, or other weights."""
        if self.model is not None and behaviour(self.model) != self._behaviour:
            self._wrong("the candidate replaces the Model's forward")
        if self.model is not None and first_changed(self._weights, self.model.state_dict()):
            self._wrong("the candidate writes the Model's weights")

    def _at_rest(self) -> None:
        """Nothing of the candidate's runs on when its calls have returned: a busy thread slows down whoever is timed next."""
        for _ in range(10):  # PyTorch's own threads may take a while to fall asleep
            begin, cpu_begin = time.monotonic(), time.process_time()
            time.sleep(REST_SECONDS)
            if time.process_time() - cpu_begin < BUSY * (time.monotonic() - begin):
                return
        self._wrong("works on after its calls have returned")

    def _same_start(self) -> None:
        """The same seed gives both the same state, in the same order, and each loads the other's, strictly."""
        case = self.case
        self.model = case.problem.make(case.problem.model_class, case.seed)
        self._behaviour = behaviour(self.model)
        try:
            self.new = case.problem.make(case.new_class, case.seed)
        except RAISED as error:
            raise CandidateRaised(last_line(error)) from error
        theirs, mine = self.model.state_dict(), self.new.state_dict()
        if list(theirs) != list(mine):
            self._wrong(f"state_dict: keys are {list(mine)}, the Model's {list(theirs)}")
            return
        trained, trained_there = (
            {name: p.requires_grad for name, p in of.named_parameters()} for of in (self.new, self.model)
        )
        for name in trained_there:
            if trained.get(name) != trained_there[name]:
                what = {
                    True: "a parameter with a gradient",
                    False: "a parameter without a gradient",
                    None: "no parameter",
                }
                self._wrong(f"{name} is {what[trained.get(name)]}, the Model's is {what[trained_there[name]]}")
        for name in theirs:
            if not same_bits(theirs[name], mine[name]):
                self._wrong(f"state_dict: the same seed does not give the Model's {name}")
        try:
            self.new.load_state_dict(theirs, strict=True)
            self.model.load_state_dict(mine, strict=True)
        except RuntimeError as error:
            self._wrong(f"state_dict: strict loading fails: {last_line(error)}")
            return
        self.model.to(device=case.device, dtype=case.dtype)
        self.new.to(device=case.device, dtype=case.dtype)

    def _give_weights(self) -> None:
        self.new.load_state_dict(self.model.state_dict(), strict=True)
        self._freeze()

    def _freeze(self) -> None:
        if self.case.frozen:
            try:
                self.new.freeze_weight()
            except RAISED as error:
                raise CandidateRaised(f"{last_line(error)} in freeze_weight") from error

    def _seeds(self) -> None:
        """Both gates over several seeds, with weights and inputs drawn anew and the two taking turns at going first."""
        case = self.case
        for turn in range(MOST_SEEDS):
            if turn >= SEEDS and not self._over_limit():
                break
            self.answer_seed = seed = case.seed + turn
            self.say(f"checking, seed {turn + 1} of {max(SEEDS, turn + 1)}")
            perturb(self.model, seed)
            self._weights = snapshot(self.model)
            self._give_weights()
            self.answer = {}
            self.inputs = self._fresh_inputs(seed)
            reference = self._reference(self.inputs, seed) if case.dtype != torch.float64 else None
            inputs_before, state_before = clone_all(self.inputs), snapshot(self.new)

            if turn % 2 == 0:
                eager = observe(self.model, self.inputs, case.backward, seed)
                form = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in eager.values()]
                seen = self._poisoned_candidate(seed, form)
            else:
                seen = self._poisoned_candidate(seed, form)
                eager = observe(self.model, self.inputs, case.backward, seed)
            written = first_changed(by_name(inputs_before), by_name(self.inputs))
            written = written or first_changed(state_before, self.new.state_dict())
            if written:
                self._wrong(f"writes {written}, which a forward pass must leave alone")
                return
            del inputs_before, state_before

            # This call ran in deterministic mode, where PyTorch may choose other kernels: gate 1 and the NaN alone. An ordinary one goes
            # through both gates, and from there on every call must give its bits.
            self._judge(f"seed {seed}", seen, eager, None, {})
            if self.verdict.reasons:
                return
            seen = self._candidate(self.inputs, seed)
            self._judge(f"a second call on the same inputs, seed {seed}", seen, eager, reference, self.verdict.errors)
            del eager, reference
            self.answer = {name: x.detach().clone() if isinstance(x, torch.Tensor) else x for name, x in seen.items()}
            del seen
            self._expect_answer(
                self._candidate(self.inputs, seed),
                "a third call on the same inputs gives another answer than the second",
            )
            if turn == 0:
                self._at_rest()
            self._same_model()
            if self.verdict.reasons:
                return
        for complaint in self._over_limit():
            self._wrong(complaint)

    def _over_limit(self) -> list[str]:
        """Gate 2 over all seeds so far."""
        if self.case.dtype == torch.float64:
            return []
        return [
            f"{name}: {complaint}"
            for name, errors in self.verdict.errors.items()
            for complaint in errors.over_limit(self.case.dtype)
        ]

    def _reference(self, inputs: list, seed: int, incoming: Callable = random_like) -> dict[str, object]:
        model = copy.deepcopy(self.model).double()
        inputs = [to_device(x, self.case.device, torch.float64) for x in inputs]
        return observe(model, inputs, self.case.backward, seed, incoming)

    def _poisoned_candidate(self, seed: int, like: list) -> dict[str, object]:
        with poisoned(self.case.device, like):
            return self._candidate(self.inputs, seed)

    def _judge(
        self, when: str, new: dict[str, object], eager: dict[str, object], reference: dict[str, object] | None, pooled: dict[str, Errors],
        exact: Callable[[], dict[str, object]] | None = None, by_gate_two: bool = False, strides: bool = True,
    ) -> None:  # fmt: skip
        """Form, NaN, constancy, gate 1; and adds to the pooled errors of gate 2.

        `exact` gives the answer in float64: who is nearer to it than the Model is not wrong for being far from the Model, whose own error
        may be above the tolerance in a sum that nearly vanishes. `by_gate_two`: nor is who is as near as gate 2 asks, for values at which
        the tolerance has no meaning.
        """
        if list(new) != list(eager):
            self._wrong(f"gives {len(new)} outputs, the Model {len(eager)}")
            return
        for name, expected in eager.items():
            complaint = same_form(name, new[name], expected, strides)
            if complaint:
                self._wrong(complaint)
                continue
            if not isinstance(expected, torch.Tensor):
                continue
            if not expected.is_floating_point():
                if not torch.equal(new[name], expected):
                    self._wrong(
                        f"{name} differs ({when}): {int((new[name] != expected).sum())} of {expected.numel()} elements"
                    )
                continue
            errors = pooled.setdefault(name, Errors())
            scale = _scale_of(name, expected)
            found = compare(
                new[name].detach(), expected.detach(), reference and reference[name], self.tolerance, scale, errors
            )
            if found.wrong and exact and not found.nan_disagrees and self.case.dtype != torch.float64:
                errors = Errors()
                compare(new[name].detach(), expected.detach(), exact()[name], self.tolerance, scale, errors)
                nearer = errors.new_max <= errors.eager_max and errors.new_squares <= errors.eager_squares
                if nearer or (by_gate_two and not errors.over_limit(self.case.dtype)):
                    continue
            if found.nan_disagrees:
                self._wrong(
                    f"{name} ({when}): {found.nan_disagrees} of {expected.numel()} elements are NaN in one and not in the other"
                )
            if found.wrong and is_constant(new[name]) and not is_constant(expected):
                self._wrong(f"{name} ({when}): constant, the Model's is not")
            if found.wrong:
                self._wrong(
                    f"{name} ({when}): {found.wrong} of {expected.numel()} elements are not close to the Model's, "
                    f"largest difference {found.largest:.2e} (tolerance {self.tolerance * scale:.1e})"
                )

    def _expect_answer(self, seen: dict[str, object], complaint: str) -> None:
        if list(seen) != list(self.answer) or not all(
            self._repeated(name, seen[name], before) for name, before in self.answer.items()
        ):
            self._wrong(complaint)

    def _repeated(self, name: str, seen, before) -> bool:
        """The same bits as before. Where the Model itself cannot keep them (cuDNN's gradients may differ from call to call), close to it."""
        if same_form(name, seen, before):
            return False
        if not isinstance(before, torch.Tensor) or same_bits(seen.detach(), before):
            return True
        return not self._model_repeats(name) and self.close(name, seen, before)

    def _model_repeats(self, name: str) -> bool:
        """Whether the Model gives the same bits three times."""
        first = observe(self.model, self.inputs, self.case.backward, self.answer_seed)[name]
        again = (observe(self.model, self.inputs, self.case.backward, self.answer_seed)[name] for _ in range(2))
        return all(same_bits(first.detach(), other.detach()) for other in again)

    def close(self, name: str, new: torch.Tensor, eager: torch.Tensor, apart: Errors | None = None) -> bool:
        """Gate 1 for one tensor; how far it is from the Model's is added to `apart`."""
        return not compare(
            new.detach(), eager.detach(), None, self.tolerance, _scale_of(name, eager), apart or Errors()
        ).wrong

    def _no_stale_answers(self) -> None:
        """An answer stays what it was when other inputs come, and those get an answer of their own."""
        self.say("checking repeated calls")
        case = self.case
        seed = self.later_seed
        kept = self._candidate(self.inputs, self.answer_seed)
        self._expect_answer(kept, "a later call on the same inputs gives another answer")
        if self.verdict.reasons:
            return
        others = self._fresh_inputs(seed)
        seen = self._candidate(others, seed)
        for _ in range(BUFFERS):
            self._candidate(others, seed)
        self._expect_answer(kept, "an earlier answer changed when called again: the output's memory is reused")
        del kept
        self._judge("other inputs in between", seen, observe(self.model, others, case.backward, seed), None, {})
        self._expect_answer(
            self._candidate(self.inputs, self.answer_seed), "the answer changed after other inputs in between"
        )

    def move(self) -> None:
        """The weights of both to other places in memory, in pairs of places that change from call to call."""
        relocate(self.model, self.new)
        self._freeze()

    def _moved_weights(self) -> None:
        """The answer does not depend on where the weights lie: `.to` moves them, and so does timing."""
        self.move()
        moved = self._candidate(self.inputs, self.answer_seed)
        self._expect_answer(moved, "the answer changes when the weights move in memory, as .to moves them")

    def _other_values(self) -> None:
        """Inputs and parameters of both signs, and larger ones: not those alone that a benchmark draws, where the Model has finite answers."""
        case, seed = self.case, self.later_seed
        perturb(self.model, seed, signs=True)
        inputs = self._fresh_inputs(seed)
        with torch.no_grad():
            spread_out(inputs, seed)
        try:
            expected = observe(self.model, inputs, case.backward, seed)
        except Exception:
            expected = {}
        if all(bool(x.isfinite().all()) for x in expected.values() if isinstance(x, torch.Tensor)) and expected:
            self._give_weights()
            seen = self._candidate(inputs, seed)
            self._judge(
                "values of both signs",
                seen,
                expected,
                None,
                {},
                lambda: self._reference(inputs, seed),
                by_gate_two=True,
            )
        self.model.load_state_dict(self._weights)
        self._give_weights()

    def _other_layouts(self) -> None:
        """The same values at other strides, and an incoming gradient that is expanded: the same answer. Who refuses them is not wrong.

        The Model gets all of it dense: where the incoming gradient is transposed, PyTorch 2.13 on a CPU gives wrong gradients of the instance
        norm of 4 x 1 x 1 x 64 values.
        """
        case, seed = self.case, self.later_seed
        inputs = self._fresh_inputs(seed)
        try:
            observe(self.model, transposed(inputs), False, seed)
        except Exception:
            return
        expected = observe(self.model, inputs, case.backward, seed, repeated_like)
        try:
            seen = self._candidate(transposed(inputs), seed, incoming=expanded_like)
        except CandidateRaised as raised:
            self.verdict.notes.append(f"refuses inputs of other strides: {raised}")
            return
        exact = partial(self._reference, inputs, seed, repeated_like)
        self._judge("inputs of other strides", seen, expected, None, {}, exact, strides=False)

    def _other_batches(self) -> None:
        """Other numbers of samples get their answers too, unless the Model itself refuses them.

        Last of all: what torch.compile made for one size it may replace by something for all, of other speed and other bits.
        """
        case, seed = self.case, self.later_seed
        if case.batch is None:
            return
        for batch in sorted({1, case.batch - case.batch // 3, case.batch + 1} - {case.batch}):
            inputs = case.problem.inputs(batch, case.device, case.dtype, seed)
            try:
                expected = observe(self.model, inputs, case.backward, seed)
            except Exception:
                continue
            self._judge(
                f"batch {batch}",
                self._candidate(inputs, seed),
                expected,
                None,
                {},
                lambda: self._reference(inputs, seed),
            )

    def _nan_in_nan_out(self) -> None:
        """One NaN in each input: it spreads as far as it does in the Model, and no further."""
        seed = self.later_seed
        inputs = self._fresh_inputs(seed)
        position = random.Random(seed)
        for x in inputs:
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel():
                with torch.no_grad():
                    x[tuple(position.randrange(size) for size in x.shape)] = float("nan")
        try:
            expected = observe(self.model, inputs, False, seed)
        except Exception:
            return
        self._judge("one NaN in each input", self._candidate(inputs, seed, forward_only=True), expected, None, {})

    def _other_grad_mode(self) -> None:
        """The forward answer does not depend on whether gradients are recorded."""
        case, seed = self.case, self.answer_seed
        when = "without gradients" if case.backward else "with gradients"
        expected = observe(self.model, self.inputs, False, seed)
        try:
            with torch.set_grad_enabled(not case.backward):
                result = named_outputs(self.new(*self.inputs))
        except RAISED as error:
            raise CandidateRaised(f"{last_line(error)} ({when})") from error
        self._judge(when, result, expected, None, {})
        differentiable = any(isinstance(out, torch.Tensor) and out.requires_grad for out in result.values())
        if not case.backward and not differentiable and any(p.requires_grad for p in self.model.parameters()):
            self.verdict.notes.append("outputs carry no gradient, the Model's do")

    def _other_stream(self) -> None:
        """On a stream that is not the default one: inputs that are written late there, and outputs that are read there only."""
        if self.case.device != "cuda":
            return
        self.say("checking on another stream")
        late = [
            torch.full_like(x, float("nan")) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in self.inputs
        ]
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        busy = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(stream):
            for _ in range(64):
                busy.zero_()  # milliseconds of work ahead: whoever does not wait for this stream reads the NaN
            for target, source in zip(late, self.inputs):
                if target is not source:
                    target.copy_(source)
            try:
                seen = observe(self.new, late, self.case.backward, self.answer_seed)
            except RAISED as error:
                raise CandidateRaised(f"{last_line(error)} (on another stream)") from error
            seen = dict(zip(seen, clone_all(list(seen.values()))))
        stream.synchronize()
        self._expect_answer(
            seen, "on a stream that is not the default one the answer differs: work is launched elsewhere"
        )


def _scale_of(name: str, tensor: torch.Tensor) -> float:
    """A gradient sums over a batch: where it is large, an error counts relative to the size of them all."""
    if not name.startswith(GRADIENT) or not tensor.numel():
        return 1.0
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float64).item()
    if not math.isfinite(norm):
        norm = torch.linalg.vector_norm(tensor.nan_to_num(0.0, 0.0, 0.0), dtype=torch.float64).item()
    return max(1.0, norm / tensor.numel() ** 0.5)
