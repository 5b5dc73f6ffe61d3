"""Normalising layers, whose running statistics are averaged anew at the weights that predict."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tyxe.bnn.base import BNN
from tyxe.bnn.batches import batches_to_predict, is_loader
from tyxe.check import described
from tyxe.predictive.norms import Statistics, averaged_statistics, norms_of, put_statistics
from tyxe.rng import RandomStream, drawing_from
from tyxe.util import tree_map_tensors


class AveragedNorms(BNN):
    """A BNN that predicts by averages of its layers' statistics: one for each draw."""

    @abstractmethod
    def mean_values(self) -> dict[str, Tensor]:
        """Return the posterior's centre, such as its mean: a value for each site, by joint name."""

    @property
    def averages_norms(self) -> bool:
        return self._runtime.norms is not None

    def update_norm_statistics(self, data_loader: Iterable[Any] | None) -> None:
        """Average the statistics of normalising layers anew: at the centre now, then at each draw.

        The averages over batches are the net's own at the posterior's centre. `predict` and its
        like, `to_ensemble` and `to_module` then go through the loader for each draw, once a call.
        Only layers whose statistics `fit` changes take part; without any, nothing happens. The
        loader is neither copied nor saved with the BNN.

        Args:
            data_loader: yields `(inputs, targets)` or inputs; None: draws take the net's own again.

        Raises:
            TypeError: no loader.
            ValueError: an empty one; also in a prediction, such as a generator that is used up.

        Reference:
            Izmailov et al. 2018; for each draw, Maddox et al. 2019.
        """
        modes = self._fitted_modes()
        norms = [norm for norm in norms_of(self.net) if modes[norm]]
        self._runtime.norms = None
        if data_loader is None or not norms:
            return
        if not is_loader(data_loader):
            raise TypeError(
                f"data_loader is {described(data_loader)}; expected a loader, or a list of batches"
            )
        put_statistics(self._norm_statistics(self.mean_values(), (data_loader, norms)))
        if self._slots:  # without sites all draws are at the centre
            self._runtime.norms = data_loader, norms

    def _norm_statistics(
        self, values: dict[str, Tensor], given: tuple[Any, list[Any]] | None = None
    ) -> Statistics:
        """Return the statistics of norms at a draw, or none where it takes the net's own."""
        loader, norms = given or self._runtime.norms or ((), [])
        if not norms:
            return {}
        own = {norm: {n: b.clone() for n, b in norm.named_buffers()} for norm in norms}
        with self.predicting():
            stand_in = self._stand_in(values, own)
        device = next(self.net.parameters()).device

        def run(batch: tuple[Any, Any]) -> None:
            with torch.no_grad():
                stand_in(tree_map_tensors(lambda t: t.to(device), batch[0]))

        copies = {norm: stand_in.part(norm) for norm in norms}
        # A loader's numbers are its own, and the draws those without it. It runs as where it was
        # given, which is not within a prediction.
        batches = drawing_from(RandomStream(), batches_to_predict(loader, None, None))
        with torch.enable_grad():
            return averaged_statistics(copies, run, batches)
