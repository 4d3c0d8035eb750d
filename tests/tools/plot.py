"""The charts of results/, from its records alone: python tests/tools/plot.py [--folder results] [--png]

A figure a direction, with a panel a pair on a scale of its own: milliseconds of the pair's files, torch.compile and
eager, and the floor as a line. One figure of the sweep: percent of the floor over the size, of ModelNew and of both
baselines, the better one marked. Each as SVG for a light and for a dark page; --png writes images to look at instead.
Needs matplotlib.
"""

import argparse
from pathlib import Path

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
LABELS = {"new": "ModelNew", "compile": "torch.compile", "eager": "eager", "floor": "floor"}


def styled(axes, colours: dict, title: str) -> None:
    axes.set_title(title, fontsize=9, color=colours["ink"], loc="left")
    axes.tick_params(colors=colours["ink"], which="both", labelsize=8, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(colours["grid"])
    axes.xaxis.label.set_color(colours["ink"])
    axes.yaxis.label.set_color(colours["ink"])
    axes.set_axisbelow(True)


def legend(figure, colours: dict, handles: list) -> None:
    style = {"loc": "outside lower center", "ncols": len(handles), "frameon": False, "fontsize": 8}
    figure.legend(handles=handles, labelcolor=colours["ink"], **style)


def bars(axes, times: dict[str, float], floor: float, colours: dict) -> None:
    """Horizontal bars, the fastest file on top; behind each its milliseconds and how many times less than eager's."""
    drawn = axes.barh(
        list(times), times.values(), color=[colours.get(name, colours["new"]) for name in times], height=0.7
    )
    texts = [
        f"{ms:.3g} ms" + (f", {times['eager'] / ms:.1f}x" if name != "eager" else "") for name, ms in times.items()
    ]
    axes.bar_label(drawn, texts, padding=3, fontsize=8, color=colours["ink"])
    axes.axvline(floor, color=colours["floor"], linewidth=1.2, linestyle=DASHES)
    axes.set_xlim(0, 1.4 * max(times.values()))
    axes.invert_yaxis()
    axes.set_xticks([])


def draw_direction(direction: str, colours: dict):
    rows = (len(summary.PAIRS) + 1) // 2
    figure, grid = pyplot.subplots(rows, 2, figsize=(8.8, 0.5 + 1.8 * rows), layout="constrained")
    figure.get_layout_engine().set(wspace=0.06, hspace=0.08)
    for axes, pair in zip(grid.flat, summary.PAIRS):
        files = [name for name in summary.FILES if summary.pair_of(name) == pair]
        machine = summary.machine_of(files[0])
        runs = {name: summary.find(summary.benchmark(name, machine), direction) for name in reversed(files)}
        runs = {name: run for name, run in runs.items() if run}
        times = {("Hopper's file" if "/" in name else "portable file"): run["ms"]["new"] for name, run in runs.items()}
        of_baselines, roof = next(iter(runs.values())), next(iter(runs.values()))["roof"]
        times |= {name: of_baselines["ms"][name] for name in ("compile", "eager") if name in of_baselines["ms"]}
        styled(axes, colours, pair)
        axes.set_xlabel(f"measured on: {summary.MACHINES[machine]}", fontsize=8, loc="left")
        bars(axes, times, roof["floor_ms"], colours)
    figure.suptitle(f"{summary.DIRECTIONS[direction]}, float32", fontsize=10, color=colours["ink"])
    floor = "floor: the machine's measured bandwidth and matrix rate allow no less"
    legend(figure, colours, [Line2D([], [], color=colours["floor"], linestyle=DASHES, label=floor)])
    return figure


def draw_sweep(colours: dict):
    """A column of dots a shape: ModelNew, and with a ring the better of the two baselines."""
    dtypes = ("float32", "bfloat16")
    columns = len(summary.SWEPT)
    figure, grid = pyplot.subplots(2, columns, figsize=(3 * columns, 5), sharey=True, layout="constrained")
    for row, dtype in zip(grid, dtypes):
        for axes, stem in zip(row, summary.SWEPT):
            styled(axes, colours, f"{stem}, {dtype}")
            runs = [run for run in summary.sweep(stem) if run["dtype"] == dtype and run["roof"]]
            for run in runs:
                floor = run["roof"]["floor_ms"]
                percent = {name: 100 * floor / ms for name, ms in run["ms"].items()}
                best = max((name for name in percent if name != "new"), key=percent.get)
                axes.plot([floor] * 2, [percent["new"], percent[best]], color=colours["eager"], linewidth=1, zorder=1)
                for name in ("eager", "compile", "new"):
                    if name in percent:
                        ring = colours["ink"] if name == best else "none"
                        style = {"markeredgecolor": ring, "markeredgewidth": 0.9, "linestyle": "none"}
                        size = 5.5 if name == "new" else 4.5
                        axes.plot(floor, percent[name], marker="o", markersize=size, color=colours[name], **style)
            axes.axhline(100, color=colours["floor"], linewidth=1.2, linestyle=DASHES)
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.grid(axis="y", color=colours["grid"], linewidth=0.6)
            axes.set_ylim(0, 118)
    for axes in grid[-1]:
        axes.set_xlabel("size of the work: its floor, ms", fontsize=8)
    for axes in grid[:, 0]:
        axes.set_ylabel("% of the floor", fontsize=8)
    dots = [Line2D([], [], marker="o", linestyle="none", color=colours[n], label=LABELS[n]) for n in ("new", "compile")]
    dots.append(Line2D([], [], marker="o", linestyle="none", color=colours["eager"], label=LABELS["eager"]))
    ring = {"marker": "o", "linestyle": "none", "color": "none", "markeredgecolor": colours["ink"]}
    legend(figure, colours, [*dots, Line2D([], [], label="the better baseline", **ring)])
    figure.suptitle("forward at other shapes, without gradients", fontsize=10, color=colours["ink"])
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=summary.ROOT / "results", help="where the figures go")
    parser.add_argument("--png", action="store_true", help="PNG on a page of the right colour instead of SVG")
    options = parser.parse_args()
    # The same records give the same file.
    settings = {"svg.hashsalt": "results", "font.family": "DejaVu Sans", "axes.facecolor": "none"}
    with matplotlib.rc_context(settings):
        for ending, colours in COLOURS.items():
            figures = {direction: draw_direction(direction, colours) for direction in summary.DIRECTIONS}
            if summary.SWEPT:
                figures["sweep"] = draw_sweep(colours)
            for name, figure in figures.items():
                path = options.folder / f"{name}{ending}.{'png' if options.png else 'svg'}"
                page = {"": "#ffffff", "_dark": "#0d1117"}[ending] if options.png else "none"
                metadata = {} if options.png else {"metadata": {"Date": None}}
                figure.savefig(path, facecolor=page, dpi=110, **metadata)
                pyplot.close(figure)


if __name__ == "__main__":
    main()
