"""Classification of six UCI sets by MAP, mean field and Laplace, linearised and not [GLM tab. 1].

Two hidden layers of 50 tanh units; stratified splits of 70 % for training, 15 % for validation
and 15 % for testing; inputs standardised on the training part. Ten prior precisions from 1e-2 to
1e2: each method takes the one with the lowest negative log-likelihood on the validation part, and
what is reported is that on the test part, in nats a point, mean and standard error over splits.

Columns: MAP; mean field (MFVI); a Laplace approximation at the MAP with the full generalised
Gauss-Newton matrix, its draws run through the net (bnn) or through the linearised net (glm); the
latter with the diagonal of the matrix (glm diag); and 250 natural-gradient steps in the linearised
net from there on (refine, refine diag), which `--columns` asks for: a step with the full matrix
costs the cube of the number of weights or, where that is less, of all points' outputs.

The ten nets of a split are fitted side by side. The published schedule is 10,000 full-batch steps
of Adam at 1e-3 for MAP and 5,000 at 1e-2 for mean field: `--published`. By default 2,000 steps
decay from 1e-2 to 1e-4 by a cosine in both. A run with the same settings leaves out the splits
and columns that the JSON in --out holds already.
"""

import argparse
import json
import math
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import _extras  # noqa: F401
import pyro.distributions as dist
import torch
from _record import environment, recorded
from _uci import PUBLISHED, RERUN, SideBySide, load, split, summary, table
from pyro.infer.autoguide import AutoDelta

import tyxe
from tyxe.guides import AutoNormal, PretrainedInitializer

COLUMNS = ["MAP", "MFVI", "bnn", "glm", "glm diag", "refine", "refine diag"]

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--data", nargs="+", choices=PUBLISHED, default=["glass"], help="the sets (default: glass)"
)
parser.add_argument(
    "--columns", nargs="+", choices=COLUMNS, default=COLUMNS[:5], help="default: all but refine"
)
parser.add_argument("--splits", type=int, default=10, help="number of splits (default: 10)")
parser.add_argument("--published", action="store_true", help="the published steps, see above")
parser.add_argument("--table", action="store_true", help="only print the table of what --out has")
parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the JSON files")
parser.add_argument(
    "--smoke-test", action="store_true", help="few steps of tiny nets, one split: no result"
)
args = parser.parse_args()
settings = {
    "hidden units": 50,
    "prior precisions": [10 ** (-2 + 4 * i / 9) for i in range(10)],
    "steps": {"MAP": 10_000, "MFVI": 5_000} if args.published else {"MAP": 2_000, "MFVI": 2_000},
    "first rate": {"MAP": 1e-3, "MFVI": 1e-2} if args.published else {"MAP": 1e-2, "MFVI": 1e-2},
    "last rate": {"MAP": 1e-3, "MFVI": 1e-2} if args.published else {"MAP": 1e-4, "MFVI": 1e-4},
    "draws": 1_000,
    "refinement steps": 250,
}
if args.smoke_test:
    args.splits = 1
    settings |= {"hidden units": 5, "prior precisions": [0.1, 10.0], "draws": 4}
    settings |= {"steps": {"MAP": 20, "MFVI": 20}, "refinement steps": 3}
precisions, draws = settings["prior precisions"], settings["draws"]
torch.set_num_threads(1)


def sampled(bnn, x, loader, predictive):
    """Predict by draws: run through the net (`"bnn"`) or the linearised net (`"glm"`)."""
    return bnn.predict(x, num_predictions=draws, predictive=predictive, batch_size=500)


def refined(bnn, x, loader, rate):
    """Predict by the linearised net, after variational steps from the Laplace approximation."""
    how = {"structure": bnn.structure, "num_steps": settings["refinement steps"], "rate": rate}
    posterior = bnn.refine(loader, "variational", **how)
    return posterior.predict(x, num_predictions=draws, batch_size=500)


# What starts at the MAP: how each column predicts, by the structure of the curvature.
AT_MAP = {
    "diag": {
        "MAP": lambda bnn, x, _: bnn.predict(x, num_predictions=0, predictive="bnn"),
        "glm diag": partial(sampled, predictive="glm"),
        "refine diag": partial(refined, rate=1e-3),
    },
    "full": {
        "bnn": partial(sampled, predictive="bnn"),
        "glm": partial(sampled, predictive="glm"),
        "refine": partial(refined, rate=1e-2),
    },
}


