"""The base class of wrappers: a copy of the net, with draws in the places of its sites."""

from __future__ import annotations

import copy
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.nn.parameter import is_lazy

from tyxe.bnn.checkpoint import Saved
from tyxe.bnn.rerun import Resting, remember
from tyxe.data import Output, pick
from tyxe.errors import described
from tyxe.poutine.draw import substituted
from tyxe.priors import Prior
from tyxe.priors.selection import parameters_of
from tyxe.priors.sites import SitePriors
from tyxe.threads import INTERRUPTS, exclusive
from tyxe.util import NET, SITE_PRIORS, Inputs, call_with


@contextmanager
def modes_restored(module: nn.Module) -> Iterator[None]:
    """Restore the train or eval mode of every submodule at the end."""
    modes = _modes(module)
    try:
        yield
    finally:
        _set_modes(modes)


def _modes(module: nn.Module) -> list[tuple[nn.Module, bool]]:
    return [(part, part.training) for part in module.modules()]


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for part, mode in modes:
        part.training = mode


# The threads that fit BNNs, and BNNs whose prior must not change. Attributes would be copied by a
# callback's `deepcopy`.
_FITTING: weakref.WeakKeyDictionary[BNN, int] = weakref.WeakKeyDictionary()
_PRIOR_FIXED: weakref.WeakSet[BNN] = weakref.WeakSet()


@contextmanager
def fitting(bnn: BNN, train: bool) -> Iterator[None]:
    """Put a BNN into train or eval mode, and refuse other threads' fits of it, until the end.

    A BNN of which some part is in train mode already stays as it is. Between batches other threads
    may predict with it, and interrupts are let in where a batch is asked for.

    Raises:
        RuntimeError: another thread fits this BNN.
    """
    with INTERRUPTS:
        with exclusive():
            outer = _FITTING.get(bnn)
            if outer not in (None, threading.get_ident()):
                raise RuntimeError(
                    f"another thread is fitting this {type(bnn).__name__}; fit a copy.deepcopy of "
                    "it, or wait for the other fit"
                )
            modes = _modes(bnn)
            _FITTING[bnn] = threading.get_ident()
            if not train:
                bnn.eval()
            elif not any(mode for _, mode in modes):
                set_train_mode(bnn)
        try:
            yield
        finally:
            with exclusive():
                _set_modes(modes)
                if outer is None:
                    _FITTING.pop(bnn, None)


@contextmanager
def prior_fixed(bnn: BNN) -> Iterator[None]:
    """Refuse updates of a BNN's prior inside, on which the objective depends."""
    outer = bnn in _PRIOR_FIXED
    _PRIOR_FIXED.add(bnn)
    try:
        yield
    finally:
        if not outer:
            _PRIOR_FIXED.discard(bnn)


def _tensors_of(net: nn.Module) -> dict[str, Tensor]:
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def _check_prior(prior: Any) -> None:
    if not isinstance(prior, Prior):
        raise TypeError(
            f"prior is {described(prior)}; expected one from tyxe.priors, such as "
            "tyxe.priors.IIDPrior(dist.Normal(0, 1))"
        )


def _check_not_scripted(net: nn.Module, sites: Container[str]) -> None:
    for parameter in parameters_of(net):
        needed = parameter.name in sites or parameter.tensor.requires_grad
        if needed and isinstance(parameter.places[0][0], torch.jit.ScriptModule):
            raise TypeError(
                f"{parameter.name!r} is in a scripted or traced module, where neither draws nor "
                "optimisers reach a copy's parameters: give the BNN the module as it was before "
                "torch.jit, or freeze them"
            )


def _check_has_values(net: nn.Module) -> None:
    for name, parameter in net.named_parameters():
        if is_lazy(parameter) or parameter.is_meta:
            raise ValueError(
                f"{name!r} has no values yet: run the net on a batch before, or for the meta "
                "device net.to_empty(device=...), and load its weights"
            )


