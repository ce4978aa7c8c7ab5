"""
One picture of one or several runs: losses, learning rate, gradient norm, speed, and memory by kind.

    python plot.py out [another ...] [--output=runs.png]

Needs matplotlib. Reads metrics.jsonl and forecast.json in each run folder.
"""

import json
import os
import sys

PANELS = [("loss", "training loss", "loss"), ("val_loss", "validation loss", "loss"), ("lr", "learning rate", ""),
          ("grad_norm", "gradient norm", ""), ("tok_s", "speed", "tokens a second")]


class PlotError(Exception):
    """A run can't be drawn; the message is one clear line."""


def read_rows(folder: str) -> list[dict]:
    """The rows of a run's metrics.jsonl; a last line cut short by a kill is left out."""
    path, rows = os.path.join(folder, "metrics.jsonl"), []
    try:
        with open(path, encoding="utf-8") as f:
            for line in f:
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict) and "step" in row:
                    rows.append(row)
    except (OSError, UnicodeDecodeError) as error:
        raise PlotError(f"{path}: {error}") from None
    if not rows:
        raise PlotError(f"{path}: no rows yet")
    return rows


def series(rows: list[dict], key: str) -> tuple[list, list]:
    """(steps, values) of the rows that have the key."""
    found = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), (int, float))]
    return [step for step, _ in found], [value for _, value in found]


def smooth(values: list[float], weight: float = 0.8) -> list[float]:
    """Exponential mean, corrected for its start."""
    out, mean, total = [], 0.0, 0.0
    for value in values:
        mean, total = weight * mean + (1 - weight) * value, weight * total + 1 - weight
        out.append(mean / total)
    return out


def draw_memory(axis, folders: list[str], runs: list[list[dict]]):
    """Stacked bars of the forecast, GB by kind, GPU and host of each run; a black line at what was measured."""
    names, colours = [], {}
    for folder, rows in zip(folders, runs):
        path = os.path.join(folder, "forecast.json")
        if not os.path.exists(path):
            continue
        with open(path, encoding="utf-8") as f:
            places = json.load(f)
        for place in ("gpu", "host"):
            bottom = 0.0
            for kind, n in places.get(place, {}).items():
                new = kind not in colours
                colour = colours.setdefault(kind, f"C{len(colours)}")
                axis.bar(len(names), n / 1e9, bottom=bottom, color=colour, label=kind if new else None)
                bottom += n / 1e9
            measured = series(rows, f"{place}_gb")[1]
            if bottom:
                if measured:
                    axis.hlines(max(measured), len(names) - 0.45, len(names) + 0.45, color="black")
                names.append(f"{os.path.basename(os.path.normpath(folder))}\n{place}")
    axis.set_xticks(range(len(names)), names)
    axis.set_title("memory: expected by kind, measured (line)")
    axis.set_ylabel("GB")
    if names:
        axis.set_ylim(0, 1.5 * axis.get_ylim()[1])  # room for the legend
        axis.legend(fontsize=7, loc="upper right")


def draw(folders: list[str], output: str):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    runs = [read_rows(folder) for folder in folders]
    figure, axes = plt.subplots(2, 3, figsize=(15, 8.5), constrained_layout=True)
    for axis, (key, title, unit) in zip(axes.flat, PANELS):
        for i, (folder, rows) in enumerate(zip(folders, runs)):
            steps, values = series(rows, key)
            noisy = key in ("loss", "grad_norm") and len(values) > 50
            axis.plot(steps, values, color=f"C{i}", alpha=0.3 if noisy else 1, marker="o" if len(values) < 20 else None, markersize=3,
                      label=None if noisy else os.path.normpath(folder))
            if noisy:
                axis.plot(steps, smooth(values), color=f"C{i}", label=os.path.normpath(folder))
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.set_ylabel(unit)
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    draw_memory(axes.flat[5], folders, runs)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    folders = [a for a in argv if not a.startswith("-")]
    flags = dict(a.removeprefix("--").partition("=")[::2] for a in argv if a.startswith("-"))
    output = flags.pop("output", "runs.png")
    if not folders or flags:
        print(__doc__.strip(), file=sys.stdout if "help" in flags else sys.stderr)
        return 0 if "help" in flags else 2
    try:
        draw(folders, output)
    except ImportError:
        print("error: plot.py needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    except (PlotError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
