"""Every kernel under compute-sanitizer: forward and gradients of the tests' cases, in every dtype, those first that reach a new kernel.

    python tests/sanitize.py [--tools initcheck,synccheck,racecheck,memcheck] [--pairs NAME,...] [--seconds 60] [--processes 4]
    python tests/sanitize.py --reach     only says how many kernels of the built library the calls launch, and which they do not

First all calls run once under PyTorch's profiler, which says which of them launches which kernels, and for how long. Then one process for
each pair and tool, several for racecheck, which is the slowest; all at once, on the GPUs in turn. They begin with the calls that are enough
to launch every kernel. A line for each pair and tool says how many calls were made in the seconds, how many kernels they launched, and what
the tool found; under it, where. Exit code 1 if any of that is ours, or if a tool did not get through all kernels. Every tensor is an
allocation of its own, so that the tools know its borders.

What a tool finds in a library's kernel is ours as long as it is not shown that it is not: a race, where both accesses are a library's; a
read of what nobody wrote, where the same instruction of the same kernel does it without our code too, in the same calls of the Model.
"""

import argparse
import atexit
import contextlib
import copy
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import test_convolution_gradients
import test_float32_gemm
import test_gpu
import test_implicit_gemm
import test_instance_norm_backward
import torch
from cases import CASES, DTYPES, STEMS, Case, build, converted, solution
from processes import visible_gpus
from torch import library, nn

TOOLS = ("initcheck", "synccheck", "racecheck", "memcheck")
RACE = re.compile(r"Race reported between \w+ access at .*\n(?:=+ +and \w+ access at .*\n?)*")
FAULT = re.compile(r"^=+ (?:Warning: Error buffer overflow|(\w.*)\n=+ +at (.+?)\+(0x\w+))", re.MULTILINE)
OFFSET = re.compile(r"(\+0x\w+)?$")
OPTIONS = {"initcheck": ("--print-limit", "100000", "--show-backtrace", "no"), "racecheck": ("--print-limit", "1000")}
LARGEST = 2.1e7  # values of the inputs: a sanitizer takes minutes for more
HOST_US = 100.0  # of a call: what it takes under a sanitizer is a multiple of this and of the GPU's time
PRODUCTS = test_float32_gemm.CASES + test_float32_gemm.ODD + test_float32_gemm.LARGE


def cases_of(stem: str) -> list[Case]:
    """Those of the tests that force a kernel by its shape."""
    found = [*CASES, *test_gpu.LARGE]
    found += PRODUCTS + test_implicit_gemm.SHAPES
    found += [
        test_instance_norm_backward.case_of(*shape) for shape in test_instance_norm_backward.SMALL + test_instance_norm_backward.LARGE
    ]
    for name, (n, ins, outs, *size, kernel) in test_convolution_gradients.SHAPES.items():
        init = ins, outs, kernel, 1, (outs, 1, 1), (outs, 1, 1)
        found.append(Case("conv_sigmoid_group_norm", name, init, ((n, ins, *size),)))
    return sorted((case for case in found if case.stem == stem and case.values < LARGEST), key=lambda case: case.values)


@functools.lru_cache(maxsize=1)
def drawn(case: Case) -> tuple[nn.Module, nn.Module, list]:
    return build(case)


