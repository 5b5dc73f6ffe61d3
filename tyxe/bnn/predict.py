"""Prediction and evaluation, for all wrappers with a likelihood."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from tyxe.bnn.batches import SameDraws, check_has_targets, is_loader, on_each
from tyxe.bnn.intervals import Intervals
from tyxe.bnn.norms import AveragedNorms
from tyxe.bnn.programs import CompiledPasses
from tyxe.bnn.rerun import remember
from tyxe.bnn.scoring import check_evaluation, reduced, rows_of, weights_of
from tyxe.curvature import Linearization
from tyxe.data import Output, Unpack, Unpacked, pick, unpacked, weighted
from tyxe.errors import check_count, described, warn
from tyxe.likelihoods import Likelihood
from tyxe.poutine.draw import draws_are_lazy
from tyxe.predictive.ensemble import Ensemble
from tyxe.predictive.front import Front
from tyxe.predictive.gaussian import LinkOptions, Outputs, check_link, predict_from_gaussian
from tyxe.predictive.links import sample_outputs
from tyxe.predictive.norms import Statistics, statistics_in
from tyxe.predictive.scores import Scores, gaussian_scores, mixture_scores
from tyxe.priors import Prior
from tyxe.processes import all_or_none
from tyxe.threads import exclusive
from tyxe.util import Inputs, at_least_float32, call_with

Values = dict[str, Tensor]

# Draws at a time under torch.vmap, which is slower than a loop on CPUs except for small nets.
VMAP_CHUNK = 8
# Smallest number of samples of Gaussian outputs, which are cheap.
FEWEST_SAMPLES = 100


class SupervisedBNN(Intervals, AveragedNorms):
    """Base of BNNs with a likelihood, which predict and evaluate.

    A subclass implements `draws`, `one_draw`, `mean_values` and `gaussian_predictives`.

    Args:
        likelihood: a likelihood of `tyxe.likelihoods`, which is copied.

    Raises:
        TypeError: not a likelihood.
    """

    # Whether a draw is one of the weights, and not of the masks of a forward.
    draws_are_weights = True

    def __init__(
        self,
        net: nn.Module,
        prior: Prior,
        likelihood: Likelihood,
        name: str = "",
        *,
        output: Output | None = None,
    ) -> None:
        if not isinstance(likelihood, Likelihood):
            raise TypeError(
                f"likelihood is {described(likelihood)}; expected one from "
                "tyxe.likelihoods, such as tyxe.likelihoods.Categorical(dataset_size)"
            )
        super().__init__(net, prior, name, output=output)
        self.likelihood = copy.deepcopy(likelihood).to(next(net.parameters()).device)
        if self.likelihood.prepares_outputs:
            pick(self.net, self.likelihood.from_net, keep=True)

    def to_fit(self, loader: Iterable[Any], unpack: Unpack | None = None) -> Iterable[Any]:
        """Return a loader of batches as fits take them."""
        loader = unpacked(loader, unpack)
        return Unpacked(loader, self._prepared) if self.likelihood.prepares_targets else loader

    def to_evaluate(self, loader: Any, unpack: Unpack | None = None) -> Any:
        """Return a loader, or a list, of batches as evaluations take them."""
        loader = unpacked(loader, unpack)
        prepares = self.likelihood.prepares_targets and is_loader(loader)
        return unpacked(loader, self._read) if prepares else loader

    def _read(self, batch: Any) -> Any:
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
            return batch  # what takes it says what is wrong
        inputs, targets, *weights = batch
        targets = self.likelihood.from_loader(targets)
        return inputs, weighted(targets, *weights) if weights else targets

    def _prepared(self, batch: Any) -> Any:
        read = self._read(batch)
        return read if read is batch else (read[0], self.likelihood.to_fit(read[1]))

    def before_step(self) -> None:
        """Forget what was made of the parameters, which a step in another loop is to move."""

    @abstractmethod
    def draws(self, num_predictions: int) -> Iterator[Values]:
        """Yield draws from the posterior: a value for each site, by joint name.

        The tensors of one draw may be overwritten by the next.
        """

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the net's output for one draw from the posterior, in its present mode."""
        # The draw as well, because other threads set the generators back for a while.
        with exclusive(), self.substituted(self.one_draw()):
            return remember(self, self.net(*inputs, **kwargs))

    def to_module(self, sample: bool = False) -> nn.Module:
        """Return a plain net of the given class at the posterior's centre.

        Args:
            sample: return the net at one draw instead.
        """
        with exclusive(), torch.no_grad():
            values = self.one_draw() if sample else self.mean_values()
            with statistics_in(self._norm_statistics(values) if sample else {}):
                net = self.net_at(values)
            pick(net, None)
            return net

    def to_ensemble(self, num_draws: int) -> Ensemble:
        """Return draws from the posterior as a plain module without Pyro, for export and servers.

        It returns what `predict` aggregates for these draws (those of `predictive="bnn"`), and is
        deterministic. Threads may call it in parallel.

        Args:
            num_draws: number of draws, each with a copy of the weights that have a posterior.

        Raises:
            ValueError: fewer than one draw.

        Example:
            >>> import pyro.distributions as dist, tyxe
            >>> bnn = tyxe.VariationalBNN(
            ...     nn.Linear(2, 3), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.likelihoods.Categorical(10), tyxe.guides.AutoNormal)
            >>> program = torch.export.export(bnn.to_ensemble(4), (torch.zeros(5, 2),))
            >>> program.module()(torch.ones(5, 2)).softmax(-1).shape
            torch.Size([5, 3])
        """
        num_draws = check_count("num_draws", num_draws)
        kept: list[Values] = []

        def draws() -> Generator[Values, None, None]:
            for values in self.draws(num_draws):
                kept.append({name: v.clone() for name, v in self._only_latents(values).items()})
                with statistics_in(self._norm_statistics(values)):
                    yield values

        with self.predicting(), closing(draws()) as made:
            nets = self.nets_at(made)
            return Ensemble(nets, copy.deepcopy(self.likelihood), self._latents(kept))

    def model(self, inputs: Inputs, obs: Tensor | None = None) -> Any:
        """The joint model (a Pyro program): weights from the prior, the net, the likelihood.

        Args:
            inputs: a batch: a tensor, a tuple of arguments, or a mapping of keyword arguments.
            obs: targets; None to sample them.

        Returns:
            The net's output.
        """
        # Also around the likelihood, as handlers of the observed site may run the net again.
        with self.substituted(self.net_prior()):
            predictions = remember(self, call_with(self.net, inputs))
            self.likelihood(predictions, obs)
        return predictions

    def own_posterior(self) -> dict[str, Distribution] | None:
        """Return what `guide` samples, by joint name, unless it or `model` has been replaced.

        None is also for guides without a distribution for each site.
        """
        return None

    # ------------------------------------------------------------------ draws

    @abstractmethod
    def one_draw(self) -> Values:
        """Return a single draw from the posterior."""

    def for_net(self, values: Values) -> Values:
        """Return values where the net is and in its dtype, which need not be the posterior's."""
        places = self.in_places()
        like = next(iter(places.values()), None)
        return {
            name: value if like is None else value.to(places.get(name, like))
            for name, value in values.items()
        }

    def _latents(self, draws: list[Values]) -> dict[str, Tensor]:
        """Return the likelihood's own variables, stacked over draws, by their own names."""
        names = {
            name: f"{self.likelihood.prefix}.{name}" for name in self.likelihood.latent_priors()
        }
        return {
            name: torch.stack([values[joint] for values in draws]) for name, joint in names.items()
        }

    def _only_latents(self, values: Values) -> Values:
        return {name: v for name, v in values.items() if name not in self._slots}

    def stacked_outputs(
        self,
        inputs: Inputs,
        num_predictions: int,
        vectorize: bool | None = None,
        known: list[Statistics] | None = None,
        run: CompiledPasses | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return outputs of all draws, `(S, n, ...)`, and the likelihood's variables.

        The statistics of norms at each draw are in `known`, or are put there. `run` passes draws
        through the net in the place of `run_net`.
        """
        known = [] if known is None else known
        draws = self.draws(num_predictions) if num_predictions else iter([self.mean_values()])
        front = Front(self.net, self._slots, inputs if num_predictions > 1 else ())
        if vectorize and self._slots:
            return self._vmapped_outputs(draws, inputs, front)
        outputs, kept = [], []
        for index, values in enumerate(draws):
            if index == len(known):
                known.append(self._norm_statistics(values) if num_predictions else {})
            with statistics_in(known[index]):
                plain = partial(front, partial(self.run_net, values, inputs))
                outputs.append(plain() if run is None else run(values, inputs, plain))
            kept.append(self._only_latents(values))
        return torch.stack(outputs), self._latents(kept)

    def _vmapped_outputs(
        self, draws: Iterator[Values], inputs: Inputs, front: Front
    ) -> tuple[Tensor, dict[str, Tensor]]:
        outputs, kept = [], []
        while chunk := [values for _, values in zip(range(VMAP_CHUNK), draws, strict=False)]:
            if draws_are_lazy() or self.averages_norms:
                raise ValueError(
                    "vectorize=True needs drawn weights and the same statistics of norms, but a "
                    "handler such as local_reparameterization samples inside the net, or "
                    "update_norm_statistics has been called: leave vectorize out"
                )
            stacked = {name: torch.stack([v[name] for v in chunk]) for name in self._slots}
            outputs.append(front(partial(self._under_vmap, stacked, inputs)))
            kept += [self._only_latents(values) for values in chunk]
        return torch.cat(outputs), self._latents(kept)

    def _under_vmap(self, stacked: Values, inputs: Inputs) -> Tensor:
        try:
            return torch.vmap(lambda values: self.run_net(values, inputs))(stacked)
        except RuntimeError as error:
            # For a net that fails without vmap as well, its own error says more.
            self.run_net({name: values[0] for name, values in stacked.items()}, inputs)
            raise ValueError(
                "vectorize=True needs a net that runs under torch.vmap, but "
                f"{type(self.net).__name__} does not: {error}; leave vectorize out"
            ) from error

    # ------------------------------------------------------------------ predict

    def predict(
        self,
        *inputs: Any,
        num_predictions: int = 1,
        aggregate: bool = True,
        vectorize: bool | None = None,
        batch_size: int | None = None,
        predictive: str | Outputs | None = None,
        link: str = "mc",
        unpack: Unpack | None = None,
        compile: bool = False,
    ) -> Any:
        """Predict with several draws of the weights, in eval mode and without gradients.

        All rows have the same draws of weights, and a seed gives the same draws for any
        `batch_size` and `vectorize`, unless a handler samples inside the net.

        Args:
            inputs: the net's arguments, or one loader of batches.
            num_predictions: number of draws; 0 predicts once, at the posterior's centre.
            aggregate: combine the draws by the likelihood; `False` returns all of them.
            vectorize: run draws in chunks under `torch.vmap` where the net allows it; the default
                is a loop, which is faster on CPUs except for small nets.
            batch_size: number of rows that go through the net at a time. Samples of Gaussian
                outputs are drawn for each row, and so depend on it.
            predictive: `"bnn"`, by draws of weights; or `"glm"`, by the net linearised about the
                centre of a Gaussian posterior [GLM 3], where outputs are Gaussian and
                `num_predictions` counts samples of them, at least 100 if aggregated. The default
                is `"bnn"`, or `"glm"` for a `LaplaceBNN`, which has `"gp"` as well, after `fit_gp`.
                A function from inputs to mean and covariance of outputs is another choice.
            link: from Gaussian logits to probabilities: `"mc"`, `"probit"` or `"bridge"`.
            unpack: from what a loader yields to inputs, or `inputs, targets`.
            compile: make a pass of the net one compiled program, for every shape of a batch and
                for this call, so that it is for long loaders (the compiler takes seconds to a
                minute); what cannot be one runs as it is, with a warning. A program runs the whole
                net for each draw, also what no site reaches. Has no effect for Gaussian outputs.

        Returns:
            Aggregated predictions in the likelihood's own parametrisation (class logits whose
            softmax is the mean of the probabilities; `(mean, scale)` for a homoskedastic
            Gaussian), or the net's outputs, `(num_predictions, n, ...)`.

        Raises:
            TypeError: `"glm"` for a posterior that is not Gaussian.
            ValueError: a negative number of draws; `vectorize=True` inside of a handler that
                samples inside the net; an unknown predictive or link.

        Example:
            >>> import pyro.distributions as dist, tyxe
            >>> bnn = tyxe.VariationalBNN(
            ...     nn.Linear(2, 3), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.likelihoods.Categorical(10), tyxe.guides.AutoNormal)
            >>> bnn.predict(torch.zeros(5, 2), num_predictions=8).softmax(-1).shape
            torch.Size([5, 3])
        """
        num_predictions = check_count("num_predictions", num_predictions, 0)
        gaussian = self._gaussian(predictive, num_predictions, link)
        options = self._link_options(gaussian, link, num_predictions)
        run = self._passes(compile, vectorize, gaussian)

        def one(inputs: Inputs, _: Any, again: SameDraws) -> Any:
            if gaussian is not None:
                moments = gaussian(inputs)
                if not aggregate:
                    return self.likelihood.outputs_of(_output_samples(moments, num_predictions))
                return predict_from_gaussian(self.likelihood, *moments, **options._asdict())
            with again as known:
                outputs, latents = self.stacked_outputs(
                    inputs, num_predictions, vectorize, known, run
                )
            if not aggregate:
                return self.likelihood.outputs_of(outputs)
            return self.likelihood.aggregate_predictions(at_least_float32(outputs), 0, latents)

        inputs = inputs if unpack is None else (unpacked(inputs[0], unpack),)
        return on_each(self, inputs, batch_size, one, 0 if aggregate else 1)

    def sample_predictive(
        self,
        *inputs: Any,
        num_samples: int = 100,
        vectorize: bool | None = None,
        batch_size: int | None = None,
        predictive: str | Outputs | None = None,
    ) -> Tensor:
        """Draw targets from the posterior predictive distribution, `(num_samples, n, ...)`.

        Each sample has a draw of the weights, of the likelihood's own variables such as the noise's
        scale, and of the targets given both. Arguments and errors that are not listed are those of
        `predict`.

        Args:
            num_samples: number of samples.

        Raises:
            ValueError: fewer than one sample.

        Example:
            >>> import pyro.distributions as dist, tyxe
            >>> bnn = tyxe.VariationalBNN(
            ...     nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1), tyxe.guides.AutoNormal)
            >>> bnn.sample_predictive(torch.zeros(5, 2), num_samples=8).shape
            torch.Size([8, 5, 1])
        """
        num_samples = check_count("num_samples", num_samples)
        gaussian = self._gaussian(predictive, num_samples, "mc")
        options = self._link_options(gaussian, "mc", num_samples)

        def one(inputs: Inputs, _: Any, again: SameDraws) -> Any:
            if gaussian is not None:
                outputs = sample_outputs(*gaussian(inputs), num_samples)
                latents = options.latents_of(num_samples)
            else:
                with again as known:
                    outputs, latents = self.stacked_outputs(inputs, num_samples, vectorize, known)
            drawn = [
                self.likelihood.sample(each, latents={n: v[s] for n, v in latents.items()})
                for s, each in enumerate(at_least_float32(outputs))
            ]
            return self.likelihood.targets_of(torch.stack(drawn))

        return on_each(self, inputs, batch_size, one, 1)

    def evaluate(
        self,
        input_data: Inputs,
        y: Tensor | None = None,
        num_predictions: int = 1,
        aggregate: bool = True,
        reduction: str = "sum",
        *,
        vectorize: bool | None = None,
        batch_size: int | None = None,
        predictive: str | Outputs | None = None,
        link: str = "mc",
        unpack: Unpack | None = None,
        process_group: Any = None,
        compile: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return error and log-likelihood on data with targets.

        The log-likelihood is that of the mixture over draws, `log 1/S sum_s p(y|f_s)`, in nats; for
        Gaussian outputs over samples of them, in closed form under Gaussian noise, and for the
        links `"probit"` and `"bridge"` that of the aggregated prediction. Arguments and errors that
        are not listed are those of `predict`.

        Args:
            input_data: a batch of inputs, or a loader or list of `(inputs, targets)`, or of
                `(inputs, targets, weights)`, by which sum and mean count points.
            y: targets of a batch; None with a loader.
            aggregate: combine the draws; `False` returns a row for each, and has no effect for
                Gaussian outputs.
            reduction: reduction over points: `"sum"`, `"mean"` or `"none"`.
            unpack: from what a loader yields to one of these.
            process_group: processes of `torch.distributed`, each with a part of the data, over all
                of which sum or mean are.

        Returns:
            `(error, log_likelihood)`; the error counts misclassifications or sums squares.

        Raises:
            RuntimeError: another process has failed.
            ValueError: targets are missing, or have another shape than the predictions; an unknown
                reduction, or `"none"` of several processes.
        """
        num_predictions = check_count("num_predictions", num_predictions, 0)
        y = None if y is None else self.likelihood.from_loader(y)
        check_evaluation(input_data, y, reduction, process_group)
        score = self.scorer(num_predictions, aggregate, vectorize, predictive, link, compile)

        def one(inputs: Inputs, targets: Any, again: SameDraws) -> tuple[Tensor, Tensor, Tensor]:
            return *score(inputs, targets, again)[:2], weights_of(self.likelihood, targets)

        loader = self.to_evaluate(input_data, unpack)
        with all_or_none(process_group):
            found = on_each(self, (loader,), batch_size, one, -1, y)
        return reduced(self.likelihood, found, reduction, process_group)

    def scorer(
        self,
        num_predictions: int,
        aggregate: bool = True,
        vectorize: bool | None = None,
        predictive: str | Outputs | None = None,
        link: str = "mc",
        compile: bool = False,
    ) -> Callable[[Inputs, Tensor, AbstractContextManager[list[Any]]], Scores]:
        """Return what scores a batch in `evaluate`, whose arguments these are."""
        gaussian = self._gaussian(predictive, num_predictions, link)
        options = self._link_options(gaussian, link, num_predictions)
        run = self._passes(compile, vectorize, gaussian)

        def score(
            inputs: Inputs, targets: Tensor, again: AbstractContextManager[list[Any]]
        ) -> Scores:
            check_has_targets(targets)
            kept, rows = self.likelihood.that_count(targets)
            if gaussian is not None:
                mean, covariance = (rows_of(part, rows, 0) for part in gaussian(inputs))
                return gaussian_scores(self.likelihood, mean, covariance, kept, options)
            with again as known:
                outputs, latents = self.stacked_outputs(
                    inputs, num_predictions, vectorize, known, run
                )
            return mixture_scores(
                self.likelihood, rows_of(outputs, rows, 1), latents, kept, aggregate
            )

        return score

    def _passes(
        self, compile: bool, vectorize: bool | None, gaussian: Outputs | None
    ) -> CompiledPasses | None:
        """Return passes of the net as programs where they are wanted and can be."""
        if not compile:
            return None
        if gaussian is not None:
            warn(
                "compile=True: predictions of the linearised net run uncompiled; those by draws of "
                "weights, predictive='bnn', can be compiled"
            )
            return None
        if vectorize:
            raise ValueError("compile=True passes draws one by one: leave vectorize out")
        if draws_are_lazy() or not self.draws_are_weights:
            warn("compile=True: draws are made inside the net, so that passes run uncompiled")
            return None
        return CompiledPasses(self)

    # ------------------------------------------------------------------ the linearised net

    default_predictive = "bnn"

    @abstractmethod
    def gaussian_predictives(self) -> Mapping[str, Outputs]:
        """Return the posterior's predictives with Gaussian outputs, such as `"glm"`, by name."""

    def linearize(self, inputs: Inputs) -> Linearization:
        """Linearise the net about the posterior's centre, on one batch."""
        values = self.mean_values()
        return Linearization(self.net, self.substituted, values, inputs, self.site_shapes())

    def _gaussian(self, predictive: str | Outputs | None, count: int, link: str) -> Outputs | None:
        """Return a function from inputs to Gaussian outputs, or None to run the net itself."""
        chosen = self.default_predictive if predictive is None else predictive
        check_link(link)
        if chosen == "bnn":
            return None
        if callable(chosen):
            return chosen
        known = self.gaussian_predictives()
        expected = " or ".join(map(repr, ("bnn", *known)))
        if not isinstance(chosen, str):
            raise TypeError(
                f"predictive is {chosen!r}; expected {expected}, or a function from inputs to mean "
                "and covariance"
            )
        if chosen == "glm" and not known:
            raise TypeError(
                f"{type(self).__name__} has no Gaussian posterior to linearise about: predict with "
                "predictive='bnn', or use tyxe.LaplaceBNN or a Normal guide"
            )
        if chosen not in known:
            raise ValueError(f"predictive is {chosen!r}; expected {expected}")
        # A prediction at the centre needs no covariance.
        return known[chosen] if count else None

    def latent_draws(self, count: int) -> dict[str, Tensor]:
        """Return draws of the likelihood's own variables by their own names, stacked.

        Without any draw, it is the posterior's centre.
        """
        if not self.likelihood.latent_priors():
            return {}
        draws = self.draws(count) if count else iter([self.mean_values()])
        return self._latents([self._only_latents(values) for values in draws])

    def _link_options(self, gaussian: Outputs | None, link: str, count: int) -> LinkOptions:
        if gaussian is None:
            return LinkOptions(link, count, {})
        with self.predicting():
            latents = self.latent_draws(count)
        return LinkOptions(link, max(count, FEWEST_SAMPLES) if count else 0, latents)


def _output_samples(gaussian: tuple[Tensor, Tensor], count: int) -> Tensor:
    return sample_outputs(*gaussian, count) if count else gaussian[0][None]
