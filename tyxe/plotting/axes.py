"""Colours, axes, and tensors as vectors, for all figures."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tyxe import check
from tyxe.metrics.checks import check_real

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito (2008) without its yellow, which is hard to see on white, then three of Paul Tol's
PALETTE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
    "#000000",
    "#882255",
    "#999933",
    "#332288",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")


def look_of(index: int) -> tuple[str, str]:
    """Return colour and marker by a curve's number, with each turn of colours other markers."""
    turn, which = divmod(index, len(PALETTE))
    return PALETTE[which], MARKERS[(which + turn) % len(MARKERS)]


def pyplot() -> Any:
    """Return matplotlib's pyplot, of the extra `plot`."""
    return check.installed("matplotlib.pyplot", "plot")


def axes(ax: "Axes | None") -> "Axes":
    """Return the given axes as they are, or those of a new figure."""
    if ax is not None:
        return ax
    ax = pyplot().subplots(figsize=(5, 3.6), layout="constrained")[1]
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_prop_cycle(color=PALETTE)
    return ax


def flat(name: str, value: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a column or vector as a float64 vector on the CPU, of the length of `like`."""
    vector = check_real(name, value).detach().cpu().double()
    if vector.dim() == 2 and vector.shape[1] == 1:
        vector = vector.squeeze(1)
    hint = f" or (n, 1): pass one number per point, such as {name}[:, 0]"
    check.shape(name, vector, ("n",), hint)
    if like is not None:
        check.shape(name, vector, like.shape, ", one for each point")
    return vector
