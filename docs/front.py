"""Write what the front page and the README show: one picture, and the table of methods.

The picture is what the front page's own lines predict, and needs matplotlib. The README's table has
its numbers from experiments/results; that of the front page is made with the pages. `--check`
changes nothing, and fails if the README's table is not of these.
"""

import argparse
import functools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
PICTURE = DOCS / "front.svg"
README = ROOT / "README.md"
sys.path.append(str(ROOT / "experiments"))
BEGIN, END = (
    f"<!-- {word} of the methods: written by docs/front.py -->" for word in ("begin", "end")
)

# By what training costs: the page, and when to take it.
METHODS = {
    "ML": ("which_method.md", "the plain net, to compare with"),
    "ML, temperature": ("calibrate.md", "calibrated probabilities of a trained classifier"),
    "Laplace, last layer": ("laplace.md", "a trained net that should know what it has not seen"),
    "MC dropout": ("ensembles.md#dropout", "one line in a training run that you do anyway"),
    "SWAG": ("ensembles.md#swag", "snapshots of a training run that you do anyway"),
    "IVON": ("guides.md#ivon", "mean field at the price of Adam"),
    "mean field, local reparam.": (
        "guides.md",
        "a posterior of all weights, the prior of a next task",
    ),
    "variational Laplace": (
        "variational_laplace.md",
        "mean field, predicted in one or two forwards",
    ),
    "ensemble": ("ensembles.md", "you can train five times"),
    "MCLMC ensemble": ("mile.md", "a small net, little data, and hours to spare"),
}


@functools.cache
def tables_of_methods():
    """Return the tables of the leaderboard, by the ending of their names."""
    import leaderboard
    import run
    from runner import Record

    one = leaderboard.experiment
    return one.table(Record(run.RESULTS / "leaderboard.json", one.by).read())


def cells(ending):
    """Return the first table of an ending: by row and column, without standard errors."""
    text = tables_of_methods()[ending].split("\n\n")[0]
    head, _, *rows = [line.strip("|").split("|") for line in text.splitlines()]
    return {
        row[0].strip(): {
            column.strip(): value.replace("*", "").split("±")[0].strip()
            for column, value in zip(head[1:], row[1:], strict=True)
        }
        for row in rows
    }


def table(folder):
    """Return the table of methods, with its source, for a page that is so far from the others."""
    images, regression = cells("_fashion"), cells("_uci")
    # As the results call them, and in short.
    columns = {
        "training": "train",
        "prediction": "predict",
        "memory": "file",
        "NLL": "NLL",
        "ECE %": "ECE %",
        "OOD AUROC": "AUROC",
        "AUROC by MI": "by MI",
    }
    lines = [
        f"| method | when | {' | '.join(columns.values())} | rank |",
        "|---|---|" + "--:|" * (len(columns) + 1),
    ]
    for name, (page, use) in METHODS.items():
        ranked = regression.get(name, {})
        numbers = [images[name][column] or ranked.get(column, "") for column in columns]
        numbers += [ranked.get("mean rank, NLL", "")]
        numbers = " | ".join(number or "-" for number in numbers)
        shown = "maximum likelihood (ML)" if name == "ML" else name
        lines.append(f"| [{shown}]({folder}{page}) | {use} | {numbers} |")
    source = (
        "Train and predict are multiples of ML's processor time, and file of the size of its\n"
        "file. NLL, ECE and AUROC are of nets trained on 5,000 images of FashionMNIST. The AUROC\n"
        "is how well the entropy tells notMNIST from FashionMNIST, where 0.5 is a guess. *By MI*\n"
        "uses the mutual information of the draws instead. The rank is the mean rank by\n"
        f"NLL over six regression data sets, from 1, the best, to {len(regression)}. MCLMC ran on\n"
        "four of these, and its costs were measured there. Laplace's file is large because it\n"
        'holds a matrix of the last layer; `structure="diag"` keeps it small.\n'
        f"[Which method]({folder}which_method.md) has the other rows and sets, standard errors,\n"
        "and the commands."
    )
    return "\n".join([*lines, "", source])


def written():
    """Return the README with the table between its marks written anew."""
    before, rest = README.read_text().split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table('docs/')}\n\n{END}{after}"


def draw():
    """Run the front page's lines, and draw what they predict."""
    import matplotlib.pyplot as plt
    import torch

    (code,) = re.findall(r"```\{testcode\}\n(.*?)```", INDEX.read_text(), re.DOTALL)
    found = {}
    exec(code, found)
    bnn, x, y = (found[name] for name in ("bnn", "x", "y"))
    grid = torch.linspace(-2, 2, 121)[:, None]
    mean, sd = (value.flatten() for value in bnn.predict(grid))
    grid = grid.flatten()
    plt.rcParams.update(
        {"svg.hashsalt": "tyxe", "svg.fonttype": "none", "font.family": "sans-serif"}
    )
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for panel, title in zip(panels, ("the net", "the net in LaplaceBNN"), strict=True):
        panel.plot(grid, torch.cos(4 * grid + 0.8), "--", color="0.3", label="truth")
        panel.plot(grid, mean, color="#0072b2", label="prediction")
        panel.plot(x, y, ".", color="black", label="data")
        panel.set(title=title, xlim=(-2, 2), ylim=(-3, 3), xlabel="x")
    for width in (1, 2, 3):
        label = "1, 2, 3 standard deviations" if width == 1 else None
        band = mean - width * sd, mean + width * sd
        panels[1].fill_between(grid, *band, color="#0072b2", alpha=0.2, linewidth=0, label=label)
    panels[0].set_ylabel("y")
    panels[1].legend(loc="upper left", fontsize="small", ncols=2)
    figure.savefig(PICTURE, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if outdated")
    check = parser.parse_args().check
    if check and written() != README.read_text():
        raise SystemExit("the table of README.md is not that of the results: run docs/front.py")
    if not check:
        README.write_text(written())
        draw()
