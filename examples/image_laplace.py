"""Six predictions from one fitted image classifier, and what each knows of other images.

After [GLM tab. 2]: MNIST and FashionMNIST, each out-of-distribution for the other, by an MLP (tanh)
and by the CNN "3c3d". A MAP for each of some prior precisions; the one with the lowest negative
log-likelihood on validation images is the centre of all posteriors, and its prior theirs.

Rows: that MAP; a Kronecker-factored Laplace approximation, its draws run through the net (bnn),
the same with damping (bnn damped), or its linearised net (glm kron); the latter with the diagonal
of the curvature (glm diag); the linearised net's Gaussian process on part of the data (gp), its
prior precision times N / M and a factor chosen by validation. The paper has these; with few data
the MAP's prior is too wide for glm, so there are besides, with the precision times a factor chosen
by validation as it is for gp, glm kron tuned and glm diag tuned. Columns: accuracy, negative
log-likelihood (NLL, nats a point), expected calibration error (10 bins), area under the ROC curve
by predictive entropy; mean and standard error over seeds.

Reduced for a CPU, in brackets what --published sets, for whoever has a GPU: 5,000 training images
(50,000; the paper 60,000), 1,000 of the others for validation (10,000; the paper half of the test
set), 2,000 test images and 2,000 of the other set (10,000), 20 epochs (500) with batches of 64
(512), prior precisions 0.1, 1, 10, 100 (16 from 0.01 to 1,000), 30 draws (100), gp by 4 factors (5)
on 300 validation images (10,000) and with 300 points for the MLP and 100 for the CNN (3,200), 2
seeds (5). Widths: MLP 512-256-128-64 (1024-512-256-128); CNN three convolutions of 16, 24 and 32
channels and layers of 128 and 64 (64, 96, 128; 512, 256). Adam's rate is 1e-3 / (1 + epoch // 10)
in both. A run with the same settings leaves out the seeds that the JSON files in --out hold.
"""

import argparse
import copy
import json
from functools import partial
from pathlib import Path

import _extras  # noqa: F401
import pyro.distributions as dist
import torch
from _image_laplace import (
    NETS,
    OTHER,
    PUBLISHED,
    REDUCED,
    SMOKE,
    Laps,
    load,
    scores,
    summary,
    table,
)
from _record import environment, recorded
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import tyxe
from tyxe import metrics

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--data", nargs="+", choices=OTHER, default=list(OTHER), help="the sets (default: both)"
)
parser.add_argument(
    "--net", nargs="+", choices=NETS, default=list(NETS), help="the nets (default: both)"
)
parser.add_argument("--seeds", type=int, help="number of seeds (default: 2, published 5)")
parser.add_argument("--published", action="store_true", help="the published settings, see above")
parser.add_argument("--device", default="cpu", help="where to compute (default: cpu)")
parser.add_argument("--table", action="store_true", help="only print the tables of what --out has")
parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the JSON files")
parser.add_argument(
    "--smoke-test", action="store_true", help="tiny nets on scikit-learn's digits: no result"
)
args = parser.parse_args()
settings = SMOKE if args.smoke_test else PUBLISHED if args.published else REDUCED
if args.smoke_test:
    args.data, args.seeds = ["digits"], 1
torch.set_num_threads(1)

# All at the same weights; and which of them each row takes, how, and with how many draws.
POSTERIORS = {
    "kron": {"structure": "kron"},
    "kron damped": {"structure": "kron", "damping": True},
    "diag": {"structure": "diag"},
}
TUNED = {"kron tuned": "kron", "diag tuned": "diag"}
ROWS = {
    "MAP": ("kron", "bnn", 0),
    "bnn": ("kron", "bnn", None),
    "bnn damped": ("kron damped", "bnn", None),
    "glm kron": ("kron", "glm", None),
    "glm diag": ("diag", "glm", None),
    "gp": ("diag", "gp", None),
    "glm kron tuned": ("kron tuned", "glm", None),
    "glm diag tuned": ("diag tuned", "glm", None),
}