def side_by_side_prior(name, module, param):
    """A precision for each net; the rows of a parameter belong to one net after the other."""
    scales = torch.tensor(precisions).rsqrt().repeat_interleave(len(param) // len(precisions))
    return dist.Normal(0, scales.view(-1, *[1] * (param.dim() - 1)).expand(param.shape))


def fit(column, nets, likelihood, guide, x, y, handler=nullcontext):
    """Fit the nets of all prior precisions at once, full batch."""
    bnn = tyxe.VariationalBNN(nets, tyxe.priors.LambdaPrior(side_by_side_prior), likelihood, guide)
    optimizer = torch.optim.Adam(bnn.parameters(), lr=settings["first rate"][column])
    steps, last = settings["steps"][column], settings["last rate"][column]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, last)
    with handler():
        bnn.fit([(x, y)], optimizer, steps, callback=lambda *_: schedule.step(), progress=False)
    return bnn


def nll(predictions, likelihood, targets):
    """Return the negative log-likelihood of the validation and of the test part."""
    parts = predictions.split([len(part) for part in targets])
    scores = [
        -likelihood.log_likelihood(part, target, "mean").item()
        for part, target in zip(parts, targets, strict=True)
    ]
    return dict(zip(("validation", "test"), scores, strict=True))


def run(x, y, seed, columns):
    """Return the best prior precision of columns, and its scores, on one split."""
    torch.manual_seed(seed)
    is_binary, outputs = int(y.max()) == 1, max(int(y.max()) + 1, 3)
    y = y.float()[:, None] if is_binary else y
    kind = tyxe.likelihoods.Bernoulli if is_binary else tyxe.likelihoods.Categorical
    (x, y), *held_out = split(x, y, seed)
    seen, labels = torch.cat([part[0] for part in held_out]), [part[1] for part in held_out]

    sizes = [x.shape[1], *[settings["hidden units"]] * 2, 1 if is_binary else outputs]
    nets = SideBySide(len(precisions), sizes)
    together, one = kind(len(x), event_dim=1), kind(len(x))
    repeated = y.view(-1, 1).expand(-1, len(precisions))
    start = PretrainedInitializer.from_net(nets)
    map_guide = partial(AutoDelta, init_loc_fn=start)
    fitted = fit("MAP", nets, together, map_guide, x, repeated).to_module()
    guide = partial(AutoNormal, init_loc_fn=start, init_scale=math.log1p(math.exp(-7)))
    handler = tyxe.poutine.local_reparameterization
    found = {column: [] for column in columns}
    if "MFVI" in columns:
        mean_field = fit("MFVI", nets, together, guide, x, repeated, handler)
        drawn = mean_field.predict(seen, num_predictions=draws)
        for member in drawn.view(len(seen), len(precisions), -1).unbind(1):
            found["MFVI"].append(nll(member, one, labels))
    for index, precision in enumerate(precisions):
        prior = tyxe.priors.IIDPrior(dist.Normal(0, precision**-0.5))
        for structure, predictives in AT_MAP.items():
            if not (wanted := [column for column in predictives if column in columns]):
                continue
            laplace = tyxe.LaplaceBNN(fitted.member(index), prior, one, structure=structure)
            laplace.fit_curvature([(x, y)], progress=False)
            for column in wanted:
                prediction = predictives[column](laplace, seen, [(x, y)])
                found[column].append(nll(prediction, one, labels))
    return {column: best(scores) for column, scores in found.items()}


def best(scores):
    """Return the prior precision with the best validation score, and its scores."""
    rows = [{"precision": p, **row} for p, row in zip(precisions, scores, strict=True)]
    return min(rows, key=lambda row: row["validation"])


def report(name):
    """Run what is missing of a set, writing the JSON after each split."""
    path = args.out / f"uci_{name}.json"
    args.out.mkdir(parents=True, exist_ok=True)
    before = recorded(path, settings)
    splits, about = before.get("splits", {}), environment(None, before.get("commands", []))
    x, y = load(name)
    for seed in map(str, range(args.splits)):
        missing = [column for column in args.columns if column not in splits.get(seed, {})]
        if not missing:
            continue
        start = time.perf_counter()
        rows = splits.setdefault(seed, {})
        rows |= run(x, y, int(seed), missing)
        cells = [f"{column} {rows[column]['test']:.3f}" for column in missing]
        seconds = time.perf_counter() - start
        print(f"{name}, split {seed}: {', '.join(cells)} ({seconds:.0f} s)", flush=True)
        content = {
            **about,
            "settings": settings,
            "summary": summary(splits, COLUMNS),
            "published": PUBLISHED[name],
            "rerun of the published code": RERUN.get(name, {}),
            "splits": splits,
        }
        path.write_text(json.dumps(content, indent=2) + "\n")


if not args.table:
    for name in args.data:
        report(name)
print(table(args.out, COLUMNS))
