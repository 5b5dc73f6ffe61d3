"""Runs what users run, with the `tyxe` that is on the path; `revisions.py` starts and times it.

By public names alone, not with the other benchmarks' models: another revision has to run it, too.
"""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import torch
from _nets import images, mlp, resnet18, vectors
from pyro.infer.mcmc import HMC
from torch import Tensor, nn

import tyxe
from tyxe.guides import AutoBernoulli, AutoInducing, AutoNormal, PretrainedInitializer
from tyxe.poutine import flipout, local_reparameterization
from tyxe.samplers import MCLMC, NUTS

Work = Callable[[], object]
POINTS = 10_000


def normal() -> tyxe.priors.Prior:
    return tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm2d])


def mean_field(net: nn.Module) -> tyxe.VariationalBNN:
    start = PretrainedInitializer.from_net(net)
    guide = functools.partial(AutoNormal, init_loc_fn=start, init_scale=1e-2)
    return tyxe.VariationalBNN(net, normal(), tyxe.likelihoods.Categorical(POINTS), guide)


def inducing(net: nn.Module, size: int) -> tyxe.VariationalBNN:
    guide = functools.partial(
        AutoInducing, inducing_rows=size, inducing_cols=size, everywhere=True, max_lambda=0.03
    )
    prior = tyxe.priors.LayerwiseNormalPrior("radford", hide_module_types=[nn.BatchNorm2d])
    return tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Categorical(POINTS), guide)


def binary(net: nn.Module) -> tyxe.VariationalBNN:
    prior = tyxe.priors.BinaryPrior()
    return tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Categorical(POINTS), AutoBernoulli)


def steps(bnn: tyxe.VariationalBNN, x: Tensor, y: Tensor, count: int, handler=nullcontext) -> Work:
    adam = torch.optim.Adam(bnn.parameters(), lr=1e-4)

    def work() -> None:
        with handler():
            bnn.fit([(x, y)] * count, adam, 1, progress=False)

    return work


def draws(bnn: tyxe.VariationalBNN, x: Tensor, count: int) -> Work:
    return lambda: bnn.predict(x, num_predictions=count)


def training(smoke: bool) -> dict[str, Work]:
    rows, pictures = vectors(8 if smoke else 128, smoke), images(2 if smoke else 8, smoke)
    count = 1 if smoke else 10
    found = {"10 steps of the MLP, plain sampling": steps(mean_field(mlp(smoke)), *rows, count)}
    for name, handler in {"local": local_reparameterization, "flipout": flipout}.items():
        work = steps(mean_field(mlp(smoke)), *rows, count, handler)
        found[f"10 steps of the MLP, {name}"] = work
    bnn = mean_field(resnet18(smoke).eval())
    work = steps(bnn, *pictures, 1, local_reparameterization)
    return found | {"a step of ResNet-18, local": work}


def prediction(smoke: bool) -> dict[str, Work]:
    rows, pictures = vectors(8 if smoke else 1_000, smoke), images(2 if smoke else 8, smoke)
    return {
        "32 draws of the MLP, 1,000 rows": draws(mean_field(mlp(smoke)), rows[0], 32),
        "8 draws of ResNet-18, 8 images": draws(mean_field(resnet18(smoke)), pictures[0], 8),
    }


def laplace(smoke: bool) -> dict[str, Work]:
    net, (x, y) = mlp(smoke).eval(), vectors(8 if smoke else 500, smoke)
    found: dict[str, Work] = {}
    for structure in ("kron", "diag"):
        likelihood = tyxe.likelihoods.Categorical(POINTS)
        bnn = tyxe.LaplaceBNN(net, normal(), likelihood, structure=structure)
        bnn.fit_curvature([(x, y)])
        found[f"curvature, {structure}"] = functools.partial(bnn.fit_curvature, [(x, y)])
        found[f"glm of 50 rows, {structure}"] = functools.partial(bnn.predict, x[:50])
        found[f"evidence's maximum, {structure}"] = functools.partial(most_evidence, bnn)
    return found


def most_evidence(bnn: tyxe.LaplaceBNN) -> None:
    bnn.update_prior(normal())
    bnn.optimize_prior_precision()


def inducing_weights(smoke: bool) -> dict[str, Work]:
    bnn = inducing(resnet18(smoke).eval(), 2 if smoke else 64)
    x, y = images(2 if smoke else 8, smoke)
    return {"a step of ResNet-18": steps(bnn, x, y, 1), "2 draws, 8 images": draws(bnn, x, 2)}


def binary_weights(smoke: bool) -> dict[str, Work]:
    net = nn.Sequential(*(nn.Tanh() if isinstance(m, nn.ReLU) else m for m in mlp(smoke)))
    for layer in net:
        if isinstance(layer, nn.Linear):
            layer.bias = None
    rows = vectors(8 if smoke else 128, smoke)
    work = steps(binary(net), *rows, 1 if smoke else 10, local_reparameterization)
    return {"10 steps of the MLP": work}


def sampling(smoke: bool) -> dict[str, Work]:
    x, y = torch.randn(20 if smoke else 200, 4), torch.randn(20 if smoke else 200, 1)
    found: dict[str, Work] = {}
    kernels = {
        "NUTS": functools.partial(NUTS, max_tree_depth=5),
        "MCLMC": MCLMC,
        "Pyro's HMC": functools.partial(HMC, step_size=0.01, num_steps=4, adapt_step_size=False),
    }
    for name, kernel in kernels.items():
        net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=0.3)
        bnn = tyxe.MCMC_BNN(net, normal(), likelihood, kernel)
        options = {"progress": False} if name != "Pyro's HMC" else {"disable_progbar": True}
        length = {"num_samples": 5 if smoke else 25, "warmup_steps": 5 if smoke else 25}
        found[f"50 transitions of {name}"] = functools.partial(
            bnn.fit, [(x, y)], **length, **options
        )
    return found


CASES = {
    "training": training,
    "prediction": prediction,
    "laplace": laplace,
    "inducing": inducing_weights,
    "binary": binary_weights,
    "sampling": sampling,
}


def main() -> None:
    """Answer `case` by the names of its works, `case<tab>work` by wall and processor seconds."""
    smoke, threads = sys.argv[1] == "smoke", int(sys.argv[2])
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", category=tyxe.TyxeWarning)
    works: dict[str, Work] = {}
    for line in sys.stdin:
        case, _, name = line.rstrip("\n").partition("\t")
        if not name:
            pyro.set_rng_seed(0)
            works = CASES[case](smoke)
            print("\t".join(works), flush=True)
            continue
        start = time.perf_counter(), time.process_time()
        works[name]()
        print(time.perf_counter() - start[0], time.process_time() - start[1], flush=True)


if __name__ == "__main__":
    main()
