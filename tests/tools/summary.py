"""The tables of the three READMEs, from the records in results/ alone: python tests/tools/summary.py

README.md gets a row a kernel file, in float32 with TF32 off, and a sample of what is printed; kernels/README.md a table
a pair, of eager, torch.compile and the pair's files; results/README.md every row that was measured. They are put
between their marks. A file's record is results/MACHINE/NAME.json, NAME being the harness's: `instance_norm`, or
`hopper/linear_swish_group_norm`.
"""

import itertools
import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from judge import show
from judge.source import discover

# The folders of results/, of which the first one that has a record is shown first: `h200_as_8.0` ran what an A100 runs.
FOLDERS = [path.name for path in (ROOT / "results").iterdir() if path.is_dir() and path.name != "sweep"]
FOLDERS.sort(key=lambda name: (name == "cpu", "_as_" in name, name))
MACHINES = {name: name.upper().replace("_AS_", ", compiled for ") for name in FOLDERS}
DIRECTIONS = {
    "forward": "forward",
    "forward_recorded": "forward, gradients recorded",
    "forward_backward": "forward + backward",
}
MAIN_DIRECTIONS = ("forward", "forward_backward")


def pair_of(name: str) -> str:
    """`hopper/X` is a file of the pair X."""
    return name.rpartition("/")[2]


def benchmark(name: str, machine: str) -> list[dict]:
    """All runs of a file that were timed; with TF32 allowed they have a record of their own. Those at other shapes are
    in the folder `sweep`."""
    paths = [ROOT / "results" / machine / f"{name}{ending}.json" for ending in ("", "_tf32")]
    runs = [run for path in paths if path.exists() for run in json.loads(path.read_text())["runs"]]
    return [run for run in runs if run["ms"]]


def machines_of(name: str) -> list[str]:
    return [machine for machine in MACHINES if benchmark(name, machine)]


FILES = [name for name in discover(ROOT) if machines_of(name)]  # what was measured, the portable file of a pair first
PAIRS = list(dict.fromkeys(pair_of(name) for name in FILES))


def machine_of(name: str) -> str:
    """The one whose record of this file is shown, where one is."""
    return machines_of(name)[0]


def find(runs: list[dict], direction: str, dtype: str = "float32", precision: str = "highest") -> dict | None:
    wanted = direction, dtype, precision
    return next((run for run in runs if (run["direction"], run["dtype"], run["precision"]) == wanted), None)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def times(run: dict | None, baseline: str) -> str:
    """How many times as fast as the baseline."""
    return f"{run['speedup'][baseline]:.2f}x" if run and baseline in run["speedup"] else "-"


def front_table() -> str:
    rows = []
    for name in FILES:
        runs = benchmark(name, machine_of(name))
        forward, training = (find(runs, direction) for direction in ("forward", "forward_backward"))
        rows.append([f"`{name}`", MACHINES[machine_of(name)], f"{forward['ms']['new']:.3g} ms"])
        rows[-1] += [f"**{times(forward, 'eager')}**", times(forward, "compile")]
        rows[-1] += [f"{forward['roof']['percent']:.0f}%" if forward["roof"] else "-"]
        rows[-1] += [f"**{times(training, 'eager')}**", times(training, "compile")]
    header = ["kernels/", "measured on", "forward", "x eager", "x compile", "of the floor"]
    return markdown([*header, "forward + backward, x eager", "x compile"], rows)


def ladder_table(pair: str) -> str:
    """Milliseconds of eager, torch.compile and the pair's files, and how many times less they are than eager's.

    A row that was measured elsewhere says where.
    """
    columns = [("forward", "float32"), ("forward_backward", "float32"), ("forward", "bfloat16")]

    def cells(runs: list[dict], contender: str) -> list[str]:
        found = []
        for direction, dtype in columns:
            run = find(runs, direction, dtype)
            ms = run["ms"] if run else {}
            factor = f" ({ms['eager'] / ms[contender]:.1f}x)" if contender in ms and contender != "eager" else ""
            found.append(f"{ms[contender]:.3g}{factor}" if contender in ms else "-")
        return found

    files = [name for name in FILES if pair_of(name) == pair]
    machine = machine_of(files[0])
    rows = [[whose, *cells(benchmark(files[0], machine), whose)] for whose in ("eager", "compile")]
    for name in files:
        elsewhere = "" if machine_of(name) == machine else f" (on: {MACHINES[machine_of(name)]})"
        rows.append([f"[{name}]({name}.py){elsewhere}", *cells(benchmark(name, machine_of(name)), "new")])
    return markdown([f"{MACHINES[machine]}, ms", "forward", "forward + backward", "forward, bfloat16"], rows)


