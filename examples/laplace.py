"""Laplace approximations of three toy nets: which posterior, and which prediction from it.

`--data cubic`: x^3 from 20 points. One fitted net, and about its weights a Gaussian by Kronecker
factors, by a diagonal and in full, against HMC: drawn weights with the two hyperparameters tuned
on 20 held-out points, drawn weights as they come, and the linearised net as it comes.
`--data step`: two weights and ten points, where the Gaussian puts mass on slopes that the true
posterior rules out: drawn weights predict far from certain, the linearised net does not.
`--data banana`: two classes from 265 points; drawn weights underfit, the linearised net does not.
"""

import argparse
from functools import partial
from pathlib import Path

import _extras  # noqa: F401
import matplotlib as mpl

mpl.use("Agg")

import _laplace_toys as toys
import pyro
import torch
from _record import environment, save
from pyro.ops.stats import effective_sample_size
from torch import nn

import tyxe

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--data", choices=["cubic", "step", "banana"], default="cubic", help="see above"
)
parser.add_argument("--epochs", type=int, default=3_000, help="of the fit (default: 3000)")
parser.add_argument("--hmc-warmup", type=int, default=300, help="samples to adapt (default: 300)")
parser.add_argument("--hmc-samples", type=int, default=1_000, help="samples kept (default: 1000)")
parser.add_argument("--draws", type=int, default=1_000, help="of the weights (default: 1000)")
parser.add_argument("--seed", type=int, default=42, help="data and inference (default: 42)")
parser.add_argument(
    "--out", type=Path, default=Path("results"), help="folder of figure and JSON (default: results)"
)
parser.add_argument(
    "--smoke-test", action="store_true", help="20 epochs, 5 + 6 samples, 8 draws: no result"
)
args = parser.parse_args()
if args.smoke_test:
    args.epochs, args.hmc_warmup, args.hmc_samples, args.draws = 20, 5, 6, 8


