"""Steps of the samplers, compiled, beside NumPyro's and bde's; effective samples; compilation.

Compilation is apart: all contestants have compiled what they time before.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from _harness import Case, Clock, Contestant, Quantity, peer, run, timed
from torch import Tensor, nn

import tyxe
from tyxe.bnn.potential import Potential, exclusive_unvalidated
from tyxe.samplers import HMC, MCLMC, NUTS, Kernel, Run, batched

# One thread, as torch; XLA reads it when it starts.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)
# In a smoke test steps run as they are, but for one: what is generated is PyTorch's affair.
COMPILES = "--smoke-test" not in sys.argv
NOISE = 0.1
PROBES = torch.linspace(-0.8, 0.8, 5)[:, None]
FIXED = {"step_size": 1e-3, "adapt_step_size": False, "adapt_mass_matrix": False}
Data = tuple[Tensor, Tensor]


def curve() -> Data:
    """Return 100 points of a regression."""
    x = torch.linspace(-1, 1, 100)[:, None]
    return x, torch.sin(4 * x) + NOISE * torch.randn_like(x)


def small(data: Data, hidden: int = 50) -> tyxe.MCMC_BNN:
    """Return the 1-50-1 net with a standard normal prior and known noise."""
    return tyxe.MCMC_BNN(
        nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1)),
        tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        tyxe.likelihoods.HomoskedasticGaussian(len(data[0]), scale=NOISE),
        NUTS(),
    )


def potential_of(bnn: tyxe.MCMC_BNN, data: Data, chains: int) -> tuple[Any, Tensor]:
    """Return the potential of all chains, and starts of small weights."""
    with exclusive_unvalidated():
        one = Potential(bnn, *data)
        like = one.flatten(bnn._in_places())
        starts = 0.1 * torch.randn(chains, len(like)).to(like)
        return batched(one.at, starts), starts


def our_run(kernel: Kernel, potential: Any, starts: Tensor, *length: int, **how: Any) -> Run:
    """Return a compiled run that has not started."""
    how = {"compile": COMPILES, "inside": exclusive_unvalidated} | how
    return Run(kernel, potential, starts, *length, **how)


def stepping(run_of_chains: Run, count: int) -> Callable[[], int]:
    """Return what makes so many steps of all chains, which is compiled here."""
    steps: Iterator[Any] = run_of_chains.steps()
    next(steps)

    def some() -> int:
        for _ in range(count):
            next(steps)
        return count

    return some


# --------------------------------------------------------------------------- leapfrog steps


def numpyro_nuts(data: Data, hidden: int, chains: int, length: tuple[int, int], **how: Any) -> Any:
    """Return what runs NumPyro's NUTS on all chains in one program, and the net as a function."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as npd
    from numpyro.infer import NUTS as NumPyroNUTS

    shapes = {"weight": (1, hidden), "bias": (hidden,), "out_weight": (hidden, 1), "out_bias": (1,)}
    x, y = (jnp.asarray(part.numpy()) for part in data)

    def net(values: dict[str, Any], x: Any) -> Any:
        hidden_units = jnp.tanh(x @ values["weight"] + values["bias"])
        return hidden_units @ values["out_weight"] + values["out_bias"]

    def model() -> None:
        prior = npd.Normal(0.0, 1.0)
        values = {
            name: numpyro.sample(name, prior.expand(shape).to_event(len(shape)))
            for name, shape in shapes.items()
        }
        numpyro.sample("data", npd.Normal(net(values, x), NOISE).to_event(2), obs=y)

    # Not by NumPyro's MCMC, which compiles anew for every run.
    kernel = NumPyroNUTS(model, **how)
    seeds = jax.random.split(jax.random.PRNGKey(0), chains)
    warmup, samples = length
    starts = {
        name: jnp.asarray(0.1 * np.random.randn(chains, *shape)) for name, shape in shapes.items()
    }
    start = kernel.init(seeds, warmup, starts, (), {})

    def body(state: Any, _: None) -> Any:
        state = kernel.sample(state, (), {})
        return state, (state.z, state.num_steps)

    @jax.jit
    def transitions(seeds: Any) -> Any:
        state = start._replace(rng_key=seeds)
        return jax.lax.scan(body, state, None, length=warmup + samples)[1]

    def sampled() -> Any:
        seed = jax.random.PRNGKey(int(torch.randint(2**31, ())))
        return jax.block_until_ready(transitions(jax.random.split(seed, chains)))

    sampled()
    return sampled, net


