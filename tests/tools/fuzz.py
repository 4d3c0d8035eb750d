"""Random valid cases of the pairs, judged as the tests judge: against the Model in float64, and eager's error there.

    python tests/tools/fuzz.py [--pair NAME,...] [--cases 10000] [--device cuda] [--seconds 300]

A case is a shape, a dtype, and a kind of values and a place in memory for each input and parameter, all drawn from
(pair, seed, index). In three quarters the output is judged, in the others the gradients. The pair's own operators take
some, the plain path the rest; the last lines say how many. For a file of kernels/hopper most shapes are drawn from what
its operators take. For each miss one line is printed: the command that repeats it, and what is wrong; a case that hangs
or ends its process is a miss. Exit code 1 if there was one. The pairs take turns; after `--seconds` no more are begun.
Each process has one thread and, on a GPU, a context of its own.
"""

import argparse
import copy
import functools
import itertools
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in conftest.py: small cases mostly wait for their threads
sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]

import torch
import torch.nn.functional as F
from accuracy import Inaccurate, assert_as_accurate_as_eager, assert_same_form, draws
from cases import DTYPES, LAYOUTS, PORTABLE, STEMS, Case, Recorder, converted, fits, in_float64, problem_of, solution
from processes import visible_gpus
from test_gradients import ROUNDINGS, differentiable
from workers import in_processes

# Of shapes. Sizes stand around the powers of two that vectors are made of.
SIZES = [*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65]
BATCHES = [0, 1, 1, 2, 2, 3, 4, 5, 9]
HOPPERS = 0.9  # of the shapes for a file of kernels/hopper, the share drawn from what its operators take


def images(r: random.Random, on_hopper: bool) -> tuple:
    features, height, width = r.randint(1, 6), r.choice(SIZES), r.choice(SIZES)
    if r.random() < 0.02:
        height, width = r.choice([(33, 1000), (130, 131), (1, 20000), (512, 512)])
    if height * width == 1:
        width = 2
    channels = features if r.random() < 0.9 else r.randint(1, 6)
    image = (channels, height, width)
    return (features,), (image if r.random() < 0.1 else (r.choice(BATCHES), *image),)


def product(r: random.Random, outs: int, on_hopper: bool) -> tuple[int, int, int]:
    """Rows, input and output features: a few, or 2^30 products at least, which a GPU's kernels for large ones take."""
    if r.random() < (1 - HOPPERS if on_hopper else 0.98):
        return r.choice(BATCHES), r.choice([0, *SIZES]), outs
    ins, outs = 4 * r.randint(128, 512), 64 * r.randint(8, 32)
    if on_hopper and r.random() < 0.9:
        ins += ins % 8  # whole packs of 16 bits
    return 2**30 // (ins * outs) + r.randint(1, 300), ins, outs


def rows_and_residuals(r: random.Random, on_hopper: bool) -> tuple:
    outs = r.choice([1 + r.choice(SIZES), 8 * r.randint(3, 20), 8 * r.randint(3, 20)])
    if r.random() < 0.02:
        outs = r.choice([1023, 1025, 5000, 20000])
    batch, ins, outs = product(r, outs, on_hopper)
    whole = [(batch, outs)] * (60 if on_hopper else 15)
    y = r.choice(whole + [(outs,), (1, outs), (batch, 1), (1,), ()])
    return (ins, outs, *r.choice([(), (), (), (1e-3,), (0.5, 0.3), (1e-12,)])), ((batch, ins), y)


def grouped_rows(r: random.Random, on_hopper: bool) -> tuple:
    groups, size = r.choice(SIZES[:12]), r.choice([*SIZES, *[8, 16, 32, 64, 128] * 6])
    if r.random() < 0.02:
        size = r.choice([1023, 1025, 5000, 20000]) // groups + 1
    batch, ins, outs = product(r, groups * size, on_hopper)
    if outs != groups * size:  # a large product
        groups = outs // 64
    if batch * outs == groups:
        batch = 2  # PyTorch refuses a single value
    usual = [(outs,)] * (60 if on_hopper else 15)
    bias = r.choice(usual + [(1, outs), (batch, 1), (batch, outs), (1,), ()])
    return (ins, outs, groups, bias), ((batch, ins),)


