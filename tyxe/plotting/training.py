"""Training curves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tyxe.plotting.axes import PALETTE, axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class HistoryLike(Protocol):
    """The lists that `history` draws, of one number per epoch, in nats, such as `fit` returns."""

    @property
    def loss(self) -> Sequence[float]:
        """The objective, `beta * kl - log_likelihood`."""

    @property
    def log_likelihood(self) -> Sequence[float]:
        """Expected log-likelihood of the whole set."""

    @property
    def kl(self) -> Sequence[float]:
        """KL divergence from the prior."""


def history(history: HistoryLike, ax: "Axes | None" = None) -> "Axes":
    r"""Draw the training curves of a fit: loss, negative log-likelihood and KL.

    `loss = beta * kl - log_likelihood`: the log-likelihood is drawn with the opposite sign, so that
    the other two add up to the loss at `beta = 1`.

    Args:
        history: what `fit` returned, or any object with its three lists of one number per epoch.
        ax: axes to draw on; None makes a figure.

    Returns:
        The axes.

    Example:
        >>> from types import SimpleNamespace
        >>> fitted = SimpleNamespace(loss=[9.0, 5.0], log_likelihood=[-8.0, -3.0], kl=[1.0, 2.0])
        >>> ax = history(fitted)
        >>> [line.get_label() for line in ax.lines]
        ['loss', 'negative log-likelihood', 'KL']
    """
    ax = axes(ax)
    curves = {
        "loss": history.loss,
        "negative log-likelihood": [-value for value in history.log_likelihood],
        "KL": history.kl,
    }
    for (label, values), color, linestyle in zip(
        curves.items(), PALETTE, ("solid", "dashed", "dashdot"), strict=False
    ):
        epochs = range(1, len(values) + 1)
        ax.plot(epochs, values, color=color, linestyle=linestyle, label=label)
    ax.set(xlabel="epoch", ylabel="nats")
    ax.locator_params(axis="x", integer=True)
    ax.legend(frameon=False)
    return ax
