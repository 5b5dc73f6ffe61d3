"""Averages from ordinary training: over the masks of dropout, and over the weights of SGD."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.infer.autoguide import AutoDelta
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from tyxe import check
from tyxe.bnn.base import DEFAULT_DRAWS, frozen_parts
from tyxe.bnn.checkpoint import History
from tyxe.bnn.checks import check_num_epochs
from tyxe.bnn.outputs import Values
from tyxe.bnn.passes import ReplayedDraws
from tyxe.bnn.standin import StandIn, in_modes, modes_of
from tyxe.bnn.variational import VariationalBNN
from tyxe.data import Output, Unpack
from tyxe.guides.normal import SWAGGuide
from tyxe.likelihoods import Likelihood
from tyxe.priors import IIDPrior, Prior
from tyxe.threads import exclusive
from tyxe.util import Inputs

# Modules whose mode says nothing but whether they drop: a transformer's layer has a fast path in
# eval mode that drops nothing.
_BY_MODE = (
    _DropoutNd,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
_NAMES = "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout"
_FUNCTIONS = {getattr(F, name) for name in _NAMES.split()}
# Those that these call.
_NAMES_BELOW = "dropout feature_dropout alpha_dropout feature_alpha_dropout"
_OPERATORS = {getattr(torch, name) for name in _NAMES_BELOW.split()}
# Parts that fits leave without dropout, and whether one of them runs here.
_STILL: ContextVar[tuple[nn.Module, ...]] = ContextVar("_STILL", default=())
_IS_STILL: ContextVar[bool] = ContextVar("_IS_STILL", default=False)


class DropoutBNN(VariationalBNN):
    """A net whose dropout stays random when it predicts: Monte Carlo dropout.

    A forward draws masks for every row, and each forward is one draw. `fit` is maximum likelihood
    with dropout; the optimiser's `weight_decay` acts as the prior. Dropout modules, dropout inside
    attention and recurrent layers, and functional dropout are random; everything else is in eval
    mode. A frozen part in eval mode, such as a backbone under a trained head, drops nothing, as in
    `fit`. Arguments are those of `SupervisedBNN`, without prior.

    Raises:
        ValueError: at the first forward, a net without active dropout.

    Reference:
        Gal, Ghahramani 2016.

    Example:
        >>> import torch, tyxe
        >>> net = nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Dropout(0.1), nn.Linear(50, 3))
        >>> bnn = DropoutBNN(net, tyxe.likelihoods.Categorical(10))
        >>> bnn.predict(torch.zeros(5, 2), num_predictions=8).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        name: str = "",
        *,
        output: Output | None = None,
        unpack: Unpack | None = None,
    ) -> None:
        prior = IIDPrior(dist.Normal(0, 1), hide_all=True)
        super().__init__(net, prior, likelihood, name=name, output=output, unpack=unpack)

    _drops = False  # whether a forward of a fit has met dropout

    def model(self, inputs: Inputs, obs: Tensor | None = None) -> Any:
        with nullcontext() if self._drops else self._dropping():
            predictions = super().model(inputs, obs)
        self._drops = True
        return predictions

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._dropping():
            return super().forward(*inputs, **kwargs)

    def _stacked_outputs(
        self,
        inputs: Inputs,
        num_predictions: int,
        vectorize: bool | None = None,
        again: ReplayedDraws | None = None,
        compile: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with self._dropping() if num_predictions else nullcontext():
            return super()._stacked_outputs(inputs, num_predictions, vectorize, again, compile)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        modes = modes_of(self) or {part: part.training for part in self.net.modules()}
        still = self._without_dropout()
        parts = [part for part in self.net.modules() if part not in still]
        dropping = [part for part in parts if isinstance(part, _BY_MODE)]
        modes = {**modes, **dict.fromkeys(still, False), **dict.fromkeys(dropping, True)}
        token = _STILL.set(tuple(still))
        try:
            with in_modes(self, modes), RandomDropout(parts) as dropout:
                yield
        finally:
            _STILL.reset(token)
        if not dropout.met:
            raise ValueError(
                f"nothing drops in this {type(self.net).__name__}, so that all draws are one: give "
                "it nn.Dropout layers with p above 0, or take tyxe.EnsembleBNN or tyxe.LaplaceBNN"
            )

    def _without_dropout(self) -> set[nn.Module]:
        """Return the parts that fits leave without dropout."""
        if {parameter.requires_grad for parameter in self.net.parameters()} != {True, False}:
            return set()  # nothing is frozen, or there is no fit
        return {part for part in frozen_parts(self.net) if not part.training}

    def _stand_in(self, *arguments: Any, **options: Any) -> StandIn:
        found = super()._stand_in(*arguments, **options)
        for part in _STILL.get():
            if not isinstance(part, torch.jit.ScriptModule):
                twin = found.part(part)
                twin.__dict__["forward"] = _still_forward(twin)
        return found

    def _draws_of_weights(self) -> int:
        return DEFAULT_DRAWS  # of masks

    def to_module(self, sample: bool = False) -> nn.Module:
        """Return a plain net without dropout; a `sample` is a TypeError, see `to_ensemble`."""
        return self.to_ensemble(1) if sample else super().to_module()

    def to_ensemble(self, num_draws: int | None = None, **options: Any) -> Any:
        """Raise a TypeError: masks are drawn in each forward, so there are no draws of weights."""
        raise TypeError(
            "dropout draws masks in every forward, and there are no draws of weights to take "
            "along: call predict, or to_module() for the net without dropout"
        )


def _still_forward(part: nn.Module) -> Callable[..., Any]:
    """Return the forward of a part, in which `RandomDropout` changes nothing."""
    own: Any = part.__dict__.get("forward")
    # A part that held itself would be freed by the garbage collector alone.
    kind, held = type(part), weakref.ref(part)

    def forward(*inputs: Any, **kwargs: Any) -> Any:
        token = _IS_STILL.set(True)
        try:
            if own is not None:
                return own(*inputs, **kwargs)
            return kind.forward(held(), *inputs, **kwargs)
        finally:
            _IS_STILL.reset(token)

    return forward


class RandomDropout(TorchFunctionMode):
    """Let functional dropout of a net drop in all modes, and count its uses in `met`.

    Dropout modules have to be in train mode too. A rate that a forward computes from its own
    `training` flag, as for `scaled_dot_product_attention`, is not changed.

    Args:
        parts: the modules that drop.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        # Recurrent layers drop inside of one function.
        recurrent = (part for part in parts if isinstance(part, nn.RNNBase))
        self.met = sum(part.dropout > 0 for part in recurrent if part.num_layers > 1)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _IS_STILL.get():
            return func(*args, **kwargs)
        if func in _FUNCTIONS:
            self._note(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
            args, kwargs = args[:2], {**kwargs, "training": True}
        elif func in _OPERATORS:
            names = ("input", "p", "train")
            x, rate, _ = [*args, *(kwargs[name] for name in names[len(args) :])]
            self._note(rate)
            args, kwargs = (x, rate, True), {}
        elif func is F.multi_head_attention_forward:
            # As `nn.MultiheadAttention` calls it, with the rate by position.
            self._note(args[10])
            kwargs["training"] = True
        return func(*args, **kwargs)

    def _note(self, rate: float) -> None:
        self.met += rate > 0


class SWAG_BNN(VariationalBNN):
    """Any net with a Gaussian about the weights that SGD goes through at a constant rate.

    The mean is that of the weights. The covariance is half of their variances plus half of a
    low-rank term: `tyxe.guides.SWAGGuide`. Hidden parameters and the likelihood's own variables
    keep the last values of the training. Arguments and errors that are not listed are those of
    `VariationalBNN`.

    Args:
        rank: number of snapshots in the low-rank term, and the smallest number for a posterior.

    Raises:
        ValueError: a rank below 2; a site with a constrained support.

    Reference:
        Maddox et al. 2019.

    Example:
        >>> import functools, torch, pyro.distributions as dist, tyxe
        >>> bnn = SWAG_BNN(
        ...     nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(8, scale=0.5), rank=5)
        >>> data = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(2)]
        >>> history = bnn.fit(data, functools.partial(torch.optim.SGD, lr=0.1), num_epochs=20)
        >>> mean, scale = bnn.predict(torch.zeros(3, 2), num_predictions=8)
    """

    net_guide: SWAGGuide
    _due = range(0)  # the epochs, counted from 1, after which snapshots are taken

    def __init__(
        self,
        net: nn.Module,
        prior: Prior,
        likelihood: Likelihood,
        rank: int = 20,
        name: str = "",
        *,
        output: Output | None = None,
        unpack: Unpack | None = None,
    ) -> None:
        has_own = isinstance(likelihood, Likelihood) and bool(likelihood.latent_priors())
        guide = functools.partial(SWAGGuide, rank=rank)
        own = AutoDelta if has_own else None
        super().__init__(net, prior, likelihood, guide, own, name, output=output, unpack=unpack)

    def _described(self) -> dict[str, Any]:
        guide = self.net_guide
        state = f"{int(guide.count)} snapshots, rank {guide.rank}" if guide.count else self._stage
        return {**super()._described(), "state": state}

    def _draws(self, num_predictions: int) -> Iterator[Values]:
        return map(self._for_net, super()._draws(num_predictions))

    def _mean_values(self) -> Values:
        """Return the mean of the snapshots, and inside of `fit` the weights that move."""
        return self._for_net(super()._mean_values())

    def collect(self, net: nn.Module) -> None:
        """Take a snapshot of a net that you train yourself, and its hidden parameters and buffers.

        Raises:
            ValueError: it differs in structure from the BNN's net, or is not finite.
        """
        own, state = self.net.state_dict(), net.state_dict()
        shapes = [{n: getattr(v, "shape", None) for n, v in part.items()} for part in (own, state)]
        if others := sorted(shapes[0].items() ^ shapes[1].items(), key=str):
            raise ValueError(
                f"{others[0][0]!r} is not the same in this {type(net).__name__} and in the BNN's "
                "net: collect takes a net like the one that the BNN was built with, and of a "
                "wrapped or compiled one what is inside (net.module, net._orig_mod)"
            )
        sites = {name: name.removeprefix(self.net_prior.prefix) for name in self._slots}
        with exclusive():
            part_of = self.net_prior.part_of
            self.net_guide.collect({n: part_of(own, state[own]) for n, own in sites.items()})
            # Of a tensor with single random weights, the others are the trained net's.
            whole = sites.values() - dict(self.net_prior.elements.items()).keys()
            hidden = {name: state[name] for name in state.keys() - whole}
            self.net.load_state_dict(hidden, strict=False)

    def reset(self) -> None:
        """Remove all snapshots, such as those of an earlier task; the weights stay."""
        self.net_guide.reset()

    def update_prior(self, prior: Prior) -> None:
        """Replace the prior; the next `fit` or `collect` then removes earlier snapshots.

        Errors are those of `BNN.update_prior`.
        """
        super().update_prior(prior)
        self.net_guide.ended.fill_(True)

    def fit(
        self,
        data_loader: Iterable[Any],
        optim: Any,
        num_epochs: int,
        callback: Callable[[VariationalBNN, int, float], Any] | None = None,
        *arguments: Any,
        start: float = 0.75,
        every: int = 1,
        **options: Any,
    ) -> History:
        """Maximise the posterior, take snapshots in later epochs, and update norm statistics.

        Let `callback` set a constant rate in `bnn.optimizer.param_groups`, such as half of the
        first. During the fit, predictions use the current weights. Another call adds to the
        snapshots, unless the prior was updated. `patience` counts epochs from the snapshot on that
        makes a posterior. The history's `kl` is minus the prior's log-density.

        Args:
            data_loader, optim, num_epochs, callback, arguments, options: of `VariationalBNN.fit`.
            start: fraction of all epochs, with those of a checkpoint, before the first snapshot.
            every: number of epochs from one snapshot to the next.

        Raises:
            ValueError: fewer snapshots than the rank; weights that are not finite; `restore_best`.
        """
        if options.setdefault("restore_best", False):
            raise ValueError("restore_best would undo the snapshots: leave it out")
        num_epochs = check_num_epochs(optim, num_epochs)
        every = check.count("every", every)
        check.number("start", start, least=0, below=1, hint=", a part of the epochs")
        done, guide = 0 if self._pending is None else self._pending["epoch"], self.net_guide
        first = math.ceil(start * (done + num_epochs) - 1e-9)
        due = range(first + every, done + num_epochs + 1, every)
        there, new = 0 if guide.ended else int(guide.count), sum(epoch > done for epoch in due)
        hint = (
            f", since that is the rank: {num_epochs} epochs with start={start} and every={every} "
            f"make {new}, so take a lower rank, more epochs or an earlier start"
        )
        check.count("the number of snapshots", there + new, guide.rank, hint)
        self._due, guide.moves = due, True
        try:
            history = super().fit(data_loader, optim, num_epochs, callback, *arguments, **options)
        finally:
            self._due, guide.moves = range(0), False
        if guide.count >= guide.rank:  # a callback may have stopped it before
            self.update_norm_statistics(data_loader)
        return history

    def _end_epoch(self, epoch: int) -> None:
        guide = self.net_guide
        if self._best is not None and (guide.ended or guide.count < guide.rank):
            self._best.waited = 0  # without a posterior, nothing can be predicted
        if epoch + 1 in self._due:
            guide.collect(guide.median())
        super()._end_epoch(epoch)
