"""For inducing_images.py: summary, tables and the figure of the ablation, from the JSON files."""

import json
import math
import statistics

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

FORMATS = {"accuracy %": ".2f", "NLL": ".3f", "ECE %": ".2f", "Brier": ".3f"}
ABLATED = {"M": "M", "lambda": "cap of lambda", "sigma": "cap of standard deviations of U"}
SHOWN = {"NLL": "NLL", "accuracy %": "accuracy %", "ECE %": "ECE %"}


# What the cells of each name depend on, besides what all do; others say what is to be run.
SCHEDULES = {"plain": ["deterministic"], "ensemble-U": ["inducing"]}
SCHEDULES |= {"FFG-W": ["weights", "pruned"], "FFG-U": ["inducing", "pruned"]}
OWN = ["deterministic", "weights", "inducing", "pruned", "ablation", "seeds"]
OWN += [f"ablation {name}" for name in ("M", "lambda", "sigma", "seeds")]


def earlier(path, settings):
    """Return what the JSON holds, less the cells of other settings."""
    content = json.loads(path.read_text()) if path.exists() else {}
    before, now = content.get("settings", {}), json.loads(json.dumps(settings))
    if any(before.get(key) != value for key, value in now.items() if key not in OWN):
        return {}
    for part in ("table", "ablation"):
        for seed, cells in content.get(part, {}).items():
            content[part][seed] = {
                name: cell
                for name, cell in cells.items()
                if all(before[key] == now[key] for key in SCHEDULES.get(name, ["ablation"]))
            }
    return content


def seeds_of(part):
    """Return the rows of all seeds, by name: `{name: [row, ...]}`."""
    found = {}
    for cells in part.values():
        for cell in cells.values():
            for name, row in cell["rows"].items():
                found.setdefault(name, []).append(row)
    return found


def summary(part):
    """Return mean and standard error of every number of every row."""
    found = {}
    for name, rows in seeds_of(part).items():
        columns = [column for column in rows[0] if all(column in row for row in rows)]
        found[name] = {c: mean_and_error([row[c] for row in rows]) for c in columns}
    return found


def mean_and_error(values):
    """Return both; no error of one value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "standard error": error}


def cell(found, form):
    """Return `mean ± error`."""
    error = found["standard error"]
    return format(found["mean"], form) + ("" if error is None else f" ± {error:{form}}")


def tables(path):
    """Return the tables of one JSON file, as Markdown."""
    content = json.loads(path.read_text())
    rows = content.get("summary", {})
    blocks = []
    if rows:
        others = [column for column in next(iter(rows.values())) if column.startswith("AUROC")]
        forms = FORMATS | dict.fromkeys(others, ".3f") | {"parameters": ",.0f"}
        blocks.append(markdown(rows, forms))
        levels = [column for column in next(iter(rows.values())) if column.startswith("level")]
        kept = {name: row for name, row in rows.items() if "kept" not in name}
        blocks.append(markdown(kept, dict.fromkeys(levels, ".1f")))
    if "ablation" in content:
        blocks.append(ablation_table(content["ablation"]))
    seconds = sum(
        cell["seconds"]
        for part in ("table", "ablation")
        for cells in content.get(part, {}).values()
        for cell in cells.values()
    )
    commands = ", ".join(f"`{command}`" for command in content["commands"])
    blocks.append(f"{commands}; {seconds / 60:.0f} minutes of one core.")
    return "\n\n".join(blocks)


def markdown(rows, forms):
    """Return some columns of some rows."""
    lines = [f"| | {' | '.join(forms)} |", "|---" * (len(forms) + 1) + "|"]
    for name, row in rows.items():
        cells = (cell(row[column], form) if column in row else "" for column, form in forms.items())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ablation_rows(part):
    """Return the summary of each cell of the ablation, by its name."""
    # They are kept in the order in which they were run.
    names = sorted(next(iter(part.values())), key=settings_of)
    return {
        name: {
            column: mean_and_error(
                [cells[name]["rows"]["FFG-U"][column] for cells in part.values()]
            )
            for column in ("accuracy %", "NLL", "ECE %", "Brier", "parameters")
        }
        for name in names
    }


def ablation_table(part):
    """Return all cells of the ablation."""
    return markdown(ablation_rows(part), FORMATS | {"parameters": ",.0f"})


def figure(path):
    """Draw NLL, accuracy and ECE against M and both caps, next to a JSON file with an ablation."""
    content = json.loads(path.read_text())
    if "ablation" not in content:
        return
    rows = {settings_of(name): row for name, row in ablation_rows(content["ablation"]).items()}
    base = content["ablation base"]
    shared = {"sharey": "row", "layout": "constrained"}
    drawing, axes = plt.subplots(len(SHOWN), 3, figsize=(10, 7), **shared)
    for column, (key, label) in enumerate(ABLATED.items()):
        others = {k: v for k, v in base.items() if k != key}
        line = {
            dict(name)[key]: row
            for name, row in rows.items()
            if all(dict(name)[k] == v for k, v in others.items())
        }
        for ax, score in zip(axes[:, column], SHOWN, strict=True):
            means = [row[score]["mean"] for row in line.values()]
            errors = [row[score]["standard error"] or 0.0 for row in line.values()]
            ax.errorbar(range(len(line)), means, errors, marker="o", capsize=3)
            ax.set_xticks(range(len(line)), [f"{value:g}" for value in line])
            ax.set(xlabel=label if score == list(SHOWN)[-1] else None)
            ax.set(ylabel=SHOWN[score] if column == 0 else None)
    drawing.savefig(path.with_suffix(".png"), dpi=120)
    print(f"wrote {path.with_suffix('.png')}")
    plt.close(drawing)


def settings_of(name):
    """Return what a cell of the ablation is called by: `M 8, lambda 0.03, sigma 0.1`."""
    pairs = (part.split(" ") for part in name.split(", "))
    return tuple((key, float(value)) for key, value in pairs)
