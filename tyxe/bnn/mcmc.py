"""Markov chain Monte Carlo over the weights of a net."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from pyro.infer.mcmc import HMC
from pyro.infer.mcmc.api import MCMC, _UnarySampler
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor, nn

from tyxe.bnn.base import fitting, prior_fixed
from tyxe.bnn.batches import collect
from tyxe.bnn.checks import check_one_batch
from tyxe.bnn.potential import functional_kernel
from tyxe.bnn.predict import SupervisedBNN, Values
from tyxe.distributions.moments import is_discrete
from tyxe.errors import check_count, warn
from tyxe.likelihoods import Likelihood
from tyxe.predictive.gaussian import Outputs
from tyxe.priors import Prior
from tyxe.priors.sites import SitePriors
from tyxe.threads import INTERRUPTS
from tyxe.util import SiteTensors, unwrapped

__all__ = ["MCMC_BNN"]


class Samples(SiteTensors):
    """Posterior samples by site, `(chains, samples, ...)`: buffers that load any number of them."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        found = {
            name.removeprefix(prefix): value
            for name, value in state_dict.items()
            if name.startswith(prefix)
        }
        self.replace(found)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def replace(self, samples: dict[str, Tensor]) -> None:
        """Replace all tensors by copies of these."""
        self._modules.clear()
        self._buffers.clear()
        self._places = {}
        for name, tensor in samples.items():
            self._put(name, tensor.detach().clone(), trainable=None)


def _interruptible(hook: Callable[..., Any] | None) -> Callable[..., None]:
    """Return a hook that lets interrupts in, between the steps of a chain in this process."""

    def wrapped(*args: Any) -> None:
        with INTERRUPTS.let_in():
            if hook is not None:
                hook(*args)

    return wrapped


class _Keeping:
    """A sampler of Pyro's `MCMC` that remembers what it has yielded."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.is_here = isinstance(sampler, _UnarySampler)
        if self.is_here:
            sampler.hook = _interruptible(sampler.hook)
        self._shapes: dict[str, torch.Size] = {}
        self._chains: dict[int, list[Tensor]] = {}

    def run(self, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int]]:
        """Yield shapes, samples as vectors, and diagnostics, each with the chain's number."""
        for item, chain in self._sampler.run(*args, **kwargs):
            if isinstance(item, Tensor):
                self._chains.setdefault(chain, []).append(item.clone())
            elif not self._shapes:
                self._shapes = dict(item)
            yield item, chain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def samples(self) -> dict[str, Tensor]:
        """Return unconstrained samples by site, `(chains, samples, ...)`, of as many as can be.

        Chains are of one length, so that the shorter ones, or the ends of the longer, are left out.
        """
        chains = sorted(self._chains.values(), key=len, reverse=True)
        if not chains:
            return {}
        most = max(range(1, len(chains) + 1), key=lambda n: n * len(chains[n - 1]))
        length = len(chains[most - 1])
        flat = torch.stack([torch.stack(chain[:length]) for chain in chains[:most]])
        names = sorted(self._shapes)
        parts = flat.split([self._shapes[name].numel() for name in names], -1)
        shapes = [(most, length, *self._shapes[name]) for name in names]
        return {n: part.reshape(s) for n, part, s in zip(names, parts, shapes, strict=True)}


