"""Moments in function space of a net of two hidden units, by NumPyro's NUTS.

Writes `two_units.npz`: at `PROBES` the means of the functions and of their squares, and the
standard errors of both. NumPyro is no dependency:
`pip install -r benchmarks/requirements-peers.txt`, then `python -m tests.oracles.two_units`.
"""

from pathlib import Path

import numpy as np

from tests.oracles.chains import NOISE, data

PROBES = [-1.0, 0.3, 2.0]
PATH = Path(__file__).with_suffix(".npz")


def main() -> None:
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    numpyro.enable_x64()
    x, y = (jnp.asarray(part.numpy()) for part in data())

    def function(values, x):
        hidden = jnp.tanh(x * values["w"] + values["b"])
        return hidden @ values["v"] + values["c"]

    def model():
        shapes = {"w": (2,), "b": (2,), "v": (2,), "c": ()}
        values = {
            name: numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event())
            for name, shape in shapes.items()
        }
        numpyro.sample("y", dist.Normal(function(values, x), NOISE).to_event(), obs=y[:, 0])

    mcmc = MCMC(
        NUTS(model),
        num_warmup=2_000,
        num_samples=25_000,
        num_chains=8,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.PRNGKey(0))
    probes = jnp.asarray(PROBES)[:, None]
    functions = np.asarray(jax.vmap(lambda values: function(values, probes))(mcmc.get_samples()))
    found = {}
    for name, value in (("mean", functions), ("square", functions**2)):
        parts = value.reshape(80, -1, len(PROBES)).mean(1)
        found[name] = parts.mean(0)
        found[f"{name}_error"] = parts.std(0, ddof=1) / len(parts) ** 0.5
    np.savez(PATH, **found)
    print(found)


if __name__ == "__main__":
    main()
