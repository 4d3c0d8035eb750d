"""Every kernel under compute-sanitizer: forward and gradients of the tests' cases, those first that reach a new kernel.

    python tests/tools/sanitize.py [--tools racecheck,memcheck,synccheck,initcheck] [--pairs NAME,...] [--seconds 150]
    python tests/tools/sanitize.py --reach     only says which kernels of the built library the calls do not launch

First all calls run once under PyTorch's profiler, which says which of them launches which kernels, and for how long.
Those that launch none of ours are left out, and those with TF32 that launch the same as without.
Then one process for each pair and tool, all at once. Each makes the shortest calls that together launch all kernels;
when every process has done so, each goes on with the other calls, the shortest first, until the time is over. A line
for each says how many calls were made, how many kernels they launched, and what the tool found; under it, where. Exit
code 1 if any of that is in a kernel of ours, or if a tool did not get through all kernels. What is found in a library's
kernel alone is listed apart: initcheck does not see what libraries store by bulk copies. So that our kernels do not
read such stores, an addition writes the output of each linear layer and convolution. Every tensor is an allocation of
its own, so that the tools know its borders.
"""

import argparse
import copy
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]

import torch
from cases import CASES, DTYPES, STEMS, Case, build, converted, solution
from processes import visible_gpus
from test_gpu import LARGE
from test_linear_products import TRAINED
from torch import library

TOOLS = ("racecheck", "memcheck", "synccheck", "initcheck")
# What is wrong, and where: a kernel, or the two that race. Of a kernel without line numbers racecheck writes one line.
FAULT = re.compile(r"^=+ (\w.*?)(?:\n=+ +| )at (.+?)\+0x\w+(?:.*\n=+ +and \w+ access at (.+?)\+0x\w+)?", re.MULTILINE)
LARGEST = 2.1e7  # values of the inputs: a sanitizer takes minutes for more
GRACE = 30  # seconds in which the last call may end
REACHED = "reached all kernels"

drawn = functools.cache(build)  # to draw the weights takes longer than most calls


def call_of(case: Case, dtype, recorded: bool, extreme: bool, tf32: bool) -> tuple[str, Callable[[], None]]:
    """With its name. Extreme: with some values that are infinite, NaN or the type's largest."""

    def whole():
        torch.backends.cuda.matmul.allow_tf32 = tf32
        _, new, inputs = drawn(case)
        new, (x, *others) = copy.deepcopy(new).to("cuda", dtype), converted(inputs, "cuda", dtype)
        for i, value in enumerate((torch.finfo(dtype).max, torch.inf, -torch.inf, torch.nan) if extreme else ()):
            x.view(-1)[7 * i :: 997] = value
        with torch.set_grad_enabled(recorded):
            out = new(*(t.requires_grad_(recorded) for t in (x, *others)))
        if recorded:
            out.backward(torch.ones_like(out))

    return f"{case} in {dtype}, gradients {recorded}, extremes {extreme}, TF32 {tf32}", whole


def of_one_sample(case: Case) -> Case | None:
    """The same images, but one: most kernels are reached by it, and a sanitizer is as slow as there are blocks.

    Not of small images: they are quick as they are, and one sample of a group of one value is refused.
    """
    if [len(shape) for shape in case.shapes] != [4] or min(case.shapes[0][2:]) < 8:
        return None
    return replace(case, name=f"one sample of {case.name}", shapes=((1, *case.shapes[0][1:]),))


def calls_of(stem: str) -> list[tuple[str, Callable[[], None]]]:
    cases = {case for case in [*CASES, *LARGE, *TRAINED] if case.stem == stem}
    cases |= {alone for case in cases if (alone := of_one_sample(case))}
    cases = {case for case in cases if case.values < LARGEST}
    ways = [(dtype, False, False) for dtype in DTYPES[1:]]
    # In 16 bits no kernel of the linear files looks at values, and TF32 is for float32 only.
    linear, single = "linear" in stem, [torch.float32]
    ways += [(dtype, True, False) for dtype in (single if linear else DTYPES[1:])]
    ways += [(dtype, False, True) for dtype in single * linear]
    return [
        call_of(case, dtype, recorded, extreme, tf32)
        for case in sorted(cases, key=lambda case: (case.values, str(case)))  # the same order in every process
        for dtype, extreme, tf32 in ways
        for recorded in (True, False)
    ]


