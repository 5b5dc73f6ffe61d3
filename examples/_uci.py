"""For uci.py: the sets and their splits, nets side by side, and the table of what was found."""

import json
import math
import statistics
from itertools import pairwise

import numpy as np
import torch
from _data import folders
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

FILES = {"cancer": "breast_cancer"}
# Test NLLs of [GLM] table 1 and, in brackets, of a rerun of its code on three splits.
PUBLISHED = {
    "australian": {"MAP": 0.31, "MFVI": 0.34, "bnn": 0.42, "glm": 0.32, "glm diag": 0.33},
    "cancer": {"MAP": 0.11, "MFVI": 0.11, "bnn": 0.19, "glm": 0.10, "glm diag": 0.11},
    "glass": {"MAP": 0.95, "MFVI": 1.06, "bnn": 1.41, "glm": 0.86, "glm diag": 0.99},
    "waveform": {"MAP": 0.335, "MFVI": 0.393, "bnn": 0.516, "glm": 0.339, "glm diag": 0.388},
    "digits": {"MAP": 0.094, "MFVI": 0.219, "bnn": 0.875, "glm": 0.250, "glm diag": 0.409},
    "satellite": {"MAP": 0.230, "MFVI": 0.307, "bnn": 0.482, "glm": 0.241, "glm diag": 0.327},
}
RERUN = {
    "australian": {"MAP": 0.30, "MFVI": 0.32, "bnn": 0.41, "glm": 0.30, "glm diag": 0.32},
    "cancer": {"MAP": 0.07, "MFVI": 0.09, "bnn": 0.18, "glm": 0.09, "glm diag": 0.10},
    "glass": {"MAP": 1.14, "MFVI": 1.08, "bnn": 1.39, "glm": 0.90, "glm diag": 1.00},
}


def load(name):
    """Return inputs and labels.

    Raises:
        FileNotFoundError: the file is in no folder (digits are part of scikit-learn).
    """
    for folder in folders():
        if (path := folder / "uci" / f"{FILES.get(name, name)}.npz").exists():
            with np.load(path) as arrays:
                return torch.tensor(arrays["X"]).float(), torch.tensor(arrays["y"]).long()
    if name == "digits":
        bunch = load_digits()
        return torch.tensor(bunch.data).float(), torch.tensor(bunch.target).long()
    looked = ", ".join(str(folder / "uci") for folder in folders())
    raise FileNotFoundError(f"no {FILES.get(name, name)}.npz in {looked}; set TYXE_DATA")


def split(x, y, seed):
    """Return 70 % for training, 15 % for validation and 15 % for testing, standardised."""
    train, rest = train_test_split(range(len(y)), train_size=0.7, stratify=y, random_state=seed)
    parts = train, *train_test_split(rest, train_size=0.5, stratify=y[rest], random_state=seed)
    mean, scale = x[train].mean(0), x[train].std(0)
    x = (x - mean) / torch.where(scale > 0, scale, 1.0)
    return [(x[part], y[part]) for part in parts]


class SideBySide(nn.Module):
    """Nets of one shape and one start, `(n, inputs) -> (n, nets, outputs)`.

    A convolution of width 1 over the data as positions is a linear map, and with groups one for
    each net: fitting ten nets is one fit, and handlers and guides see nothing unusual. With one
    output the last dimension is dropped.
    """

    def __init__(self, nets, sizes):
        super().__init__()
        self.nets, self.sizes = nets, sizes
        layers = []
        for index, (columns, rows) in enumerate(pairwise(sizes)):
            groups = nets if index else 1  # all nets see the same inputs
            layer = nn.Conv1d(columns * groups, rows * nets, 1, groups=groups)
            with torch.no_grad():
                start = nn.Linear(columns, rows)
                layer.weight.copy_(start.weight.repeat(nets, 1)[..., None])
                layer.bias.copy_(start.bias.repeat(nets))
            layers += [layer, nn.Tanh()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x):
        """Run all nets on the same inputs."""
        outputs = self.layers(x.T[None])[0]
        return outputs.reshape(self.nets, self.sizes[-1], -1).permute(2, 0, 1).squeeze(-1)

    def member(self, index):
        """Return one of the nets, of `nn.Linear` layers."""
        layers = []
        for layer in self.layers[::2]:
            linear = nn.Linear(layer.weight.shape[1], len(layer.bias) // self.nets)
            with torch.no_grad():
                linear.weight.copy_(layer.weight[..., 0].chunk(self.nets)[index])
                linear.bias.copy_(layer.bias.chunk(self.nets)[index])
            layers += [linear, nn.Tanh()]
        return nn.Sequential(*layers[:-1])


def summary(splits, columns):
    """Return mean and standard error of the test NLL over splits, for each column."""
    found = {}
    for column in columns:
        tests = [row[column]["test"] for row in splits.values() if column in row]
        if tests:
            error = statistics.stdev(tests) / math.sqrt(len(tests)) if len(tests) > 1 else None
            mean = statistics.fmean(tests)
            found[column] = {"test NLL": mean, "standard error": error, "splits": len(tests)}
    return found


def table(folder, columns):
    """Return what the JSON files of a folder hold as a Markdown table, the paper's beside it."""
    lines = [f"| | splits | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for name in PUBLISHED:
        if not (path := folder / f"uci_{name}.json").exists():
            continue
        content = json.loads(path.read_text())
        found = content["summary"]
        count = len(content["splits"])
        cells = [_cell(name, column, found.get(column), count) for column in columns]
        lines.append(f"| {name} | {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(name, column, found, splits):
    if found is None:
        return ""
    error = found["standard error"]
    ours = f"{found['test NLL']:.3f}" + ("" if error is None else f" ± {error:.3f}")
    if found["splits"] < splits:
        ours += f", {found['splits']} splits"
    others = [each[name][column] for each in (PUBLISHED, RERUN) if column in each.get(name, {})]
    return ours + (f" ({'; '.join(f'{other:g}' for other in others)})" if others else "")