def cubic():
    data, held_out, test = (toys.draw_cubic(count) for count in (20, 20, 1_000))
    grid = torch.linspace(-6, 6, 241)[:, None]
    unit, height = (column.std() for column in data)  # the net sees variances of one
    (x, y), (x_held, y_held), (x_test, y_test) = (
        (x / unit, y / height) for x, y in (data, held_out, test)
    )
    net = nn.Sequential(nn.Linear(1, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 1))
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=float(3 / height))
    fitted = tyxe.LaplaceBNN(net, toys.normal(1.0), likelihood)
    fitted.fit([(x, y)], partial(torch.optim.Adam, lr=1e-2), args.epochs)
    rows, table, chosen = {"tuned, bnn": {}, "untuned, bnn": {}, "untuned, glm": {}}, {}, {}

    def look(bnn, name, kind):
        how = {"num_predictions": args.draws, "predictive": kind[-3:]}
        mean, scale = bnn.predict(grid / unit, **how)
        rows[kind][name] = mean * height, scale * height
        _, log_likelihood = bnn.evaluate(x_test, y_test, reduction="mean", **how)
        nll = (height.log() - log_likelihood).item()
        table[f"{name}, {kind}"] = {**toys.spread(grid, scale * height), "NLL": nll}

    for name, options in {
        "kron": {"damping": True},
        "diag": {"curvature": "fisher"},
        "full": {"curvature": "fisher"},
    }.items():
        # A net that is fitted already: only the curvature is missing.
        bnn = tyxe.LaplaceBNN(
            fitted.to_module(), toys.normal(1.0), likelihood, structure=name, **options
        )
        bnn.fit_curvature([(x, y)])
        look(bnn, name, "untuned, glm")
        look(bnn, name, "untuned, bnn")
        chosen[name] = toys.tune(bnn, x_held, y_held, args.draws // 5)
        look(bnn, name, "tuned, bnn")
    bnn = toys.hmc(net, likelihood, [(x, y)], args)
    look(bnn, "HMC", "untuned, bnn")
    for predictions in rows.values():
        predictions["HMC"] = rows["untuned, bnn"]["HMC"]
    # How far HMC can be trusted: its independent draws, the chain's halves taken as two chains.
    at = grid[20::100] / unit  # -5, 0 and 5
    functions = bnn.predict(at, num_predictions=args.hmc_samples, aggregate=False)
    ess = effective_sample_size(functions.reshape(2, -1, len(at))).tolist()
    figure = toys.plot_cubic(rows, grid, data, grid**3)
    return figure, table, {"chosen": chosen, "hmc effective sample size": ess}


def step():
    x = torch.tensor([1.0, 1.5, 2.0, 2.5, 3.0])
    x = torch.cat([-x, x])[:, None]
    y = (x > 0).float()
    grid = torch.linspace(-6, 6, 241)[:, None]
    likelihood = tyxe.likelihoods.Bernoulli(len(x), event_dim=1)
    net = toys.Step()
    fitted = tyxe.LaplaceBNN(net, toys.normal(1.0), likelihood)
    fitted.fit([(x, y)], partial(torch.optim.Adam, lr=1e-2), args.epochs)
    fitted, posteriors = fitted.to_module(), {}
    for name, options in {
        "Laplace, Hessian": {"structure": "full"},
        "Laplace, GGN": {"structure": "full"},
        "Laplace, GGN damped": {"structure": "kron", "damping": True},
    }.items():
        posteriors[name] = tyxe.LaplaceBNN(fitted, toys.normal(1.0), likelihood, **options)
        posteriors[name].fit_curvature([(x, y)])
    toys.use_hessian_(posteriors["Laplace, Hessian"], x, y)
    posteriors["HMC"] = toys.hmc(net, likelihood, [(x, y)], args)
    truth = toys.step_truth(x, y, grid)
    exact = {"P(w1 < 0)": truth[2], "p at x = 4": truth[3][200].item()}
    table, panels = {"true posterior": exact}, {}
    for name, bnn in posteriors.items():
        count = args.hmc_samples if name == "HMC" else 10 * args.draws
        weights = toys.step_weights(bnn, count)
        table[name], outputs = {"P(w1 < 0)": (weights[:, 0] < 0).float().mean().item()}, {}
        for kind in ("bnn",) if name == "HMC" else ("bnn", "glm"):
            predict = partial(bnn.predict, num_predictions=args.draws, predictive=kind)
            outputs[kind] = predict(grid, aggregate=False)[..., 0]
            table[name][f"{kind} at x = 4"] = outputs[kind][:, 200].sigmoid().mean().item()
        panels[name] = weights, outputs
    return (
        toys.plot_step(panels, grid, truth, (x, y)),
        table,
        {"w1 of the MAP": fitted.linear.weight.item()},
    )


def banana():
    train, validation, test = toys.load_banana(args.seed)
    likelihood = tyxe.likelihoods.Bernoulli(len(train[0]), event_dim=1)
    kinds = {
        "MAP": {"num_predictions": 0, "predictive": "bnn"},
        "bnn": {"num_predictions": args.draws, "predictive": "bnn"},
        "glm": {"num_predictions": args.draws, "predictive": "glm"},
    }
    found, posteriors = {}, {}
    precisions = (0.1, 0.4, 0.7, 1.0, 1.3, 1.6, 1.9, 2.2, 2.5, 2.8)
    for precision in precisions[: 2 if args.smoke_test else None]:
        net = nn.Sequential(
            nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)
        )
        bnn = tyxe.LaplaceBNN(net, toys.normal(precision), likelihood, structure="full")
        adam = {"optimizer": torch.optim.Adam, "optim_args": {"lr": 1e-2}, "gamma": 0.1}
        decays = [args.epochs * 24 // 30, args.epochs * 28 // 30]
        optim = pyro.optim.MultiStepLR({**adam, "milestones": decays})
        bnn.fit([train], optim, args.epochs, lambda *_, optim=optim: optim.step())
        posteriors[precision] = bnn
        found[precision] = {k: toys.scores(bnn, validation, test, how) for k, how in kinds.items()}
    best = {k: min(found, key=lambda p: found[p][k]["validation NLL"]) for k in kinds}
    table = {f"{k}, precision {best[k]}": found[best[k]][k] for k in kinds}
    # Its own choice apart, bnn on the posterior that glm chose: the predictive alone differs.
    table[f"bnn, precision {best['glm']}"] = found[best["glm"]]["bnn"]
    plane = toys.square(5.0, 8 if args.smoke_test else 80)
    predict = partial(posteriors[best["glm"]].predict, plane, aggregate=False)
    maps = {kind: toys.decompose(predict(**kinds[kind])) for kind in ("bnn", "glm")}
    return toys.plot_banana(maps, 5.0, train), table, {"by prior precision": found}


pyro.set_rng_seed(args.seed)
figure, table, details = {"cubic": cubic, "step": step, "banana": banana}[args.data]()
for name, row in table.items():
    print(f"{name:28}" + ", ".join(f"{column} {value:.3f}" for column, value in row.items()))
settings = {name: value for name, value in vars(args).items() if name not in ("out", "seed")}
content = {**environment(args.seed), "settings": settings, "table": table, **details}
save(args.out, f"laplace_{args.data}", figure, content)
