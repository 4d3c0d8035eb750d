"""What is printed: a block a record, one line of progress, and a table at the end. Colours on a terminal alone."""

from __future__ import annotations

import os
import sys
import textwrap

from judge.bench import AMBIGUOUS, FASTER, SLOWER
from judge.record import BUILD, DROP_IN, RIGHT, UNJUDGED, WRONG, Result
from judge.source import DIRECTIONS

COLUMNS = 100
COLOURS = {DROP_IN: 32, RIGHT: 33, WRONG: 31, BUILD: 31, UNJUDGED: 31, FASTER: 32, SLOWER: 31, AMBIGUOUS: 33}
WORDS = dict(zip(DIRECTIONS, ("forward", "forward with gradients recorded", "forward + backward")))
SHORT = dict(zip(DIRECTIONS, ("forward", "recorded", "fwd + bwd")))
ORDER = ("new", "eager", "compile")
MARKS = {FASTER: ">", SLOWER: "<", AMBIGUOUS: "~"}
RULE = (
    "Brackets hold a 95% interval of the speed-up. FASTER: all of it is above 1.0; SLOWER: below. AMBIGUOUS: it holds "
    "1.0 or, if other programs disturbed the rounds, comes nearer to 1.0 than 0.1 or than its own width."
)


def paint(text: str, colour: int | None) -> str:
    """Coloured on a terminal, unless NO_COLOR asks for none."""
    plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain or colour is None else f"\x1b[{colour}m{text}\x1b[0m"


class Progress:
    """One line on stderr that is written over and over; nothing where that is no terminal."""

    def __init__(self, before: str = ""):
        self.before = before  # what is said before each text, as which pair it is

    def __call__(self, text: str = "") -> None:
        """Without a text the line is empty."""
        if sys.stderr.isatty():
            width = os.get_terminal_size(sys.stderr.fileno()).columns or COLUMNS
            print(f"\r\x1b[K{(self.before * bool(text) + text)[: width - 1]}", end="", file=sys.stderr, flush=True)


def question(run: Result) -> str:
    """What was asked, in words."""
    precision = " with TF32 allowed" if run.precision == "high" and run.dtype == "float32" else ""
    shapes = " and ".join(" x ".join(map(str, shape)) or "a number" for shape in run.shapes)
    seen = {size for shape in run.shapes for size in shape}
    unseen = {name: value for name, value in run.constants.items() if isinstance(value, int) and value not in seen}
    constants = "".join(f", {name} {value}" for name, value in unseen.items())
    said = f"{WORDS[run.direction]}, {run.dtype}{precision}, {run.device}"
    return f"{said}, input {shapes}{constants}" if shapes else said


def wrapped(label: str, text: str) -> str:
    """A remark below the head of a block."""
    first = f"  {label}: " if label else "  "
    return textwrap.fill(" ".join(text.split()), COLUMNS, initial_indent=first, subsequent_indent="      ")


def amount(value: float, unit: str) -> str:
    """Of bytes or FLOPs."""
    scale, prefix = next(((10**n, p) for n, p in ((12, "T"), (9, "G"), (6, "M")) if value >= 10**n), (1e3, "k"))
    return f"{value / scale:.3g} {prefix}{unit}"


def largest_error(label: str, error: dict, what: str) -> str:
    return f"  {label:11}{error['new_max']:>10.1e}    {what}; eager's is {error['eager_max']:.1e}"


