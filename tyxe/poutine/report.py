"""A table of how each site was used: which linear maps were reparameterised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import Message, effectful

from tyxe.poutine.draw import Draw
from tyxe.util import site_spellings


class Row(NamedTuple):
    """One use of a site.

    Attributes:
        site: the site's name in the joint model.
        map: the kind of linear map, or the function that used the value.
        treatment: `moments`, `flipped`, `mean`, `drawn`, or `never used`.
    """

    site: str
    map: str
    treatment: str


@effectful(type="note")
def note(text: str) -> None:
    """Add a note to an active report that does not belong to a single site."""


class Report(Messenger):
    """List how each site was used by what runs inside: iterate over it, or print it.

    Attributes:
        notes: messages that do not belong to a single site.

    Example:
        >>> import torch, pyro.distributions as dist, tyxe
        >>> bnn = tyxe.VariationalBNN(
        ...     torch.nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1), tyxe.guides.AutoNormal)
        >>> with report() as r, tyxe.poutine.local_reparameterization():
        ...     _ = bnn.predict(torch.randn(5, 2))
        >>> print(r)
        site        map     treatment
        net.weight  linear  moments
        net.bias    linear  moments
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[Row, None] = {}
        self._placed: dict[str, None] = {}
        self.notes: list[str] = []

    def __iter__(self) -> Iterator[Row]:
        """Yield each use once, and unused sites last."""
        yield from self._rows
        used = {row.site for row in self._rows}
        yield from (Row(site, "", "never used") for site in self._placed if site not in used)

    def __str__(self) -> str:
        """Return the rows as a table of three columns, and the notes."""
        rows = [Row("site", "map", "treatment"), *self]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
        return "\n".join([*(line.rstrip() for line in lines), *self.notes])

    def treatments(self, site: str) -> set[str]:
        """Return how one site was treated, by its name in the net or in the joint model."""
        return {row.treatment for row in self if site in site_spellings(row.site)}

    def _pyro_note(self, msg: Message) -> None:
        (text,) = msg["args"]
        if text not in self.notes:
            self.notes.append(text)

    def _pyro_post_substitute_site(self, msg: Message) -> None:
        name = msg["args"][0]
        self._placed[name] = None
        if not isinstance(msg["value"], Draw):
            msg["value"] = Draw(name, None, msg["value"])

    def _pyro_post_linear_map(self, msg: Message) -> None:
        event = msg["args"][0]
        treatment = msg["infer"].get("treatment", "drawn")
        for draw in event.draws:
            self._rows[Row(draw.name_of_site, event.kind, treatment)] = None

    def _pyro_post_draw_value(self, msg: Message) -> None:
        draw, func = msg["args"]
        name = getattr(func, "__name__", str(func))
        self._rows[Row(draw.name_of_site, name, "drawn")] = None


report = Report