def numpyro_steps(data: Data, hidden: int, chains: int, depth: int, samples: int) -> Any:
    """Return what runs chains of full trees, and counts the leapfrog steps of the longest."""
    sampled, _ = numpyro_nuts(data, hidden, chains, (0, samples), **FIXED, max_tree_depth=depth)

    def some() -> int:
        return int(np.asarray(sampled()[1]).max(1).sum())

    return some


def leapfrogs(smoke_test: bool) -> Case:
    """Return a leapfrog step of 1, 4 and 8 chains on the 1-50-1 net."""
    hidden, depth, samples = (3, 2, 2) if smoke_test else (50, 6, 30)
    data, found = curve(), []
    kernel = NUTS(**FIXED, max_tree_depth=depth)
    version = peer("numpyro", "numpyro")
    for chains in (4,) if smoke_test else (4, 1, 8):
        if version is not None:
            steps = numpyro_steps(data, hidden, chains, depth, samples)
            found.append(Contestant(f"{version}, {chains} chains", steps, "NumPyro"))
        beside = found[-1].name if version is not None else None
        run_of_chains = our_run(kernel, *potential_of(small(data, hidden), data, chains), 10**4)
        steps = stepping(run_of_chains, samples * (2**depth - 1))
        found.append(Contestant(f"ours, {chains} chains", steps, "ours", plain=beside))

    def findings(seconds: dict[str, list[float]]) -> dict[str, str]:
        ours = {n: [*v] for n, v in seconds.items() if n.startswith("ours")}
        one, many = ours.get("ours, 1 chains"), ours.get("ours, 8 chains")
        if one is None or many is None:
            return {}
        ratios = np.median(np.divide(many, one))
        return {"8 chains cost": f"{ratios:.3g} times what one costs"}

    title = "NUTS, 1-50-1 tanh regression, 100 points, full trees of depth 6, compile apart"
    return Case("leapfrogs", title, "leapfrog step of all chains", 15, found, findings=findings)


# --------------------------------------------------------------------------- effective samples


def smallest_ess(outputs: np.ndarray) -> float:
    """Return the smallest bulk ESS of predictions `(chains, samples, inputs)`."""
    import arviz

    return float(min(arviz.ess(outputs[..., i], method="bulk") for i in range(outputs.shape[-1])))


class Ours:
    """Runs of NUTS with a warm-up that share their compiled programs."""

    def __init__(self, data: Data, hidden: int, length: tuple[int, int], depth: int) -> None:
        self.bnn, self.data, self.length = small(data, hidden), data, length
        self.potential, starts = potential_of(self.bnn, data, 4)
        self.kernel, self.shape = NUTS(max_tree_depth=depth), starts.shape
        first = our_run(self.kernel, self.potential, starts, *reversed(length))
        next(first.steps())
        self.programs = first.programs

    def __call__(self) -> np.ndarray:
        """Return predictions of a new run."""
        starts, seed = 0.1 * torch.randn(self.shape), int(torch.randint(2**31, ()))
        how = {"seed": seed, "programs": self.programs}
        again = our_run(self.kernel, self.potential, starts, *reversed(self.length), **how)
        for _ in again.steps():
            pass
        with exclusive_unvalidated(), torch.no_grad():
            flat = again.kept.positions.flatten(0, 1)
            one = Potential(self.bnn, *self.data)
            net = torch.func.vmap(lambda w: self.bnn._run_net(one.unflatten(w), PROBES))
            return net(flat).reshape(4, -1, len(PROBES)).numpy()


