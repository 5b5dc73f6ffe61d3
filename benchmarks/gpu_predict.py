"""Time of many predictions and of samplers' steps on a GPU, beside forwards and NumPyro."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

# Before JAX is imported, which would take most of the memory that PyTorch needs.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch
from _gpu import FINISHED, Makers, Step, device, forwards, host_reads, reported, synchronizations
from _harness import Case, Contestant, buildable, peer, run
from _nets import images, mlp, resnet18, vectors
from last_layer import on_last
from samplers import FIXED, curve, numpyro_steps, our_run, potential_of, small, stepping
from torch import Tensor, nn
from training_step import make_bnn

import tyxe
from tyxe.samplers import MCLMC, NUTS, Kernel

NUM_POINTS = 50_000


def built(name: str, who: str, make: Callable[[], Step]) -> Contestant:
    """Return a contestant whose run is made here, and has run twice."""
    step = make()

    def run_once() -> None:
        step()

    run_once()  # the first pass at many draws is compared with single ones
    return Contestant(name, run_once, who)


def plain_forwards(net: nn.Module, x: Tensor, count: int) -> Step:
    """Return so many forwards of the plain net."""
    return functools.partial(forwards, functools.partial(net, x), count)


def predictions(bnn: Any, x: Tensor, count: int, **how: Any) -> dict[str, Callable[[], Step]]:
    """Return ways to predict with so many draws, by name."""
    predict = functools.partial(bnn.predict, x, num_predictions=count, **how)

    def ensemble() -> Step:
        return functools.partial(forwards, functools.partial(bnn.to_ensemble(count), x), 1)

    return {
        "predict, ours": lambda: predict,
        "predict(compile=True), ours": lambda: functools.partial(predict, compile=True),
        "predict(vectorize=False), ours": lambda: functools.partial(predict, vectorize=False),
        "predict(vectorize=True), ours": lambda: functools.partial(predict, vectorize=True),
        "to_ensemble, ours": ensemble,
    }


def case(
    name: str, title: str, unit: str, plain: Step, ways: dict[str, Callable[[], Step]]
) -> Case:
    """Return the case of ways to predict, beside plain forwards."""
    makers: Makers = {"plain forwards": lambda: built("plain forwards", "plain", lambda: plain)}
    for way, make in ways.items():
        makers[way] = functools.partial(built, way, "ours", make)
    return reported(name, title, unit, makers)


def all_weights_case(name: str, what: str, net: nn.Module, x: Tensor, count: int) -> Case:
    """Return draws of all weights of a net, beside as many forwards."""
    net, x = net.to(device()).eval(), x.to(device())
    plain, bnn = plain_forwards(net, x, count), make_bnn(net, NUM_POINTS)
    title = f"{what}, {count} draws of all weights"
    return case(name, title, f"{count} draws", plain, predictions(bnn, x, count))


def mlp_case(smoke_test: bool) -> Case:
    """Return 32 draws of all weights of the MLP, on 2,000 rows."""
    rows, count = (4, 3) if smoke_test else (2000, 32)
    net, x = mlp(smoke_test), vectors(rows, smoke_test)[0]
    return all_weights_case("mlp_predict", f"MLP 784-400-400-10, {rows} rows", net, x, count)


def resnet18_case(smoke_test: bool) -> Case:
    """Return 32 draws of all weights of ResNet-18, on 128 images."""
    rows, count = (2, 3) if smoke_test else (128, 32)
    net, x = resnet18(smoke_test), images(rows, smoke_test)[0]
    what = f"ResNet-18, {rows} images of 32 x 32"
    return all_weights_case("resnet18_predict", what, net, x, count)


def last_layer_case(smoke_test: bool) -> Case:
    """Return 64 draws of ResNet-18's last layer, on 128 images, beside one forward."""
    rows, count = (2, 3) if smoke_test else (128, 64)
    net, x = resnet18(smoke_test).to(device()).eval(), images(rows, smoke_test)[0].to(device())
    prior, likelihood = on_last(tyxe.util.last_layer(net)), tyxe.likelihoods.Categorical(NUM_POINTS)
    bnn = tyxe.VariationalBNN(net, prior, likelihood, tyxe.guides.AutoNormal)
    laplace = tyxe.LaplaceBNN(net, prior, tyxe.likelihoods.Categorical(rows))
    laplace.fit_curvature([(x, torch.arange(rows, device=x.device) % 10)], progress=False)
    by_draws = predictions(laplace, x, count, predictive="bnn")["predict, ours"]
    ways = predictions(bnn, x, count) | {"Laplace by draws, ours": by_draws}
    title = f"Last layer of ResNet-18, {rows} images of 32 x 32, {count} draws"
    return case("last_layer", title, "prediction", plain_forwards(net, x, 1), ways)


