"""Classification of UCI sets by MAP, mean field, Laplace, linearised or not [GLM tab. 1, B2, B3].

Two hidden layers of 50 tanh units (tab. B3: --hidden-layers 1); stratified splits of 70 % for
training, 15 % for validation and 15 % for testing, standardised. Ten prior precisions, whose nets
are fitted side by side: each method takes the one of the lowest negative log-likelihood on the
validation part. One table has that of the test part, with the paper's, and that of a rerun of its
code; a second one accuracy and expected calibration error (10 bins). Columns: MAP; mean field
(MFVI); a Laplace approximation with the full generalised Gauss-Newton matrix, its draws run through
the net (bnn) or the linearised net (glm); the latter with a diagonal (glm diag); and
natural-gradient steps in the linearised net from there on (refine, refine diag), to be asked for: a
step with the full matrix costs the cube of the number of weights or, where that is less, of
outputs.
"""

import math
from contextlib import nullcontext
from functools import partial
from itertools import pairwise, product

import common
import pyro.distributions as dist
import runner
import tables
import torch
from torch import nn

import tyxe

COLUMNS = ["MAP", "MFVI", "bnn", "glm", "glm diag", "refine", "refine diag"]
SCORES = ["accuracy %", "ECE %"]
OWN = {"diag": ["MAP", "glm diag", "refine diag"], "full": ["bnn", "glm", "refine"]}
# By set and column, the test NLL of the paper, and of a rerun of its code.
PUBLISHED, RERUN = runner.SETTINGS["uci"]["facts"].values()
SETS = [*PUBLISHED, "ionosphere", "vehicle"]


def load(name):
    file = f"uci/{'breast_cancer' if name == 'cancer' else name}.npz"
    if name == "digits" and common.find(file) is None:
        x, y = common.all_digits()
        return 16 * x.flatten(1).float(), y
    found = common.arrays(file)
    return found["X"].float(), found["y"].long()


def split(x, y, seed):
    """Return 70 % for training, 15 % for validation and 15 % for testing, standardised."""
    from sklearn.model_selection import train_test_split

    train, rest = train_test_split(range(len(y)), train_size=0.7, stratify=y, random_state=seed)
    parts = train, *train_test_split(rest, train_size=0.5, stratify=y[rest], random_state=seed)
    x = common.standardised_columns(x, train)
    return [(x[part], y[part]) for part in parts]


class SideBySide(nn.Module):
    """Nets of one shape and one start, `(n, inputs) -> (n, nets, outputs)`.

    A convolution of width 1 over the data as positions is a linear map, and with groups one for
    each net: fitting ten nets is one fit, and handlers and guides see nothing unusual. With one
    output the last dimension is dropped.
    """

    def __init__(self, nets, sizes):
        super().__init__()
        self.nets, self.sizes, layers = nets, sizes, []
        for index, (columns, rows) in enumerate(pairwise(sizes)):
            groups = nets if index else 1  # all nets see the same inputs
            layer = nn.Conv1d(columns * groups, rows * nets, 1, groups=groups)
            start = nn.Linear(columns, rows)
            layer.weight.data = start.weight.data.repeat(nets, 1)[..., None]
            layer.bias.data = start.bias.data.repeat(nets)
            layers += [layer, nn.Tanh()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x):
        outputs = self.layers(x.T[None])[0]
        return outputs.reshape(self.nets, self.sizes[-1], -1).permute(2, 0, 1).squeeze(-1)

    def member(self, index):
        net = common.mlp(*self.sizes, act=nn.Tanh)
        for own, layer in zip(net[::2], self.layers[::2], strict=True):
            own.weight.data = layer.weight.data[..., 0].chunk(self.nets)[index].clone()
            own.bias.data = layer.bias.data.chunk(self.nets)[index].clone()
        return net


