"""A small transformer made Bayesian in its head, in its attention, and everywhere.

The task is scikit-learn's digits, 8x8 pixels, read as a sequence of eight rows of eight pixels:
PyTorch's own `nn.TransformerEncoder` (two layers of width 32 with four heads, no dropout) on
embedded rows, the mean over rows, and a linear head. The net's code knows nothing of tyxe; a row of
the table changes which parameters are random, by globs on their names, or how they are inferred:

  ML, MAP           maximum likelihood, and all linear maps under a N(0, 1) prior
  head              "head.*", mean field about ML's weights, the rest frozen
  attention         "*self_attn*", the projections inside attention, the rest trained along
  linear maps       all but the positions and LayerNorm's scales, which stay deterministic
  Laplace, head     Kronecker-factored Laplace about the MAP, predictions of the linearised net
  Laplace, attention, and Laplace, linear maps: likewise

Other images, to be recognised as such: test digits turned by 90 degrees, and test digits whose rows
are in a random order (each its own), so that only attention to positions can tell. Letters or other
sets of this size do not come with scikit-learn. A 0 or 8 looks the same when turned, more or less.

897 digits to train, 180 for validation, 720 to test, shuffled by seed; 60 epochs of Adam with rate
1e-3, batches of 100. The KL is weighed by `beta`, without which 18,000 weights outweigh 897 digits:
a tempered posterior. beta was the best of 0.1, 0.01 and 0.001 on seed 0's validation data; these
choose the precision of Laplace's prior in each run. 32 draws of weights; 100 of the linearised
net's Gaussian outputs. A run leaves out the seeds that the JSON file in --out holds.
"""

import argparse
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import _extras  # noqa: F401
import pyro.distributions as dist
import torch
from _image_laplace import Laps, summary
from _record import environment, recorded
from pyro.infer.autoguide import AutoDelta
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tyxe import metrics
from tyxe.guides import AutoNormal, PretrainedInitializer

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
parser.add_argument("--beta", type=float, default=0.001, help="weight of the KL (default: 0.001)")
parser.add_argument("--table", action="store_true", help="only print the table of what --out has")
parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the JSON file")
parser.add_argument("--smoke-test", action="store_true", help="few epochs: seconds, no result")
args = parser.parse_args()
if args.seeds < 1:
    parser.error(f"--seeds is {args.seeds}; expected a positive number")
torch.set_num_threads(1)  # such a net is too small to share
settings = {
    **{"train": 897, "validation": 180, "test": 720, "batch": 100, "epochs": 60, "rate": 1e-3},
    **{"beta": args.beta, "draws": 32, "output draws": 100, "width": 32},
    "prior precisions": [1.0, 10.0, 1e2, 1e3, 1e4, 1e5],
}
if args.smoke_test:
    small = {"train": 100, "validation": 20, "test": 40, "epochs": 1, "draws": 2, "width": 8}
    settings |= {**small, "output draws": 10, "prior precisions": [1.0, 100.0]}
    args.seeds = 1

LINEAR_MAPS = {"hide": ["position", "*norm*"]}
SELECTIONS = {
    "head": {"expose": ["head.*"]},
    "attention": {"expose": ["*self_attn*"]},
    "linear maps": LINEAR_MAPS,
}
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


def load():
    """Return pairs to train, validate and test, and changed test images."""
    bunch = load_digits()
    x, y = torch.tensor(bunch.images / 16, dtype=torch.float), torch.tensor(bunch.target)
    sizes = [settings[name] for name in ("train", "validation", "test")]
    train, validation, test = torch.randperm(len(x))[: sum(sizes)].split(sizes)
    order = torch.rand(len(test), 8).argsort(1)
    others = {
        "AUROC turned": x[test].rot90(dims=(1, 2)),
        "AUROC rows shuffled": x[test].take_along_dim(order[..., None], 1),
    }
    return [(x[part], y[part]) for part in (train, validation, test)], others


def selected(rules):
    """Return a standard Normal prior on some of the parameters."""
    return tyxe.priors.IIDPrior(dist.Normal(0, 1), **rules)