def calls_of(stem: str, plain: bool = False) -> list[tuple[str, Callable[[], None]]]:
    """Each with its name: with gradients and without, of ordinary values, and with some that are infinite, NaN or the type's largest, which are
    computed anew; for the float32 products also with TF32, badly scaled rows, and an x of one sign, for which TF32's one product
    rounds W otherwise.

    plain: of the Model instead of ModelNew, so with none of our code.
    """
    calls = []

    def add(case, dtype, how, call, change=lambda new, inputs: inputs, tf32=False):
        def whole():
            torch.backends.cuda.matmul.allow_tf32 = tf32
            model, new, inputs = drawn(case)
            new, inputs = copy.deepcopy(model if plain else new).to("cuda", dtype), converted(inputs, "cuda", dtype)
            call(new, change(new, inputs))

        calls.append((f"{case} in {dtype}, {how}", whole))

    def train(new, inputs):
        out = new(*(t.requires_grad_() for t in inputs))
        out.backward(torch.ones_like(out))

    @torch.no_grad()
    def infer(new, inputs):
        new(*inputs)

    def extremes(new, inputs):
        x = inputs[0].flatten()
        for i, value in enumerate((torch.finfo(x.dtype).max, torch.inf, -torch.inf, torch.nan)):
            x[7 * i :: 997] = value
        return [x.view_as(inputs[0]), *inputs[1:]]

    def badly_scaled(new, inputs):
        return [test_float32_gemm.balanced_now_and_then(inputs[0], inputs[0].clone())[0], *inputs[1:]]

    def of_one_sign(new, inputs):
        return [inputs[0].abs(), *inputs[1:]]

    for case in cases_of(stem):
        for dtype in DTYPES:
            for call, how in ((train, "gradients"), (infer, "no gradients")):
                add(case, dtype, how, call)
                add(case, dtype, f"extremes, {how}", call, extremes)
        for tf32 in (False, True) if case in PRODUCTS else ():
            add(case, torch.float32, f"badly scaled, no gradients, TF32 {tf32}", infer, badly_scaled, tf32)
            add(case, torch.float32, f"badly scaled, gradients, TF32 {tf32}", train, badly_scaled, tf32)
        if case in PRODUCTS:
            add(case, torch.float32, "x of one sign, TF32 True", infer, of_one_sign, True)
    return calls


def name_of(kernel: str) -> str:
    """As compilers and profilers both have it: without arguments, casts and blanks."""
    plain = re.sub(r"^void |\(anonymous namespace\)::|\((?:\w|::)+\)(?=[\w-])|\s", "", kernel)
    return plain.partition(">(")[0].partition("(")[0].replace("true", "1").replace("false", "0")


def built_kernels(stem: str) -> set[str]:
    """Those in the library."""
    library = next(path for path in torch.ops.loaded_libraries if Path(path).name.startswith(solution(stem).NAMESPACE))
    listed = subprocess.run(["cuobjdump", "--dump-resource-usage", library], capture_output=True, text=True, check=True).stdout
    mangled = re.findall(r"Function (\w+):", listed)
    plain = subprocess.run(["c++filt", *mangled], capture_output=True, text=True, check=True).stdout.splitlines()
    return {name_of(kernel) for kernel in plain}


def profile_all(stem: str, path: Path) -> None:
    """Writes, as JSON, the kernels of each call and those that no call launches. A kernel that only waits stands between two calls."""
    calls = calls_of(stem)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _, call in calls:
            call()
            torch.cuda._sleep(1)
        torch.cuda.synchronize()
    built, launched, us = built_kernels(stem), [set()], [0.0]
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        if "spin_kernel" in event.name:
            launched.append(set())
            us.append(0.0)
        else:
            us[-1] += event.time_range.elapsed_us()
        launched[-1] |= {name_of(event.name)} & built
    assert len(launched) == len(calls) + 1
    reached = set().union(*launched)
    calls = [sorted(names) for names in launched[:-1]]
    path.write_text(json.dumps({"calls": calls, "us": us[:-1], "built": sorted(built), "unreached": sorted(built - reached)}))


def in_order(launched: list[list[str]], us: list[float]) -> list[int]:
    """First a few calls that launch all kernels in little time, the longest of them ahead; then the others, by time.

    Each of the few is the one that launches the most kernels not yet launched for its time, which a sanitizer multiplies.
    """
    wanted, few = set().union(*launched), []
    while wanted:
        best = max(range(len(launched)), key=lambda index: len(wanted.intersection(launched[index])) / (us[index] + HOST_US))
        few.append(best)
        wanted.difference_update(launched[best])
    others = sorted(set(range(len(launched))).difference(few), key=us.__getitem__)
    return sorted(few, key=us.__getitem__, reverse=True) + others