class MCMC_BNN(SupervisedBNN):
    """Any net with posterior samples from HMC or NUTS over its weights.

    The net runs in eval mode. The likelihood's own variables are sampled too; trainable parameters
    that the prior hides are not fitted, which gives a warning. Arguments that are not listed are
    those of `BNN` and `SupervisedBNN`.

    Args:
        kernel_builder: makes a Pyro kernel from a model: `pyro.infer.mcmc.NUTS`, or a
            `functools.partial` of a kernel.

    Raises:
        TypeError: `kernel_builder` is no kernel, or one that is built already.
        ValueError: there is nothing to sample, or it is discrete or in half precision; the
            likelihood has parameters to train.

    Example:
        >>> import functools, torch, pyro.distributions as dist, tyxe
        >>> from pyro.infer.mcmc import HMC
        >>> bnn = MCMC_BNN(
        ...     nn.Linear(1, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(4, scale=0.5),
        ...     functools.partial(HMC, step_size=0.1, num_steps=5))
        >>> mcmc = bnn.fit(
        ...     [(torch.ones(4, 1), torch.ones(4, 1))], num_samples=20, warmup_steps=5,
        ...     disable_progbar=True)
        >>> mcmc.get_samples()["net.weight"].shape
        torch.Size([20, 1, 1])
    """

    def __init__(
        self,
        net: nn.Module,
        prior: Prior,
        likelihood: Likelihood,
        kernel_builder: Callable[..., Any],
        name: str = "",
    ) -> None:
        super().__init__(net, prior, likelihood, name)
        if not callable(kernel_builder):
            raise TypeError(
                f"kernel_builder is a {type(kernel_builder).__name__}; expected a kernel class "
                "such as pyro.infer.mcmc.NUTS, or a functools.partial of one"
            )
        if not len(self.net_prior) and not likelihood.latent_priors():
            raise ValueError("the prior exposes no parameters, so there is nothing to sample")
        kind, _ = unwrapped(kernel_builder)
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            raise TypeError(f"{kind.__name__} is a guide; use it with tyxe.VariationalBNN")
        trained = [name for name, p in self.likelihood.named_parameters() if p.requires_grad]
        if trained:
            raise ValueError(
                f"MCMC trains no parameters, and the likelihood has {', '.join(trained)}: pass its "
                "scale as a number, or as a distribution, which is sampled"
            )
        if isinstance(kind, MCMCKernel):
            raise TypeError(
                f"kernel_builder is a {type(kind).__name__} already built; pass its class, or a "
                "functools.partial of it: the BNN builds it on its own model"
            )
        if isinstance(kind, type) and issubclass(kind, HMC):
            _check_for_hmc(kind.__name__, self.net_prior, self.in_places())
        self.kernel_builder: Callable[..., Any] = kernel_builder
        self.samples = Samples({}, trainable=None)

    def fit(
        self,
        data_loader: Iterable[Any],
        num_samples: int,
        device: Any = None,
        batch_data: bool = False,
        *,
        compile: bool = False,
        **mcmc_kwargs: Any,
    ) -> MCMC:
        """Run the chains on the whole data set.

        Args:
            data_loader: yields `(inputs, targets)`; all batches are concatenated.
            num_samples: number of samples of each chain.
            device: device that the data are moved to.
            batch_data: whether `data_loader` is one batch itself, the pair `(inputs, targets)`.
            compile: compile the potential and its gradient by TorchInductor, which needs a C++
                compiler. It takes seconds once, and shortens steps on small nets. Several chains
                run in processes that are spawned, so that the script needs `if __name__ == ...`.
            mcmc_kwargs: arguments of `pyro.infer.MCMC`, such as `warmup_steps` and `num_chains`.

        An interrupt from the keyboard is raised, and the BNN keeps the samples made until then.

        Returns:
            Pyro's `MCMC`; `get_samples()` has keys `net.<parameter>`.

        Raises:
            TypeError: `num_samples` is no integer.
            ValueError: the data do not fit the likelihood; a kernel, prior or `mp_context` that
                `compile` does not take.
        """
        hint = ": fit(data_loader, num_samples, warmup_steps=...)"
        num_samples = check_count("num_samples", num_samples, hint=hint)
        if mcmc_kwargs.get("warmup_steps") is not None:
            check_count("warmup_steps", mcmc_kwargs["warmup_steps"], 0)
        inputs, targets = collect([data_loader] if batch_data else data_loader, device)
        with fitting(self, train=False), prior_fixed(self):
            check_one_batch(self, self.net_prior, inputs, targets)
            self._warn_of_setting(len(targets))
            mcmc = self._chains((inputs, targets), num_samples, compile, mcmc_kwargs)
            mcmc.sampler = kept = _Keeping(mcmc.sampler)
            try:
                # Chains in processes of their own are waited for, in no code of PyTorch's.
                with nullcontext() if kept.is_here else INTERRUPTS.let_in():
                    mcmc.run(inputs, targets)
            except KeyboardInterrupt:
                self._keep(kept, mcmc, (inputs, targets))
                raise
        self.samples.replace(mcmc.get_samples(group_by_chain=True))
        return mcmc

    def _keep(self, kept: _Keeping, mcmc: MCMC, data: tuple[Any, Tensor]) -> None:
        """Take the samples that an interrupted run has made, if there are any."""
        samples = kept.samples()
        if not samples:
            return
        if mcmc.transforms is None:
            mcmc._set_transforms(*data)
        inverse = {name: transform.inv for name, transform in mcmc.transforms.items()}
        self.samples.replace({n: inverse[n](z) if n in inverse else z for n, z in samples.items()})
        chains, count = next(iter(samples.values())).shape[:2]
        warn(f"interrupted: the BNN keeps {count} samples of each of {chains} chains")

    def _warn_of_setting(self, points: int) -> None:
        if am_i_wrapped():
            warn(
                "Pyro's MCMC shields its model from handlers: those around fit have no effect",
            )
        size = self.likelihood.dataset_size
        if points != size:
            warn(
                f"the likelihood was built with dataset_size={size}, but there are {points} "
                f"points: each counts {size / points:.3g} times",
            )
        hidden = [name for name, p in self.net.named_parameters() if p.requires_grad]
        if hidden:
            warn(
                f"MCMC does not fit {', '.join(hidden)}, which the prior hides; they stay as "
                "they came with the net",
            )

    def _chains(
        self,
        data: tuple[Any, Tensor],
        num_samples: int,
        compiled: bool,
        options: dict[str, Any],
    ) -> MCMC:
        functional = None
        if compiled and options.get("num_chains", 1) > 1:
            context = options.get("mp_context") or "spawn"
            options = options | {"mp_context": context}
            if context == "fork":
                raise ValueError(
                    'compile=True does not go with mp_context="fork", since a forked process has '
                    "not the compiler's threads and may wait for them for ever; leave it out"
                )
        if "initial_params" not in options:
            chains = options.get("num_chains", 1)
            functional = functional_kernel(self.kernel_builder, self, data, chains, compiled)
        if functional is None:
            if compiled:
                raise ValueError(
                    "compile=True needs priors that are distributions, and a kernel HMC or NUTS "
                    "(or a functools.partial of one) that starts by itself and asks for nothing "
                    "of the model; leave compile or initial_params, jit_compile ... out"
                )
            kernel = self.kernel_builder(self.model)
            if not isinstance(kernel, MCMCKernel):
                raise TypeError(
                    f"kernel_builder made a {type(kernel).__name__}; expected a kernel of Pyro's "
                    "MCMC, such as pyro.infer.mcmc.NUTS(model)"
                )
            return MCMC(kernel, num_samples, **options)
        kernel, initial = functional
        return MCMC(kernel, num_samples, initial_params=initial, **options)

    def get_samples(self) -> dict[str, Tensor]:
        """Return the samples of all chains together, `(chains * samples, ...)`, by joint name.

        Raises:
            RuntimeError: there are no samples yet; all methods that need them raise this as well.
        """
        if not len(self.samples):
            raise RuntimeError(
                "there are no samples yet; call fit(data_loader, num_samples), or load a state "
                "dict that has some"
            )
        return {name: value.flatten(0, 1) for name, value in self.samples.items()}

    def draws(self, num_predictions: int) -> Iterator[Values]:
        """Yield samples that are spread evenly over all chains."""
        samples = self.get_samples()
        total = len(next(iter(samples.values())))
        for index in range(num_predictions):
            position = (2 * index + 1) * total // (2 * num_predictions) % total
            yield {name: value[position] for name, value in samples.items()}

    def one_draw(self) -> Values:
        samples = self.get_samples()
        position = int(torch.randint(len(next(iter(samples.values()))), ()))
        return {name: value[position] for name, value in samples.items()}

    def mean_values(self) -> Values:
        """Return the mean of the samples."""
        return {name: value.mean(0) for name, value in self.get_samples().items()}

    def gaussian_predictives(self) -> Mapping[str, Outputs]:
        """Return none, because samples are not Gaussian."""
        return {}

    def _follow_prior(self, priors: SitePriors) -> None:
        """Do nothing, because the samples are kept."""

    def to_arviz(self) -> Any:
        """Return the samples as ArviZ's `InferenceData`, for `az.summary` (r-hat, ESS) and plots.

        Raises:
            ImportError: ArviZ is not installed.
        """
        try:
            import arviz
        except ImportError:
            raise ImportError('to_arviz needs ArviZ: pip install -e ".[mcmc]"') from None
        self.get_samples()
        posterior = {name: value.cpu().numpy() for name, value in self.samples.items()}
        return arviz.from_dict(posterior=posterior)


def _check_for_hmc(kernel: str, priors: SitePriors, values: Mapping[str, Tensor]) -> None:
    for name, prior in priors.priors():
        if is_discrete(getattr(prior, "support", None)):
            raise ValueError(
                f"{kernel} samples no discrete weights, which {name!r} has; use "
                "tyxe.VariationalBNN with tyxe.guides.AutoBernoulli, or a continuous prior"
            )
        dtype = values[priors.prefix + name].dtype
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{kernel} needs float32 or float64, and {name!r} is in {dtype}; use net.float()"
            )
