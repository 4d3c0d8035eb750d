"""The README's table, from results/h200/*.json: python tests/tools/summary.py [--write]

A row a pair, in float32 with TF32 off: milliseconds, times eager, times torch.compile. --write puts it into README.md.
"""

import argparse
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DIRECTIONS = {"forward": "forward", "forward_recorded": "forward, gradients recorded", "forward_backward": "forward + backward"}
BLOCK = re.compile(r"(?<=<!-- results: make chart -->\n).*?(?=\n<!-- end results -->)", re.DOTALL)


def summary() -> str:
    lines = ["| pair | " + " | ".join(DIRECTIONS.values()) + " | forward, % of the floor |", "| --- " * (len(DIRECTIONS) + 2) + "|"]
    for path in sorted((ROOT / "results" / "h200").glob("*.json")):
        runs = json.loads(path.read_text())["runs"]
        chosen = {run["direction"]: run for run in runs if (run["dtype"], run["precision"]) == ("float32", "highest")}
        if not chosen:
            continue
        cells = []
        for direction in DIRECTIONS:
            run = chosen[direction]
            cells.append(f"{run['ms']['new']:.3f} ms, {run['speedup']['eager']:.2f}x eager, {run['speedup']['compile']:.2f}x compile")
        lines.append(f"| `{path.stem}` | " + " | ".join(cells) + f" | {chosen['forward']['roof']['percent']:.0f}% |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into README.md instead of printing it")
    if parser.parse_args().write:
        readme = ROOT / "README.md"
        readme.write_text(BLOCK.sub(lambda _: summary(), readme.read_text()))
    else:
        print(summary())


if __name__ == "__main__":
    main()
