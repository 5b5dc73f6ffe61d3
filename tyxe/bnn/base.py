"""The base class of wrappers: a copy of the net, which runs with draws of its sites."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from textwrap import indent
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.nn.parameter import is_lazy

from tyxe import check
from tyxe.bnn.checkpoint import Saved
from tyxe.bnn.elbo import check_samples
from tyxe.bnn.runtime import Runtime
from tyxe.bnn.standin import (
    Modes,
    Outline,
    StandIn,
    detached_copies,
    in_modes,
    is_compiled,
    modes_of,
)
from tyxe.data import Output, pick
from tyxe.errors import warn
from tyxe.poutine.draw import substitute_site
from tyxe.predictive.forwards import Statistics, put_statistics
from tyxe.priors import Prior
from tyxe.priors.base import parameters_of
from tyxe.priors.sites import SitePriors
from tyxe.threads import as_before, exclusive, handlers
from tyxe.util import NET, SITE_PRIORS, Inputs, aligned, named_tensors, outside_inference

# Draws of weights in a prediction that is not told how many.
DEFAULT_DRAWS = 32


def _check_prior(prior: Any) -> None:
    expected = "one from tyxe.priors, such as tyxe.priors.IIDPrior(dist.Normal(0, 1))"
    check.one_of("prior", prior, Prior, expected)


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


def _another_kind(state_dict: Mapping[str, Any]) -> str:
    """Say what a state dict is that is none of a BNN, and where it goes."""
    if set(state_dict) == {"training", "content"}:
        return "this is what is in a file of save: call load(path)"
    if "optimizer" in state_dict and "bnn" in state_dict:
        return "this is a checkpoint; pass it to load_checkpoint"
    ours = ("net.", "net_prior.", "net_guide.", "samples.")
    if any(str(key).startswith(ours) for key in state_dict):
        return ""
    return (
        "this state is not that of one BNN: a net's goes into the net, before the BNN is built, "
        "and an ensemble's into an EnsembleBNN, or what to_ensemble returns"
    )


def set_train_mode(bnn: BNN) -> None:
    """Put a BNN into train mode, except for parts of the net in which nothing is trained."""
    modes = bnn._modes(train=True)
    bnn.train()
    for part in bnn.net.modules():
        part.training = modes.get(part, part.training)


def frozen_parts(net: nn.Module, sites: Iterable[Tensor] = ()) -> list[nn.Module]:
    """Return the parts of a net with parameters of which none is trained, and what they hold."""
    fitted = {id(own) for own in sites}
    found: list[nn.Module] = []
    for part in net.modules():
        own = [*part.parameters()]
        if own and not any(p.requires_grad or id(p) in fitted for p in own):
            found += part.modules()
    return found


class BNN(Saved, nn.Module):
    """Base of all wrappers: a net with a prior.

    The net is copied, with its class, forward and hooks. Parameters that the prior exposes are
    sites: while the net runs, they are replaced by draws. At other times they keep the values of
    the given net, which are not trained. Embeddings of the copy have dense gradients.

    Args:
        net: any module with parameters.
        prior: a prior of `tyxe.priors`, which says which parameters are sites.
        name: prefix of all site names.
        output: picks the predictions from the net's output, if that is more than one tensor: a
            name, such as `"logits"`, an index, or a function.

    Raises:
        TypeError: not a module, or not a prior; sites or trainable parameters of a scripted module.
        ValueError: the net has no parameters, or they have no values; the prior does not fit.
    """

    @outside_inference()
    def __init__(
        self, net: nn.Module, prior: Prior, name: str = "", *, output: Output | None = None
    ) -> None:
        super().__init__()
        check.one_of("net", net, nn.Module, "a torch.nn.Module")
        check.one_of("name", name, str, "a string")
        _check_prior(prior)
        if next(net.parameters(), None) is None:
            raise ValueError(f"{type(net).__name__} has no parameters, so nothing can be inferred")
        _check_has_values(net)
        priors, elements = prior.sites(net), prior.elements(net)
        _check_not_scripted(net, priors)
        self.prior = prior
        self.net = copy.deepcopy(net, detached_copies(net))
        pick(self.net, output)
        for part in self.net.modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag):
                part.sparse = False  # few optimisers, no chain and no curvature take such gradients
        prefix = f"{name}.net." if name else "net."
        self._slots: dict[str, list[tuple[nn.Module, str]]] = {
            prefix + parameter.name: list(parameter.places)
            for parameter in parameters_of(self.net)
            if parameter.name in priors
        }
        for name, own in self.net.named_parameters():
            if name in priors or name in elements:
                own.requires_grad_(False)
        self.net_prior = SitePriors(priors, self.net, prefix, elements)
        self.net.__dict__[SITE_PRIORS] = self.net_prior
        self.__dict__[NET] = self.net
        self._runtime = Runtime()
        if any(map(is_compiled, self.net.modules())):
            warn(
                "compiled modules of the net run uncompiled, since each forward has draws of its "
                "own: pass the net as it was before torch.compile, and compile what to_ensemble "
                "returns"
            )
        # A trained net comes in eval mode; a fresh module is in train mode.
        set_train_mode(self)

    # Whether there is a posterior yet, in words. Copies keep it, and states have nothing of it.
    _stage = "not fitted"

    def __repr__(self) -> str:
        """Say what the BNN is made of, how many weights are random, and whether it is fitted."""
        described = self._described()
        described["state"] = described.pop("state")  # the last line
        if not self._slots:  # nothing has it
            del described["prior"]
        parts = "".join(f"  {name}: {part}\n" for name, part in described.items())
        return f"{type(self).__name__}(\n{parts}{indent(f'(net): {self.net}', '  ')}\n)"

    def _described(self) -> dict[str, Any]:
        """Return the lines of `repr` by name."""
        sites = [shape.numel() for shape in self._site_shapes().values()]
        total = sum(tensor.numel() for tensor in self.net.parameters())
        guides = {"guide": "net_guide", "likelihood guide": "likelihood_guide"}
        found = {name: self._modules.get(part) for name, part in guides.items()}
        return {
            "prior": self.prior,
            "random weights": f"{sum(sites):,} of {total:,}, in {len(sites)} sites",
            # Of a Pyro guide, the class that the user knows.
            **{
                name: type(getattr(guide, "guide", guide)).__name__
                for name, guide in found.items()
                if guide is not None
            },
            "state": self._stage,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> BNN:
        """Copy the BNN; of tensors with a graph that its net keeps, the numbers."""
        for key, tensor in detached_copies(self).items():
            memo.setdefault(key, tensor)
        memo[id(self)] = other = type(self).__new__(type(self))
        other.__setstate__(copy.deepcopy(self.__reduce_ex__(4)[2], memo))  # type: ignore[no-untyped-call]
        return other

    def _in_places(self) -> dict[str, Tensor]:
        """Return the parameters in whose places draws are put, by joint name."""
        owners = {name: slots[0] for name, slots in self._slots.items()}
        return {name: module._parameters[a] for name, (module, a) in owners.items()}  # type: ignore[misc]

    def _own_values(self) -> dict[str, Tensor]:
        """Return the values that the sites came with, by joint name."""
        prefix, places = self.net_prior.prefix, self._in_places().items()
        return {n: self.net_prior.part_of(n.removeprefix(prefix), own) for n, own in places}

    def _replaced(self) -> set[int]:
        """Return the `id`s of parameters of which a draw leaves nothing."""
        parts = {self.net_prior.prefix + name for name in self.net_prior.elements}
        return {id(own) for name, own in self._in_places().items() if name not in parts}

    @property
    def _like(self) -> Tensor:
        """A tensor in the dtype of the sites, the widest, and on their device.

        Other parameters may be in half precision, complex or integers. Without sites it is a
        parameter of the net.
        """
        if sites := self._in_places():
            return max(sites.values(), key=Tensor.element_size)
        others = [p for p in self.net.parameters() if p.is_floating_point()]
        return max(others or self.net.parameters(), key=Tensor.element_size)

    @property
    def _outline(self) -> Outline:
        """What stand-ins need to know of the net, from one look at it."""
        if self._runtime.outline is None:
            self._runtime.outline = Outline(self.net)
        return self._runtime.outline

    def _modes(self, train: bool) -> Modes:
        """Return in which modes the parts of the net run in a fit, or in a prediction.

        In a fit a part whose parameters are all frozen, such as a backbone, keeps its mode, so that
        the statistics of its normalising layers do not change.
        """
        parts = [*self.net.modules()]
        if not train and all(type(part).train is nn.Module.train for part in parts):
            return dict.fromkeys(parts, False)
        # A net's own `train` may keep some of its parts in eval mode.
        modes = StandIn(self.net, self._outline, {}, {}).modes_by(lambda net: net.train(train))
        if train:
            frozen = frozen_parts(self.net, self._in_places().values())
            modes |= {part: part.training for part in frozen}
        return modes

    def _fitted_modes(self) -> Modes:
        """Return the modes of a fit: the net's own, if any part of the BNN is in train mode."""
        if any(part.training for part in self.modules()):
            return {part: part.training for part in self.net.modules()}
        return self._modes(train=True)

    def _stand_in(
        self,
        values: Mapping[str, Tensor],
        statistics: Statistics | None = None,
        *,
        frozen: bool = False,
    ) -> StandIn:
        """Return a stand-in of the net with values of its sites, and perhaps statistics of norms.

        With `frozen`, no gradients are recorded for other parameters.
        """
        tensors = self._tensors_at(values)
        if frozen:
            others = (p for p in self.net.parameters() if p.requires_grad)
            tensors |= {id(p): p.detach() for p in others}
        return StandIn(self.net, self._outline, tensors, modes_of(self), statistics)

    def _tensors_at(
        self, values: Mapping[str, Tensor], others: Mapping[int, Tensor] | None = None
    ) -> dict[int, Tensor]:
        """Return values of sites, as handlers have them, by the `id` of the parameter there.

        `others` are other tensors in the places of parameters, for sites that are a part of one.
        """
        tensors: dict[int, Tensor] = {}
        prior, has_handlers = self.net_prior, bool(handlers())
        for name, slots in self._slots.items():
            check_samples(name, values)
            value = substitute_site(name, values[name]) if has_handlers else values[name]
            own: Any = slots[0][0]._parameters[slots[0][1]]
            if others is not None:
                own = others.get(id(own), own)
            value = aligned(prior.whole_of(name.removeprefix(prior.prefix), own, value))
            for module, attribute in slots:
                tensors[id(module._parameters[attribute])] = value
        return tensors

    @contextmanager
    def _predicting(self, gradients: bool = False) -> Iterator[None]:
        """Run the net in eval mode until the end, and with or without gradients."""
        as_it_is = not any(part.training for part in self.net.modules())
        modes = None if as_it_is else self._modes(train=False)
        with as_before(), outside_inference(gradients), in_modes(self, modes):
            yield

    def _run_net(self, values: Mapping[str, Tensor], inputs: Inputs) -> Any:
        """Return the net's output on a batch, with values by joint name in its sites' places."""
        return self._stand_in(values)(inputs)

    def _run_frozen(self, values: Mapping[str, Tensor], inputs: Inputs) -> Any:
        """Return what `_run_net` does, without gradients in other parameters."""
        return self._stand_in(values, frozen=True)(inputs)

    @outside_inference()
    def update_prior(self, prior: Prior) -> None:
        """Replace the priors of the sites; the choice of sites does not change.

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
        if self._runtime.prior_is_fixed:
            raise RuntimeError(
                "the prior cannot be updated within a fit, since it is part of the objective; let "
                "the callback return True, and update it after the fit"
            )
        with exclusive():
            priors = prior.replacing(self.net_prior, self.net)
            self._follow_prior(priors)
            self.net_prior.restore(priors.snapshot())
            self.prior = prior

    @abstractmethod
    def _follow_prior(self, priors: SitePriors) -> None:
        """Recompute what depends on the sites' priors; an error leaves everything as it was."""

    def _site_shapes(self) -> dict[str, Size]:
        """Return the shapes of the net's sites, by joint name."""
        return {name: own.shape for name, own in self._own_values().items()}

    def _nets_at(self, draws: Iterable[tuple[Mapping[str, Tensor], Statistics]]) -> list[nn.Module]:
        """Return a plain copy of the net for each draw; all of them share the other tensors."""
        sites = {id(own) for own in self._in_places().values()}
        own = {n: t for n, t in named_tensors(self.net).items() if id(t) not in sites}
        nets: list[nn.Module] = []
        for values, statistics in draws:
            first = named_tensors(nets[0]) if nets else {}
            shared = {id(own[name]): tensor for name, tensor in first.items() if name in own}
            nets.append(self._net_at(values, statistics, shared))
        return nets

    def _net_at(
        self,
        values: Mapping[str, Tensor],
        statistics: Statistics | None = None,
        memo: dict[int, Any] | None = None,
    ) -> nn.Module:
        """Return a plain copy of the net, in eval mode, with values of its sites as parameters.

        `memo` has copies of parts that are there already, as `copy.deepcopy` takes them.
        """
        memo = {} if memo is None else memo
        memo.update({key: t for key, t in detached_copies(self.net).items() if key not in memo})
        net = copy.deepcopy(self.net, memo).eval()
        put_statistics({memo[id(norm)]: b for norm, b in (statistics or {}).items()})
        net.__dict__.pop(SITE_PRIORS, None)
        for parameter in parameters_of(net):
            name = self.net_prior.prefix + parameter.name
            if name in values:
                value = self.net_prior.whole_of(parameter.name, parameter.tensor, values[name])
                own = nn.Parameter(value.detach().to(parameter.tensor, copy=True))
                for module, attribute in parameter.places:
                    module._parameters[attribute] = own
        return net

    def _sites_in_state(self, prefix: str) -> dict[str, Tensor]:
        """Return the parameters of which draws leave nothing, by their names in a state dict."""
        sites = self._replaced()
        named = self.net.named_parameters(f"{prefix}net", remove_duplicate=False)
        return {name: held for name, held in named if id(held) in sites}

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state: tensors only, without the values that the net's sites came with."""
        with exclusive(), as_before():  # no state of a step that is half taken
            state = super().state_dict(*args, **options)
        for name in self._sites_in_state(options.get("prefix", "")):
            state.pop(name)
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._check_numbers(state_dict, prefix)  # a parent's state comes to here only
        for name, own in self._sites_in_state(prefix).items():
            state_dict.setdefault(name, own.detach())
        super()._load_from_state_dict(state_dict, prefix, *args)

    @outside_inference()
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict, or raise an error and change nothing.

        Raises:
            RuntimeError: the state dict does not fit this BNN, or has NaN in it.
        """
        with exclusive(), as_before():
            return self._load_or_restore(state_dict, strict, assign)

    def _load_or_restore(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        self._check_numbers(state_dict, "")
        before = copy.deepcopy(self.state_dict())
        sites = {name: own.clone() for name, own in self._sites_in_state("").items()}
        priors = self.net_prior.snapshot()
        try:
            found = super().load_state_dict(state_dict, strict, assign)
            self._follow_prior(self.net_prior)
            self._stage = "loaded"
            return found
        except BaseException as error:
            self.net_prior.restore(priors)
            super().load_state_dict(before | sites, strict=False)
            self._follow_prior(self.net_prior)
            if not isinstance(error, Exception):
                raise
            reason = _another_kind(state_dict) or (
                f"the state dict does not fit this {type(self).__name__}, which was left as it "
                f"was; build it with the same net, prior, likelihood and guide. {error}"
            )
            raise RuntimeError(reason) from None

    def _check_numbers(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Raise where anything in a state dict but the net's buffers has elements that are NaN.

        What inference has set, or will train, may not be infinite either. In priors the logarithm
        of a weight may be, and in frozen tensors a mask.
        """
        of_net = dict(self.net.named_buffers(f"{prefix}net"))
        trained = {f"{prefix}{name}" for name, p in self.named_parameters() if p.requires_grad}
        parts = tuple(f"{prefix}{part}." for part in ("net_guide", "likelihood_guide", "samples"))
        for name, value in state_dict.items():
            if name in of_net or not isinstance(value, Tensor):
                continue
            is_finite = name in trained or str(name).startswith(parts)
            if bool((~value.isfinite() if is_finite else value.isnan()).any()):
                what = "NaN" if bool(value.isnan().any()) else "infinities"
                raise RuntimeError(f"{name} of the state dict has {what}; the BNN is as it was")

    def _num_draws(
        self,
        given: int | None,
        predictive: Any = "bnn",
        name: str = "num_predictions",
        least: int = 0,
    ) -> int:
        """Return the number of draws that a call is given, or else one that shows the spread."""
        if given is not None:
            return check.count(name, given, least)
        return self._draws_of_weights() if predictive == "bnn" else DEFAULT_DRAWS

    def _draws_of_weights(self) -> int:
        """Return the default number of draws, which is one where all of them are alike."""
        guides = (getattr(self, part, None) for part in ("net_guide", "likelihood_guide"))
        has_spread = any(guide is not None and guide.has_spread for guide in guides)
        return DEFAULT_DRAWS if has_spread else 1

    def _parameter_kinds(self) -> dict[str, str]:
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
