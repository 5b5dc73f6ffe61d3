"""Prediction and evaluation, for all wrappers with a likelihood."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tyxe import check
from tyxe.bnn.batches import ReplayedDraws, check_has_targets, is_loader, map_batches
from tyxe.bnn.intervals import Intervals
from tyxe.bnn.norms import AveragedNorms
from tyxe.bnn.passes import NetOnBatch
from tyxe.bnn.reading import look_at_sites
from tyxe.bnn.scoring import check_evaluation, reduced, rows_of, weights_of
from tyxe.check import described
from tyxe.curvature import Linearization
from tyxe.curvature.output_covariance import jacobian_products
from tyxe.data import Output, Unpack, Unpacked, pick, unpacked, weighted
from tyxe.likelihoods import Likelihood
from tyxe.poutine.draw import Draw, draws_are_lazy
from tyxe.predictive.ensemble import Ensemble
from tyxe.predictive.gaussian import LinkOptions, Outputs, check_link, predict_from_gaussian
from tyxe.predictive.links import sample_outputs
from tyxe.predictive.scores import Scores, gaussian_scores, mixture_scores
from tyxe.priors import Prior
from tyxe.processes import all_or_none
from tyxe.threads import as_before, exclusive
from tyxe.util import Inputs, at_least_float32, outside_inference

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

    @outside_inference()
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

    @as_before()
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the net's output for one draw from the posterior, in its present mode."""
        with exclusive():  # other threads set the generators back for a while
            values = self.one_draw()
        return self._stand_in(values).call(*inputs, **kwargs)

    @outside_inference()
    def to_module(self, sample: bool = False) -> nn.Module:
        """Return a plain net of the given class at the posterior's centre.

        Args:
            sample: return the net at one draw instead.
        """
        with exclusive(), torch.no_grad():
            values = self.one_draw() if sample else self.mean_values()
        net = self.net_at(values, self._norm_statistics(values) if sample else {})
        pick(net, None)
        return net

    @as_before()
    @outside_inference()
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
        num_draws = check.count("num_draws", num_draws)
        with torch.no_grad():
            draws = [*ReplayedDraws().over(self.draws(num_draws))]
            nets = self.nets_at((values, self._norm_statistics(values)) for values in draws)
        latents = self._latents([self._only_latents(values) for values in draws])
        return Ensemble(nets, copy.deepcopy(self.likelihood), latents)

    def model(self, inputs: Inputs, obs: Tensor | None = None) -> Any:
        """The joint model (a Pyro program): weights from the prior, the net, the likelihood.

        Args:
            inputs: a batch: a tensor, a tuple of arguments, or a mapping of keyword arguments.
            obs: targets; None to sample them.

        Returns:
            The net's output.
        """
        predictions = self.run_net(self.net_prior(), inputs)
        self.likelihood(predictions, obs)
        return predictions

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
        again: ReplayedDraws | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return outputs of all draws, `(S, n, ...)`, and the likelihood's variables.

        The draws are those of `again`, if it is given.
        """
        again = ReplayedDraws() if again is None else again
        if num_predictions:
            look_at_sites(self, inputs, needs_gradients=False)
        draws = self._draws_or_mean(num_predictions, again)
        net = NetOnBatch(self, inputs, keeps=num_predictions > 1 and not self.averages_norms)
        if vectorize and self._slots:
            return self._vmapped_outputs(draws, net)
        outputs, kept = [], []
        for index, values in enumerate(draws):
            if index == len(again.statistics):
                again.statistics.append(self._norm_statistics(values) if num_predictions else {})
            outputs.append(net(values, again.statistics[index]))
            kept.append(self._only_latents(values))
        return torch.stack(outputs), self._latents(kept)

    def _draws_or_mean(self, num_predictions: int, again: ReplayedDraws) -> Iterator[Values]:
        """Return the draws of a call, or the mean, which takes no random numbers, for none."""
        if not num_predictions:
            return iter([self.mean_values()])
        return again.over(self.draws(num_predictions))

    def linearized_outputs(
        self, inputs: Inputs, num_predictions: int, again: ReplayedDraws | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what `stacked_outputs` does, of the net linearised about the posterior's centre.

        Draws `w` have the outputs `f(m) + J (w - m)` at all points.
        """
        again = ReplayedDraws() if again is None else again
        linear, vectors, kept = self.linearize(inputs, torch.is_grad_enabled()), [], []
        for values in self._draws_or_mean(num_predictions, again):
            plain = {n: v.value() if isinstance(v, Draw) else v for n, v in values.items()}
            vectors.append(linear.blocks.flatten(plain).detach())
            kept.append(self._only_latents(values))
        moved = torch.stack(vectors) - linear.blocks.flatten(self.mean_values()).detach()
        outputs = linear.result(linear.outputs) + jacobian_products(linear, moved)
        return outputs, self._latents(kept)

    def drawing(
        self, predictive: str | Outputs | None = None, vectorize: bool | None = None
    ) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        """Return `stacked_outputs` or `linearized_outputs`: one function of the inputs a draw.

        Raises:
            ValueError: a predictive that has the outputs of each point alone.
        """
        if self._gaussian(predictive, 1, "mc") is None:
            return partial(self.stacked_outputs, vectorize=vectorize)
        if (predictive or self.default_predictive) != "glm":
            raise ValueError(
                f"predictive is {described(predictive)}, which has the outputs of each point alone:"
                " draws that are joint are those of weights, by predictive='glm' or 'bnn'"
            )
        return self.linearized_outputs

    def _vmapped_outputs(
        self, draws: Iterator[Values], net: NetOnBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        outputs: list[Tensor] = []
        kept: list[Values] = []
        while chunk := [values for _, values in zip(range(VMAP_CHUNK), draws, strict=False)]:
            if draws_are_lazy() or self.averages_norms:
                raise ValueError(
                    "vectorize=True needs drawn weights and the same statistics of norms, but a "
                    "handler such as local_reparameterization samples inside the net, or "
                    "update_norm_statistics has been called: leave vectorize out"
                )
            if not outputs:
                net.look(chunk)
            stacked = {name: torch.stack([v[name] for v in chunk]) for name in self._slots}
            outputs.append(self._under_vmap(net, stacked))
            kept += [self._only_latents(values) for values in chunk]
        return torch.cat(outputs), self._latents(kept)

    def _under_vmap(self, net: NetOnBatch, stacked: Values) -> Tensor:
        try:
            return torch.vmap(net)(stacked)
        except RuntimeError as error:
            # For a net that fails without vmap as well, its own error says more.
            net({name: values[0] for name, values in stacked.items()})
            raise ValueError(
                "vectorize=True needs a net that runs under torch.vmap, but "
                f"{type(self.net).__name__} does not: {error}; leave vectorize out"
            ) from error

    # ------------------------------------------------------------------ predict

    @as_before()
    def predict(
        self,
        *inputs: Any,
        num_predictions: int = 1,
        aggregate: bool = True,
        vectorize: bool | None = None,
        batch_size: int | None = None,
        predictive: str | Outputs | None = None,
        link: str = "mc",
        joint: bool = False,
        unpack: Unpack | None = None,
        enable_grad: bool = False,
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
                outputs are drawn for each row, and so depend on it, unless they are joint.
            predictive: `"bnn"`, by draws of weights; or `"glm"`, by the net linearised about the
                centre of a Gaussian posterior [GLM 3], where outputs are Gaussian and
                `num_predictions` counts samples of them, at least 100 if aggregated. The default
                is `"bnn"`, or `"glm"` for a `LaplaceBNN`, which has `"gp"` as well, after `fit_gp`.
                A function from inputs to mean and covariance of outputs is another choice.
            link: from Gaussian logits to probabilities: `"mc"`, `"probit"` or `"bridge"`.
            joint: for Gaussian outputs and `aggregate=False`. By default samples are those of each
                point, independent of other points': what is computed of several points together,
                such as a sum, has another law. With `joint` each sample is the linearised net at
                one draw of the weights, a smooth function of the inputs; this is for `"glm"`.
                Samples of `"bnn"` are joint always.
            unpack: from what a loader yields to inputs, or `inputs, targets`.
            enable_grad: record gradients, such as of an acquisition function in the inputs.

        Returns:
            Aggregated predictions in the likelihood's own parametrisation (class logits whose
            softmax is the mean of the probabilities; `(mean, scale)` for a homoskedastic
            Gaussian), or the net's outputs, `(num_predictions, n, ...)`.

        Raises:
            TypeError: `"glm"` for a posterior that is not Gaussian.
            ValueError: a negative number of draws; `vectorize=True` inside of a handler that
                samples inside the net; an unknown predictive or link; `joint` for `"gp"` or a
                function.

        Example:
            >>> import pyro.distributions as dist, tyxe
            >>> bnn = tyxe.VariationalBNN(
            ...     nn.Linear(2, 3), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.likelihoods.Categorical(10), tyxe.guides.AutoNormal)
            >>> bnn.predict(torch.zeros(5, 2), num_predictions=8).softmax(-1).shape
            torch.Size([5, 3])
        """
        num_predictions = check.count("num_predictions", num_predictions, 0)
        gaussian = self._gaussian(predictive, num_predictions, link)
        options = self._link_options(gaussian, link, num_predictions)
        draw = self.drawing(predictive if joint else "bnn", vectorize)

        def one(inputs: Inputs, _: Any, again: ReplayedDraws) -> Any:
            if gaussian is not None and (aggregate or not joint):
                moments = gaussian(inputs)
                if not aggregate:
                    return self.likelihood.outputs_of(_output_samples(moments, num_predictions))
                return predict_from_gaussian(self.likelihood, *moments, **options._asdict())
            outputs, latents = draw(inputs, num_predictions, again=again)
            if not aggregate:
                return self.likelihood.outputs_of(outputs)
            return self.likelihood.aggregate_predictions(at_least_float32(outputs), 0, latents)

        inputs = inputs if unpack is None else (unpacked(inputs[0], unpack),)
        dim = 0 if aggregate else 1
        return map_batches(self, inputs, batch_size, one, dim, gradients=enable_grad)

    @as_before()
    def sample_predictive(
        self,
        *inputs: Any,
        num_samples: int = 100,
        vectorize: bool | None = None,
        batch_size: int | None = None,
        predictive: str | Outputs | None = None,
        joint: bool = False,
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
        num_samples = check.count("num_samples", num_samples)
        gaussian = self._gaussian(predictive, num_samples, "mc")
        options = self._link_options(gaussian, "mc", num_samples)
        draw = self.drawing(predictive if joint else "bnn", vectorize)

        def one(inputs: Inputs, _: Any, again: ReplayedDraws) -> Any:
            if gaussian is not None and not joint:
                outputs = sample_outputs(*gaussian(inputs), num_samples)
                latents = options.latents_of(num_samples)
            else:
                outputs, latents = draw(inputs, num_samples, again=again)
            drawn = [
                self.likelihood.sample(each, latents={n: v[s] for n, v in latents.items()})
                for s, each in enumerate(at_least_float32(outputs))
            ]
            return self.likelihood.targets_of(torch.stack(drawn))

        return map_batches(self, inputs, batch_size, one, 1)

    @as_before()
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
        num_predictions = check.count("num_predictions", num_predictions, 0)
        y = None if y is None else self.likelihood.from_loader(y)
        check_evaluation(input_data, y, reduction, process_group)
        score = self.scorer(num_predictions, aggregate, vectorize, predictive, link)

        def one(
            inputs: Inputs, targets: Any, again: ReplayedDraws
        ) -> tuple[Tensor, Tensor, Tensor]:
            return *score(inputs, targets, again)[:2], weights_of(self.likelihood, targets)

        loader = self.to_evaluate(input_data, unpack)
        with all_or_none(process_group):
            found = map_batches(self, (loader,), batch_size, one, -1, y)
        return reduced(self.likelihood, found, reduction, process_group)

    def scorer(
        self,
        num_predictions: int,
        aggregate: bool = True,
        vectorize: bool | None = None,
        predictive: str | Outputs | None = None,
        link: str = "mc",
    ) -> Callable[[Inputs, Tensor, ReplayedDraws], Scores]:
        """Return what scores a batch in `evaluate`, whose arguments these are."""
        gaussian = self._gaussian(predictive, num_predictions, link)
        options = self._link_options(gaussian, link, num_predictions)

        def score(inputs: Inputs, targets: Tensor, again: ReplayedDraws) -> Scores:
            check_has_targets(targets)
            kept, rows = self.likelihood.counted(targets)
            if gaussian is not None:
                mean, covariance = (rows_of(part, rows, 0) for part in gaussian(inputs))
                return gaussian_scores(self.likelihood, mean, covariance, kept, options)
            outputs, latents = self.stacked_outputs(inputs, num_predictions, vectorize, again)
            return mixture_scores(
                self.likelihood, rows_of(outputs, rows, 1), latents, kept, aggregate
            )

        return score

    # ------------------------------------------------------------------ the linearised net

    default_predictive = "bnn"

    @abstractmethod
    def gaussian_predictives(self) -> Mapping[str, Outputs]:
        """Return the posterior's predictives with Gaussian outputs, such as `"glm"`, by name."""

    def linearize(self, inputs: Inputs, differentiable: bool = False) -> Linearization:
        """Linearise the net about the posterior's centre, on one batch.

        Args:
            inputs: the batch.
            differentiable: whether outputs and gradients are to be differentiated in the inputs.
        """
        look_at_sites(self, inputs, needs_gradients=True)
        return Linearization(
            self._run_frozen,
            self.mean_values(),
            inputs,
            self.site_shapes(),
            self._runtime.linearized,
            differentiable,
        )

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
        with exclusive(), torch.no_grad():
            latents = self.latent_draws(count)
        return LinkOptions(link, max(count, FEWEST_SAMPLES) if count else 0, latents)


def _output_samples(gaussian: tuple[Tensor, Tensor], count: int) -> Tensor:
    return sample_outputs(*gaussian, count) if count else gaussian[0][None]