def name_of(kernel: str) -> str:
    """As compilers and profilers both have it: without arguments, casts and blanks."""
    plain = re.sub(r"^void |\(anonymous namespace\)::|\((?:\w|::)+\)(?=[\w-])|\s", "", kernel)
    return plain.partition(">(")[0].partition("(")[0].replace("true", "1").replace("false", "0")


def built_kernels(stem: str) -> set[str]:
    """Those in the library."""
    path = next(p for p in torch.ops.loaded_libraries if Path(p).name.startswith(solution(stem).NAMESPACE))
    options = {"capture_output": True, "text": True, "check": True}
    listed = subprocess.run(["cuobjdump", "--dump-resource-usage", path], **options).stdout
    plain = subprocess.run(["c++filt", *re.findall(r"Function (\w+):", listed)], **options).stdout
    return {name_of(kernel) for kernel in plain.splitlines()}


def profile_all(stem: str, path: Path) -> None:
    """Writes, as JSON, the kernels of each call and its microseconds. A kernel that only waits stands between calls."""
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
    of_name = dict(zip([name for name, _ in calls], launched))
    asked = [  # a TF32 call has the name of its twin without TF32, but for the last word
        i
        for i, (name, kernels) in enumerate(of_name.items())
        if kernels and (name.endswith("False") or kernels != of_name[name.replace("TF32 True", "TF32 False")])
    ]
    found = {"calls": [sorted(names) for names in launched[:-1]], "us": us, "built": sorted(built), "asked": asked}
    path.write_text(json.dumps(found))


def in_order(reach: dict) -> tuple[list[int], list[int]]:
    """The calls by time: those that launch a kernel that none before them does, and the others."""
    launched, few, seen = reach["calls"], [], set()
    by_time = sorted(reach["asked"], key=reach["us"].__getitem__)
    for index in by_time:
        if not seen.issuperset(launched[index]):
            few.append(index)
            seen.update(launched[index])
    return few, [index for index in by_time if index not in few]


def call_all(stem: str, path: Path, deadline: float) -> None:
    """Between the two kinds of calls it waits until the parent makes a file: until all processes are as far."""
    calls, reach = calls_of(stem), json.loads(path.read_text())
    additions = library.Library("aten", "IMPL")
    additions.impl("addmm", lambda bias, a, b, **_: torch.add(torch.mm(a, b), bias), "CUDA")
    additions.impl("addmm.out", lambda bias, a, b, *, out, **_: torch.add(torch.mm(a, b), bias, out=out), "CUDA")
    additions.impl("mm.dtype", lambda a, b, dtype: torch.mm(a.to(dtype), b.to(dtype)) + 0, "CUDA")

    def convolve(x, weight, *_):  # one launch for all samples: the tools need memory for each, and ran out of it
        windows = x.unfold(2, weight.shape[2], 1).unfold(3, weight.shape[3], 1)
        return torch.einsum("nihwkl,oikl->nohw", windows, weight).contiguous() + 0

    additions.impl("cudnn_convolution", convolve, "CUDA")

    def seconds_of(index: int) -> float:
        name, call = calls[index]
        print(f"calling {name}", flush=True)
        start = time.monotonic()
        call()
        torch.cuda.synchronize()
        print(f"called {index}", flush=True)
        return time.monotonic() - start

    few, others = in_order(reach)
    for index in few:
        if time.monotonic() > deadline:
            return
        seconds_of(index)
    print(REACHED, flush=True)
    while not (path.parent / REACHED).exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    seconds_each_us = 0.0  # of the last call, which was a little shorter
    for index in others:
        us = max(reach["us"][index], 1.0)
        if time.monotonic() + seconds_each_us * us > deadline:
            return
        seconds_each_us = seconds_of(index) / us