def block(run: Result, before: Result | None = None) -> list[str]:
    """Verdict and pair, a line a contender, floor and errors, and what is to be said.

    before: the same pair's record of another direction, whose block stands above. What it says is not said again.
    """
    asked = question(run).replace(" x ", "\xa0x\xa0")  # no line ends inside a shape
    wrapped_head = textwrap.wrap(f"{run.status}  {run.model}: {asked}", COLUMNS, subsequent_indent="      ")
    lines = [line.replace("\xa0", " ") for line in wrapped_head]
    lines[0] = paint(run.status, COLOURS.get(run.status)) + lines[0].removeprefix(run.status)
    if run.ms:
        lines += ["              median ms    middle half of the times  ModelNew is"]
        lines += [contender(run, name) for name in ORDER if name in run.ms]
    if run.roof.get("floor_ms"):  # 0 where there is nothing to compute
        floor, times = run.roof["floor_ms"], run.ms["new"] / run.roof["floor_ms"]
        products = amount(run.roof["flops"], "FLOP") if run.roof["flops"] else "no matrix products"
        work = f"for {amount(run.roof['bytes'], 'B')} and {products}"
        lines.append(f"  {'floor':11}{floor:>10.4g}    ModelNew takes {times:.2f} times as long ({work})")
    if run.error:
        lines.append(largest_error("error", run.error, "largest absolute error, against the Model in float64"))
    if run.gradient_error:
        name, error = max(run.gradient_error.items(), key=lambda item: item[1]["new_max"])
        lines.append(largest_error("gradients", error, f"the same of the gradients: that of {name[-30:]}"))
    label = "" if run.status == BUILD else run.status
    same = ["for the same reasons"]
    reasons = same if before and run.reasons and run.reasons == before.reasons else run.reasons
    no_dropin = same if before and run.no_dropin and run.no_dropin == before.no_dropin else run.no_dropin
    lines += [wrapped(label, reason) for reason in reasons] + [wrapped("no drop-in", reason) for reason in no_dropin]
    if run.interference and run.ms:
        advice = "Other programs ran meanwhile: time it again when none does."
        lines.append(wrapped("disturbed", f"{'; '.join(run.interference)}. {advice}"))
    ratios = {name: run.ms[name] / run.ms["new"] for name in ORDER if name in run.speedup}
    apart = [f"{ratio:.2f}x {name}" for name, ratio in ratios.items() if abs(ratio / run.speedup[name] - 1) > 0.02]
    if apart:
        said = f"the factors are medians of the rounds' ratios; the ratio of the medians is {', '.join(apart)}"
        lines.append(wrapped("note", said))
    return lines + [wrapped("note", note) for note in run.notes if not before or note not in before.notes]


def contender(run: Result, name: str) -> str:
    low, high = run.spread[name]
    line = f"  {'ModelNew' if name == 'new' else name:11}{run.ms[name]:>10.4g}    {f'{low:.4g} to {high:.4g}':26}"
    if name not in run.speedup:
        return line.rstrip()
    low, high = run.speedup_ci[name]
    verdict = run.verdict[name]
    disturbed = " (disturbed)" if verdict == AMBIGUOUS and not low <= 1 <= high else ""
    return f"{line}{run.speedup[name]:.2f}x [{low:.2f}, {high:.2f}]  {paint(verdict, COLOURS[verdict])}{disturbed}"


def summary(runs: list[Result]) -> list[str]:
    """A row a record; what all records have in common is left out."""
    plain = ["*" * any(note.startswith("plain path") for note in run.notes) for run in runs]
    verdicts = [run.status + mark for run, mark in zip(runs, plain)]
    columns = [["verdict", *verdicts], ["pair", *(run.model for run in runs)]]
    parts = [[run.dtype for run in runs], ["TF32" if run.precision == "high" else "strict" for run in runs]]
    parts.append([SHORT[run.direction] for run in runs])
    shapes = [", ".join("x".join(map(str, shape)) for shape in run.shapes) for run in runs]
    if len({*zip(columns[1][1:], shapes)}) > len({*columns[1][1:]}):  # they differ within a pair
        parts.append(shapes)
    columns += [["", *part] for part in parts if len({*part}) > 1]
    left = len(columns)
    columns.append(["ModelNew", *(f"{run.ms['new']:.4g} ms" if run.ms else "-" for run in runs)])
    for name in ORDER:
        cells = [f"{run.speedup[name]:.2f} {MARKS[run.verdict[name]]}" if name in run.speedup else "-" for run in runs]
        columns += [[f"x {name}", *cells]] * any(name in run.speedup for run in runs)
    widths = [max(map(len, column)) for column in columns]
    over = max(0, sum(widths) + 2 * len(widths) - 2 - COLUMNS)
    if left > 2 and over:  # the shapes, if any, give way
        widths[left - 1] = max(8, widths[left - 1] - over)
    lines = []
    for row in zip(*columns):
        sized = enumerate(zip(row, widths))
        cells = [f"{cell[:width]:{'<' if i < left else '>'}{width}}" for i, (cell, width) in sized]
        cells[0] = paint(cells[0], COLOURS.get(row[0].rstrip("*")))
        lines.append("  ".join(cells).rstrip())
    given = {verdict for run in runs for verdict in run.verdict.values()}
    legend = [f"{mark} {verdict}" for verdict, mark in MARKS.items() if verdict in given]
    legend += ["* plain path: none of the file's kernels ran"] * any(plain)
    return lines + ["", ", ".join(legend)] * bool(legend)
