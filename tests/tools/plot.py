"""The charts of results/, from its records alone: python tests/tools/plot.py

A figure a direction, with a panel a pair on a scale of its own: milliseconds of the pair's files, torch.compile and
eager, and the floor as a line. Each as SVG for a light and for a dark page. Needs matplotlib.
"""

import matplotlib
import summary

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.lines import Line2D

COLOURS = {  # by the file's ending: text and axes, grid, ModelNew, compile, eager, the floor
    "": dict(ink="#1f2328", grid="#d8dee4", new="#0969da", compile="#8c959f", eager="#c4cbd2", floor="#cf222e"),
    "_dark": dict(ink="#e6edf3", grid="#30363d", new="#58a6ff", compile="#8b949e", eager="#484f58", floor="#ff7b72"),
}
DASHES = (0, (4, 2))


def draw_panel(axes, pair: str, direction: str, colours: dict) -> None:
    """Horizontal bars, the fastest file on top; behind each its milliseconds and how many times less than eager's."""
    files = [name for name in summary.FILES if summary.pair_of(name) == pair]
    machine = summary.machine_of(files[0])
    found = {name: summary.find(summary.benchmark(name, machine), direction) for name in reversed(files)}
    runs = {name: run for name, run in found.items() if run}
    times = {("Hopper's file" if "/" in name else "portable file"): run["ms"]["new"] for name, run in runs.items()}
    first = next(iter(runs.values()))
    times |= {name: first["ms"][name] for name in ("compile", "eager") if name in first["ms"]}
    painted = [colours.get(name, colours["new"]) for name in times]
    drawn = axes.barh(list(times), times.values(), color=painted, height=0.7)
    factors = {name: f", {times['eager'] / ms:.1f}x" for name, ms in times.items() if name != "eager"}
    texts = [f"{ms:.3g} ms{factors.get(name, '')}" for name, ms in times.items()]
    axes.bar_label(drawn, texts, padding=3, fontsize=8, color=colours["ink"])
    axes.axvline(first["roof"]["floor_ms"], color=colours["floor"], linewidth=1.2, linestyle=DASHES)
    axes.set_xlim(0, 1.4 * max(times.values()))
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_title(pair, fontsize=9, color=colours["ink"], loc="left")
    axes.set_xlabel(f"measured on: {summary.MACHINES[machine]}", fontsize=8, loc="left", color=colours["ink"])
    axes.tick_params(colors=colours["ink"], which="both", labelsize=8, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(colours["grid"])
    axes.set_axisbelow(True)


def draw(direction: str, colours: dict):
    rows = (len(summary.PAIRS) + 1) // 2
    figure, grid = pyplot.subplots(rows, 2, figsize=(8.8, 0.5 + 1.8 * rows), layout="constrained")
    figure.get_layout_engine().set(wspace=0.06, hspace=0.08)
    for axes, pair in zip(grid.flat, summary.PAIRS):
        draw_panel(axes, pair, direction, colours)
    figure.suptitle(f"{summary.DIRECTIONS[direction]}, float32", fontsize=10, color=colours["ink"])
    floor = "floor: the machine's measured bandwidth and matrix rate allow no less"
    line = Line2D([], [], color=colours["floor"], linestyle=DASHES, label=floor)
    style = {"loc": "outside lower center", "frameon": False, "fontsize": 8}
    figure.legend(handles=[line], labelcolor=colours["ink"], **style)
    return figure


def main() -> None:
    # The same records give the same file.
    settings = {"svg.hashsalt": "results", "font.family": "DejaVu Sans", "axes.facecolor": "none"}
    with matplotlib.rc_context(settings):
        for ending, colours in COLOURS.items():
            for direction in summary.DIRECTIONS:
                figure = draw(direction, colours)
                path = summary.ROOT / "results" / f"{direction}{ending}.svg"
                figure.savefig(path, facecolor="none", metadata={"Date": None})
                pyplot.close(figure)


if __name__ == "__main__":
    main()
