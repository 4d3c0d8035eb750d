"""Times kernel files beside eager at shapes drawn at random, where `sweep` lists what people use.

    python tests/tools/random_shapes.py [--seconds 60] [--seed 0] NAME ...

Each file gets that many seconds. A call is timed alone, as a program makes it that waits for each answer: on a GPU by
events around it, so what the host takes is in its time. Both contenders take turns in one process; a time is the median
of 8. For each shape, dtype and direction a line: milliseconds of ModelNew, and how many times as fast as eager it is.
Last, how many calls took more than 1.05 times as long as eager: of long calls, whose time is the device's, and of
others, which vary more.
"""

import argparse
import math
import random
import statistics
import sys
import time

from contend import DEVICE, ROOT, Problem, calls_of, milliseconds

from judge.source import DTYPES, discover, load, set_precision

ROUNDS = 8
LONG = {"forward": 0.6, "forward_backward": 2.0}  # milliseconds
MOST_VALUES = {"cuda": 2**27, "cpu": 2**22}[DEVICE]  # of an input or output
DRAWN = random.Random()  # of its own, as making inputs seeds the common one
MOST_PRODUCTS = {"cuda": 2**38, "cpu": 2**32}[DEVICE]  # multiplications of a linear layer


def size(least: int, most: int) -> int:
    """Small and large ones are equally likely: its logarithm is uniform."""
    return round(math.exp(DRAWN.uniform(math.log(least), math.log(most))))


def instance_norm() -> dict:
    return dict(batch_size=size(1, 5000), features=size(1, 2048), dim1=size(2, 3000), dim2=size(2, 3000))


def linear() -> dict:
    step = DRAWN.choice((1, 8, 8))
    features = {name: max(8, size(4, 16384) // step * step) for name in ("in_features", "out_features")}
    return dict(batch_size=size(1, 200000), **features)


def linear_swish_group_norm() -> dict:
    constants = linear()
    outs = constants["out_features"]
    groups = DRAWN.choice([n for n in (1, 2, 4, 8, 16, 32, 64, 128) if outs % n == 0 and outs >= 2 * n])
    return dict(**constants, num_groups=groups, bias_shape=(outs,))


def conv_sigmoid_group_norm() -> dict:
    outs, kernel = DRAWN.choice((8, 16, 32, 48, 64, 96, 128)), DRAWN.choice((1, 3, 3, 3, 5))
    groups = DRAWN.choice([groups for groups in (1, 2, 4, 8, 16, 32) if outs % groups == 0])
    constants = dict(batch_size=size(1, 300000), height=size(kernel, 3000), width=size(kernel, 3000))
    constants |= dict(in_channels=DRAWN.choice((1, 3, 4, 8, 16, 24, 32, 64)), out_channels=outs, kernel_size=kernel)
    return constants | dict(num_groups=groups, bias_shape=(outs, 1, 1), scale_shape=(outs, 1, 1))


DRAW = {
    "instance_norm": instance_norm,
    "linear_instance_norm_residual": linear,
    "linear_swish_group_norm": linear_swish_group_norm,
    "conv_sigmoid_group_norm": conv_sigmoid_group_norm,
}


def is_small_enough(constants: dict) -> bool:
    batch = constants["batch_size"]
    if "in_features" in constants:
        ins, outs = constants["in_features"], constants["out_features"]
        return batch * max(ins, outs) <= MOST_VALUES and batch * ins * outs <= MOST_PRODUCTS
    channels = constants.get("features") or max(constants["in_channels"], constants["out_channels"])
    rows, columns = (constants[name] for name in (("dim1", "dim2") if "dim1" in constants else ("height", "width")))
    return 2**14 <= batch * channels * rows * columns <= MOST_VALUES


def time_file(name: str, seconds: float) -> list[tuple[str, float, float]]:
    """Direction, milliseconds of ModelNew and factor, of each timed call."""
    pair, found, deadline = discover(ROOT)[name], [], time.monotonic() + seconds
    new = load(pair.new_path).ModelNew
    while time.monotonic() < deadline:
        constants = DRAW[pair.model_path.stem]()
        if not is_small_enough(constants):
            continue
        problem, dtype = Problem(pair.model_path, constants), DRAWN.choice(("float32", "bfloat16"))
        inputs = problem.inputs(constants["batch_size"], DEVICE, DTYPES[dtype], 0)
        modules = (problem.make(cls, 0).to(DEVICE, DTYPES[dtype]) for cls in (problem.module.Model, new))
        eager, ours = (calls_of(module, inputs) for module in modules)
        for direction in LONG:
            times = [(milliseconds(eager[direction], 0), milliseconds(ours[direction], 0)) for _ in range(ROUNDS + 2)]
            of_eager, of_new = (statistics.median(column) for column in zip(*times[2:]))
            found.append((direction, of_new, of_eager / of_new))
            shape = ", ".join(f"{key} {value}" for key, value in constants.items() if "shape" not in key)
            print(f"{name} {dtype} {direction}, {shape}: {of_new:.4g} ms, {of_eager / of_new:.3f}x", flush=True)
        del eager, ours  # before the next inputs are made
    return found


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    files = [name for name, pair in discover(ROOT).items() if pair.model_path.stem in DRAW]
    parser.add_argument("names", nargs="+", choices=files, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    set_precision("highest")
    DRAWN.seed(options.seed)
    found = [call for name in options.names for call in time_file(name, options.seconds)]
    for kind, is_long in (("long", True), ("others", False)):
        factors = [factor for way, ms, factor in found if (ms * factor >= LONG[way]) == is_long]
        slower = [factor for factor in factors if factor < 1 / 1.05]
        least = f", the least {min(factors):.2f}x, the median {statistics.median(factors):.2f}x" if factors else ""
        print(f"{kind}: {len(slower)} of {len(factors)} calls took more than 1.05 times as long as eager{least}")


if __name__ == "__main__":
    main(sys.argv[1:])
