"""Ensembles: a mixture of posteriors that are fitted separately."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from textwrap import indent
from typing import Any

import torch
from torch import Tensor, nn

from tyxe import check
from tyxe.bnn.batches import copied, is_loader
from tyxe.bnn.checkpoint import Saved
from tyxe.bnn.members import check_apart, fit_in_turn, fit_shares, fit_together
from tyxe.bnn.passes import DrawsOfEach, ReplayedDraws, map_batches, not_vectorized
from tyxe.bnn.predict import SupervisedBNN
from tyxe.bnn.scoring import Derived, check_evaluation, evaluated
from tyxe.data import Unpack, UnpackedList, concatenated
from tyxe.errors import warn
from tyxe.likelihoods import Likelihood
from tyxe.predictive.distributions import mixture
from tyxe.predictive.ensemble import Mixture, mixed
from tyxe.priors import Prior
from tyxe.processes import check_group
from tyxe.rng import fresh_seed
from tyxe.threads import as_before
from tyxe.util import Inputs, outside_inference


class EnsembleBNN(Derived, Saved, nn.Module):
    """A mixture of BNNs of any kind, such as nets trained from different starts.

    With members of maximum likelihood it is a deep ensemble; with SWAG, Multi-SWAG; with Laplace, a
    mixture of Gaussians. `num_predictions` always counts draws of each member. All other arguments
    are those of the members.

    Args:
        make_member: makes the BNN for an index, from 0. Nets need different starts: make a new net,
            or call `tyxe.util.reset_parameters_(net)`, perhaps on its head only.
        num_members: how many.
        weights: weights of the members, not negative; equal by default.

    Raises:
        TypeError: `make_member` does not return a BNN that predicts.
        ValueError: fewer than one member; members that share parameters, or have different kinds of
            likelihood; weights that do not fit.

    Reference:
        Lakshminarayanan, Pritzel, Blundell 2017; Wilson, Izmailov 2020, for other members.

    Example:
        >>> import pyro.distributions as dist, torch, tyxe
        >>> x, y = torch.randn(20, 2), torch.randint(3, (20,))
        >>> def make_member(index):
        ...     return tyxe.VariationalBNN(
        ...         nn.Linear(2, 3), tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True),
        ...         tyxe.likelihoods.Categorical(20))
        >>> ensemble = EnsembleBNN(make_member, 5)
        >>> _ = ensemble.fit([(x, y)], torch.optim.Adam, num_epochs=10)
        >>> ensemble.predict(x).softmax(-1).shape
        torch.Size([20, 3])
        >>> each = ensemble.predict(x, aggregate=False).softmax(-1)  # disagreement of the members
        >>> tyxe.predictive.entropy_decomposition(each).mutual_information.shape
        torch.Size([20])
    """

    @outside_inference()
    def __init__(
        self,
        make_member: Callable[[int], SupervisedBNN],
        num_members: int,
        *,
        weights: Sequence[float] | Tensor | None = None,
    ) -> None:
        super().__init__()
        num_members = check.count("num_members", num_members)
        expected = (
            "a function from the member's index to a new BNN, "
            "lambda index: tyxe.VariationalBNN(...)"
        )
        check.function("make_member", make_member, expected)
        members = [make_member(index) for index in range(num_members)]
        expected = "a BNN that predicts, such as tyxe.VariationalBNN(net, prior, likelihood)"
        for member in members:
            check.one_of("what make_member made", member, SupervisedBNN, expected)
        check_apart(members)
        self.members = nn.ModuleList(members)
        self.weights: Tensor | None
        self.register_buffer("weights", _checked_weights(weights, num_members))
        # What the last fit has still to do: the members' seeds, without those that are done.
        self._left: dict[int, int] = {}

    def __repr__(self) -> str:
        """Say how many members there are, what they have been fitted to, and what the first is."""
        states = Counter(member._described()["state"] for member in self._bnns)
        counted = "; ".join(f"{count} x {state}" for state, count in states.items())
        first = indent(f"(members[0]): {self._bnns[0]}", "  ")
        return f"EnsembleBNN(\n  members: {len(self._bnns)}\n  state: {counted}\n{first}\n)"

    @property
    def _bnns(self) -> list[SupervisedBNN]:  # type: ignore[override]
        return list(self.members)  # type: ignore[arg-type]

    @property
    def likelihood(self) -> Likelihood:  # type: ignore[override]
        """The first member's likelihood."""
        return self._bnns[0].likelihood

    # ------------------------------------------------------------------ fit

    @as_before()
    def fit(
        self,
        data_loader: Iterable[Any],
        *arguments: Any,
        resume: bool = False,
        member_callback: Callable[[EnsembleBNN, int], Any] | None = None,
        vectorize: bool = False,
        process_group: Any = None,
        **options: Any,
    ) -> list[Any]:
        """Fit one member after the other, or all at once, each with its own seed.

        Args:
            data_loader, arguments, options: those of the members' fit.
            resume: fit the members that the last fit, or a loaded one, has not finished.
            member_callback: called as `member_callback(ensemble, index)` after each member, for
                example to save what a killed program resumes from:
                `ensemble.save(path, training=True)`.
            vectorize: train `VariationalBNN`s together in stacked tensors, which is faster for
                small nets. Results are the same except for rounding and random numbers inside
                steps. `optim` has to treat every number separately, as SGD and Adam do; the other
                arguments are `num_epochs`, `device`, `beta`, `clip_norm`, `progress`, `unpack`,
                `validation`, `patience` and `restore_best`. The step is traced first, so short fits
                are faster in the loop.
            process_group: processes of `torch.distributed`, each with a loader of all data, among
                which the members are divided. At the end all have all members, as one process would
                have fitted them with the first process's seeds.

        Returns:
            The results of the members' fits, for the members that were left.

        Raises:
            ValueError: `vectorize` with members or arguments that it does not support, such as
                processes, with nets that `torch.vmap` does not support, or with members that
                differ in more than the values of their tensors.
            RuntimeError: `resume` with nothing left to fit; another process has failed. Errors and
                interrupts leave a member as it was before its fit, and earlier members fitted.
        """
        check.one_of("member_callback", member_callback, Callable | None, "a function, or None")
        check.flags(resume=resume, vectorize=vectorize)
        check_group(process_group)
        if resume:
            check.known(
                self._left or None,
                "there is no fit to resume: load what save(path, training=True) has written while "
                "it ran, or leave resume=True out",
            )
        before = self._left
        if not resume:
            self._left = {index: fresh_seed() for index in range(len(self.members))}
        asked = len(self._left)
        given = data_loader, *arguments
        try:
            if vectorize and process_group is not None:
                not_vectorized("fits in one process, and not in those of process_group")
            if vectorize:
                return fit_together(self, *given, **options)
            if process_group is not None:
                return fit_shares(self, process_group, member_callback, *given, **options)
            return fit_in_turn(self, member_callback, *given, **options)
        except (TypeError, ValueError):
            if len(self._left) == asked:  # nothing has begun
                self._left = before
            raise

    # ------------------------------------------------------------------ predict

    def _to_evaluate(self, loader: Any, unpack: Unpack | None = None) -> Any:
        """Return a loader, or a list, of batches as evaluations take them."""
        return self._bnns[0]._to_evaluate(loader, unpack)

    @contextmanager
    def _predicting(self, gradients: bool = False) -> Iterator[None]:
        """Run the members in eval mode, and with or without gradients."""
        if self._left:
            warn(
                f"members {[*self._left]} are not fitted, since fit was stopped: "
                "fit(..., resume=True) continues"
            )
        with ExitStack() as stack:
            for member in self._bnns:
                stack.enter_context(member._predicting(gradients))
            yield

    def predict(
        self,
        *inputs: Any,
        num_predictions: int | None = None,
        aggregate: bool = True,
        batch_size: int | None = None,
        unpack: Unpack | None = None,
        enable_grad: bool = False,
        **options: Any,
    ) -> Any:
        """Return the mixture of the members' predictions, or the outputs of all their draws.

        Args:
            inputs, batch_size, unpack, enable_grad, options: those of the members' `predict`.
            num_predictions: number of draws of each member, by default theirs; 0 predicts at the
                members' centres.
            aggregate: `False` returns the outputs, `(members * num_predictions, n, ...)`.
        """
        check.flags(aggregate=aggregate, enable_grad=enable_grad)
        count = self._num_draws(num_predictions, options)
        given = {"num_predictions": count, "aggregate": aggregate, **options}
        given["enable_grad"] = enable_grad
        draws = DrawsOfEach()

        def one(inputs: Inputs, _: Any, again: ReplayedDraws) -> Any:
            found = [m.predict(inputs, **given) for m, _ in draws.over(self._bnns, again)]
            return (
                mixed(self.likelihood, found, self.weights) if aggregate else concatenated(found, 0)
            )

        inputs = self._bnns[0]._to_predict(inputs, unpack)
        dim = 0 if aggregate else 1
        return map_batches(self, inputs, batch_size, one, dim, gradients=enable_grad)

    def predictive(self, *inputs: Any, unpack: Unpack | None = None, **options: Any) -> Any:
        """Return the mixture of the members' predictive distributions.

        Args:
            inputs, unpack, options: those of the members' `predictive`; batches of a loader are
                kept in memory.
        """
        inputs = self._bnns[0]._to_predict(inputs, unpack)
        if is_loader(inputs[0]):
            inputs = (UnpackedList(map(copied, inputs[0])),)
        with self._predicting(options.get("enable_grad", False)):
            found = [member.predictive(*inputs, **options) for member in self._bnns]
        return mixture(found, self.weights)

    def _num_draws(self, given: int | None, options: Mapping[str, Any]) -> int:
        """Return the draws of each member, which are as many of one as of another."""
        predictive = options.get("predictive")
        return max(
            member._num_draws(given, predictive or member._default_predictive)
            for member in self._bnns
        )

    def sample_predictive(
        self,
        *inputs: Any,
        num_samples: int = 100,
        batch_size: int | None = None,
        unpack: Unpack | None = None,
        **options: Any,
    ) -> Tensor:
        """Draw targets from the mixture, `(num_samples, n, ...)`, ordered by member.

        Args:
            inputs, batch_size, unpack, options: those of the members' `sample_predictive`.
            num_samples: number of samples, spread over the members by their weights.
        """
        num_samples = check.count("num_samples", num_samples)
        equal = torch.full([len(self.members)], 1 / len(self.members), device="cpu")
        shares = (equal if self.weights is None else self.weights).cumsum(0)[:-1]
        # From a place of chance, so that few samples are of every member at times.
        place = torch.rand((), device="cpu") if len(shares) else 0.0
        ends = [0, *(num_samples * shares + place).long().tolist(), num_samples]
        counts = [end - start for start, end in itertools.pairwise(ends)]
        asked = [(m, count) for m, count in zip(self._bnns, counts, strict=True) if count]
        draws = DrawsOfEach()

        def one(inputs: Inputs, _: Any, again: ReplayedDraws) -> Any:
            found = [
                member.sample_predictive(inputs, num_samples=count, **options)
                for (member, count), _ in draws.over(asked, again)
            ]
            return concatenated(found, 0)

        inputs = self._bnns[0]._to_predict(inputs, unpack)
        return map_batches(self, inputs, batch_size, one, 1)

    def evaluate(
        self,
        input_data: Inputs,
        y: Tensor | None = None,
        num_predictions: int | None = None,
        aggregate: bool = True,
        reduction: str = "sum",
        *,
        batch_size: int | None = None,
        unpack: Unpack | None = None,
        process_group: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return error and log-likelihood of the mixture, `log sum_k w_k p_k(y | x)`, in nats.

        Args:
            input_data, y, reduction, batch_size, unpack, process_group, options: of the members'
                `evaluate`.
            num_predictions: number of draws of each member, by default theirs.
            aggregate: `False` returns a row for each draw of each member, and one for a member with
                Gaussian outputs.
        """
        num_predictions = self._num_draws(num_predictions, options)
        y = check_evaluation(self, input_data, y, reduction, process_group)
        scorers = [m._scorer(num_predictions, aggregate, **options) for m in self._bnns]
        draws = DrawsOfEach()

        def score(inputs: Inputs, targets: Any, again: ReplayedDraws) -> tuple[Tensor, Tensor]:
            found = [one(inputs, targets, own) for one, own in draws.over(scorers, again)]
            kept, _ = self.likelihood.counted(targets)
            if not aggregate:
                rows = self.likelihood.score_counts(kept).dim()
                errors, logs = zip(*(one[:2] for one in found), strict=True)
                return _of_draws(errors, rows), _of_draws(logs, rows)
            predictions: list[Any] = [scores.prediction for scores in found]
            if predictions[0] is None:  # all points are masked
                return found[0][:2]
            prediction = mixed(self.likelihood, predictions, self.weights)
            logs = torch.stack([scores.log_likelihood for scores in found])
            together = self.likelihood._of_mixture(logs, prediction, kept, self.weights)
            return self.likelihood.errors(prediction, kept), together

        how = reduction, batch_size, unpack, process_group
        return evaluated(self, score, input_data, y, *how)

    def draw_weights(self, count: int) -> Tensor | None:
        """Return the weights of so many draws, which sum to one; None if all are equal.

        They belong to the draws of `predict(..., aggregate=False)`, for functions of stacked draws
        such as `tyxe.predictive.entropy_decomposition`.
        """
        if self.weights is None:
            return None
        each = count // len(self.members)
        return self.weights.repeat_interleave(each) / each

    _weights_of = draw_weights

    @property
    def _averages_norms(self) -> bool:
        return any(member._averages_norms for member in self.members)

    def update_norm_statistics(self, data_loader: Iterable[Any] | None) -> None:
        """Recompute norm statistics, see `SupervisedBNN.update_norm_statistics`."""
        for member in self._bnns:
            member.update_norm_statistics(data_loader)

    @outside_inference()
    def to_ensemble(self, num_draws: int | None = None) -> Mixture:
        """Return draws of all members as one plain module, see `SupervisedBNN.to_ensemble`."""
        parts: list[Any] = [member.to_ensemble(num_draws) for member in self._bnns]
        return Mixture(parts, self.weights)

    # ------------------------------------------------------------------ priors and state

    def update_prior(self, prior: Prior | Callable[[SupervisedBNN], Prior]) -> None:
        """Replace the members' priors, by one prior or by a function of each member.

        Errors are those of `BNN.update_prior`, and leave all priors unchanged.
        """
        with ExitStack() as undone:
            for member in self._bnns:
                new, old = prior if isinstance(prior, Prior) else prior(member), member.prior
                member.update_prior(new)
                undone.callback(member.update_prior, old)
            undone.pop_all()

    @outside_inference()
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict into all members, or raise a RuntimeError and change nothing."""
        prefixes = [f"members.{index}." for index in range(len(self.members))]
        parts = [
            {n.removeprefix(prefix): v for n, v in state_dict.items() if n.startswith(prefix)}
            for prefix in prefixes
        ]
        others = [name for name in state_dict if not name.startswith(tuple(prefixes))]
        if others != ([] if self.weights is None else ["weights"]) or not all(parts):
            raise RuntimeError(
                f"the state dict does not fit this ensemble of {len(parts)} members, which was "
                "left as it was: it is of one BNN, of another number, or one of the two has weights"
            )
        try:
            weights = _checked_weights(state_dict.get("weights"), len(parts))
        except ValueError as error:
            raise RuntimeError(f"{error} in the state dict; the ensemble is as it was") from None
        with ExitStack() as undone:
            for member, part in zip(self._bnns, parts, strict=True):
                before = copy.deepcopy(member.state_dict())
                undone.callback(setattr, member, "_stage", member._stage)
                undone.callback(member.load_state_dict, before, strict=False)
                member.load_state_dict(part, strict, assign)
            undone.pop_all()
        if self.weights is not None:
            self.weights = weights.to(self.weights)  # type: ignore[union-attr]

    def checkpoint(self) -> dict[str, Any]:
        """Return the state, and the members that the last fit did not finish, with their seeds."""
        return {"ensemble": dict(self.state_dict()), "left": [*map(list, self._left.items())]}

    @outside_inference()
    def load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Load a result of `checkpoint`, from which `fit(..., resume=True)` continues.

        Raises:
            RuntimeError: it does not fit, or is not a checkpoint of an ensemble. Nothing changes.
        """
        if not isinstance(checkpoint, Mapping) or checkpoint.keys() != {"ensemble", "left"}:
            raise RuntimeError(
                "this is no checkpoint of an ensemble: pass what its checkpoint() returned"
            )
        self.load_state_dict(checkpoint["ensemble"])
        self._left = dict(checkpoint["left"])


def _of_draws(scores: Iterable[Tensor], dims: int) -> Tensor:
    """Return the scores of all members' draws; those of one draw have `dims` dimensions."""
    return torch.cat([each if each.dim() > dims else each[None] for each in scores])


def _checked_weights(weights: Any, count: int) -> Tensor | None:
    if weights is None:
        return None
    found = check.tensor("weights", weights, dtype=torch.float32)
    check.shape("weights", found, (count,))
    check.numbers("weights", found, "numbers of 0 or more", least=0)
    total = check.number("the sum of weights", found.sum(), above=0)
    return found if abs(total - 1) < 1e-6 else found / total  # those of a file stay as they are
