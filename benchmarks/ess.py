"""Effective samples a second of NUTS: Pyro through the model, ours, and NumPyro.

They are counted for predictions, not for weights, which can be permuted without changing the net:
the smallest bulk ESS of `f(x)` over a few inputs. Start-up, compilation and warm-up are part of the
time.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from _by_hand import TanhRegression
from _harness import Case, Contestant, run
from pyro.infer.autoguide.initialization import init_to_median
from pyro.infer.mcmc import MCMC, NUTS
from torch import Tensor, nn

import tyxe

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ announces its next version at every import
    import arviz

NOISE = 0.1
PROBES = torch.linspace(-0.8, 0.8, 5)[:, None]


def effective(predictions: np.ndarray) -> float:
    """Return the smallest bulk ESS of predictions `(samples, inputs)` of one chain."""
    return float(min(arviz.ess(column[None], method="bulk") for column in predictions.T))


class Tally:
    """Remembers the effective samples of every run of every contestant."""

    def __init__(self) -> None:
        self.sizes: dict[str, list[float]] = {}

    def contestant(
        self, name: str, who: str, chain: Callable[[], float], limit: str | None = None
    ) -> Contestant:
        """Return a contestant whose runs are remembered."""

        def run_chain() -> None:
            self.sizes.setdefault(name, []).append(chain())

        return Contestant(name, run_chain, who, limit)

    def findings(self, seconds: dict[str, list[float]]) -> dict[str, str]:
        """Return effective samples a second, of all rounds together, and how runs differ."""
        found = {}
        for name, sizes in self.sizes.items():
            rate = sum(sizes) / sum(seconds[name])
            text = f"{rate:.3g} effective samples a second"
            found[name] = f"{text} (in a run: {min(sizes):.0f} to {max(sizes):.0f})"
        return found


# --------------------------------------------------------------------------- contestants


def bnn_chain(
    kernel: Callable[..., Any], data: tuple[Tensor, Tensor], hidden: int, **options: Any
) -> float:
    """Run `MCMC_BNN.fit`."""
    bnn = tyxe.MCMC_BNN(
        nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1)),
        tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        tyxe.likelihoods.HomoskedasticGaussian(len(data[0]), scale=NOISE),
        kernel,
    )
    bnn.fit([data], disable_progbar=True, **options)
    outputs = bnn.predict(PROBES, num_predictions=options["num_samples"], aggregate=False)
    return effective(outputs.squeeze(-1).numpy())


def flat_chain(kernel: Callable[..., Any], problem: TanhRegression, **options: Any) -> float:
    """Run Pyro's own kernel on the flat potential in plain PyTorch, from the prior's median."""
    chain = MCMC(
        kernel(potential_fn=lambda params: problem.potential(params["z"])),
        initial_params={"z": torch.randn(15, problem.size).median(0).values},
        disable_progbar=True,
        **options,
    )
    chain.run()
    samples = chain.get_samples()["z"].T
    weight, bias, out_weight, out_bias = (part[:, None] for part in problem._split(samples))
    outputs = (torch.tanh(PROBES * weight + bias) * out_weight).sum(0) + out_bias[0]
    return effective(outputs.T.numpy())


def numpyro_chain(
    data: tuple[Tensor, Tensor], hidden: int, depth: int, warmup_steps: int, num_samples: int
) -> float:
    """Run NumPyro's NUTS, which compiles anew for every run."""
    # One thread, as the other contestants.
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    )
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as npd
    from numpyro.infer import MCMC as NumPyroMCMC
    from numpyro.infer import NUTS as NumPyroNUTS
    from numpyro.infer import init_to_median as numpyro_init_to_median

    shapes = {"weight": (1, hidden), "bias": (hidden,), "out_weight": (hidden, 1), "out_bias": (1,)}

    def net(values: dict[str, Any], x: Any) -> Any:
        hidden_units = jnp.tanh(x @ values["weight"] + values["bias"])
        return hidden_units @ values["out_weight"] + values["out_bias"]

    def model(x: Any, y: Any) -> None:
        prior = npd.Normal(0.0, 1.0)
        values = {
            name: numpyro.sample(name, prior.expand(shape).to_event(len(shape)))
            for name, shape in shapes.items()
        }
        numpyro.sample("data", npd.Normal(net(values, x), NOISE).to_event(2), obs=y)

    mcmc = NumPyroMCMC(
        NumPyroNUTS(model, max_tree_depth=depth, init_strategy=numpyro_init_to_median()),
        num_warmup=warmup_steps,
        num_samples=num_samples,
        progress_bar=False,
    )
    x, y = (jnp.asarray(part.numpy()) for part in data)
    probes = jnp.asarray(PROBES.numpy())

    mcmc.run(jax.random.PRNGKey(int(torch.randint(2**31, ()))), x, y)
    outputs = jax.vmap(lambda values: net(values, probes))(mcmc.get_samples())
    return effective(np.asarray(outputs.squeeze(-1)))


def case(smoke_test: bool) -> Case:
    """Return NUTS with trees of depth six on the regression with 50 hidden units."""
    hidden, depth, warmup_steps, num_samples = (3, 2, 5, 8) if smoke_test else (50, 6, 200, 300)
    x = torch.linspace(-1, 1, 100)[:, None]
    data = (x, torch.sin(4 * x) + NOISE * torch.randn_like(x))
    problem = TanhRegression(*data, NOISE, hidden)
    length = {"warmup_steps": warmup_steps, "num_samples": num_samples}
    kernel = functools.partial(NUTS, max_tree_depth=depth, init_strategy=init_to_median)
    ours = functools.partial(bnn_chain, kernel, data, hidden, **length)

    def through_the_model(model: Callable[..., Any]) -> Any:
        return kernel(model)  # no class or partial: Pyro gets the model itself

    general = functools.partial(bnn_chain, through_the_model, data, hidden, **length)
    flat = functools.partial(flat_chain, kernel, problem, **length)
    tally, limit = Tally(), "Pyro on a flat potential"
    found = [
        tally.contestant("Pyro on the model", "plain", general),
        tally.contestant(limit, "by hand", flat),
        tally.contestant("ours", "ours", ours, limit),
        tally.contestant("ours, compiled", "ours", functools.partial(ours, compile=True), limit),
    ]
    if importlib.util.find_spec("numpyro") is None:
        print("NumPyro is left out: pip install -r benchmarks/requirements-peers.txt", flush=True)
    else:
        chain = functools.partial(numpyro_chain, data, hidden, depth, warmup_steps, num_samples)
        peer = f"NumPyro {importlib.metadata.version('numpyro')}"
        found.append(tally.contestant(peer, "NumPyro", chain))
    title = "NUTS, 1-50-1 tanh regression, 100 points, 200 + 300 samples, trees up to depth 6"
    return Case("regression", title, "run", 5, found, warm_up=False, findings=tally.findings)


if __name__ == "__main__":
    run(
        "Seconds of a run of NUTS and its effective samples, start-up, compilation and warm-up "
        "included.",
        {"regression": case},
    )