def numpyro_predictions(data: Data, hidden: int, length: tuple[int, int], depth: int) -> Any:
    """Return what runs four chains and returns predictions, which is compiled here."""
    import jax
    import jax.numpy as jnp

    sampled, net = numpyro_nuts(data, hidden, 4, length, max_tree_depth=depth)
    probes = jnp.asarray(PROBES.numpy())
    predict = jax.jit(jax.vmap(jax.vmap(lambda values: net(values, probes))))

    def outputs() -> np.ndarray:
        kept = jax.tree.map(lambda leaf: leaf[length[0] :].swapaxes(0, 1), sampled()[0])
        return np.asarray(predict(kept))[..., 0]

    outputs()
    return outputs


def ess_case(smoke_test: bool) -> Case:
    """Return seconds for an effective sample, the warm-up's included."""
    hidden, depth, length = (3, 2, (20, 20)) if smoke_test else (50, 8, (300, 500))
    data = curve()
    makers: dict[str, Callable[[], np.ndarray]] = {}
    if (version := peer("numpyro", "numpyro")) is not None:
        makers[version] = numpyro_predictions(data, hidden, length, depth)
    makers["ours"] = Ours(data, hidden, length, depth)
    last: dict[str, np.ndarray] = {}
    sizes: dict[str, list[float]] = {name: [] for name in makers}

    def remembered(name: str) -> None:
        last[name] = makers[name]()

    def seconds_each(contestant: Contestant, clock: Clock) -> float:
        start = clock()
        contestant.run()
        seconds = clock() - start
        sizes[contestant.name].append(smallest_ess(last[contestant.name]))
        return seconds / sizes[contestant.name][-1]

    def findings(seconds: dict[str, list[float]]) -> dict[str, str]:
        # Of all rounds together, because the sizes differ from run to run by luck.
        found = {}
        for name, own in sizes.items():
            rate = sum(own) / np.dot(own, seconds[name])
            text = f"{rate:.3g} effective samples a second"
            found[name] = f"{text} (in a run: {min(own):.0f} to {max(own):.0f})"
        return found

    found = [
        Contestant(name, functools.partial(remembered, name), name.split()[0]) for name in makers
    ]
    quantity = Quantity("seconds", "ms", 1e3, seconds_each)
    title = "NUTS, 4 chains, 1-50-1, 300 + 500 samples, trees up to depth 8, compile apart"
    case = Case("ess", title, "effective sample", 9, found, warm_up=False, quantity=quantity)
    return replace(case, findings=findings)


# --------------------------------------------------------------------------- MCLMC


def airfoil() -> Data:
    """Return 80 % of airfoil, or numbers of its shape where there are no data."""
    folder = os.environ.get("TYXE_DATA", "data")
    path = os.path.join(folder, "regression", "airfoil.npz")
    if os.path.exists(path):
        found = np.load(path)
        x, y = (torch.from_numpy(found[name]).float()[:1202] for name in ("X", "y"))
        return (x - x.mean(0)) / x.std(0), (y - y.mean(0)) / y.std(0)
    x = torch.randn(1202, 5)
    return x, torch.sin(x.sum(-1, keepdim=True)) + NOISE * torch.randn(1202, 1)


def bde_steps(data: Data, sizes: list[int], chains: int, count: int, adapts: bool) -> Any:
    """Return what makes steps of bde's chains, of its warm-up or after it, compiled here."""
    import jax
    import jax.numpy as jnp
    from bde.models import Fnn
    from bde.sampler.mile_wrapper import MileWrapper
    from bde.sampler.prior import PriorDist
    from bde.sampler.probabilistic import ProbabilisticModel
    from bde.sampler.warmup import custom_mclmc_warmup
    from bde.task import TaskType

    members = [Fnn(sizes, seed, act_fn="relu") for seed in range(chains)]
    starts = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[one.params for one in members])
    prior = PriorDist.STANDARDNORMAL.get_prior()
    target = ProbabilisticModel(members[0], members[0].params, prior, TaskType.REGRESSION)
    x, y = (jnp.asarray(part.numpy()) for part in data)
    density = functools.partial(target.log_unnormalized_posterior, x=x, y=y)
    wrapper = MileWrapper(density)
    ones = jnp.ones(chains)
    diagonal = jnp.ones((chains, target.n_params))

    @jax.jit
    def sampling(key: Any, states: Any) -> Any:
        def body(states: Any, key: Any) -> Any:
            keys = jax.random.split(key, chains)
            states, _ = wrapper._step_batched(keys, states, 20.0 * ones, 1e-3 * ones, diagonal)
            return states, states.position

        return jax.lax.scan(body, states, jax.random.split(key, count))

    warm_up = custom_mclmc_warmup(density, 0.5, 0.1, step_size_init=1e-3)

    @jax.jit
    def adapting(key: Any, states: Any) -> Any:
        def one(key: Any, position: Any) -> Any:
            found = warm_up.run(key, position, count)
            return found.state, found.parameters

        return jax.vmap(one)(jax.random.split(key, chains), states.position)

    state = wrapper.init_batched(starts, jax.random.split(jax.random.PRNGKey(0), chains))

    def some() -> int:
        key = jax.random.PRNGKey(int(torch.randint(2**31, ())))
        jax.block_until_ready((adapting if adapts else sampling)(key, state))
        return count

    some()
    return some