def full_table() -> str:
    """A row a file, machine, dtype and precision: forward and forward + backward, and the forward's largest errors.

    What ran on the same machine as another GPU would has no rows, but a column.
    """

    def ms(run: dict | None) -> str:
        return f"{run['ms']['new']:.4g}" if run else "-"

    def cells(run: dict | None) -> list[str]:
        floor = f"{run['roof']['percent']:.0f}%" if run and run["roof"] else "-"
        return [ms(run), times(run, "eager"), times(run, "compile"), floor]

    rows = []
    measured = ((file, machine) for file in FILES for machine in machines_of(file))
    for name, machine in (one for one in measured if "_as_" not in one[1]):
        runs, as_older = benchmark(name, machine), benchmark(name, f"{machine}_as_8.0")
        for dtype, precision in dict.fromkeys((run["dtype"], run["precision"]) for run in runs):
            forward, training = (find(runs, direction, dtype, precision) for direction in MAIN_DIRECTIONS)
            older = [ms(find(as_older, direction, dtype, precision)) for direction in MAIN_DIRECTIONS]
            tf32 = ", TF32 allowed" if precision == "high" else ""
            errors = " / ".join(f"{forward['error'][f'{whose}_max']:.1e}" for whose in ("new", "eager"))
            row = [f"`{name}`", f"{MACHINES[machine]}, {dtype}{tf32}", *cells(forward), *cells(training)]
            rows.append([*row, ", ".join(older) if as_older else "-", errors])
    columns = ["x eager", "x compile", "floor / time"]
    header = ["file", "measured", "forward, ms", *columns, "forward + backward, ms", *columns]
    return markdown(
        [*header, "compiled for 8.0, ms: forward, forward + backward", "largest absolute error, forward: new / eager"],
        rows,
    )


def slower_table() -> str:
    """Where the sweeps' runs have a faster baseline: a row a file and baseline."""
    rows = []
    for name, baseline in itertools.product(discover(ROOT), ("eager", "compile")):
        timed = [run for run in benchmark(name, "sweep") if baseline in run["speedup"]]
        timed.sort(key=lambda run: run["speedup"][baseline])
        slower, said = [run for run in timed if run["speedup"][baseline] < 0.995], []
        for run in slower[:3]:
            shape = " and ".join(" x ".join(map(str, shape)) for shape in run["shapes"])
            said.append(f"{shape} {run['dtype']} {DIRECTIONS[run['direction']]}: {times(run, baseline)}")
        if timed:
            span = f"{times(timed[0], baseline)} to {timed[-1]['speedup'][baseline]:.3g}x"
            rows.append([f"`{name}`", baseline, f"{len(slower)} of {len(timed)}", span, "; ".join(said) or "-"])
    return markdown(["file", "baseline", "rows where it is faster", "ModelNew's factors", "the three lowest"], rows)


def sample() -> str:
    """What the harness prints of the first file's forward."""
    os.environ["NO_COLOR"] = "1"
    run = find(benchmark(FILES[0], machine_of(FILES[0])), "forward")
    return "\n".join(["```", *show.block(show.Result(**run)), "```"])


def tables() -> dict[str, dict]:
    """By file and mark."""
    return {
        "README.md": {"results": front_table, "sample": sample},
        "kernels/README.md": {pair: lambda pair=pair: ladder_table(pair) for pair in PAIRS},
        "results/README.md": {"all rows": full_table, "slower": slower_table},
    }


def filled(name: str) -> str:
    """The file with its tables as the records have them."""
    text = (ROOT / name).read_text()
    for mark, table in tables()[name].items():
        block = re.compile(rf"(?<=<!-- {mark}: make chart -->\n).*?(?=<!-- end {mark} -->)", re.DOTALL)
        text, found = block.subn(lambda _, table=table: table() + "\n", text)
        assert found == 1, f"{name} has no marks for {mark}"
    return text


if __name__ == "__main__":
    for name in tables():
        (ROOT / name).write_text(filled(name))