def run(seed):
    """Return the scores of all rows, what validation chose, and the seconds of each row."""
    torch.manual_seed(seed)
    (train, validation, test), others = load()
    loader = DataLoader(TensorDataset(*train), settings["batch"], shuffle=True)
    likelihood = tyxe.likelihoods.Categorical(len(train[0]))
    rows, precisions, laps = {}, {}, Laps()

    def score(name, bnn, draws):
        """Add a row of the table; what it took, seconds, is from the last one's end."""
        torch.manual_seed(seed)
        predict = partial(bnn.predict, num_predictions=draws, batch_size=60)
        probs, seen = predict(test[0]).softmax(-1), predict(validation[0]).softmax(-1)
        rows[name] = {
            "accuracy %": 100 * metrics.accuracy(probs, test[1]).item(),
            "NLL": metrics.nll(probs, test[1]).item(),
            "ECE %": 100 * metrics.expected_calibration_error(probs, test[1]).item(),
            **{
                column: metrics.ood_auroc(probs.amax(-1), predict(x).softmax(-1).amax(-1)).item()
                for column, x in others.items()
            },
            "validation NLL": metrics.nll(seen, validation[1]).item(),
        }
        laps(name)

    def fit(name, net, rules, guide=None, draws=1, handler=nullcontext, **options):
        bnn = tyxe.VariationalBNN(net, selected(rules), likelihood, guide)
        adam = partial(torch.optim.Adam, lr=settings["rate"])
        with handler():
            bnn.fit(loader, adam, settings["epochs"], progress=False, **options)
        score(name, bnn, draws)
        return bnn.to_module()

    def laplace(name, net, rules):
        bnn = tyxe.LaplaceBNN(net, selected(rules), likelihood, structure="kron")
        bnn.fit_curvature(loader, progress=False)
        # In pieces: the linearised net holds each image's gradients.
        held_out = list(zip(*(part.split(60) for part in validation), strict=True))
        grid = settings["prior precisions"]
        precisions[name] = bnn.optimize_prior_precision("grid", held_out, grid=grid).item()
        score(name, bnn, settings["output draws"])

    start = RowTransformer(settings["width"])
    ml = fit("ML", start, {"hide_all": True})
    at = partial(AutoDelta, init_loc_fn=PretrainedInitializer.from_net(start))
    at_map = fit("MAP", start, LINEAR_MAPS, at)
    # Small scales at first, about ML's weights, with a learning rate of their own.
    guide = partial(AutoNormal, init_loc_fn=PretrainedInitializer.from_net(ml), init_scale=1e-3)
    how = {"beta": settings["beta"], "lr_multipliers": {"scale": 10}, "draws": settings["draws"]}
    how["handler"] = tyxe.poutine.local_reparameterization
    for name, rules in SELECTIONS.items():
        # The head alone is fitted on features that stay as they are.
        net = ml.requires_grad_(name != "head")
        fit(f"mean field, {name}", net, rules, guide, **how)
    for name, rules in SELECTIONS.items():
        laplace(f"Laplace, {name}", at_map, rules)
    return {"rows": rows, "prior precision": precisions, "seconds": laps.seconds}


def table(content):
    """Return what a JSON file holds as a Markdown table."""
    lines = [f"| | {' | '.join(FORMATS)} |", "|---" * (len(FORMATS) + 1) + "|"]
    for name, row in content["summary"].items():
        cells = [
            " ± ".join(format(v, form) for v in row[column].values() if v is not None)
            for column, form in FORMATS.items()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


path = args.out / "transformer.json"
if args.table and not path.exists():
    parser.error(f"there is no {path}; run without --table first")
if args.table:
    content = json.loads(path.read_text())
else:
    content = recorded(path, settings)
    seeds, about = content.get("seeds", {}), environment(None, content.get("commands", []))
    for seed in (str(seed) for seed in range(args.seeds) if str(seed) not in seeds):
        seeds[seed] = run(int(seed))
        print(f"seed {seed}: {sum(seeds[seed]['seconds'].values()):.0f} s", flush=True)
        content = {**about, "settings": settings}
        content |= {"summary": summary(seeds), "seeds": seeds}
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")
print(table(content))
