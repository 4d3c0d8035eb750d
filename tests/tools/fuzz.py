"""Random valid cases of a pair, judged as the tests judge: against the Model in float64, and eager's own error there.

    python tests/tools/fuzz.py --pair NAME --cases 10000 --seed 0 [--device cuda] [--processes 16]

A case is a shape, a dtype, and a kind of values and a place in memory for each input and parameter, all drawn from
(pair, seed, index). For each miss one line is printed: the command that repeats it, and what is wrong. Exit code 1 if
there was one.
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in conftest.py: small cases mostly wait for their threads
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from accuracy import Inaccurate, assert_as_accurate_as_eager, assert_same_form, draws
from cases import DTYPES, LAYOUTS, STEMS, Case, converted, fits, in_float64, solution
from processes import pool

# ---- shapes: constructor arguments and input shapes. Sizes stand around the powers of two that vectors are made of.

SIZES = [*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65]
BATCHES = [0, 1, 1, 2, 2, 3, 4, 5, 9]


def images(r: random.Random) -> tuple:
    features, height, width = r.randint(1, 6), r.choice(SIZES), r.choice(SIZES)
    if r.random() < 0.02:
        height, width = r.choice([(33, 1000), (130, 131), (1, 20000)])
    if height * width == 1:
        width = 2
    channels = features if r.random() < 0.9 else r.randint(1, 6)
    image = (channels, height, width)
    return (features,), (image if r.random() < 0.1 else (r.choice(BATCHES), *image),)


def rows_and_residuals(r: random.Random) -> tuple:
    batch, ins, outs = r.choice(BATCHES), r.choice([0, *SIZES]), 1 + r.choice(SIZES)
    if r.random() < 0.02:
        outs = r.choice([1023, 1025, 5000, 20000])
    y = r.choice([(batch, outs)] * 5 + [(outs,), (1, outs), (batch, 1), (1,), ()])
    return (ins, outs, *r.choice([(), (), (), (1e-3,), (0.5, 0.3), (1e-12,)])), ((batch, ins), y)


def grouped_rows(r: random.Random) -> tuple:
    batch, ins, groups, size = r.choice(BATCHES), r.choice([0, *SIZES]), r.choice(SIZES[:12]), r.choice(SIZES)
    if r.random() < 0.02:
        size = r.choice([1023, 1025, 5000, 20000]) // groups + 1
    if batch * size == 1:
        size = 2
    outs = groups * size
    bias = r.choice([(outs,)] * 5 + [(1, outs), (batch, 1), (batch, outs), (1,), ()])
    return (ins, outs, groups, bias), ((batch, ins),)


def convolved(r: random.Random) -> tuple:
    batch, ins, groups, size = r.choice(BATCHES), r.randint(1, 4), r.randint(1, 5), r.randint(1, 5)
    kernel = r.choice([1, 2, 3, 3, 3, 5, (1, 3), (3, 1), (2, 4)])
    high, wide = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    rows, columns = r.choice(SIZES[:15]), r.choice(SIZES[:15])  # of the output
    if r.random() < 0.02:
        rows, columns = r.choice([(130, 131), (1, 8000)])
    if batch * size * rows * columns == 1:
        columns = 2
    outs = groups * size
    whole = (outs, rows, columns)
    operands = [(outs, 1, 1)] * 6 + [(batch, outs, 1, 1), (1, outs, 1, 1), whole, (batch, *whole)]
    operands += [(columns,), (rows, 1), (1,), ()]
    image = (batch, ins, rows + high - 1, columns + wide - 1)
    return (ins, outs, kernel, groups, r.choice(operands), r.choice(operands)), (image,)


SHAPES = {
    "instance_norm": images,
    "linear_instance_norm_residual": rows_and_residuals,
    "linear_swish_group_norm": grouped_rows,
    "conv_sigmoid_group_norm": convolved,
}

# ---- values, from standard normal ones in float64; what does not fit the dtype is cut to its largest number


def with_some(value: float) -> Callable:
    """One to three of the elements replaced."""

    def replaced(z: torch.Tensor, info: torch.finfo, r: random.Random) -> torch.Tensor:
        z = z.clone()
        for _ in range(r.randint(1, 3) if z.numel() else 0):
            z.view(-1)[r.randrange(z.numel())] = value
        return z

    return replaced


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
    "with an outlier": with_some(1e4),
    "with NaN": with_some(torch.nan),
    "with Inf": with_some(torch.inf),
    "with -Inf": with_some(-torch.inf),
}


# Of equal values float64's own result is the rounding of their mean, and nothing finer tells how large it may be; they
# are left to tests/test_forward.py, which knows.
EQUAL = ["zero", "constant", "of tiny variance", "subnormal"]


def drawn(kind: str, like: torch.Tensor, r: random.Random) -> torch.Tensor:
    """Values of a kind in another tensor's shape, dtype and device; the same on every device."""
    info = torch.finfo(like.dtype)
    values = VALUES[kind](torch.randn(like.shape, dtype=torch.float64), info, r)
    return torch.where(values.isinf(), values, values.clamp(-info.max, info.max)).to(like)


