"""Every kernel under compute-sanitizer: forward and gradients of the tests' cases, once each, the small ones first.

    python tests/sanitize.py [--tools initcheck,synccheck,racecheck,memcheck] [--pairs NAME,...] [--seconds 60]

One process for each pair and tool, all at once; each says how many calls it got through in its seconds, and what the tool found. Exit code 1
if that was anything. Every tensor is an allocation of its own, so that the tools know its borders.
"""

import argparse
import os
import re
import subprocess
import sys
import time

import torch
from cases import CASES, DTYPES, STEMS, build
from test_gpu import LARGE

TOOLS = ("initcheck", "synccheck", "racecheck", "memcheck")


def call_all(stem: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    cases = sorted((case for case in [*CASES, *LARGE] if case.stem == stem and case.values < 2e7), key=lambda case: case.values)
    wanted = [(case, dtype) for dtype in (torch.float32, *(other for other in DTYPES if other is not torch.float32)) for case in cases]
    for done, (case, dtype) in enumerate(wanted):
        if time.monotonic() > deadline:
            break
        _, new, inputs = build(case, "cuda", dtype)
        out = new(*(t.requires_grad_() for t in inputs))
        out.backward(torch.ones_like(out))
        torch.cuda.synchronize()
    else:
        done = len(wanted)
    print(f"{done} of {len(wanted)} calls")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--pairs", default=",".join(STEMS))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--call", help=argparse.SUPPRESS)  # what the processes do
    options = parser.parse_args()
    if options.call:
        call_all(options.call, options.seconds)
        return 0
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    running = {}
    for tool in options.tools.split(","):
        for stem in options.pairs.split(","):
            command = [sys.executable, __file__, "--call", stem, "--seconds", str(options.seconds)]
            running[tool, stem] = subprocess.Popen(
                ["compute-sanitizer", "--tool", tool, "--print-limit", "5", *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
    found = 0
    for (tool, stem), process in running.items():
        said = process.communicate()[0]
        calls, summary = re.search(r"\d+ of \d+ calls", said), re.search(r"SUMMARY: (.*)", said)
        clean = bool(calls and summary and re.search(r"\b0 (errors|hazards)", summary[1]))
        found += not clean
        print(f"{tool}, {stem}: {calls and calls[0]}, {summary and summary[1]}", flush=True)
        if not clean:
            print("\n".join(said.splitlines()[-60:]), flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