def start(*arguments, output: Path, gpu: int, tool: str | None = None) -> subprocess.Popen:
    command, gpus = [sys.executable, __file__, *map(str, arguments)], visible_gpus()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus[gpu % len(gpus)]}
    if tool:
        options = ["--print-limit", "1000", "--show-backtrace", "no"]
        if tool == "synccheck":  # it finds their number itself, too few: then kernels hang, or fail with its own errors
            options += ["--num-cuda-barriers", "4096"]
        command = ["compute-sanitizer", "--tool", tool, *options, *command]
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    streams = {"stdout": output.open("w"), "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, start_new_session=True, **streams)


def report(tool: str, stem: str, reach: dict, said: str) -> bool:
    """Whether all kernels were launched, without a fault but in libraries; prints what was found."""
    called = [int(index) for index in re.findall(r"^called (\d+)$", said, re.MULTILINE)]
    kernels, wanted = (set().union(*(reach["calls"][i] for i in c)) for c in (called, range(len(reach["calls"]))))
    summary = re.search(r"SUMMARY: (\d+) (?:error|hazard)", said)
    faults = Counter((what, *(name_of(site) for site in sites if site)) for what, *sites in FAULT.findall(said))
    ours = {fault: count for fault, count in faults.items() if {*fault[1:]} & {*reach["built"]} or len(fault) == 1}
    nameless = int(summary[1]) if summary and not faults else 0  # the tool counts them, and does not say where they are
    errors, others = sum(ours.values()) + nameless, faults.total() - sum(ours.values())
    done = f"{len(called)} of {len(reach['asked'])} calls, {len(kernels)} of {len(wanted)} kernels"
    found = f"{errors} errors, {others} in libraries alone{'' if summary else ', cut off'}"
    print(f"{tool}, {stem}: {done}, {found}", flush=True)
    for fault, count in faults.most_common():
        print(f"    {'ours' if fault in ours else 'a library'}: {count} times {', '.join(fault)}")
    if nameless:
        lines = [line for line in said.splitlines() if line.startswith("=====")]
        print("    without a place; the tool's first and last lines:", *lines[:20], *lines[-5:], sep="\n        ")
    return not ours and not nameless and bool(summary) and kernels == wanted


def main() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--pairs", default=",".join(STEMS))
    parser.add_argument("--seconds", type=float, default=150, help="of all tools, which run at once")
    parser.add_argument("--reach", action="store_true")
    parser.add_argument("--profile", type=Path, help=argparse.SUPPRESS)  # what the processes do
    parser.add_argument("--call", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.profile:
        return profile_all(options.pairs, options.profile)
    if options.call:
        return call_all(options.pairs, options.call, options.until)
    folder, stems, reach, running, right = Path(tempfile.mkdtemp()), options.pairs.split(","), {}, {}, True
    for gpu, stem in enumerate(stems):
        (folder / stem).mkdir(parents=True)  # a folder of its own: stems may have a slash
        path, output = folder / stem / "reach", folder / stem / "log"
        running[stem] = start("--pairs", stem, "--profile", path, output=output, gpu=gpu)
    for stem, process in running.items():
        assert process.wait() == 0, (folder / stem / "log").read_text()
        reach[stem] = json.loads((folder / stem / "reach").read_text())
        missing = sorted(set(reach[stem]["built"]) - set().union(*reach[stem]["calls"]))
        print(f"{stem}: the calls launch all of {len(reach[stem]['built'])} kernels but {missing}", flush=True)
    until, running = time.monotonic() + options.seconds, {}
    for gpu, (tool, stem) in enumerate((t, s) for t in options.tools.split(",") for s in stems if not options.reach):
        log, asked = folder / stem / tool, ("--pairs", stem, "--call", folder / stem / "reach", "--until", until)
        running[tool, stem] = log, start(*asked, output=log, gpu=gpu, tool=tool)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # who stops this tool early is told what was found so far
    try:
        while any(process.poll() is None for _, process in running.values()) and time.monotonic() < until + GRACE:
            if all(process.poll() is not None or REACHED in log.read_text() for log, process in running.values()):
                for stem in stems:
                    (folder / stem / REACHED).touch()
            time.sleep(0.5)
    finally:  # in sessions of their own, they would go on without this process
        for (tool, stem), (log, process) in running.items():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            right &= report(tool, stem, reach[stem], log.read_text())
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
