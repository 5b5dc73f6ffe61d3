"""Variational Laplace: the ELBO of a Normal guide, expanded about its mean instead of sampled."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import pyro.distributions as dist
import torch
import torch.distributions as td
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import Message, effectful
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.attention import SDPBackend, sdpa_kernel

from tyxe import check
from tyxe.distributions import as_gaussian, independent_moments
from tyxe.errors import warn
from tyxe.poutine import second_order
from tyxe.poutine.draw import Draw, draws_are_lazy
from tyxe.poutine.second_order import CURVATURES, NONSMOOTH, WITHOUT_SECOND_DERIVATIVE


def _check_alone(is_alone: bool) -> None:
    if not is_alone:
        raise RuntimeError(
            "variational_laplace runs the net at its guide's means, and another handler around it "
            "samples the same sites: use one of them, such as local_reparameterization, at a time"
        )


@effectful(type="epoch")
def announce_epoch(net: nn.Module, kl_weight: float) -> None:
    """Tell handlers, before an epoch, which net is trained and the weight `beta` of the KL."""


class variational_laplace(Messenger):
    r"""Fit a Normal guide without sampling weights, by an expansion of the ELBO about its means.

    To second order, `E_q log p(y | w) = log p(y | mu) + 1/2 sum_l sigma_l^2 d^2 log p / dmu_l^2`,
    for independent weights with means `mu` and variances `sigma^2`. Around `fit`, the net runs once
    per step, at the means, and the second term is added to the data term and scaled with it:

    - `"fisher"`: `-1/2 sum_l sigma_l^2 gt_l^2`, where `gt` is the gradient of the batch's summed
      log-likelihood at labels drawn from the model [VL 28, 29]. It is unbiased for the Fisher
      information, never positive, and takes one more backward pass.
    - `"hessian"`: the exact diagonal at the true labels [VL 18]. It takes a backward pass for each
      weight, so it is for small nets. If it is positive a variance may grow without bound, and
      there is a warning.
    - `"empirical"`: the gradient at the true labels [VL 26], for comparison. It is biased, by the
      squared mean of the gradient.

    Everything else stays the same: the KL and `beta`, masks and scales, `num_particles` (draws of
    labels), draws of the likelihood's own variables. The curvature is differentiated, so
    activations should have second derivatives (`nn.Softplus`, `nn.SiLU`, `nn.GELU`, `nn.Tanh`); a
    warning names those that have none. Inside, fused attention is replaced by its plain form,
    and a `fit` of a net with recurrent layers does without cuDNN.

    Adam moves a parameter by no more than its learning rate in a step: start scales at
    `init_scale=tyxe.guides.scale_below_prior()` and give them `lr_multipliers={"scale": 10}`, or
    they hardly change during training [VL 5.2].

    Args:
        curvature: `"fisher"`, `"hessian"` or `"empirical"`.

    Raises:
        ValueError: another curvature; with `"hessian"`, a net that is too large for it.
        TypeError: in `fit`, posteriors that are not independent Normals, or a likelihood that
            cannot draw labels.
        RuntimeError: another handler samples the same sites; gradients are off; a function of the
            net has no second derivative; the curvature is not finite.

    References:
        [VL] 4, eq. 18-29; [GR] 4.

    Example:
        >>> import functools, pyro.distributions as dist, tyxe
        >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> bnn = tyxe.VariationalBNN(
        ...     net, tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(5, scale=0.1),
        ...     functools.partial(
        ...         tyxe.guides.AutoNormal, init_scale=tyxe.guides.scale_below_prior()))
        >>> data = [(torch.ones(5, 1), torch.zeros(5, 1))]
        >>> with variational_laplace():
        ...     history = bnn.fit(data, torch.optim.Adam, 2, lr_multipliers={"scale": 10})
        >>> len(history.loss)
        2
    """

    def __init__(self, curvature: str = "fisher") -> None:
        super().__init__()
        self.curvature: str = check.choice("curvature", curvature, CURVATURES)
        self._forget()

    def _forget(self) -> None:
        # Draws made here, to tell them from those of another handler.
        self._made: WeakSet[Any] = WeakSet()
        self._unfit: dict[str, str] = {}
        self._sites: dict[str, second_order.Expansion] = {}
        self._priors: dict[str, Any] = {}
        self._is_used = self._ran = self._met_data = False
        self._looked_for_nonsmooth = self._warned_of_growth = False
        self._net: nn.Module | None = None
        self._kl_weight = 1.0

    @property
    def configuration(self) -> str:
        """What its answers depend on, for programs of steps."""
        return self.curvature

    def __enter__(self) -> variational_laplace:
        """Raise if another handler that samples inside the net is active."""
        _check_alone(not draws_are_lazy())
        super().__enter__()
        self._plain = ExitStack()
        # Fused attention has no second derivative.
        self._plain.enter_context(sdpa_kernel([SDPBackend.MATH]))
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> Any:
        """Warn if no data were met."""
        had_no_data = self._ran and not self._met_data
        try:
            self._plain.close()
            self._forget()
        finally:
            result = super().__exit__(exc_type, exc_value, traceback)
        if had_no_data and exc_type is None:
            warn(
                "variational_laplace ran a net at its guide's means, but met no data: it belongs "
                "around fit. Predict outside of it; num_predictions=0 is the mean network",
            )
        return result

    # ------------------------------------------------------------------ the net at its means

    def _pyro_lazy(self, msg: Message) -> None:
        msg["value"], msg["done"] = True, True

    def _pyro_sample(self, msg: Message) -> None:
        if msg["is_observed"] or msg["infer"].get("is_auxiliary"):
            return
        name, fn = msg["name"], msg["fn"]
        if msg["done"] or msg["value"] is not None:
            # The model's prior of a site that the guide has drawn.
            self._priors[name] = fn
        elif as_gaussian(fn) is not None and not fn.batch_shape:
            draw = Draw(name, fn)
            self._made.add(draw._source)
            msg["value"], msg["done"] = draw, True
            self._unfit.pop(name, None)
        else:
            self._unfit[name] = type(fn).__name__

    def _pyro_substitute_site(self, msg: Message) -> None:
        name, value = msg["args"]
        if name in self._unfit:
            net = name[: name.find("net.") + len("net.")]
            sites = [site for site in self._unfit if site.startswith(net)]
            unfit = ", ".join(f"{site} ({self._unfit[site]})" for site in sites)
            raise TypeError(
                "variational_laplace expands about the mean of independent Normals, which these "
                f"sites' posteriors are not: {unfit}; use tyxe.guides.AutoNormal"
            )
        if not isinstance(value, Draw):
            return  # values that the caller chose
        _check_alone(value._source in self._made)
        fn = value._source.distribution
        moments = None if fn is None else independent_moments(fn)
        assert moments is not None  # of a Gaussian, as all that are made here
        loc, variance = moments
        # After the likelihood has used the means, a new run of the model begins.
        self._sites = {} if self._is_used else self._sites
        self._ran, self._is_used = True, False
        mean = loc if loc.requires_grad else loc.detach().requires_grad_()
        self._sites[name] = second_order.Expansion(name, mean, variance)
        msg["args"] = (name, mean)

    def _pyro_linear_map(self, msg: Message) -> None:
        # Only `report` puts draws in the places of means.
        msg["infer"]["treatment"] = "mean"

    # ------------------------------------------------------------------ the data at the means

    def _pyro_epoch(self, msg: Message) -> None:
        net, self._kl_weight = msg["args"]
        if net is not self._net:
            self._net, self._looked_for_nonsmooth, self._warned_of_growth = net, False, False
            if any(isinstance(part, nn.RNNBase) for part in net.modules()):
                # Those of cuDNN have no second derivative.
                self._plain.enter_context(torch.backends.cudnn.flags(enabled=False))

    def _pyro_post_sample(self, msg: Message) -> None:
        if not msg["is_observed"] or not self._sites or not _has_data(msg["fn"]):
            return
        self._is_used = self._met_data = True
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "variational_laplace differentiates the log-likelihood, but gradients are off: "
                "leave out torch.no_grad around the objective"
            )
        if msg["infer"].get("has_weights"):
            raise ValueError(
                "variational_laplace counts each point once, and these have weights: leave them out"
            )
        if msg["infer"].get("has_target_hessian") and self.curvature == "fisher":
            raise TypeError(
                "variational_laplace draws labels, which are not censored as the targets are: use "
                "curvature='hessian' or 'empirical'"
            )
        fn, mask, sites = msg["fn"], msg["mask"], list(self._sites.values())
        log_prob = fn.log_prob(msg["value"])
        if not self._looked_for_nonsmooth:
            self._looked_for_nonsmooth = True
            _check_smoothness(log_prob, self._net)
        labels = self._labels(fn, msg["value"])
        gradients = second_order.gradients_at_means(fn, labels, mask, sites)
        diagonals: list[Tensor] = []
        if self.curvature == "hessian":
            diagonals = second_order.hessian_diagonals(gradients, sites)
            parts = [(s.variance * d).sum() for s, d in zip(sites, diagonals, strict=True)]
            terms = 0.5 * torch.stack(parts)
        else:
            terms = second_order.minus_half_of_squares(gradients, sites)
        is_traced = get_proxy_mode() is not None  # numbers are those of later runs, looked at there
        if not is_traced:
            self._check_finite(terms, log_prob)
            self._warn_of_growth(diagonals, msg["scale"])
        rows = fn.batch_shape
        counted = int(mask.expand(rows).sum()) if isinstance(mask, Tensor) else rows.numel()
        # Divided among the rows that count, so that mask and plate scale apply to it.
        msg["fn"] = second_order.Shifted(fn, terms.sum() / max(counted, 1))

    def _labels(self, fn: Any, value: Tensor) -> Tensor:
        """Return the labels at which the log-likelihood is differentiated."""
        return second_order.pseudo_labels(fn) if self.curvature == "fisher" else value

    def _check_finite(self, terms: Tensor, log_prob: Tensor) -> None:
        # If the log-likelihood itself is not finite, the code that computes the loss reports it.
        if bool(terms.sum().isfinite()) or not bool(log_prob.isfinite().all()):
            return
        names = [n for n, one in zip(self._sites, terms, strict=True) if not bool(one.isfinite())]
        raise RuntimeError(
            f"the curvature of the log-likelihood is not finite at {', '.join(names)}: start "
            "scales lower, or look for a function in the net whose second derivative is infinite "
            "(a square root or norm of something that is 0)"
        )

    def _warn_of_growth(self, diagonals: list[Tensor], scale: Any) -> None:
        """Warn where the expansion gains more from a larger variance than the KL costs [VL 23]."""
        for name, diagonal in zip(self._sites, diagonals, strict=False):
            prior = self._priors.get(name)
            moments = None if prior is None else independent_moments(prior)
            if moments is None or self._warned_of_growth:
                continue
            grows = int((scale * diagonal * moments[1] >= self._kl_weight).sum())
            if grows:
                self._warned_of_growth = True
                warn(
                    f"the log-likelihood curves upwards at {grows} weights of {name!r} by more "
                    "than the KL curves down, so that their variances grow without bound under "
                    'curvature="hessian": start from trained means, cap the scales '
                    '(max_guide_scale), or use curvature="fisher"',
                )


def _has_data(fn: td.Distribution) -> bool:
    """Whether an observed site has a density; `pyro.deterministic` and `factor` have none."""
    while isinstance(fn, td.Independent | dist.MaskedDistribution):
        fn = fn.base_dist
    return not isinstance(fn, dist.Delta | dist.Unit)


def _check_smoothness(log_prob: Tensor, net: nn.Module | None) -> None:
    """Raise for functions without a second derivative, and warn of piecewise linear ones.

    The gradient of the curvature misses the kinks of these.
    """
    missing = second_order.functions_of(WITHOUT_SECOND_DERIVATIVE, log_prob, net)
    if missing:
        raise RuntimeError(
            "variational_laplace differentiates the net twice, and PyTorch has no second "
            f"derivative of {', '.join(missing)}: replace them before training, by "
            "tyxe.util.replace_activations_(net, nn.Hardsigmoid, nn.Sigmoid) or nn.Embedding and a "
            "sum"
        )
    found = second_order.functions_of(NONSMOOTH, log_prob, net)
    if found:
        warn(
            "variational_laplace differentiates the net twice, and these are linear in pieces: "
            f"{', '.join(found)}. Their kinks bend the log-likelihood too, which the gradient of "
            "the curvature does not see. Use smooth ones before training: for modules "
            "tyxe.util.replace_activations_(net, nn.ReLU, nn.Softplus), for functions a change of "
            "the forward (or of an argument such as activation=), and average pooling",
        )