def convolved(r: random.Random, on_hopper: bool) -> tuple:
    if on_hopper and r.random() < HOPPERS:
        return small_convolved(r)
    batch, ins, groups, size = r.choice(BATCHES), r.randint(1, 8), r.randint(1, 6), r.randint(1, 5)
    kernel = r.choice([3] * 9 + [1, 2, 5, (1, 3), (3, 1), (2, 4)])
    high, wide = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    rows, columns = (r.choice([*SIZES[:15], *range(6, 41, 2)]) for _ in range(2))  # of the output
    if r.random() < 0.02:
        rows, columns = r.choice([(130, 131), (1, 8000), (254, 254)])
    if batch * size * rows * columns == 1:
        columns = 2
    outs = groups * size
    whole = (outs, rows, columns)
    operands = [(outs, 1, 1)] * 50 + [(batch, outs, 1, 1), (1, outs, 1, 1), whole, (batch, *whole)]
    operands += [(columns,), (rows, 1), (1,), ()]
    image = (batch, ins, rows + high - 1, columns + wide - 1)
    return (ins, outs, kernel, groups, r.choice(operands), r.choice(operands)), (image,)


def small_convolved(r: random.Random) -> tuple:
    """What hopper/conv_sigmoid_group_norm takes: mostly images of a few blocks, and some near the largest ones."""
    batch, ins, groups, size = r.choice(BATCHES), r.randint(1, 8), r.randint(1, 8), r.randint(1, 4)
    rows, columns = r.randint(1, 64), 2 * r.randint(1, 40)  # of the output
    if r.random() < 0.03:
        rows, columns = r.randint(100, 264), 2 * r.randint(60, 175)
    if columns % 4 != 0:  # a multiple of 4 pixels
        rows += rows % 2
    outs = groups * size
    return (ins, outs, 3, groups, (outs, 1, 1), (outs, 1, 1)), ((batch, ins, rows + 2, columns + 2),)


SHAPES = {
    "instance_norm": images,
    "linear_instance_norm_residual": rows_and_residuals,
    "linear_swish_group_norm": grouped_rows,
    "conv_sigmoid_group_norm": convolved,
}


def with_some(value: float) -> Callable:
    """One to three of the elements replaced."""

    def replaced(z: torch.Tensor, info: torch.finfo, r: random.Random) -> torch.Tensor:
        z = z.clone()
        for _ in range(r.randint(1, 3) if z.numel() else 0):
            z.view(-1)[r.randrange(z.numel())] = value
        return z

    return replaced


# From standard normal values in float64; what does not fit the dtype is cut to its largest number.
VALUES: dict[str, Callable] = {
    "ordinary": lambda z, info, r: z,
    "uniform": lambda z, info, r: torch.special.ndtr(z),
    "few different": lambda z, info, r: z.round(),
    "zero": lambda z, info, r: z * 0,
    "constant": lambda z, info, r: torch.full_like(z, r.choice([-1, 1]) * 10 ** r.uniform(-4, 4)),
    "of tiny variance": lambda z, info, r: 10 ** r.uniform(-2, 3) * (1 + 4 * info.eps * z),
    "far from zero": lambda z, info, r: z + r.choice([-1, 1]) * 10 ** r.uniform(2, 6),
    "of all magnitudes": lambda z, info, r: z * 10 ** (6 * torch.rand_like(z) - 3),
    "subnormal": lambda z, info, r: z * info.tiny / 4,
    # Nothing is finer than float64: there the squares of products must fit too, or nobody could say what is right.
    "huge": lambda z, info, r: z * (info.max / 16 if info.bits < 64 else 1e50),
    "large": lambda z, info, r: z * min(info.max**0.8, 1e30),  # 1e30 in float32, 7000 in float16
    "with an outlier": with_some(1e4),
    "with NaN": with_some(torch.nan),
    "with Inf": with_some(torch.inf),
    "with -Inf": with_some(-torch.inf),
}

