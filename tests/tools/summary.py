"""The tables of README.md and results/README.md, from the records in results/ alone.

    python tests/tools/summary.py [--write]

README.md gets a row a pair that was measured, in float32 with TF32 off; results/README.md every row. --write puts them
between their marks; without it the README's is printed. A pair's record is taken from the first of FOLDERS that has it.
"""

import argparse
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("h200", "h100")
DIRECTIONS = {
    "forward": "forward",
    "forward_recorded": "forward, gradients recorded",
    "forward_backward": "forward + backward",
}


def runs_of(path: Path) -> list[dict]:
    """Those that were timed."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    return [run for run in runs if run["ms"]]


def folder_of(stem: str) -> str:
    return next((name for name in FOLDERS if (ROOT / "results" / name / f"{stem}.json").exists()), FOLDERS[-1])


def where(stem: str) -> str:
    return f"on an {folder_of(stem).upper()}"


def benchmark(stem: str) -> list[dict]:
    """All runs of a pair at its benchmark shapes."""
    paths = (ROOT / "results" / folder_of(stem)).glob(f"{stem}*.json")
    return [run for path in sorted(paths) for run in runs_of(path)]


STEMS = [path.stem for path in sorted((ROOT / "kernels").glob("*.py")) if benchmark(path.stem)]


def sweep(stem: str) -> list[dict]:
    """All runs of a pair at other shapes."""
    return runs_of(ROOT / "results" / "sweep" / f"{stem}.json")


def strict_float32(stem: str, direction: str) -> dict:
    """The run of the README's table and charts."""
    wanted = (direction, "float32", "highest")
    return next(run for run in benchmark(stem) if (run["direction"], run["dtype"], run["precision"]) == wanted)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def front_table() -> str:
    def cell(run: dict) -> str:
        times = " ".join(f"**{run['speedup'][name]:.2f}x** {name}," for name in ("eager", "compile"))
        return f"{times} {run['roof']['percent']:.0f}% of the floor"

    rows = [[f"`{stem}`", where(stem), *(cell(strict_float32(stem, way)) for way in DIRECTIONS)] for stem in STEMS]
    return markdown(["pair", "measured", *DIRECTIONS.values()], rows)


def full_row(run: dict) -> list[str]:
    """A run of results/README.md: what was measured, then milliseconds and factors with their intervals."""
    times = [f"{run['ms'][name]:.4g}" if name in run["ms"] else "-" for name in ("new", "eager", "compile")]
    factors = []
    for name in ("eager", "compile"):
        low, high = run["speedup_ci"].get(name, (0, 0))
        factors.append(f"{run['speedup'][name]:.2f} [{low:.2f}, {high:.2f}]" if name in run["speedup"] else "-")
    error = [run["error"].get(name) for name in ("new_max", "eager_max")]
    percent = f"{run['roof']['percent']:.0f}%" if run["roof"] else "-"
    return [
        run["dtype"],
        "allowed" if run["precision"] == "high" else "off",
        DIRECTIONS[run["direction"]],
        *times,
        *factors,
        percent,
        " / ".join("-" if e is None else f"{e:.1e}" for e in error),
    ]


def full_tables() -> str:
    header = ["dtype", "TF32", "direction", "new ms", "eager ms", "compile ms", "x eager [95%]", "x compile [95%]"]
    header += ["of floor", "largest error, new / eager"]
    tables = {stem: markdown(header, [full_row(run) for run in benchmark(stem)]) for stem in STEMS}
    return "\n\n".join(f"`{stem}`, {where(stem)}:\n\n{table}" for stem, table in tables.items())


def slower_table() -> str:
    """The shapes of the sweeps at which eager or torch.compile is faster; last, the sweeps that lack compile."""
    rows, silent = [], []
    for stem in STEMS:
        if not any("compile" in run["speedup"] for run in sweep(stem)):
            silent.append(f"`{stem}`")
        for run in sweep(stem):
            best = min(run["speedup"], key=run["speedup"].get)
            if run["speedup"][best] < 0.995:
                shapes = " and ".join(" x ".join(map(str, shape)) for shape in run["shapes"])
                rows.append([f"`{stem}`", shapes, run["dtype"], f"{run['speedup'][best]:.2f}x {best}"])
    note = f"\n\nTaken without torch.compile: the sweep of {', '.join(silent)}." if silent else ""
    return markdown(["pair", "input", "dtype", "ModelNew is"], rows) + note


TABLES = {
    "README.md": {"results": front_table},
    "results/README.md": {"all rows": full_tables, "slower": slower_table},
}


def filled(name: str) -> str:
    """The file with its tables as the records have them."""
    text = (ROOT / name).read_text()
    for mark, table in TABLES[name].items():
        block = re.compile(rf"(?<=<!-- {mark}: make chart -->\n).*?(?=<!-- end {mark} -->)", re.DOTALL)
        text, found = block.subn(lambda _, table=table: table() + "\n", text)
        assert found == 1, f"{name} has no marks for {mark}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the two files")
    if parser.parse_args().write:
        for name in TABLES:
            (ROOT / name).write_text(filled(name))
    else:
        print(front_table())


if __name__ == "__main__":
    main()
