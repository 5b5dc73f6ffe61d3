"""A BNN as a `LightningModule` (extra `lightning`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import lightning
from torch import Tensor
from torch.optim import Optimizer

from tyxe.bnn import Trainable
from tyxe.bnn.checks import check_beta
from tyxe.bnn.trained import Handler
from tyxe.data import Unpack, unpacked
from tyxe.optim import ParticleOptimizer
from tyxe.optim.groups import make_optimizer


class LightningBNN(lightning.LightningModule):
    """A BNN that `lightning.Trainer` trains, validates, tests and predicts with.

    It logs `train_loss` in nats per data point, `train_log_likelihood` and `train_kl` in nats for
    the whole data set, and for held-out data `val_error` and `val_log_likelihood`, or `test_...`,
    means over points, for each part of a `Joint` likelihood.

    Args:
        bnn: as in `Trainable`; so are `unpack` and `handler`.
        optim: a torch optimiser class or a partial of one, as in `fit`.
        scheduler: a function from the optimiser to Lightning's `lr_scheduler`.
        lr_multipliers: factors of the learning rate by kind of parameter, as in `fit`.
        beta: weight of the KL, or a function of the epoch that returns it; by default as in
            `Trainable`.
        num_predictions: number of draws; by default those of `Trainable` in validation and test,
            and of the BNN's `predict` in `trainer.predict`.

    Raises:
        TypeError: a BNN that is not fitted in steps, or an optimiser that takes its own gradients.

    Example:
        >>> import functools, torch, pyro.distributions as dist, tyxe
        >>> bnn = tyxe.VariationalBNN(
        ...     torch.nn.Linear(2, 3), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.Categorical(10), tyxe.guides.AutoNormal)
        >>> module = LightningBNN(bnn, functools.partial(torch.optim.Adam, lr=1e-3))
        >>> [group["lr"] for group in module.configure_optimizers().param_groups]
        [0.001, 0.001]
    """

    def __init__(
        self,
        bnn: Any,
        optim: Any,
        *,
        scheduler: Callable[[Optimizer], Any] | None = None,
        lr_multipliers: Mapping[str, float] | None = None,
        unpack: Unpack | None = None,
        handler: Handler = nullcontext,
        beta: float | Callable[[int], float] | None = None,
        num_predictions: int | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"handler": handler, "num_predictions": num_predictions}
        self.trainable = Trainable(bnn, unpack=unpack, **options)
        self._optim, self._scheduler, self._lr_multipliers = optim, scheduler, lr_multipliers
        self._num_predictions = num_predictions
        self._beta = beta if beta is None or callable(beta) else check_beta(beta)

    @property
    def bnn(self) -> Any:
        """The BNN."""
        return self.trainable.bnn

    def configure_optimizers(self) -> Any:
        named = {n: p for n, p in self.bnn.named_parameters() if p.requires_grad}
        kinds = self.bnn._parameter_kinds()
        optimizer = make_optimizer(self._optim, named, kinds, self._lr_multipliers, fused=False)
        if isinstance(optimizer, ParticleOptimizer):
            raise TypeError(
                f"{type(optimizer).__name__} takes its own gradients, which Lightning does not "
                "leave to it: call bnn.fit, or choose an optimiser of gradients"
            )
        if self._scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self._scheduler(optimizer)}

    # How much points have weighed so far decides what a weighted one does in a later step.
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mean_weight"] = self.trainable._mean_weight.sums

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.trainable._mean_weight.sums = checkpoint.get("mean_weight", [0.0, 0.0])

    def on_train_epoch_start(self) -> None:
        self.trainable.train()
        if (beta := self._beta) is not None:
            epoch = self.current_epoch
            self.trainable.beta = check_beta(beta(epoch) if callable(beta) else beta, epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.trainable(batch)
        terms = self.trainable.terms
        assert terms is not None
        # The step's loss has the weights of its points already, by which means are weighted here.
        shown = (self.trainable.beta * terms.kl - terms.data) / self.bnn.likelihood.dataset_size
        found = {"loss": shown, "log_likelihood": terms.data, "kl": terms.kl}
        self._log("train", found, terms.points)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._judge("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._judge("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        batches = unpacked([batch], self.trainable.unpack)
        return self.bnn.predict(batches, num_predictions=self._num_predictions)

    def _judge(self, stage: str, batch: Any) -> None:
        scored = self.trainable.score_batch(batch, "sum")
        for name in ("error", "log_likelihood"):
            found, counts = getattr(scored, name), scored.weights
            if not isinstance(found, Mapping):
                found, counts = {"": found}, {"": counts}
            for part, sums in found.items():
                points = float(counts[part].sum())
                mean = {f"{name}_{part}".strip("_"): sums / (points or 1.0)}
                self._log(stage, mean, points)

    def _log(self, stage: str, found: Mapping[str, Any], points: Any) -> None:
        if not (count := float(points)):  # a batch may be masked as a whole
            return
        named = {f"{stage}_{name}": value for name, value in found.items()}
        self.log_dict(
            named,
            batch_size=count,  # type: ignore[arg-type]  # by which means are weighted
            sync_dist=stage != "train",
            on_epoch=True,
        )