# Of equal values float64's own result is the rounding of their mean, and nothing finer tells how large it may be; they
# are left to tests/test_forward.py, which knows; and their gradients to nobody. Whether a huge one overflows is luck.
EQUAL = ["zero", "constant", "of tiny variance", "subnormal"]


def drawn(kind: str, like: torch.Tensor, r: random.Random) -> torch.Tensor:
    """Values of a kind in another tensor's shape, dtype and device; the same on every device."""
    info = torch.finfo(like.dtype)
    values = VALUES[kind](torch.randn(like.shape, dtype=torch.float64), info, r)
    return torch.where(values.isinf(), values, values.clamp(-info.max, info.max)).to(like)


def placed(t: torch.Tensor, r: random.Random) -> torch.Tensor:
    """The same values with the dimensions in any order in memory, with gaps, at any offset; NaN stands all around."""
    strides, stride = [0] * t.dim(), r.choice([1, 1, 2])
    for dim in r.sample(range(t.dim()), t.dim()):
        strides[dim] = stride
        stride = stride * max(t.shape[dim], 1) + r.choice([0, 0, 1, 3])
    offset = r.randrange(9)
    room = t.new_full((offset + stride + 8,), torch.nan)
    return room.as_strided(t.shape, strides, offset).copy_(t)


def laid(t: torch.Tensor, layouts: list[Callable], r: random.Random, as_it_is: int = 4) -> torch.Tensor:
    """One of `layouts`, or at any place, or, `as_it_is` times as often as either, as it is."""
    return r.choice([*[lambda t: t] * as_it_is, lambda t: placed(t, r), r.choice(layouts)])(t)


def moved(t: torch.Tensor, device) -> torch.Tensor:
    """The same memory on another device, gaps and offset and all: one copy, which nobody waits for."""
    everything = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())
    there = everything.to(device, non_blocking=True).as_strided(t.shape, t.stride(), t.storage_offset())
    return torch._neg_view(there) if t.is_neg() else there