# ---- memory


def placed(t: torch.Tensor, r: random.Random) -> torch.Tensor:
    """The same values with the dimensions in any order in memory, with gaps, at any offset; NaN stands all around."""
    strides, stride = [0] * t.dim(), r.choice([1, 1, 2])
    for dim in r.sample(range(t.dim()), t.dim()):
        strides[dim] = stride
        stride = stride * max(t.shape[dim], 1) + r.choice([0, 0, 1, 3])
    offset = r.randrange(9)
    room = t.new_full((offset + stride + 8,), torch.nan)
    return room.as_strided(t.shape, strides, offset).copy_(t)


def laid(t: torch.Tensor, layouts: list[Callable], r: random.Random) -> torch.Tensor:
    return r.choice([lambda t: t, lambda t: placed(t, r), r.choice(layouts)])(t)


def moved(t: torch.Tensor, device) -> torch.Tensor:
    """The same memory on another device, gaps and offset and all: one copy, which nobody waits for."""
    everything = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())
    there = everything.to(device, non_blocking=True).as_strided(t.shape, t.stride(), t.storage_offset())
    return torch._neg_view(there) if t.is_neg() else there


# ---- cases


@torch.no_grad()
def undecided(model: torch.nn.Module, inputs: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each value of the Model's output, whether a rounding makes NaN, an infinity or a number of it; and whether NaN
    or either infinity.

    So it is with what depends on a sum of products that passes the dtype's largest number in some order of its terms,
    which becomes NaN and spreads as far as NaN does in the Model; and with an infinite weight of a norm times a value
    too near zero to have a sign, also where float64 on the CPU, which multiplies before it subtracts, has NaN itself:
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
        near = (normed.abs() <= 2 * error + info.eps).flatten(1, 2)
        signless.append(near & norm.weight.isinf().view(-1, *[1] * (out.dim() - 2)))

    for (name, layer), original in zip(exact.named_modules(), model.modules()):
        if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)):
            layer.register_forward_hook(overflowing)
        elif isinstance(layer, torch.nn.GroupNorm):
            original.register_forward_pre_hook(
                lambda norm, norm_inputs, name=name: given.update({name: norm_inputs[0]})
            )
            layer.register_forward_hook(functools.partial(without_sign, name=name))
    model(*inputs)
    for layer in model.modules():
        layer._forward_pre_hooks.clear()
    inputs = converted(inputs, dtype=torch.float64)
    anything = exact(*inputs).isnan() & ~in_float64(model)(*inputs).isnan()
    return anything, torch.stack([torch.zeros_like(anything), *signless]).any(0)


