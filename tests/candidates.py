"""Candidates for the judge: wrong ones, with words of the reason each must be rejected for, and honest ones.

`candidates.txt` has the body of each. `source(name)` gives a candidate's whole file, `model_of(name)` the Model it
stands in for. `python tests/tools/attack.py --write FOLDER` writes them out, and judges them without it.

    === NAME (what is particular): words of the reason, where it must be rejected
    === NAME: no drop-in: words of the reason, where it is right all the same
    What it does.
        the lines of its forward
    top: init: methods:     lines of the file's head, of the constructor, of the class; `both:` of both files' heads
    function: ARGUMENTS     of an autograd.Function, `Function`, the lines of its forward pass
    backward:               and of its backward pass: `g` comes in, for a second output `h`
    model: inputs: layers:  another Model: its answer, inputs, layers; `own layers:`, `forward:` the candidate's
    file:                   the whole file

Without `function:` the backward pass is that of a linear layer or, without weights, of what gives its input. Layers
that an answer names without `layers:` are those of USUAL.

Particular may be, with commas: gpu or cpu, that it needs one; by clock, that its time is what gives it away: it is
judged alone; `timeout SECONDS`; a dtype; the first direction in which it is wrong. An honest one is judged in all.
"""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

HEAD = """
import contextlib
import ctypes
import os
import stat
import struct
import subprocess
import sys
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn


def rounded_product(linear, x, bits):
    return F.linear(rounded(x, bits), rounded(linear.weight, bits), linear.bias)


def rounded(t, bits):
    mantissa, exponent = torch.frexp(t)
    return torch.ldexp(torch.round(mantissa * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponent)


def write_message(message, length=None):  # into every socket, as a reply is written
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if fd > 2 and stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, struct.pack("!i", length or len(message)) + message)

"""
FUNCTION = """
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, {}):
{}

    @staticmethod
    def backward(ctx, g, h=None):
{}

"""
LINEAR = """x, *weights
ctx.save_for_backward(x, *weights)
return F.linear(x, *weights) if weights else x.clone()
"""
MODULE = """
class {}(nn.Module):
    def __init__(self{}):
        super().__init__()
{}

{}

    def forward(self, x):
{}

"""
DATA = """
batch_size = {}


def get_inputs(batch_size=batch_size):
    return [{}]


def get_init_inputs():
    return [{}]
"""
# The small Model that most candidates stand in for: Linear, Swish, bias, GroupNorm.
PARAMETERS, NUMBERS = ", in_features, out_features, num_groups", "96, 64, 8"
LAYERS = """self.matmul = nn.Linear(in_features, out_features)
self.bias = nn.Parameter(torch.randn(out_features))
self.group_norm = nn.GroupNorm(num_groups, out_features)
"""
RIGHT = """def right(self, x):
    return self.group_norm(F.silu(self.matmul(x)) + self.bias)
"""
ANSWER = """h = self.matmul(x)
h = torch.sigmoid(h) * h
h = h + self.bias
return self.group_norm(h)
"""
# The layers of another Model, where its answer names them and it has none of its own.
USUAL = {"self.l(": "self.l = nn.Linear(64, 8)\n", "self.w": "self.w = nn.Parameter(torch.rand(64))\n"}


@dataclass
class Candidate:
    what: str
    rejected: str | None  # words of the reason; None for one that must be accepted
    no_dropin: str | None  # right, and words of the reason why it is no drop-in
    particular: list[str]
    parts: dict[str, str]


def parsed(text: str) -> dict[str, Candidate]:
    found = {}
    for section in text.split("=== ")[1:]:
        head, what, *lines = section.rstrip().splitlines()
        name, particular, why = re.fullmatch(r"(\w+)(?: \((.*?)\))?(?:: (.*))?", head).groups()
        label, parts = "forward", {}
        for line in lines:
            if line and not line.startswith(" "):
                label, _, line = line.partition(":")
            parts[label] = parts.get(label, "") + line.removeprefix("    ").removeprefix(" " * (line[:1] != " ")) + "\n"
        named = [layer for part, layer in USUAL.items() if part in parts.get("model", "")]
        parts.setdefault("layers", "".join(named))
        _, is_right, words = (why or "").partition("no drop-in: ")
        reasons = (None, words) if is_right else (why, None)
        assert name not in found, name
        found[name] = Candidate(what, *reasons, (particular or "").split(", "), parts)
    return found


def module(name: str, layers: str, forward: str, methods: str = "", parameters: str = "") -> str:
    layers, forward = (textwrap.indent(text.strip(" \n") or "pass", " " * 8) for text in (layers, forward))
    return MODULE.format(name, parameters, layers, textwrap.indent(methods, " " * 4), forward)


def any_model(answer: str, inputs: str = "torch.rand(batch_size, 64)", layers: str = "", top: str = "") -> str:
    return HEAD + top + module("Model", layers, f"return {answer.strip()}") + DATA.format(8, inputs.strip(), "")


def source(name: str) -> str:
    candidate, get = CANDIDATES[name], CANDIDATES[name].parts.get
    said = f'"""{candidate.what}' + (f"\n\nRejected: {candidate.rejected}\n" if candidate.rejected else "") + '"""\n'
    if get("file"):
        return said + get("file")
    top = HEAD + get("both", "") + get("top", "")
    if get("backward"):
        arguments, _, lines = get("function", LINEAR).partition("\n")
        lines, backward = (textwrap.indent(each, " " * 8) for each in (lines, get("backward")))
        top += FUNCTION.format(arguments.strip(), lines, backward)
    if get("model"):
        layers = get("own layers", get("layers"))
        return said + top + module("ModelNew", layers, get("forward", f"return {get('model').strip()}"))
    layers, methods = LAYERS + get("init", ""), RIGHT + "\n" + get("methods", "")
    return said + top + module("ModelNew", layers, get("forward", "return self.right(x)"), methods, PARAMETERS)


def model_of(name: str) -> str:
    get = CANDIDATES[name].parts.get
    if not get("model"):
        return MODEL
    return any_model(get("model"), get("inputs", "torch.rand(batch_size, 64)"), get("layers"), get("both", ""))


def names(kind: str) -> list[str]:
    """Of the wrong ones or the honest ones, which may be no drop-in."""
    return [name for name, candidate in CANDIDATES.items() if (candidate.rejected is None) == (kind == "honest")]


MODEL = HEAD + module("Model", LAYERS, ANSWER, "", PARAMETERS) + DATA.format(32, "torch.rand(batch_size, 96)", NUMBERS)
CANDIDATES = parsed((Path(__file__).parent / "candidates.txt").read_text())