@torch.no_grad()
def undecided(model: torch.nn.Module, inputs: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each value of the Model's output, whether a rounding makes NaN, an infinity or a number of it; and whether NaN
    or either infinity.

    So it is with what depends on a sum of products that passes the dtype's largest number in some order of its terms,
    which becomes NaN and spreads as far as NaN does in the Model; and with an infinite weight of a norm where the
    normalised value or, since PyTorch multiplies before it subtracts, the group's mean is too near zero to have a sign:
    the second kind. (The norms are what the Models end with.)
    """
    exact, given, info, signless = in_float64(model), {}, torch.finfo(inputs[0].dtype), []

    def overflowing(layer, layer_inputs, out):
        magnitudes = copy.deepcopy(layer)
        magnitudes._forward_hooks.clear()
        for t in magnitudes.parameters():
            t.copy_(t.abs().nan_to_num(0, 0))
        return out.masked_fill(magnitudes(layer_inputs[0].abs().nan_to_num(0, 0)) > info.max, torch.nan)

    def without_sign(norm, norm_inputs, out, name):
        normed, rounded = (
            F.group_norm(t, norm.num_groups, eps=norm.eps).unflatten(1, (norm.num_groups, -1))
            for t in (*norm_inputs, given[name])
        )
        error = (normed - rounded).abs().flatten(2).amax(2).view(*normed.shape[:2], *[1] * (normed.dim() - 2))
        values = norm_inputs[0].unflatten(1, (norm.num_groups, -1)).flatten(2)
        mean = (values.mean(2) / values.std(2)).view_as(error)
        near = (torch.fmin(normed.abs(), mean.abs()) <= 2 * error + info.eps).flatten(1, 2)
        signless.append(near & norm.weight.isinf().view(-1, *[1] * (out.dim() - 2)))

    for (name, layer), original in zip(exact.named_modules(), model.modules()):
        if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)):
            layer.register_forward_hook(overflowing)
        elif isinstance(layer, torch.nn.GroupNorm):
            original.register_forward_pre_hook(lambda norm, values, name=name: given.update({name: values[0]}))
            layer.register_forward_hook(functools.partial(without_sign, name=name))
    model(*inputs)
    for layer in model.modules():
        layer._forward_pre_hooks.clear()
    inputs = converted(inputs, dtype=torch.float64)
    anything = exact(*inputs).isnan() & ~in_float64(model)(*inputs).isnan()
    return anything, torch.stack([torch.zeros_like(anything), *signless]).any(0)


def judge(stem: str, seed: int, index: int, device="cpu") -> bool:
    """Whether the pair's own operators took the case. AssertionError, saying what it is, where ModelNew is wrong."""
    r = random.Random(f"{stem} {seed} {index}")
    on_hopper = stem not in PORTABLE
    init, shapes = SHAPES[problem_of(stem)](r, on_hopper)
    dtype = r.choice([torch.float32] * 4 + DTYPES)
    recorded = r.random() < 0.25
    unequal = recorded or dtype is torch.float64
    values = [kind for kind in VALUES if kind not in EQUAL * unequal + ["huge"] * recorded]
    kinds = [r.choice(values) if r.random() < 0.7 else "ordinary" for _ in range(9)]
    changed = [r.choice(values) if r.random() < 0.3 else None for _ in range(9)]  # of parameters; None: as they were
    incoming = r.choice(values) if r.random() < 0.5 else "ordinary"  # the gradient of the output
    first_seed = r.randrange(2**40)
    case = Case(stem, "", init, shapes)
    repeated = ["one value repeated"] * unequal
    layouts = [lay for name, lay in LAYOUTS.items() if fits(case, name) and name not in repeated]

    def change(model, new, inputs):
        r = random.Random(first_seed)  # the same magnitudes and places for each sample, other values
        for one, other, kind in zip(model.parameters(), new.parameters(), changed):
            if kind is not None:
                one.data = other.data = r.choice([placed, lambda t, r: t])(drawn(kind, one, r), r)
        often = 16 if on_hopper else 4
        return [
            laid(drawn(kind, t, r), layouts, r, often) if t.is_floating_point() else t for kind, t in zip(kinds, inputs)
        ]

    @torch.no_grad()
    def on_device(module, inputs) -> torch.Tensor:
        for p in module.parameters():
            p.data = moved(p.data, device)
        return module(*(moved(t, device) for t in inputs))

    def forward(module, inputs) -> dict[str, torch.Tensor]:
        return {"output": on_device(module, inputs)}

    def gradients(module, inputs) -> dict[str, torch.Tensor]:
        for p in module.parameters():
            p.data = moved(p.data, device)
        tensors = differentiable(module, [moved(t, device) for t in inputs])
        out = module(*(t for name, t in tensors.items() if name.startswith("input ")))
        torch.default_generator.manual_seed(first_seed)  # the same gradient for each module
        grad = drawn(incoming, torch.empty(out.shape, dtype=dtype), random.Random(first_seed)).to(out)
        if device != "cpu":  # where PyTorch 2.13's batch_norm misreads a transposed gradient
            grad = laid(grad, [torch.clone], random.Random(first_seed))
        return dict(zip(tensors, torch.autograd.grad(out, list(tensors.values()), grad)))

    def noting_what_to_leave_out(samples):
        for model, new, inputs in samples:
            model.left_out = new.left_out = undecided(copy.deepcopy(model), inputs)
            yield model, new, inputs

    def forward_but_for_them(module, inputs) -> dict[str, torch.Tensor]:
        out, (anything, not_finite) = on_device(module, inputs).cpu(), module.left_out
        return {"output": out.masked_fill(anything | (not_finite & ~out.isfinite()), torch.nan)}

    run, how = (gradients, (ROUNDINGS, True)) if recorded else (forward, ())
    samples = draws(case, "cpu", dtype, change, first_seed)
    model, new, inputs = first = next(samples)
    try:
        with Recorder(stem) as seen:
            run(*copy.deepcopy((new, inputs)))
        assert_same_form(*(on_device(*copy.deepcopy((module, inputs))) for module in (new, model)))
        try:
            assert_as_accurate_as_eager(run, itertools.chain([first], samples), *how)
        except Inaccurate:
            # Where the two values of a group nearly meet, each rounding counts a thousandfold, and whose is the larger
            # in the worst such sample is luck, once in tens of thousands of cases. A fault is in other samples too.
            assert_as_accurate_as_eager(run, draws(case, "cpu", dtype, change, first_seed + 24), *how)
        except AssertionError:  # NaN or Inf elsewhere than in eager
            if recorded:
                raise
            samples = noting_what_to_leave_out(draws(case, "cpu", dtype, change, first_seed))
            assert_as_accurate_as_eager(forward_but_for_them, samples)
    except Exception as error:
        said = [f"input {kind}" for kind, _ in zip(kinds, inputs)]
        said += [f"{name} {kind}" for (name, _), kind in zip(model.named_parameters(), changed) if kind is not None]
        said += [f"gradient {incoming}"] * recorded
        what = f"{shapes} from {init} in {dtype}, {', '.join(said)}"
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    return bool(seen.calls)


def miss(case: tuple[str, int, int, str]) -> str | None:
    """What is wrong in a case (pair, seed, index, device), in any process. Nothing: None, or "" if it was plain."""
    warnings.simplefilter("ignore")
    torch.backends.cudnn.allow_tf32 = False  # strict float32, as in the tests
    try:
        return None if judge(*case) else ""
    except Exception as error:
        said = " ".join(str(error).split()) or repr(error)
        if case[-1].startswith("cuda"):  # says whether the process can go on
            try:
                torch.cuda.synchronize()
            except Exception as broken:
                said += f"; {broken}"
        return said


def again(stem: str, seed: int, index: int, device: str, said: str) -> str:
    return f"python tests/tools/fuzz.py --pair {stem} --seed {seed} --index {index} --device {device}  # {said}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default=",".join(STEMS))
    parser.add_argument("--cases", type=int, default=10_000, help="of each pair")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--index", type=int, help="this case alone, in this process")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="take the GPUs in turn")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after these no more cases are begun")
    parser.add_argument("--patience", type=float, default=120, help="seconds after which a case hangs")
    options = parser.parse_args(arguments)
    pairs = options.pair.split(",")
    if unknown := set(pairs) - set(STEMS):
        parser.error(f"no pair {', '.join(unknown)}: there are {', '.join(STEMS)}")
    if options.index is not None:
        said = miss((pairs[0], options.seed, options.index, options.device))
        print(said or "passed")
        return int(bool(said))
    for stem in pairs:  # built before the clock starts
        solution(stem)
    start, done, own, missed = time.monotonic(), Counter(), Counter(), Counter()
    in_turns = itertools.product(range(options.cases), pairs)
    cases = ((stem, options.seed, index, options.device) for index, stem in in_turns)
    in_time = itertools.takewhile(lambda case: time.monotonic() <= start + options.seconds, cases)
    for case, said in in_processes(miss, in_time, options.processes, options.patience, visible_gpus()):
        done[case[0]] += 1
        own[case[0]] += said is None
        if said:
            missed[case[0]] += 1
            print(again(*case, said), flush=True)
    seconds = round(time.monotonic() - start)  # of all pairs, which take turns
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device
    for stem in pairs:
        taken = f"{done[stem]} cases, {own[stem]} by the pair's operators"
        print(f"{stem} on {device}, seed {options.seed}: {taken}, {missed[stem]} missed, {seconds} s")
    return int(any(missed.values()))


if __name__ == "__main__":
    sys.exit(main())
