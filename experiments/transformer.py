"""A small transformer made Bayesian in its head, in its attention, and everywhere.

Scikit-learn's digits, 8x8 pixels, read as a sequence of eight rows of eight pixels by PyTorch's own
`nn.TransformerEncoder` on embedded rows, the mean over rows, and a linear head. The net's code
knows nothing of tyxe; a row of the table changes which parameters are random, by globs on their
names, or how they are inferred:

  ML, MAP           maximum likelihood, and all linear maps under a N(0, 1) prior
  head              "head.*", mean field about ML's weights, the rest frozen
  attention         "*self_attn*", the projections inside attention, the rest trained along
  linear maps       all but the positions and LayerNorm's scales, which stay deterministic
  Laplace, ...      Kronecker-factored Laplace about the MAP, predictions of the linearised net

AUROC is of the maximal probability, against test digits turned by 90 degrees, and those whose rows
are in a random order, so that only attention to positions can tell. The KL is weighed by `beta`,
without which 18,000 weights outweigh 897 digits: a tempered posterior.
"""

from contextlib import nullcontext
from functools import partial

import common
import runner
import tables
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe

SELECTIONS = {"head": {"expose": ["head.*"]}, "attention": {"expose": ["*self_attn*"]}}
SELECTIONS |= {"linear maps": {"hide": ["position", "*norm*"]}}
FORMATS = {"accuracy %": ".2f", "NLL": ".3f", "ECE %": ".2f"}
FORMATS |= {"AUROC turned": ".3f", "AUROC rows shuffled": ".3f"}


class RowTransformer(nn.Module):
    """Classify images `(n, 8, 8)` as sequences of eight rows."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(0.02 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(width, 10)

    def forward(self, rows):
        return self.head(self.encoder(self.embed(rows) + self.position).mean(1))


def load(s):
    (x, y), sizes = common.all_digits(), [s.train, s.validation, s.test]
    train, validation, test = torch.randperm(len(x))[: sum(sizes)].split(sizes)
    x, order = x.float(), torch.rand(len(test), 8).argsort(1)
    others = {"AUROC turned": x[test].rot90(dims=(1, 2))}
    others["AUROC rows shuffled"] = x[test].take_along_dim(order[..., None], 1)
    return [(x[part], y[part]) for part in (train, validation, test)], others


def run(s, seed):
    (train, validation, test), others = load(s)
    loader = DataLoader(TensorDataset(*train), s.batch, shuffle=True)
    likelihood = tyxe.likelihoods.Categorical(len(train[0]))
    rows, precisions = {}, {}

    def score(name, bnn, draws):
        torch.manual_seed(seed)
        parts = {"test": test[0], "validation": validation[0], **others}
        how = {"num_predictions": draws, "batch_size": 60}
        probs = {part: bnn.predict(x, **how).softmax(-1) for part, x in parts.items()}
        rows[name], best = tables.scores(probs["test"], test[1]), probs["test"].amax(-1)
        rows[name] |= {c: tyxe.metrics.ood_auroc(best, probs[c].amax(-1)).item() for c in others}
        rows[name]["validation NLL"] = tyxe.metrics.nll(probs["validation"], validation[1]).item()

    def fit(name, net, rules, guide=None, draws=1, handler=nullcontext, **options):
        bnn = tyxe.VariationalBNN(net, common.normal(**rules), likelihood, guide)
        with handler():
            adam = partial(torch.optim.Adam, lr=s.rate)
            bnn.fit(loader, adam, s.epochs, progress=False, **options)
        score(name, bnn, draws)
        return bnn.to_module()

    start = RowTransformer(s.width)
    ml = fit("ML", start, {"hide_all": True})
    at_map = fit("MAP", start, SELECTIONS["linear maps"], common.point(start))
    # Small scales at first, about ML's weights, with a learning rate of their own.
    how = {"beta": s.beta, "lr_multipliers": {"scale": 10}, "draws": s.draws}
    how |= {"guide": common.mean_field(ml, init_scale=1e-3)}
    how["handler"] = tyxe.poutine.local_reparameterization
    for name, rules in SELECTIONS.items():
        # The head alone is fitted on features that stay as they are.
        fit(f"mean field, {name}", ml.requires_grad_(name != "head"), rules, **how)
    # In pieces: the linearised net holds each image's gradients.
    held_out = list(zip(*(part.split(60) for part in validation), strict=True))
    for selection, rules in SELECTIONS.items():
        name, prior = f"Laplace, {selection}", common.normal(**rules)
        bnn = tyxe.LaplaceBNN(at_map, prior, likelihood, structure="kron")
        bnn.fit_curvature(loader, progress=False)
        precision = bnn.optimize_prior_precision("grid", held_out, grid=s.prior_precisions)
        precisions[name] = precision.item()
        score(name, bnn, s.output_draws)
    return {"rows": rows, "prior precision": precisions}


cells = runner.every(run, seed="seeds")
experiment = runner.Experiment("transformer", cells, tables.of(FORMATS))
