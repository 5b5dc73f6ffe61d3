"""A posterior that is known by its samples: draws of them, their state, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from tyxe import check
from tyxe.bnn.base import DEFAULT_DRAWS
from tyxe.bnn.chains import MCMCRun, SampleFile, Samples
from tyxe.bnn.outputs import Values
from tyxe.bnn.predict import SupervisedBNN
from tyxe.predictive.gaussian import Outputs
from tyxe.priors.sites import SitePriors
from tyxe.threads import exclusive
from tyxe.util import Inputs, at_least_float32, outside_inference


class SamplePosterior(SupervisedBNN):
    """The posterior of an `MCMC_BNN`, whose chains make the samples."""

    samples: Samples
    _chains: MCMCRun | None

    def _take(self, samples: dict[str, Tensor], file: SampleFile | None = None) -> None:
        with exclusive():
            self.samples.replace(samples, file)

    def get_samples(self) -> dict[str, Tensor]:
        """Return the samples of all chains together, `(chains * samples, ...)`, by joint name.

        Raises:
            RuntimeError: there are no samples yet; all methods that need them raise this as well.
        """
        hint = (
            "there are no samples yet; call fit(data_loader, num_samples), or load a state dict "
            "that has some"
        )
        samples = check.known(self.samples if len(self.samples) else None, hint)
        return {name: value.flatten(0, 1) for name, value in samples.items()}

    def _draws(self, num_predictions: int) -> Iterator[Values]:
        """Return samples that are spread evenly over all chains."""
        samples = self.get_samples()
        total = len(next(iter(samples.values())))
        middles = (2 * index + 1 for index in range(num_predictions))
        positions = (middle * total // (2 * num_predictions) % total for middle in middles)
        return (self._for_net({n: value[p] for n, value in samples.items()}) for p in positions)

    def _draws_of_weights(self) -> int:
        return min(DEFAULT_DRAWS, len(next(iter(self.get_samples().values()))))

    def _one_draw(self) -> Values:
        samples = self.get_samples()
        position = int(torch.randint(len(next(iter(samples.values()))), (), device="cpu"))
        return self._for_net({name: value[position] for name, value in samples.items()})

    def _mean_values(self) -> Values:
        """Return the mean of the samples."""
        samples = self.get_samples().items()
        return self._for_net({name: at_least_float32(value).mean(0) for name, value in samples})

    def _gaussian_predictives(self) -> Mapping[str, Outputs]:
        """Return none, because samples are not Gaussian."""
        return {}

    def _follow_prior(self, priors: SitePriors) -> None:
        """Keep the samples, and forget the run, whose target has changed."""
        self._chains = None

    @outside_inference()
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict and its samples, or raise an error and change nothing.

        Args:
            state_dict: that of such a BNN.
            strict: refuse a state without samples if this BNN has some, which would be lost.
            assign: as in `torch.nn.Module`.

        Raises:
            RuntimeError: the state dict, or its samples, do not fit this BNN; NaN in it.
        """
        with exclusive():
            with ExitStack() as undone:
                undone.callback(setattr, self, "_chains", self._chains)
                undone.callback(self.samples.replace, dict(self.samples.items()), self.samples.file)
                found = super().load_state_dict(state_dict, strict, assign)
                undone.pop_all()
            if not any(name.startswith("samples.") for name in state_dict):
                self.samples.replace({})
            return found

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        start = f"{prefix}samples."
        given = {n.removeprefix(start): v for n, v in state_dict.items() if n.startswith(start)}
        if given:
            unexpected += [start + name for name in self._check_samples(given)]
        rest = metadata, strict, missing, unexpected, errors
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _check_samples(self, given: Mapping[str, Any]) -> set[str]:
        """Raise a RuntimeError for samples of another BNN; return names that are not known."""
        expected = {name: tuple(shape) for name, shape in self._site_shapes().items()} | {
            f"{self.likelihood.prefix}.{name}": (*prior.batch_shape, *prior.event_shape)
            for name, prior in self.likelihood.latent_priors().items()
        }
        shapes = {n: tuple(getattr(value, "shape", (0, 0))) for n, value in given.items()}
        wrong = [n for n, shape in expected.items() if shapes.get(n, (0, 0, 0))[2:] != shape]
        counts = {shape[:2] for shape in shapes.values()}
        if wrong or len(counts) > 1 or any(len(one) < 2 or 0 in one for one in counts):
            raise RuntimeError(
                f"its samples are those of another BNN: {', '.join(sorted(wrong))} in "
                f"{sorted(counts)} chains and samples"
            )
        if not all(isinstance(prior, Distribution) for _, prior in self.net_prior.priors()):
            return set()  # hierarchical priors have variables of their own
        return given.keys() - expected.keys() - set(self.samples)

    def to_arviz(self, inputs: Inputs | None = None) -> Any:
        """Return samples as ArviZ's `InferenceData`, for `az.summary` (R-hat, ESS) and plots.

        Args:
            inputs: return the net's outputs for these instead of the samples. Nets have many
                equivalent sets of weights, so only predictions show that chains agree.

        Raises:
            ImportError: ArviZ is not installed.
        """
        arviz = check.installed("arviz", "mcmc")
        self.get_samples()
        if inputs is None:
            posterior = {name: value.cpu().numpy() for name, value in self.samples.items()}
        else:
            chains, count = next(iter(self.samples.items()))[1].shape[:2]
            outputs = self.predict(inputs, num_predictions=chains * count, aggregate=False)
            posterior = {"predictions": outputs.unflatten(0, (chains, count)).cpu().numpy()}
        return arviz.from_dict(posterior=posterior)

    def summary(self, inputs: Inputs | None = None) -> Any:
        """Return a table of means, rank-normalised R-hat, and bulk and tail ESS (of ArviZ).

        Its rows are predictions for the inputs, or without inputs the weights.

        Raises:
            ImportError: ArviZ is not installed.

        Reference:
            Vehtari et al. 2021.
        """
        found = self.to_arviz(inputs)
        import arviz

        return arviz.summary(found)

    def __getstate__(self) -> dict[str, Any]:
        # Without the run, whose programs and generator belong to this object.
        return {**self.__dict__, "_chains": None}