def fit_maps(net, likelihood, loader, seed, chosen, laps):
    """Return a BNN at the maximum of the posterior for each prior precision."""
    found = {}
    for precision in chosen["prior precisions"]:
        torch.manual_seed(seed)
        prior = tyxe.priors.IIDPrior(dist.Normal(0, precision**-0.5))
        # Of these only the weights are used: the curvature that takes the least time.
        bnn = tyxe.LaplaceBNN(net, prior, likelihood, structure="diag", curvature="fisher")
        adam = torch.optim.Adam(bnn.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda epoch: 1 / (1 + epoch // 10))
        epochs = chosen["epochs"]
        bnn.fit(loader, adam, epochs, lambda *_, s=schedule: s.step(), progress=False)
        found[precision] = bnn
        laps(f"MAP, precision {precision:g}")
    return found


def probabilities(bnn, x, predictive, draws):
    """Return class probabilities."""
    how = {"predictive": predictive, "num_predictions": draws}
    # A Gaussian process holds the gradients of a batch.
    return bnn.predict(x, batch_size=100 if predictive == "gp" else 500, **how).softmax(-1)


def nll(bnn, pair, predictive="bnn", draws=0):
    """Return the negative log-likelihood, nats a point."""
    return metrics.nll(probabilities(bnn, pair[0], predictive, draws), pair[1]).item()


def choose_factor(bnn, loader, validation, seed, chosen):
    """Fit gp with the factor that is best on validation images; return each factor's NLL."""
    pair = [part[: chosen["gp validation images"]] for part in validation]

    def fit(factor):
        torch.manual_seed(seed)  # the same points for each factor
        bnn.fit_gp(loader, chosen["gp points"], factor)
        return bnn

    found = {f: nll(fit(f), pair, "gp", chosen["draws"]) for f in chosen["gp factors"]}
    fit(min(found, key=found.get))
    return found


def run(data, kind, seed, chosen):
    """Return the scores of all rows, what validation chose, and the seconds of each step."""
    train, validation, test, unknown = (
        [tensor.to(args.device) for tensor in part] for part in load(data, chosen, seed)
    )
    dataset = TensorDataset(*train)
    sampler = BatchSampler(RandomSampler(dataset), chosen["batch"], drop_last=False)
    loader = DataLoader(dataset, sampler=sampler, batch_size=None)
    likelihood = tyxe.likelihoods.Categorical(len(dataset))
    torch.manual_seed(seed)
    start = NETS[kind](chosen["widths"]).to(args.device)
    laps = Laps()
    maps = fit_maps(start, likelihood, loader, seed, chosen, laps)
    at_map = {
        precision: {"training NLL": nll(bnn, train), "validation NLL": nll(bnn, validation)}
        for precision, bnn in maps.items()
    }
    best = min(at_map, key=lambda precision: at_map[precision]["validation NLL"])
    net, prior = maps[best].to_module(), maps[best].prior
    posteriors = {}
    for name, structure in POSTERIORS.items():
        posteriors[name] = tyxe.LaplaceBNN(net, prior, likelihood, **structure)
        posteriors[name].fit_curvature(loader, progress=False)
        laps(f"curvature, {name}")
    tuned, rows = {}, {}
    for name, structure in TUNED.items():
        posteriors[name] = copy.deepcopy(posteriors[structure])
        grid = [best * factor for factor in chosen["tuning factors"]]
        pieces = zip(*(part.split(500) for part in validation), strict=True)
        found = posteriors[name].optimize_prior_precision("grid", list(pieces), grid=grid)
        tuned[f"glm {name}"] = found.item()
        laps(f"precision, {name}")
    factors = choose_factor(posteriors["diag"], loader, validation, seed, chosen)
    laps("factor of gp")
    for row, (name, predictive, draws) in ROWS.items():
        torch.manual_seed(seed)
        predict = partial(
            probabilities,
            posteriors[name],
            predictive=predictive,
            draws=chosen["draws"] if draws is None else draws,
        )
        rows[row] = scores(predict(test[0]), test[1], predict(unknown[0]))
        laps(row)
    return {
        "rows": rows,
        "prior precision": best,
        "MAP by prior precision": at_map,
        "tuned precision": tuned,
        "gp factor": min(factors, key=factors.get),
        "validation NLL of gp by factor": factors,
        "seconds": laps.seconds,
    }


def report(data, kind, seed):
    """Run one seed, unless it is there; write the JSON."""
    chosen = {
        name: value[kind] if isinstance(value, dict) else value for name, value in settings.items()
    }
    path = args.out / f"image_laplace_{data}_{kind}.json"
    before = recorded(path, chosen)
    seeds, commands = before.get("seeds", {}), before.get("commands", [])
    if str(seed) in seeds:
        return
    seeds[str(seed)] = run(data, kind, seed, chosen)
    cells = [f"{name} {row['NLL']:.3f}" for name, row in seeds[str(seed)]["rows"].items()]
    took = sum(seeds[str(seed)]["seconds"].values())
    print(f"{data}, {kind}, seed {seed}: NLL {', '.join(cells)} ({took:.0f} s)", flush=True)
    content = {
        **environment(None, commands),
        "data": data,
        "net": kind,
        "settings": chosen,
        "published settings": {
            name: value[kind] if isinstance(value, dict) else value
            for name, value in PUBLISHED.items()
        },
        "summary": summary(seeds),
        "seeds": seeds,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


if not args.table:
    for seed in range(args.seeds or settings["seeds"]):
        for kind in args.net:
            for data in args.data:
                report(data, kind, seed)
print(table(args.out))