@contextlib.contextmanager
def prefilled() -> Iterator[None]:
    """ATen's matrix products write over zeros: initcheck does not see what cuBLAS stores by bulk copies."""
    aten = library.Library("aten", "IMPL")  # for as long as it lives

    def mm(a, b):
        return torch.ops.aten.mm.out(a, b, out=a.new_zeros(a.shape[0], b.shape[1]))

    def addmm(bias, a, b, *, beta=1, alpha=1):
        return torch.ops.aten.addmm.out(bias, a, b, beta=beta, alpha=alpha, out=a.new_zeros(a.shape[0], b.shape[1]))

    aten.impl("mm", mm, "CUDA")
    aten.impl("addmm", addmm, "CUDA")
    yield
    del aten


def call_all(stem: str, plain: bool, path: Path, claims: Path, deadline: float) -> None:
    """Makes the calls that no other process has claimed, those first that reach a new kernel."""
    calls = calls_of(stem, plain)
    reach = json.loads(path.read_text())
    for index in in_order(reach["calls"], reach["us"]):
        if time.monotonic() > deadline:
            break
        try:
            (claims / str(index)).touch(exist_ok=False)
        except FileExistsError:
            continue
        name, call = calls[index]
        print(f"calling {name}", flush=True)
        start = time.monotonic()
        call()
        torch.cuda.synchronize()
        print(f"call {index} took {time.monotonic() - start:.1f} s", flush=True)


def start(*arguments, output: Path, gpu: int, tool: str | None = None) -> subprocess.Popen:
    command, gpus = [sys.executable, __file__, *map(str, arguments)], visible_gpus()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus[gpu % len(gpus)]}
    if tool:
        # No kernel is left out by its name: racecheck dies of an error of its own where one runs between others that it watches.
        command = ["compute-sanitizer", "--tool", tool, *OPTIONS.get(tool, ("--print-limit", "5")), *command]
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    process = subprocess.Popen(command, env=environment, stdout=output.open("w"), stderr=subprocess.STDOUT, start_new_session=True)
    atexit.register(lambda: process.poll() is None and os.killpg(process.pid, signal.SIGKILL))
    return process


def found_in(said: str) -> Counter[tuple[str, ...]]:
    """What was printed of a process's faults: how often each kind of them, at which instructions; of a race, in which kernels."""
    faults, last = Counter(), ("records dropped",)
    for what, kernel, offset in FAULT.findall(said):
        last = (what, f"{kernel}+{offset}") if what else last  # of a launch's first 256 records; the others are dropped, and counted as one
        faults[last] += 1
    faults.update(("Race", *sorted(set(re.findall(r"access at (.+?)\+0x", race)))) for race in RACE.findall(said))
    return faults


def told(fault: tuple[str, ...], count: int) -> str:
    what, *sites = fault
    return f"{count} times {what} in {' and '.join(name_of(site) + OFFSET.search(site)[0] for site in sites)}"


def is_a_librarys(fault: tuple[str, ...], built: set[str], without_ours: Counter[tuple[str, ...]]) -> bool:
    """Whether it is shown that it is not ours."""
    what, *sites = fault
    return not {name_of(site) for site in sites} & built and (what == "Race" or fault in without_ours)


