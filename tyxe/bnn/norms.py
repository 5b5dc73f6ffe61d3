"""Normalising layers, whose running statistics are averaged anew at the weights that predict."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tyxe.bnn.base import BNN, fitting, modes_restored
from tyxe.bnn.batches import batches_to_predict, is_loader
from tyxe.errors import described
from tyxe.predictive.norms import Statistics, averaged_statistics, norms_of
from tyxe.rng import torch_rng_kept
from tyxe.util import tree_map_tensors

# Loaders for the statistics of norms at each draw, and these norms. Attributes would be pickled.
_NORM_LOADERS: weakref.WeakKeyDictionary[AveragedNorms, tuple[Any, list[Any]]]
_NORM_LOADERS = weakref.WeakKeyDictionary()


class AveragedNorms(BNN):
    """A BNN that predicts by averages of its layers' statistics: one for each draw."""

    @abstractmethod
    def mean_values(self) -> dict[str, Tensor]:
        """Return the posterior's centre, such as its mean: a value for each site, by joint name."""

    @property
    def averages_norms(self) -> bool:
        return self in _NORM_LOADERS

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
        with fitting(self, train=True):
            norms = [norm for norm in norms_of(self.net) if norm.training]
        if data_loader is None or not norms:
            _NORM_LOADERS.pop(self, None)
            return
        if not is_loader(data_loader):
            raise TypeError(
                f"data_loader is {described(data_loader)}; expected a loader, or a list of batches"
            )
        with self.predicting():
            found = self._norm_statistics(self.mean_values(), (data_loader, norms))
            for norm, buffers in found.items():
                norm.load_state_dict(buffers, strict=False)
        if self._slots:  # without sites all draws are at the centre
            _NORM_LOADERS[self] = data_loader, norms

    def _norm_statistics(
        self, values: dict[str, Tensor], given: tuple[Any, list[Any]] | None = None
    ) -> Statistics:
        """Return the statistics of norms at a draw, or none where it takes the net's own."""
        loader, norms = given or _NORM_LOADERS.get(self, ((), []))
        if not norms:
            return {}

        def run(batch: tuple[Any, Any]) -> None:
            device = next(self.net.parameters()).device
            self.run_net(values, tree_map_tensors(lambda t: t.to(device), batch[0]))

        with torch_rng_kept(), modes_restored(self), torch.no_grad():
            self.eval()
            return averaged_statistics(norms, run, batches_to_predict(loader, None, None))