def mclmc(smoke_test: bool) -> Case:
    """Return a step of ten chains on airfoil, of two gradients, in and after the warm-up."""
    hidden, chains, count = (3, 2, 3) if smoke_test else (16, 10, 100)
    data, found = airfoil(), []
    sizes = [data[0].shape[1], *[hidden] * 4, 2]
    layers = [(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(sizes)]
    net = nn.Sequential(*[module for layer in layers for module in layer][:-1])
    likelihood = tyxe.likelihoods.HeteroskedasticGaussian(len(data[0]))
    bnn = tyxe.MCMC_BNN(net, tyxe.priors.IIDPrior(dist.Normal(0, 1)), likelihood, MCLMC())
    version = peer("bde", "sklearn-contrib-bde")
    for what, adapts in (("sampling", False), ("warm-up", True)):
        peers = None if version is None else f"{version}, {what}"
        if peers is not None:
            steps = bde_steps(data, sizes, chains, count, adapts)
            first = found[0].name if found else None
            found.append(Contestant(peers, steps, "bde", plain=peers if first else None))
        warm = 10**6 if adapts else 0
        both = potential_of(bnn, data, chains)
        run_of_chains = our_run(MCLMC(), *both, 10**3, warm, thinning=100)
        steps = stepping(run_of_chains, count)
        found.append(Contestant(f"ours, {what}", steps, "ours", plain=peers))
    title = "MCLMC, 10 chains, airfoil, 16-16-16-16 ReLU, mean and scale, compile apart"
    return Case("mclmc", title, "step of all chains", 15, found)


# --------------------------------------------------------------------------- compilation


def compilation(smoke_test: bool) -> Case:
    """Return seconds to compile one step, after a first program, without any cache."""
    import torch._inductor.config as config

    data = curve()
    torch._inductor.compile(torch.fx.symbolic_trace(lambda x: (x + 1,)), [torch.ones(3)])
    hidden = 3 if smoke_test else 50

    def compiled(kernel: Kernel) -> None:
        potential, starts = potential_of(small(data, hidden), data, 4)
        # In this process, whose finished children the clock has.
        with config.patch(force_disable_caches=True, compile_threads=1):
            next(our_run(kernel, potential, starts, 10, compile=True).steps())

    kernels: dict[str, Kernel] = {"HMC": HMC(**FIXED)}
    if not smoke_test:
        kernels |= {"NUTS": NUTS(**FIXED), "MCLMC": MCLMC()}
    found = [
        Contestant(name, functools.partial(compiled, kernel), "ours")
        for name, kernel in kernels.items()
    ]
    quantity = Quantity("seconds", "s", 1.0, timed)
    title = "Compiling one step of 4 chains on 1-50-1, cache off, after a first program"
    return Case("compilation", title, "program", 3, found, warm_up=False, quantity=quantity)


if __name__ == "__main__":
    run(
        "Seconds of steps of all chains, compiled, beside NumPyro's and bde's.",
        {"leapfrogs": leapfrogs, "mclmc": mclmc, "ess": ess_case, "compilation": compilation},
    )