def report(tool: str, stem: str, reach: dict, logs: list[str], without_ours: Counter[tuple[str, ...]]) -> bool:
    """Whether all kernels were launched, without a fault of ours; what the processes that shared the calls said, summed up and printed."""
    took = {int(call): float(seconds) for said in logs for call, seconds in re.findall(r"^call (\d+) took (.+) s$", said, re.MULTILINE)}
    kernels, wanted = (set().union(*(reach["calls"][i] for i in indices)) for indices in (took, range(len(reach["calls"]))))
    summaries = [re.search(r"SUMMARY: (\d+) (?:error|hazard)", said) for said in logs]
    ended, total = sum(map(bool, summaries)), sum(int(summary[1]) for summary in summaries if summary)
    faults = sum(map(found_in, logs), Counter())
    libraries = {fault: count for fault, count in faults.items() if is_a_librarys(fault, set(reach["built"]), without_ours)}
    ours = max(total, faults.total()) - sum(libraries.values())  # with those that were not printed
    parts = [f"{len(took)} of {len(reach['calls'])} calls", f"{len(kernels)} of {len(wanted)} kernels"]
    parts += [f"{ours} errors", *([f"and {sum(libraries.values())} of libraries' own"] if libraries else [])]
    parts += [f"{len(logs) - ended} of {len(logs)} processes cut off"] if ended < len(logs) else []
    parts += [f"{sum(took.values()):.0f} s, the longest call {max(took.values(), default=0):.0f} s"]
    print(f"{tool}, {stem}: {', '.join(parts)}", flush=True)
    for fault, count in faults.most_common():
        print(f"    {'a library' if fault in libraries else 'ours'}: {told(fault, count)}", flush=True)
    return not ours and ended == len(logs) and kernels == wanted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--pairs", default=",".join(STEMS))
    parser.add_argument("--seconds", type=float, default=60, help="of each tool, its start included; the last calls may take half of it")
    parser.add_argument("--processes", type=int, default=4, help="that share the calls of a pair under racecheck (default 4)")
    parser.add_argument("--reach", action="store_true")
    parser.add_argument("--profile", type=Path, help=argparse.SUPPRESS)  # what the processes do
    parser.add_argument("--call", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.profile:
        profile_all(options.pairs, options.profile)
        return 0
    if options.call:
        with prefilled() if options.tools == "initcheck" else contextlib.nullcontext():
            call_all(options.pairs, options.plain, options.call, options.claims, options.until)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no process is left behind
    folder = Path(tempfile.mkdtemp())
    found, stems, gpu, reach = 0, options.pairs.split(","), itertools.count(), {}
    profiling = {stem: start("--pairs", stem, "--profile", folder / stem, output=folder / f"{stem}.log", gpu=next(gpu)) for stem in stems}
    for stem, process in profiling.items():
        assert process.wait() == 0, (folder / f"{stem}.log").read_text()
        reach[stem] = json.loads((folder / stem).read_text())
        built, unreached = reach[stem]["built"], reach[stem]["unreached"]
        print(f"{stem}: {len(reach[stem]['calls'])} calls launch {len(built) - len(unreached)} of {len(built)} kernels", flush=True)
        for kernel in unreached:
            print(f"    not {kernel}", flush=True)
    until, running = time.monotonic() + options.seconds, {}
    tools = [] if options.reach else options.tools.split(",")
    for tool, plain, stem in [(tool, plain, stem) for tool in tools for plain in {False, tool == "initcheck"} for stem in stems]:
        claims = folder / f"{tool}, {stem}, {plain}"
        claims.mkdir()
        asked = "--tools", tool, "--pairs", stem, "--call", folder / stem, "--claims", claims, "--until", until, *["--plain"] * plain
        logs = [folder / f"{tool}, {stem}, {plain}, {i}" for i in range(options.processes if tool == "racecheck" else 1)]
        running[tool, stem, plain] = {log: start(*asked, output=log, gpu=next(gpu), tool=tool) for log in logs}
    for process in itertools.chain.from_iterable(processes.values() for processes in running.values()):
        try:
            process.wait(max(0, until + options.seconds / 2 - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = {key: [log.read_text() for log in logs] for key, logs in running.items()}
    without_ours = sum((found_in(text) for (*_, plain), texts in said.items() if plain for text in texts), Counter())
    for (tool, stem, plain), texts in said.items():
        found += not plain and not report(tool, stem, reach[stem], texts, without_ours)
    for fault, count in without_ours.items():
        print(f"without our code: {told(fault, count)}")
    shutil.rmtree(folder)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