def set_train_mode(bnn: BNN) -> None:
    """Put a BNN into train mode, except for parts of the net in which nothing is trained.

    A part whose parameters are all frozen, such as a backbone, keeps its mode, so that the
    statistics of its normalising layers do not change.
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


class BNN(Saved, nn.Module):
    """Base of all wrappers: a net with a prior.

    The net is copied, and the copy keeps its class, forward and hooks. Parameters that the prior
    exposes are sites, in whose places draws are put while the net runs. At other times they have
    the values of the given net, which are not trained.

    Args:
        net: any module with parameters.
        prior: a prior of `tyxe.priors`, which says which parameters are sites.
        name: prefix of all site names.
        output: the predictions in what the net returns, where that is more than one tensor: a name,
            such as `"logits"`, an index, or a function.

    Raises:
        TypeError: not a module, or not a prior; sites or trainable parameters of a scripted module.
        ValueError: the net has no parameters, or these no values; the prior does not fit it.
    """

    def __init__(
        self, net: nn.Module, prior: Prior, name: str = "", *, output: Output | None = None
    ) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise TypeError(f"net is {described(net)}; expected a torch.nn.Module")
        _check_prior(prior)
        if next(net.parameters(), None) is None:
            raise ValueError(f"{type(net).__name__} has no parameters, so nothing can be inferred")
        _check_has_values(net)
        priors = prior.sites(net)
        _check_not_scripted(net, priors)
        self.name = name
        self.prior = prior
        self.net = copy.deepcopy(net)
        pick(self.net, output)
        prefix = f"{name}.net." if name else "net."
        self._slots: dict[str, list[tuple[nn.Module, str]]] = {
            prefix + parameter.name: list(parameter.places)
            for parameter in parameters_of(self.net)
            if parameter.name in priors
        }
        self._put_to_rest()
        self.register_load_state_dict_post_hook(BNN._put_to_rest)  # type: ignore[no-untyped-call]
        self.net_prior = SitePriors(priors, self.net, prefix)
        self.net.__dict__[SITE_PRIORS] = self.net_prior
        self.__dict__[NET] = self.net
        # A trained net comes in eval mode; a fresh module is in train mode.
        set_train_mode(self)

    def _put_to_rest(self, *_: Any) -> None:
        """Let the places of sites hold parameters that a backward can replace by draws."""
        for slots in self._slots.values():
            module, attribute = slots[0]
            held = module._parameters[attribute]
            assert held is not None
            if type(held) is not Resting:
                held = Resting(held.detach(), requires_grad=False)
                for module, attribute in slots:
                    module._parameters[attribute] = held

    def in_places(self) -> dict[str, Tensor]:
        """Return what is in the places of the sites now, by joint name."""
        owners = {name: slots[0] for name, slots in self._slots.items()}
        return {name: module._parameters[a] for name, (module, a) in owners.items()}  # type: ignore[misc]

    @contextmanager
    def substituted(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Put values, given by joint name, in the places of sites until the end.

        No other thread runs a BNN meanwhile.

        Raises:
            ValueError: a site has no value.
        """
        with exclusive(), substituted(self._slots, values):
            yield

    @contextmanager
    def predicting(self) -> Iterator[None]:
        """Run the net in eval mode and without gradients, and restore its modes at the end.

        No other thread runs a BNN meanwhile.
        """
        with exclusive(), modes_restored(self), torch.no_grad():
            self.eval()
            yield

    def run_net(self, values: Mapping[str, Tensor], inputs: Inputs) -> Any:
        """Return the net's output with values in the places of its sites.

        Args:
            values: a value for each site, by joint name.
            inputs: a batch: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        """
        with self.substituted(values):
            return remember(self, call_with(self.net, inputs))

    def update_prior(self, prior: Prior) -> None:
        """Replace the priors of the sites, which stay the same parameters.

        Args:
            prior: a prior that fits every site; its hide and expose rules have no effect.

        Raises:
            TypeError: not a prior.
            ValueError: the prior does not fit; the old one is kept.
            RuntimeError: a fit is running, as in a callback.

        Example:
            >>> import tyxe, pyro.distributions as dist
            >>> bnn = tyxe.VariationalBNN(
            ...     nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1), tyxe.guides.AutoNormal)
            >>> posterior = bnn.net_guide.get_detached_distributions()
            >>> bnn.update_prior(tyxe.priors.DictPrior(posterior))
        """
        _check_prior(prior)
        if self in _PRIOR_FIXED:
            raise RuntimeError(
                "the prior cannot be updated within a fit, whose objective it is a part of; let "
                "the callback return True, and update it then"
            )
        with exclusive():
            priors = prior.replacing(self.net_prior, self.net)
            self._follow_prior(priors)
            self.net_prior.adopt(priors)
            self.prior = prior

    @abstractmethod
    def _follow_prior(self, priors: SitePriors) -> None:
        """Recompute what depends on the sites' priors; an error leaves everything as it was."""

    def site_shapes(self) -> dict[str, Size]:
        """Return the shapes of the net's sites, by joint name."""
        owners = {name: slots[0] for name, slots in self._slots.items()}
        return {n: module._parameters[a].shape for n, (module, a) in owners.items()}  # type: ignore[union-attr]

    def nets_at(self, draws: Iterable[Mapping[str, Tensor]]) -> list[nn.Module]:
        """Return a plain copy of the net for each of several draws, which share all other tensors.

        Raises:
            ValueError: there are no draws.
        """
        nets: list[nn.Module] = []
        with exclusive():  # before the draws, which may bring buffers of their own
            own = {n: t for n, t in _tensors_of(self.net).items() if not isinstance(t, Resting)}
        for values in draws:
            with exclusive():
                first = _tensors_of(nets[0]) if nets else {}
                shared = {id(own[name]): tensor for name, tensor in first.items() if name in own}
                nets.append(self.net_at(values, shared))
        if not nets:
            raise ValueError("there are no draws; expected one or more")
        return nets

    def net_at(self, values: Mapping[str, Tensor], memo: dict[int, Any] | None = None) -> nn.Module:
        """Return a plain copy of the net, in eval mode, with values of its sites as parameters.

        Args:
            values: a value for each site, by joint name.
            memo: copies of parts that are there already, as `copy.deepcopy` takes them.
        """
        with exclusive():  # another thread may have draws in it
            net = copy.deepcopy(self.net, memo).eval()
        net.__dict__.pop(SITE_PRIORS, None)
        for parameter in parameters_of(net):
            name = self.net_prior.prefix + parameter.name
            if name in values:
                value = values[name].detach().to(parameter.tensor, copy=True)
                own = nn.Parameter(value)
                for module, attribute in parameter.places:
                    module._parameters[attribute] = own
        return net

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BNN:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._put_to_rest()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> BNN:
        with exclusive():  # another thread may have draws, or modes of its own, in the net
            reduced: Any = self.__reduce_ex__(4)
            make, arguments, state = reduced[:3]
            copied: BNN = make(*arguments)
            memo[id(self)] = copied
            copied.__setstate__(copy.deepcopy(state, memo))
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._put_to_rest()

    def _sites_in_state(self, prefix: str) -> dict[str, Tensor]:
        """Return what is in the places of the sites, by its names in a state dict."""
        named = self.net.named_parameters(f"{prefix}net", remove_duplicate=False)
        return {name: held for name, held in named if isinstance(held, Resting)}

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state: tensors only, without the values that the net's sites came with."""
        with exclusive():  # another thread may have draws in the places
            state = super().state_dict(*args, **options)
            for name in self._sites_in_state(options.get("prefix", "")):
                state.pop(name)
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._check_numbers(state_dict, prefix)  # a parent's state comes to here only
        for name, own in self._sites_in_state(prefix).items():
            state_dict.setdefault(name, own.detach())
        super()._load_from_state_dict(state_dict, prefix, *args)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict, or raise an error and change nothing.

        Raises:
            RuntimeError: the state dict does not fit this BNN, or has NaN in it.
        """
        with exclusive():
            return self._load_or_restore(state_dict, strict, assign)

    def _load_or_restore(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        self._check_numbers(state_dict, "")
        before = copy.deepcopy(self.state_dict())
        sites = {name: own.clone() for name, own in self._sites_in_state("").items()}
        priors = self.net_prior.snapshot()
        try:
            found = super().load_state_dict(state_dict, strict, assign)
            self._follow_prior(self.net_prior)
            return found
        except Exception as error:
            self.net_prior.restore(priors)
            super().load_state_dict(before | sites, strict=False)
            self._follow_prior(self.net_prior)
            if "optimizer" in state_dict and "bnn" in state_dict:
                raise RuntimeError("this is a checkpoint; pass it to load_checkpoint") from None
            ours = ("net.", "net_prior.", "net_guide.", "samples.")
            if not any(str(key).startswith(ours) for key in state_dict):
                raise RuntimeError(
                    "this is the state of a plain module, not of a BNN; a net's goes into the net, "
                    "before the BNN is built, and an ensemble's into what to_ensemble returns"
                ) from None
            raise RuntimeError(
                f"the state dict does not fit this {type(self).__name__}, which was left as it "
                "was; build it with the same net, prior, likelihood and guide. " + str(error)
            ) from None

    def _check_numbers(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Raise where anything in a state dict but the net's buffers has elements that are NaN."""
        of_net = dict(self.net.named_buffers(f"{prefix}net"))
        for name, value in state_dict.items():
            if name not in of_net and isinstance(value, Tensor) and bool(value.isnan().any()):
                raise RuntimeError(f"{name} of the state dict has NaN in it; the BNN is as it was")

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