# --------------------------------------------------------------------------- samplers


def our_steps(kernel: Kernel, chains: int, hidden: int, count: int) -> Contestant:
    """Return steps of chains of the 1-50-1 net, of which the programs are made here."""
    data = curve()
    here = (data[0].to(device()), data[1].to(device()))
    bnn = small(here, hidden).to(device())
    run_of_chains = our_run(kernel, *potential_of(bnn, here, chains), 10**3, thinning=100)
    name = f"{type(kernel).__name__}, {chains} chains, ours"
    return Contestant(name, stepping(run_of_chains, count), "ours")


def numpyro_leapfrogs(name: str, chains: int, hidden: int, depth: int, samples: int) -> Contestant:
    """Return leapfrog steps of NumPyro on full trees, compiled here."""
    return Contestant(name, numpyro_steps(curve(), hidden, chains, depth, samples), "NumPyro")


def samplers_case(smoke_test: bool) -> Case:
    """Return a step of 4 and of 256 chains of NUTS, MCLMC and NumPyro's NUTS."""
    hidden, depth, samples, many = (3, 2, 2, 5) if smoke_test else (50, 6, 10, 256)
    kernel, count = NUTS(**FIXED, max_tree_depth=depth), samples * (2**depth - 1)
    version, makers = peer("numpyro", "numpyro"), {}
    for chains in (4, many):
        if version is not None:
            name = f"{version}, {chains} chains"
            given = name, chains, hidden, depth, samples
            makers[name] = functools.partial(numpyro_leapfrogs, *given)
        for own in (kernel, MCLMC()):
            makers[f"{own}, {chains}"] = functools.partial(our_steps, own, chains, hidden, count)
    found, errors = buildable(makers)
    beside = {c.name.split(", ")[-1]: c.name for c in found if c.who == "NumPyro"}
    found = [
        Contestant(c.name, c.run, c.who, plain=beside.get(c.name.split(", ")[1])) for c in found
    ]

    def findings(_: Any) -> dict[str, Any]:
        reads: dict[str, Any] = {}
        for one in found:
            if one.who == "ours":
                counted = waits_of(one.run) / count
                reads[f"{one.name}: waits a step"] = f"{counted:.3g}"
        return errors | reads

    title = "NUTS and MCLMC, 1-50-1 tanh regression, 100 points, compile apart"
    return Case("samplers", title, "step of all chains", 15, found, True, FINISHED, findings)


def waits_of(step: Step) -> int:
    """Return how often the host waits for the device in a run; on a CPU, for a number."""
    if device().type == "cuda":
        return sum(synchronizations(step).values())
    return sum(host_reads(step, "cpu").values())


CASES = {
    "mlp_predict": mlp_case,
    "resnet18_predict": resnet18_case,
    "last_layer": last_layer_case,
    "samplers": samplers_case,
}

if __name__ == "__main__":
    if not torch.cuda.is_available() and "--smoke-test" not in sys.argv:
        print("benchmarks/gpu_predict.py: no CUDA device here, so nothing was measured")
        sys.exit(0)
    run(
        "Seconds of predictions by many draws on a GPU, and ratios to plain forwards; of steps of "
        "samplers, and ratios to NumPyro's.",
        CASES,
    )
