"""Prediction and evaluation, for all wrappers with a likelihood."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tyxe import check
from tyxe.bnn.batches import check_has_targets
from tyxe.bnn.outputs import PosteriorBNN
from tyxe.bnn.passes import ReplayedDraws, map_batches
from tyxe.bnn.scoring import Derived, check_evaluation, evaluated, rows_of
from tyxe.data import Unpack, pick
from tyxe.distributions.param_blocks import LinearBlock
from tyxe.likelihoods import Likelihood
from tyxe.predictive.distributions import distribution_at_draws, gaussian_distribution
from tyxe.predictive.ensemble import ClosedForm, Ensemble, no_closed_form
from tyxe.predictive.evaluation import Scores, gaussian_scores, mixture_scores
from tyxe.predictive.gaussian import GaussianOutputs, Outputs, predict_from_gaussian
from tyxe.predictive.links import sample_outputs
from tyxe.threads import as_before, exclusive
from tyxe.util import Inputs, at_least_float32, outside_inference


class SupervisedBNN(Derived, PosteriorBNN):
    """Base of BNNs with a likelihood, which predict and evaluate.

    Args:
        likelihood: a likelihood of `tyxe.likelihoods`, which is copied.
        unpack: a function from a batch of a loader to `inputs, targets`, or with weights. If given
            here, or to a fit, it holds for all later loaders of the BNN.

    Raises:
        TypeError: not a likelihood.
    """

    def _described(self) -> dict[str, Any]:
        parts = [part for part in self.likelihood.modules() if isinstance(part, Likelihood)]
        own, *inner = (f"{type(part).__name__}({part.extra_repr()})" for part in parts)
        likelihood = f"{own} of {', '.join(inner)}" if inner else own
        return {"prior": self.prior, "likelihood": likelihood, **super()._described()}

    def _weights_of(self, count: int) -> None:
        """Return None, because all draws count alike."""

    @property
    def _bnns(self) -> list[Any]:  # type: ignore[override]
        return [self]

    @as_before()
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the net's output for one draw from the posterior, in its present mode."""
        with exclusive():  # other threads set the generators back for a while
            values = self._one_draw()
        return self._stand_in(values).call(*inputs, **kwargs)

    @outside_inference()
    def to_module(self, sample: bool = False) -> nn.Module:
        """Return a plain net of the given class at the posterior's centre.

        Args:
            sample: return the net at one draw instead.
        """
        check.flags(sample=sample)
        with exclusive(), torch.no_grad():
            values = self._one_draw() if sample else self._mean_values()
        net = self._net_at(values, self._norm_statistics(values) if sample else {})
        pick(net, None)
        return net

    @as_before()
    @outside_inference()
    def to_ensemble(
        self, num_draws: int | None = None, *, closed_form: bool = False, link: str = "probit"
    ) -> Ensemble | ClosedForm:
        """Return draws from the posterior as a plain module without Pyro, for export and servers.

        It returns the aggregated predictions of these draws (by `predictive="bnn"`), and is
        deterministic. Threads may call it in parallel.

        Args:
            num_draws: number of draws, each with a copy of the weights that have a posterior; by
                default those of `predict`.
            closed_form: return one net with Gaussian outputs instead of draws, for a posterior of
                Normals over the last layer. It predicts like `predictive="glm"`.
            link: `"probit"` or `"bridge"`, for classes and binary labels in closed form.

        Raises:
            TypeError: `closed_form` for another posterior or likelihood, or with `num_draws`.
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
        if check.flag("closed_form", closed_form):
            if num_draws is not None:
                raise TypeError("closed_form=True takes no draws: leave num_draws out")
            return self._in_closed_form(link)
        num_draws = self._num_draws(num_draws, name="num_draws", least=1)
        with torch.no_grad():
            draws = [*self._draws_or_mean(num_draws, ReplayedDraws())]
            nets = self._nets_at((values, self._norm_statistics(values)) for values in draws)
        return Ensemble(nets, copy.deepcopy(self.likelihood), self._latents(draws))

    def _in_closed_form(self, link: str) -> ClosedForm:
        """Return the net with a Gaussian posterior over its last layer as a plain module."""
        names = {part: name for name, part in self.net.named_modules()}
        places = [place for slots in self._slots.values() for place in slots]
        layers = {part for part, _ in places}
        sites = {attribute: site for site, ((_, attribute), *_) in self._slots.items()}
        layer = next(iter(layers), None)
        if len(layers) != 1 or not isinstance(layer, nn.Linear) or len(self.net_prior.elements):
            no_closed_form(
                f"the posterior is over {len(self._slots)} parameters of {len(layers)} modules; "
                "closed forms are for one over the last linear layer: expose that alone"
            )
        block = LinearBlock(sites.get("weight"), sites.get("bias"), layer.weight.shape)
        with torch.no_grad():
            precision = self._layer_precision(block).detach()
            _, _, options = self._resolved(100, "glm", link)
        has = "weight" in sites, "bias" in sites
        net, likelihood = self.to_module(), copy.deepcopy(self.likelihood)
        return ClosedForm(net, names[layer], *has, precision, likelihood, options)

    def model(self, inputs: Inputs, obs: Tensor | None = None) -> Any:
        """The joint model (a Pyro program): weights from the prior, the net, the likelihood.

        Args:
            inputs: a batch: a tensor, a tuple of arguments, or a mapping of keyword arguments.
            obs: targets; None to sample them.

        Returns:
            The net's output.
        """
        predictions = self._run_net(self.net_prior(), inputs)
        self.likelihood(predictions, obs)
        return predictions

    @as_before()
    def predict(
        self,
        *inputs: Any,
        num_predictions: int | None = None,
        aggregate: bool = True,
        vectorize: bool | None = None,
        compile: bool = False,
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
            num_predictions: number of draws; 0 predicts once, at the posterior's centre. The
                default is 32, or all samples if there are fewer, or 1 if all draws are equal.
            aggregate: combine the draws by the likelihood; `False` returns all of them.
            vectorize: run draws at once under `torch.vmap`, or with `False` in a loop. By default
                they run at once if that is faster and gives the same: for a last linear layer, and
                on a GPU for other nets without random convolutions.
            compile: run the net as a program that is traced at its first draws and compared there.
                On a GPU, where this was never run, it is to be one launch. Later calls use it
                again; it is made anew when the net changes otherwise than in the numbers of its
                parameters and buffers. Globals that its forward reads are not seen. All draws run
                at once, unless a convolution or a recurrent layer is random, or `vectorize` is
                False.
            batch_size: number of rows that go through the net at a time. Samples of Gaussian
                outputs are drawn for each row, and so depend on it, unless they are joint.
            predictive: `"bnn"`, by draws of weights; or `"glm"`, by the net linearised about the
                centre of a Gaussian posterior [GLM 3]. Then outputs are Gaussian, and
                `num_predictions` counts samples of them, at least 100 if aggregated. The default is
                `"bnn"`, or `"glm"` for a `LaplaceBNN`, which also has `"gp"`, after `fit_gp`. You
                may also pass a function from inputs to mean and covariance of outputs.
            link: from Gaussian logits to probabilities: `"mc"`, `"probit"` or `"bridge"`.
            joint: for Gaussian outputs and `aggregate=False`. By default each point is sampled
                independently, so functions of several points, such as a sum, have the wrong
                distribution. With `joint`, for `"glm"`, each sample is the linearised net at one
                draw of the weights, a smooth function of the inputs. `"bnn"` is always joint.
            unpack: a function from a batch of a loader to inputs, or `inputs, targets`.
            enable_grad: record gradients, such as with respect to the inputs.

        Returns:
            Aggregated predictions in the likelihood's own parametrisation (class logits whose
            softmax is the mean of the probabilities; `(mean, scale)` for a homoskedastic
            Gaussian), or the net's outputs, `(num_predictions, n, ...)`.

        Raises:
            TypeError: `"glm"` for a posterior that is not Gaussian.
            ValueError: a negative number of draws; `vectorize=True` with a handler that samples
                inside the net; an unknown predictive or link; `joint` for `"gp"` or a function;
                `compile` with a handler, `enable_grad`, `update_norm_statistics`, or Gaussian
                outputs.

        Example:
            >>> import pyro.distributions as dist, tyxe
            >>> bnn = tyxe.VariationalBNN(
            ...     nn.Linear(2, 3), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.likelihoods.Categorical(10), tyxe.guides.AutoNormal)
            >>> bnn.predict(torch.zeros(5, 2), num_predictions=8).softmax(-1).shape
            torch.Size([5, 3])
        """
        check.flags(aggregate=aggregate, vectorize=vectorize, joint=joint)
        check.flags(enable_grad=enable_grad)
        count, gaussian, options = self._resolved(num_predictions, predictive, link, compile)
        draw = self._drawing(predictive if joint else "bnn", vectorize, compile)

        def one(inputs: Inputs, _: Any, again: ReplayedDraws) -> Any:
            if gaussian is not None and (aggregate or not joint):
                moments = gaussian(inputs)
                if not aggregate:
                    samples = moments[0][None]
                    if count:
                        samples = sample_outputs(*moments, count)
                    return self.likelihood.outputs_of(samples)
                return predict_from_gaussian(self.likelihood, *moments, **options._asdict())
            outputs, latents = draw(inputs, count, again=again)
            if not aggregate:
                return self.likelihood.outputs_of(outputs)
            return self.likelihood.aggregate_predictions(at_least_float32(outputs), 0, latents)

        inputs = self._to_predict(inputs, unpack)
        dim = 0 if aggregate else 1
        return map_batches(self, inputs, batch_size, one, dim, gradients=enable_grad)

    @as_before()
    def predictive(
        self,
        *inputs: Any,
        num_predictions: int | None = None,
        vectorize: bool | None = None,
        compile: bool = False,
        batch_size: int | None = None,
        predictive: str | Outputs | None = None,
        link: str = "mc",
        unpack: Unpack | None = None,
        enable_grad: bool = False,
    ) -> Any:
        """Return the predictive distribution of targets, with one batch element for each point.

        It is a `torch.distributions` object with `mean`, `stddev`, `sample` and `log_prob`, which
        is the log-likelihood of `evaluate`: a mixture over draws; for one label a point, a
        Categorical or Bernoulli; for Gaussian outputs and noise, a Normal. Arguments and errors are
        those of `predict`.

        Returns:
            The distribution; for a `Joint`, one for each part by name; for `Censored` targets, that
            of the uncensored numbers. A Categorical has a NaN mean and stddev, as in PyTorch; use
            `probs`. Its `log_prob` also takes class probabilities `q`, with `sum_c q_c log p_c`.

        Example:
            >>> import pyro.distributions as dist, tyxe
            >>> bnn = tyxe.VariationalBNN(
            ...     nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1), tyxe.guides.AutoNormal)
            >>> found = bnn.predictive(torch.zeros(5, 2))
            >>> found.mean.shape, found.stddev.shape, found.log_prob(torch.zeros(5, 1)).shape
            (torch.Size([5, 1]), torch.Size([5, 1]), torch.Size([5]))
        """
        check.flags(vectorize=vectorize, enable_grad=enable_grad)
        count, gaussian, options = self._resolved(num_predictions, predictive, link, compile)
        latents: dict[str, Tensor] = {}

        def one(inputs: Inputs, _: Any, again: ReplayedDraws) -> Any:
            if gaussian is not None:
                return gaussian(inputs)
            outputs, own = self._stacked_outputs(inputs, count, vectorize, again, compile)
            latents.update(own)  # the same for all batches
            return outputs

        inputs = self._to_predict(inputs, unpack)
        dim = 1 if gaussian is None else 0
        found = map_batches(self, inputs, batch_size, one, dim, gradients=enable_grad)
        likelihood = self.likelihood.with_gradients(enable_grad)
        if gaussian is None:
            return distribution_at_draws(likelihood, at_least_float32(found), latents)
        mean, covariance = found
        if not count:
            return distribution_at_draws(likelihood, at_least_float32(mean[None]), options.latents)
        return gaussian_distribution(likelihood, GaussianOutputs(mean, covariance, options))

    @as_before()
    def sample_predictive(
        self,
        *inputs: Any,
        num_samples: int = 100,
        vectorize: bool | None = None,
        compile: bool = False,
        batch_size: int | None = None,
        predictive: str | Outputs | None = None,
        joint: bool = False,
        unpack: Unpack | None = None,
    ) -> Tensor:
        """Draw targets from the posterior predictive distribution, `(num_samples, n, ...)`.

        Each sample has its own draw of the weights, of the likelihood's variables, such as the
        scale of the noise, and of the targets given both. Arguments and errors that are not listed
        are those of `predict`.

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
        check.flags(joint=joint, vectorize=vectorize)
        _, gaussian, options = self._resolved(num_samples, predictive, "mc", compile)
        draw = self._drawing(predictive if joint else "bnn", vectorize, compile)

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

        return map_batches(self, self._to_predict(inputs, unpack), batch_size, one, 1)

    @as_before()
    def evaluate(
        self,
        input_data: Inputs,
        y: Tensor | None = None,
        num_predictions: int | None = None,
        aggregate: bool = True,
        reduction: str = "sum",
        *,
        vectorize: bool | None = None,
        compile: bool = False,
        batch_size: int | None = None,
        predictive: str | Outputs | None = None,
        link: str = "mc",
        unpack: Unpack | None = None,
        process_group: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Return error and log-likelihood on data with targets.

        The log-likelihood is that of the mixture over draws, `log 1/S sum_s p(y|f_s)`, in nats. For
        Gaussian outputs it is over samples of them, or without any with Gaussian noise, and a
        product over the positions of a point, such as steps of a series: `predictive="bnn"` scores
        them together. For the links `"probit"` and `"bridge"` it is that of the aggregated
        prediction. Arguments and errors that are not listed are those of `predict`.

        Args:
            input_data: a batch of inputs, or a loader or list of `(inputs, targets)`, or of
                `(inputs, targets, weights)`; sums and means then use the weights.
            y: targets of a batch; None with a loader.
            aggregate: combine the draws; `False` returns a row for each draw, and has no effect on
                Gaussian outputs.
            reduction: reduction over points: `"sum"`, `"mean"` or `"none"`.
            unpack: a function from a batch of a loader to one of these.
            process_group: processes of `torch.distributed`, each with a part of the data; the sum
                or mean is over all of them.

        Returns:
            `(error, log_likelihood)`; the error counts misclassifications or sums squares.

        Raises:
            RuntimeError: another process has failed.
            ValueError: targets are missing, or have another shape than the predictions; an unknown
                reduction, or `"none"` of several processes.
        """
        y = check_evaluation(self, input_data, y, reduction, process_group)
        score = self._scorer(num_predictions, aggregate, vectorize, predictive, link, compile)
        how = reduction, batch_size, unpack, process_group
        return evaluated(self, score, input_data, y, *how)

    def _scorer(
        self,
        num_predictions: int | None,
        aggregate: bool = True,
        vectorize: bool | None = None,
        predictive: str | Outputs | None = None,
        link: str = "mc",
        compile: bool = False,
    ) -> Callable[[Inputs, Tensor, ReplayedDraws], Scores]:
        """Return what scores a batch in `evaluate`, whose arguments these are."""
        check.flags(aggregate=aggregate, vectorize=vectorize)
        count, gaussian, options = self._resolved(num_predictions, predictive, link, compile)

        def score(inputs: Inputs, targets: Tensor, again: ReplayedDraws) -> Scores:
            check_has_targets(targets)
            kept, rows = self.likelihood.counted(targets)
            if gaussian is not None:
                mean, covariance = (rows_of(part, rows, 0) for part in gaussian(inputs))
                return gaussian_scores(self.likelihood, mean, covariance, kept, options)
            outputs, latents = self._stacked_outputs(inputs, count, vectorize, again, compile)
            return mixture_scores(
                self.likelihood, rows_of(outputs, rows, 1), latents, kept, aggregate
            )

        return score
