"""The net at draws from a posterior: its outputs, and statistics of norms at each draw."""

from __future__ import annotations

import copy
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tyxe import check, data
from tyxe.bnn.base import BNN
from tyxe.bnn.batches import batches_to_predict, check_iterable, device_for, is_loader, on_device
from tyxe.bnn.passes import NetOnBatch, ReplayedDraws, not_vectorized, stacked, unstacked
from tyxe.bnn.reading import look_at_sites
from tyxe.bnn.traced import TracedNet
from tyxe.check import described
from tyxe.curvature import Linearization
from tyxe.curvature.output_covariance import jacobian_products
from tyxe.distributions.param_blocks import LinearBlock
from tyxe.likelihoods import Likelihood
from tyxe.linalg import Operator
from tyxe.poutine.draw import Draw, draws_are_lazy
from tyxe.predictive.ensemble import no_closed_form
from tyxe.predictive.forwards import (
    DRAWS_AT_ONCE,
    MOST_DRAWN,
    Statistics,
    averaged_statistics,
    norms_of,
    put_statistics,
)
from tyxe.predictive.gaussian import LinkOptions, Outputs, check_link, check_unbounded
from tyxe.priors import Prior
from tyxe.rng import RandomStream, drawing_from
from tyxe.threads import exclusive, handlers
from tyxe.util import Inputs, outside_inference

Values = dict[str, Tensor]

# Draws at a time under torch.vmap on CPUs, where it is slower than a loop except for small nets.
VMAP_CHUNK = 8
# Smallest number of samples of Gaussian outputs, which are cheap.
FEWEST_SAMPLES = 100