def fit(s, column, nets, likelihood, guide, pair, handler=nullcontext):
    def prior(name, module, param):  # the rows of a parameter belong to one net after the other
        scales = torch.tensor(s.prior_precisions).rsqrt().repeat_interleave(len(param) // nets.nets)
        return dist.Normal(0, scales.view(-1, *[1] * (param.dim() - 1)).expand(param.shape))

    bnn = tyxe.VariationalBNN(nets, tyxe.priors.LambdaPrior(prior), likelihood, guide)
    how = s.first_rate[column], s.steps[column], s.last_rate[column], handler
    return common.fit_by_cosine(bnn, [pair], *how)


def predict(s, column, bnn, pair, x):
    """Return what a column predicts from a Laplace approximation about a MAP."""
    how = {"num_predictions": s.draws, "batch_size": 500}
    if column == "MAP":
        return bnn.predict(x, num_predictions=0, predictive="bnn")
    if column.startswith("refine"):
        steps = {"num_steps": s.refinement_steps, "rate": 1e-2 if column == "refine" else 1e-3}
        refined = bnn.refine([pair], "variational", structure=bnn.net_guide.structure, **steps)
        return refined.predict(x, **how)
    return bnn.predict(x, predictive=column[:3], **how)


def of_classes(logits, y):
    """Return accuracy and calibration of predictions, by one logit or by one for each class."""
    probs = logits.softmax(-1)
    if logits.shape[-1] == 1:
        probs = torch.cat([(-logits).sigmoid(), logits.sigmoid()], -1)
    scores = tables.scores(probs, y.flatten().long(), 10)
    return {name: scores[name] for name in SCORES}


def run(s, name, columns, seed):
    x, y = load(name)
    torch.manual_seed(seed)
    is_binary, outputs = int(y.max()) == 1, max(int(y.max()) + 1, 3)
    y = y.float()[:, None] if is_binary else y
    kind = tyxe.likelihoods.Bernoulli if is_binary else tyxe.likelihoods.Categorical
    (x, y), *held_out = split(x, y, seed)
    seen, found = torch.cat([part[0] for part in held_out]), {column: [] for column in columns}
    sizes = [x.shape[1], *[s.hidden_units] * s.hidden_layers, 1 if is_binary else outputs]
    nets, together = SideBySide(len(s.prior_precisions), sizes), kind(len(x), event_dim=1)
    one, pair = kind(len(x)), (x, y.view(-1, 1).expand(-1, nets.nets))

    def score(column, precision, predictions):
        pieces = predictions.split([len(y) for _, y in held_out])
        parts = zip(pieces, held_out, strict=True)
        nlls = [-one.log_likelihood(found, y, "mean").item() for found, (_, y) in parts]
        row = {"precision": precision, "validation": nlls[0], "test": nlls[1]}
        found[column].append(row | of_classes(pieces[1], held_out[1][1]))

    if {*columns} != {"MFVI"}:
        fitted = fit(s, "MAP", nets, together, common.point(nets), pair).to_module()
    if "MFVI" in columns:
        guide = common.mean_field(nets, init_scale=math.log1p(math.exp(-7)))
        handler = tyxe.poutine.local_reparameterization
        mean_field = fit(s, "MFVI", nets, together, guide, pair, handler)
        drawn = mean_field.predict(seen, num_predictions=s.draws)
        drawn = drawn.view(len(seen), nets.nets, -1).unbind(1)
        for precision, member in zip(s.prior_precisions, drawn, strict=True):
            score("MFVI", precision, member)
    for index, precision in enumerate(s.prior_precisions):
        prior = common.normal(precision**-0.5)
        for structure in OWN:
            if not (wanted := [column for column in OWN[structure] if column in columns]):
                continue
            laplace = tyxe.LaplaceBNN(fitted.member(index), prior, one, structure=structure)
            laplace.fit_curvature([(x, y)], progress=False)
            for column in wanted:
                score(column, precision, predict(s, column, laplace, (x, y), seen))
    return {c: min(rows, key=lambda row: row["validation"]) for c, rows in found.items()}


def cells(s, found):
    """Yield the columns of a split that are missing, which share a fit."""
    for name, seed in product(s.data, s.splits):
        if missing := [c for c in s.columns if (name, c, str(seed)) not in found]:
            yield (name, missing, seed), partial(run, s, name, missing, seed)


def table(record):
    """Return a page of negative log-likelihoods, and one of accuracies and calibration errors."""
    nlls, scores, has_paper = [], [], record.content["settings"]["hidden layers"] == 2
    for name in dict.fromkeys([*SETS, *(key[0] for key in record.cells)]):
        found = [[*record.of(name, column).values()] for column in COLUMNS]
        count = max(map(len, found))
        if not count:
            continue
        texts = [tables.over_seeds([cell["test"] for cell in cells], ".3f") for cells in found]
        for i, cells in enumerate(found):
            texts[i] += f", {len(cells)} splits" if 0 < len(cells) < count else ""
            known = [each.get(name, {}).get(COLUMNS[i]) for each in (PUBLISHED, RERUN)]
            others = "; ".join(f"{number:g}" for number in known if number and has_paper)
            texts[i] += f" ({others})" if cells and others else ""
        nlls.append([name, str(count), *texts])
        # Former revisions recorded log-likelihoods alone.
        found = [[cell for cell in cells if SCORES[0] in cell] for cells in found]
        for score in SCORES if any(found) else ():
            values = [[cell[score] for cell in cells] for cells in found]
            texts = [tables.over_seeds(each, ".1f") for each in values]
            scores.append([f"{name}, {score}", str(max(map(len, values))), *texts])
    pages = {"": nlls} | ({"_scores": scores} if scores else {})
    # What few steps cost mean field is not to be taken for what it can do.
    steps = record.content["settings"]["steps"]["MFVI"]
    titles = [f"{c}, {steps:,} steps" if c == "MFVI" else c for c in COLUMNS]
    return {e: tables.markdown(["", "splits", *titles], lines) for e, lines in pages.items()}


experiment = runner.Experiment(
    "uci",
    cells,
    table,
    by=("data", "column", "split"),
    ending=lambda s: "" if s.hidden_layers == 2 else f"_{s.hidden_layers}_layer",
    choices={"data": SETS},
)
