"""What every wrapper shares: a copy of the net, with draws in the places of its sites."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tyxe.poutine import place
from tyxe.priors import Prior, SitePriors
from tyxe.priors.selection import parameters_of
from tyxe.util import SITE_PRIORS, call_with

__all__ = ["BNN", "modes_restored", "prior_fixed", "set_train_mode"]


@contextmanager
def modes_restored(module: nn.Module) -> Iterator[None]:
    """Give every submodule its train or eval mode back, whatever happened inside."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


# Not an attribute: a copy that a callback makes is not being fitted.
_FITTING: weakref.WeakSet[BNN] = weakref.WeakSet()


@contextmanager
def prior_fixed(bnn: BNN) -> Iterator[None]:
    """Let nobody update a BNN's prior: the objective, and what the optimiser knows, hang on it."""
    outer = bnn in _FITTING
    _FITTING.add(bnn)
    try:
        yield
    finally:
        if not outer:
            _FITTING.discard(bnn)


def _check_prior(prior: Any) -> None:
    if not isinstance(prior, Prior):
        raise TypeError(
            f"prior is a {type(prior).__name__}; expected one from tyxe.priors, such as "
            "tyxe.priors.IIDPrior(dist.Normal(0, 1))"
        )


def set_train_mode(bnn: BNN) -> None:
    """Put a BNN into train mode, but for parts of the net in which nothing is trained.

    A part whose parameters are all frozen, such as a backbone, keeps its modes: the statistics
    of its norms must not drift.
    """
    sites = {id(module._parameters[a]) for slots in bnn._slots.values() for module, a in slots}
    kept = [
        (module, module.training)
        for part in bnn.net.modules()
        if _is_frozen(part, sites)
        for module in part.modules()
    ]
    bnn.train()  # a net's own `train` may keep some of its parts in eval mode
    for module, mode in kept:
        module.training = mode


def _is_frozen(part: nn.Module, sites: set[int]) -> bool:
    parameters = list(part.parameters())
    return bool(parameters) and not any(p.requires_grad or id(p) in sites for p in parameters)