class PosteriorBNN(BNN):
    """A BNN with a likelihood, and its net at draws from a posterior.

    A subclass implements `_draws`, `_one_draw`, `_mean_values` and `_gaussian_predictives`.
    """

    @outside_inference()
    def __init__(
        self,
        net: nn.Module,
        prior: Prior,
        likelihood: Likelihood,
        name: str = "",
        *,
        output: data.Output | None = None,
        unpack: data.Unpack | None = None,
    ) -> None:
        expected = "one from tyxe.likelihoods, such as tyxe.likelihoods.Categorical(dataset_size)"
        check.one_of("likelihood", likelihood, Likelihood, expected)
        super().__init__(net, prior, name, output=output)
        self._unpack = None if unpack is None else data.check_unpack(unpack)
        self.likelihood = copy.deepcopy(likelihood).to(next(net.parameters()).device)
        if self.likelihood.prepares_outputs:
            data.pick(self.net, self.likelihood.from_net, keep=True)

    def _to_fit(self, loader: Iterable[Any], unpack: data.Unpack | None = None) -> Iterable[Any]:
        """Return a loader of batches as fits take them, and remember how they are unpacked."""
        if unpack is not None:
            self._runtime.unpack = known = data.KnownUnpack(unpack)
            unpack = known.first
        loader = self._unpacked(loader, unpack)
        return data.Unpacked(loader, self._prepared) if self.likelihood.prepares_targets else loader

    def _to_evaluate(self, loader: Any, unpack: data.Unpack | None = None) -> Any:
        """Return a loader, or a list, of batches as evaluations take them."""
        loader = self._unpacked(loader, unpack)
        prepares = self.likelihood.prepares_targets and is_loader(loader)
        return data.unpacked(loader, self._read) if prepares else loader

    def _unpacked(self, loader: Any, unpack: data.Unpack | None) -> Any:
        """Return a loader whose batches go through a function, if one was given now or before."""
        if unpack is not None or isinstance(loader, data.Unpacked | data.UnpackedList):
            return data.unpacked(loader, unpack)
        if self._runtime.unpack is None and self._unpack is not None:
            self._runtime.unpack = data.KnownUnpack(self._unpack)
        known = self._runtime.unpack
        if known is None or not is_loader(loader):
            return loader
        return data.unpacked(loader, known.again)

    def _to_predict(self, inputs: tuple[Any, ...], unpack: data.Unpack | None) -> tuple[Any, ...]:
        """Return the arguments of a prediction, of which a loader alone is unpacked."""
        return (self._unpacked(inputs[0], unpack),) if len(inputs) == 1 else inputs

    def _read(self, batch: Any) -> Any:
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
            return batch  # what takes it says what is wrong
        inputs, targets, *weights = batch
        targets = self.likelihood.from_loader(targets)
        return inputs, data.weighted(targets, *weights) if weights else targets

    def _prepared(self, batch: Any) -> Any:
        read = self._read(batch)
        if read is batch or not isinstance(read[1], Tensor | data.Targets):
            return read
        return read[0], self.likelihood.with_fit_weights(data.read_targets(read[1]))

    def _before_step(self) -> None:
        """Forget what was made of the parameters, which a step in another loop is to move."""

    # ------------------------------------------------------------------ draws

    @abstractmethod
    def _draws(self, num_predictions: int) -> Iterator[Values]:
        """Yield draws from the posterior: a value for each site, by joint name."""

    @abstractmethod
    def _mean_values(self) -> Values:
        """Return the posterior's centre, such as its mean: a value for each site, by joint name."""

    @abstractmethod
    def _one_draw(self) -> Values:
        """Return a single draw from the posterior."""

    def _for_net(self, values: Values) -> Values:
        """Return values where the net is and in its dtype, which need not be the posterior's."""
        places = self._in_places()
        like = next(iter(places.values()), None)
        return {
            name: value if like is None else value.to(places.get(name, like))
            for name, value in values.items()
        }

    def _latents(
        self, draws: list[Values], join: Callable[[list[Tensor]], Tensor] = torch.stack
    ) -> dict[str, Tensor]:
        """Return the likelihood's own variables, stacked over draws, by their own names."""
        prefix, names = self.likelihood.prefix, self.likelihood.latent_priors()
        return {n: join([values[f"{prefix}.{n}"] for values in draws]) for n in names}

    def _only_latents(self, values: Values) -> Values:
        return {name: v for name, v in values.items() if name not in self._slots}

    def _stacked_outputs(
        self,
        inputs: Inputs,
        num_predictions: int,
        vectorize: bool | None = None,
        again: ReplayedDraws | None = None,
        compile: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return outputs of all draws, `(S, n, ...)`, and the likelihood's variables.

        The draws are those of `again`, if it is given.
        """
        again = ReplayedDraws() if again is None else again
        if num_predictions:
            look_at_sites(self, inputs, needs_gradients=False)
        is_alone = draws_are_lazy() or self._averages_norms
        net = NetOnBatch(self, inputs, keeps=num_predictions > 1 and not self._averages_norms)
        if compile and self._slots:
            if is_alone or handlers() or torch.is_grad_enabled():
                raise ValueError(
                    "compile=True needs drawn weights, the same statistics of norms and no "
                    "gradients, but a handler is active, update_norm_statistics has been called, "
                    "or enable_grad is set; leave compile out"
                )
            traced = TracedNet(self, inputs, vectorize, net.many)
            return self._at_stacks(traced, num_predictions, again)
        if vectorize and self._slots:
            if is_alone:
                not_vectorized(
                    "needs drawn weights and the same statistics of norms, but a handler such as "
                    "local_reparameterization samples inside the net, or update_norm_statistics "
                    "has been called"
                )
            return self._at_stacks(partial(self._under_vmap, net), num_predictions, again)
        several = vectorize is None and num_predictions > 1 and self._slots and not is_alone
        if several and net.may_run_at_once():
            return self._at_stacks(net.at_many, num_predictions, again)
        outputs, kept = [], []
        for index, values in enumerate(self._draws_or_mean(num_predictions, again)):
            if index == len(again.statistics):
                again.statistics.append(self._norm_statistics(values) if num_predictions else {})
            outputs.append(net(values, again.statistics[index]))
            kept.append(self._only_latents(values))
        return torch.stack(outputs), self._latents(kept)

    def _at_stacks(
        self, net: Callable[[Values], Tensor], num_predictions: int, again: ReplayedDraws
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what `_stacked_outputs` does, by a function of stacked draws."""
        outputs, kept = [], []
        for together in self._stacks(num_predictions, again):
            outputs.append(net(together))
            kept.append(self._only_latents(together))
        return torch.cat(outputs), self._latents(kept, torch.cat)

    def _draws_or_mean(self, num_predictions: int, again: ReplayedDraws) -> Iterator[Values]:
        """Return the draws of a call, or the mean, which takes no random numbers, for none."""
        if not num_predictions:
            return iter([self._mean_values()])
        if (at_once := self._at_once(num_predictions)) is not None:
            return itertools.chain.from_iterable(map(unstacked, again.over(at_once)))
        return again.over(self._draws(num_predictions), self._size_of_draw())

    def _stacks(self, num_predictions: int, again: ReplayedDraws) -> Iterator[Values]:
        """Yield what `_draws_or_mean` does in stacks, of which each fits into memory."""
        at_once = self._at_once(num_predictions) if num_predictions else None
        if at_once is not None:
            yield from again.over(at_once, self._size_of_draw() * num_predictions)
            return
        draws = self._draws_or_mean(num_predictions, again)
        while rows := [*itertools.islice(draws, self._most_drawn())]:
            yield stacked(rows)

    def _most_drawn(self) -> int:
        """Return how many draws are stacked at a time."""
        return max(1, MOST_DRAWN[self._like.device.type == "cpu"] // self._size_of_draw())

    def _size_of_draw(self) -> int:
        return max(1, sum(shape.numel() for shape in self._site_shapes().values()))

    def _at_once(self, num_predictions: int) -> Iterator[Values] | None:
        """Return stacks of draws that one call makes for each site, or None if draws are single.

        Accelerators take as long for many numbers as for a few. Processors do not, and there a
        seed gives the draws that it has always given.
        """
        if not self._slots or self._like.device.type not in DRAWS_AT_ONCE or handlers():
            return None
        sampler, most = self._sampler(), self._most_drawn()
        if sampler is None:
            return None
        starts = range(0, num_predictions, most)
        return (sampler(min(most, num_predictions - start)) for start in starts)

    def _sampler(self) -> Callable[[int], Values] | None:
        """Return what draws so many times at once, stacked, or None where nothing does."""
        return None

    def _linearized_outputs(
        self, inputs: Inputs, num_predictions: int, again: ReplayedDraws | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what `_stacked_outputs` does, of the net linearised about the posterior's centre.

        Draws `w` have the outputs `f(m) + J (w - m)` at all points.
        """
        again = ReplayedDraws() if again is None else again
        linear, vectors, kept = self._linearize(inputs, torch.is_grad_enabled()), [], []
        for values in self._draws_or_mean(num_predictions, again):
            plain = {n: v.value() if isinstance(v, Draw) else v for n, v in values.items()}
            vectors.append(linear.blocks.flatten(plain).detach())
            kept.append(self._only_latents(values))
        moved = torch.stack(vectors) - linear.blocks.flatten(self._mean_values()).detach()
        outputs = linear.result(linear.outputs) + jacobian_products(linear, moved)
        return outputs, self._latents(kept)

    def _drawing(
        self,
        predictive: str | Outputs | None = None,
        vectorize: bool | None = None,
        compile: bool = False,
    ) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        """Return `_stacked_outputs` or `_linearized_outputs`: one function of the inputs a draw."""
        predictive = self._default_predictive if predictive is None else predictive
        if self._gaussian(predictive, 1, "mc") is None:
            return partial(self._stacked_outputs, vectorize=vectorize, compile=compile)
        if predictive != "glm":
            raise ValueError(
                f"predictive is {described(predictive)}, which has the outputs of each point alone:"
                " draws that are joint are those of weights, by predictive='glm' or 'bnn'"
            )
        return self._linearized_outputs

    def _under_vmap(self, net: NetOnBatch, together: Values) -> Tensor:
        try:
            net.look(unstacked(together))
            return net.at_once(together, VMAP_CHUNK if self._like.device.type == "cpu" else None)
        except RuntimeError as error:
            # For a net that fails without vmap as well, its own error says more.
            net(next(unstacked(together)))
            name = type(self.net).__name__
            not_vectorized(
                f"needs a net that runs under torch.vmap, but {name} does not: {error}", error
            )

    # ------------------------------------------------------------------ the linearised net

    _default_predictive = "bnn"

    @abstractmethod
    def _gaussian_predictives(self) -> Mapping[str, Outputs]:
        """Return the posterior's predictives with Gaussian outputs, such as `"glm"`, by name."""

    def _linearize(self, inputs: Inputs, differentiable: bool = False) -> Linearization:
        """Linearise the net about the posterior's centre, on one batch.

        With `differentiable`, outputs and gradients can be differentiated in the inputs.
        """
        look_at_sites(self, inputs, needs_gradients=True)
        values, prior, places = self._mean_values(), self.net_prior, self._in_places()
        parts = {}
        for name, elements in prior.elements.items():
            site = prior.prefix + name
            if values[site].shape != places[site].shape:  # else it may be whole or not
                parts[site] = elements, prior.whole_of(name, places[site], values[site])
        return Linearization(
            self._run_frozen,
            values,
            inputs,
            self._site_shapes(),
            self._runtime.linearized,
            differentiable,
            parts,
        )

    def _gaussian(self, chosen: str | Outputs, count: int, link: str) -> Outputs | None:
        """Return a function from inputs to Gaussian outputs, or None to run the net itself."""
        check_link(link)
        if chosen == "bnn":
            return None
        if count:
            check_unbounded(self.likelihood)
        if callable(chosen):
            return chosen
        known = self._gaussian_predictives()
        if chosen == "glm" and not known:
            raise TypeError(
                f"{type(self).__name__} has no Gaussian posterior to linearise about: predict with "
                "predictive='bnn', or use tyxe.LaplaceBNN or a Normal guide"
            )
        hint = ", or a function from inputs to mean and covariance"
        check.choice("predictive", chosen, ("bnn", *known), hint)
        # A prediction at the centre needs no covariance.
        return known[chosen] if count else None

    def _resolved(
        self,
        num_predictions: int | None,
        predictive: str | Outputs | None,
        link: str,
        compile: bool = False,
    ) -> tuple[int, Outputs | None, LinkOptions]:
        """Return the number of draws of a prediction, and how it goes by Gaussian outputs if so.

        With `compile` Gaussian outputs are a ValueError.
        """
        predictive = self._default_predictive if predictive is None else predictive
        count = self._num_draws(num_predictions, predictive)
        gaussian = self._gaussian(predictive, count, link)
        check.flags(compile=compile)
        if compile and gaussian is not None:
            raise ValueError(
                "compile=True is for draws of weights, and this prediction has Gaussian outputs: "
                "leave compile out"
            )
        return count, gaussian, self._link_options(gaussian, link, count)

    def _layer_precision(self, block: LinearBlock) -> Operator:
        """Return the precision of a posterior that is a Gaussian over one layer alone."""
        no_closed_form(f"the posterior of a {type(self).__name__} has no closed form")

    def _link_options(self, gaussian: Outputs | None, link: str, count: int) -> LinkOptions:
        """Return the options of predictions by Gaussian outputs, if these are such."""
        if gaussian is None:
            return LinkOptions(link, count, {})
        latents: dict[str, Tensor] = {}
        if self.likelihood.latent_priors():
            with exclusive(), torch.no_grad():
                draws = self._draws(count) if count else iter([self._mean_values()])
                latents = self._latents([self._only_latents(values) for values in draws])
        return LinkOptions(link, max(count, FEWEST_SAMPLES) if count else 0, latents)

    # ------------------------------------------------------------------ statistics of norms

    @property
    def _averages_norms(self) -> bool:
        return self._runtime.norms is not None

    def update_norm_statistics(self, data_loader: Iterable[Any] | None) -> None:
        """Recompute the statistics of normalising layers: now at the centre, later at each draw.

        At the posterior's centre they become the net's own. From then on `predict` and similar
        methods, `to_ensemble` and `to_module` go through the loader for each draw, once a call.
        Only layers whose statistics `fit` changes take part; without any, nothing happens. The
        loader is neither copied nor saved with the BNN.

        Args:
            data_loader: yields `(inputs, targets)` or inputs; None restores the net's own
                statistics.

        Raises:
            TypeError: not a loader.
            ValueError: an empty loader; also in a prediction, such as a generator that is used up.

        Reference:
            Izmailov et al. 2018; for each draw, Maddox et al. 2019.
        """
        modes = self._fitted_modes()
        norms = [norm for norm in norms_of(self.net) if modes[norm]]
        self._runtime.norms = None
        if data_loader is None or not norms:
            return
        check_iterable(data_loader)
        data_loader = self._unpacked(data_loader, None)
        put_statistics(self._norm_statistics(self._mean_values(), (data_loader, norms)))
        if self._slots:  # without sites all draws are at the centre
            self._runtime.norms = data_loader, norms

    def _norm_statistics(
        self, values: Values, given: tuple[Any, list[Any]] | None = None
    ) -> Statistics:
        """Return the statistics of norms at a draw, or none where it takes the net's own."""
        loader, norms = given or self._runtime.norms or ((), [])
        if not norms:
            return {}
        own = {norm: {n: b.clone() for n, b in norm.named_buffers()} for norm in norms}
        with self._predicting():
            stand_in = self._stand_in(values, own)
        device = device_for(self)

        def run(batch: tuple[Any, Any]) -> None:
            with torch.no_grad():
                stand_in(on_device(batch[0], device))

        copies = {norm: stand_in.part(norm) for norm in norms}
        # A loader's numbers are its own, and the draws those without it. It runs as where it was
        # given, which is not within a prediction.
        batches = drawing_from(RandomStream(), batches_to_predict(loader, None, None))
        with torch.enable_grad():
            return averaged_statistics(copies, run, batches)