def judge(stem: str, seed: int, index: int, device="cpu") -> None:
    """AssertionError, which says what the case is, where ModelNew is not as accurate as eager or has not its form."""
    r = random.Random(f"{stem} {seed} {index}")
    init, shapes = SHAPES[stem](r) if stem in SHAPES else (None, None)
    dtype = r.choice(DTYPES if shapes is not None else [torch.float32])
    values = [kind for kind in VALUES if dtype is not torch.float64 or kind not in EQUAL]
    kinds = [r.choice(values) if r.random() < 0.7 else "ordinary" for _ in range(9)]
    changed = [r.choice(values) if r.random() < 0.3 else None for _ in range(9)]  # of parameters; None: as they were
    first_seed = r.randrange(2**40)
    case = Case(stem, "", init, shapes)
    taken = [name for name in LAYOUTS if fits(case, name) and (dtype, name) != (torch.float64, "one value repeated")]
    layouts = [LAYOUTS[name] for name in taken]

    def change(model, new, inputs):
        r = random.Random(first_seed)  # the same magnitudes and places for each sample, other values
        for one, other, kind in zip(model.parameters(), new.parameters(), changed):
            if kind is not None:
                one.data = other.data = placed(drawn(kind, one, r), r)
        return [laid(drawn(kind, t, r), layouts, r) if t.is_floating_point() else t for kind, t in zip(kinds, inputs)]

    @torch.no_grad()
    def on_device(module, inputs) -> torch.Tensor:
        for p in module.parameters():
            p.data = moved(p.data, device)
        return module(*(moved(t, device) for t in inputs))

    def forward(module, inputs) -> dict[str, torch.Tensor]:
        return {"output": on_device(module, inputs).cpu()}  # small: the host compares them faster than a GPU would

    left_out = []

    def noting_what_to_leave_out(samples):
        for model, new, inputs in samples:
            left_out[:] = [undecided(copy.deepcopy(model), inputs)]
            yield model, new, inputs

    def forward_but_for_them(module, inputs) -> dict[str, torch.Tensor]:
        out, (anything, not_finite) = forward(module, inputs)["output"], left_out[0]
        return {"output": out.masked_fill(anything | (not_finite & ~out.isfinite()), torch.nan)}

    samples = draws(case, "cpu", dtype, change, first_seed)
    model, new, inputs = first = next(samples)
    try:
        assert_same_form(on_device(*copy.deepcopy((new, inputs))), on_device(*copy.deepcopy((model, inputs))))
        try:
            assert_as_accurate_as_eager(forward, itertools.chain([first], samples))
        except Inaccurate:
            # Where the two values of a group nearly meet, each rounding counts a thousandfold, and whose is the larger
            # in the worst such sample is luck, once in tens of thousands of cases. A fault is in other samples too.
            assert_as_accurate_as_eager(forward, draws(case, "cpu", dtype, change, first_seed + 24))
        except AssertionError:  # NaN or Inf elsewhere than in eager
            samples = noting_what_to_leave_out(draws(case, "cpu", dtype, change, first_seed))
            assert_as_accurate_as_eager(forward_but_for_them, samples)
    except Exception as error:
        said = [f"input {kind}" for kind, _ in zip(kinds, inputs)]
        said += [f"{name} {kind}" for (name, _), kind in zip(model.named_parameters(), changed) if kind is not None]
        what = f"{shapes} from {init} in {dtype}, {', '.join(said)}"
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def misses(stem: str, seed: int, indices: Iterable[int], device="cpu") -> Iterator[str]:
    """A line for each case that ModelNew does not pass."""
    for index in indices:
        try:
            judge(stem, seed, index, device)
        except AssertionError as miss:
            what = " ".join(str(miss).split())
            again = f"--pair {stem} --seed {seed} --index {index} --device {device}"
            yield f"python tests/tools/fuzz.py {again}  # {what}"


def judged(share: tuple[str, int, range, str]) -> tuple[int, list[str]]:
    """Of a pair, a seed, indices and a device: how many cases, and the lines of those missed; in any process."""
    warnings.simplefilter("ignore")
    torch.backends.cudnn.allow_tf32 = False  # strict float32, as in the tests
    stem, seed, indices, device = share
    return len(indices), [*misses(stem, seed, indices, device)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pair", required=True, choices=STEMS)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--index", type=int, help="this case alone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="that share the cases, and take the GPUs in turn")
    options = parser.parse_args(arguments)
    indices = range(options.cases) if options.index is None else range(options.index, options.index + 1)
    solution(options.pair)  # built, if it must be, before the clock starts
    shares = [(options.pair, options.seed, indices[i : i + 50], options.device) for i in range(0, len(indices), 50)]
    results = pool(options.processes).imap_unordered(judged, shares) if options.processes > 1 else map(judged, shares)
    start, done, missed = time.perf_counter(), 0, 0
    for count, lines in results:
        done, missed = done + count, missed + len(lines)
        print("".join(f"{line}\n" for line in lines), end="", flush=True)
    seconds = time.perf_counter() - start
    print(f"{options.pair} on {options.device}, seed {options.seed}: {done} cases, {missed} missed, {seconds:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