class BNN(nn.Module):
    """A net with a prior: base of all wrappers.

    The net is copied, and the copy keeps its class, its forward and its hooks. Parameters that
    the prior exposes are sites: while the net runs, draws stand in their places. The values that
    stay there otherwise are those that the net came with; they are not trained.

    Args:
        net: any module with parameters.
        prior: which parameters are sites, and their distributions.
        name: prefix of all site names.

    Raises:
        TypeError: not a module, or not a prior.
        ValueError: the net has no parameters, or the prior does not fit it.
    """

    def __init__(self, net: nn.Module, prior: Prior, name: str = "") -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise TypeError(f"net is a {type(net).__name__}; expected a torch.nn.Module")
        _check_prior(prior)
        if next(net.parameters(), None) is None:
            raise ValueError(f"{type(net).__name__} has no parameters, so nothing can be inferred")
        priors = prior.sites(net)
        self.name = name
        self.prior = prior
        self.net = copy.deepcopy(net)
        prefix = f"{name}.net." if name else "net."
        self.net_prior = SitePriors(priors, self.net, prefix)
        self.net.__dict__[SITE_PRIORS] = self.net_prior
        self._slots: dict[str, list[tuple[nn.Module, str]]] = {}
        for parameter in parameters_of(self.net):
            if parameter.name in priors:
                parameter.tensor.requires_grad_(False)
                self._slots[prefix + parameter.name] = list(parameter.places)
        # A trained net comes in eval mode; a fresh module is in train mode.
        set_train_mode(self)

    # ------------------------------------------------------------------ the net with draws

    @contextmanager
    def substituted(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Put values (draws, by joint name) in the places of sites; take them out at the end."""
        before = [
            (module._parameters, attribute, module._parameters[attribute])
            for slots in self._slots.values()
            for module, attribute in slots
        ]
        try:
            for name, slots in self._slots.items():
                if name not in values:
                    raise ValueError(
                        f"there is no draw for site {name!r}; the guide gives "
                        f"{', '.join(values) or 'none'}"
                    )
                value = place(name, values[name])
                for module, attribute in slots:
                    module._parameters[attribute] = value
            yield
        finally:
            for parameters, attribute, original in before:
                parameters[attribute] = original

    def run_net(self, values: Mapping[str, Tensor], inputs: Any) -> Any:
        """Return the net's output with values in the places of its sites.

        Args:
            values: one for each site, by joint name.
            inputs: a batch: a tensor, a tuple for several arguments, a mapping for keywords.
        """
        if not self._slots:
            return call_with(self.net, inputs)
        with self.substituted(values):
            return call_with(self.net, inputs)

    def update_prior(self, prior: Prior) -> None:
        """Replace the prior of the sites; which parameters are sites stays as it is.

        Args:
            prior: fits every site; its hide and expose rules are not asked.

        Raises:
            TypeError: not a prior.
            ValueError: the prior does not fit; the old one then stays.
            RuntimeError: a fit is going on, as it is in a callback.

        Example:
            >>> import tyxe, pyro.distributions as dist
            >>> bnn = tyxe.VariationalBNN(
            ...     nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1), tyxe.guides.AutoNormal)
            >>> posterior = bnn.net_guide.get_detached_distributions()
            >>> bnn.update_prior(tyxe.priors.DictPrior(posterior))
        """
        _check_prior(prior)
        if self in _FITTING:
            raise RuntimeError(
                "the prior cannot be updated within a fit, whose objective it is a part of; let "
                "the callback return True, and update it then"
            )
        prior.update_(self.net)
        self.prior = prior

    def net_at(self, values: Mapping[str, Tensor]) -> nn.Module:
        """Return a plain copy of the net, in eval mode, with values for its sites as parameters."""
        net = copy.deepcopy(self.net).eval()
        net.__dict__.pop(SITE_PRIORS, None)
        for parameter in parameters_of(net):
            name = self.net_prior.prefix + parameter.name
            if name in values:
                with torch.no_grad():
                    parameter.tensor.copy_(values[name])
                parameter.tensor.requires_grad_(True)
        return net

    # ------------------------------------------------------------------ state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict, or raise one error and change nothing.

        Raises:
            RuntimeError: the state is that of another architecture.
        """
        before, priors = copy.deepcopy(self.state_dict()), self.net_prior.snapshot()
        try:
            found = super().load_state_dict(state_dict, strict, assign)
            self._after_loading()
            return found
        except Exception as error:
            self.net_prior.restore(priors)
            super().load_state_dict(before, strict=False)
            self._after_loading()
            if "optimizer" in state_dict and "bnn" in state_dict:
                raise RuntimeError("this is a checkpoint; pass it to load_checkpoint") from None
            if not any(str(key).startswith("net.") for key in state_dict):
                raise RuntimeError(
                    "this is the state of a plain net; load it into the net, and start the guide "
                    "there: init_loc_fn=tyxe.guides.PretrainedInitializer.from_net(net)"
                ) from None
            raise RuntimeError(
                f"the state dict does not fit this {type(self).__name__}, which was left as it "
                "was; build it with the same net, prior, likelihood and guide. " + str(error)
            ) from None

    def _after_loading(self) -> None:
        """Form anew what follows from the state; an error undoes the loading."""

    def parameter_kinds(self) -> dict[str, str]:
        """Return the kind of each trainable parameter: `loc`, `scale` or `deterministic`."""
        kinds = {
            f"{part}.{name}": kind
            for part in ("net_guide", "likelihood_guide")
            if (guide := getattr(self, part, None)) is not None
            for name, kind in guide.parameter_kinds().items()
        }
        return {
            name: kinds.get(name, "deterministic")
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        }
