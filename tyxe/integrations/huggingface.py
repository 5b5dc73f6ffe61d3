"""Hugging Face: batches with labels, and models of `transformers.Trainer` (extra `huggingface`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tyxe.bnn import Trainable
from tyxe.bnn.scoring import together
from tyxe.data import Unpack

IGNORED = -100


def unpack(batch: Mapping[str, Any], shift: bool = False) -> Any:
    """Return a mapping's `labels` as targets, and the rest of it as the net's arguments.

    Args:
        batch: the result of a Hugging Face collator; without labels, for `predict`.
        shift: use each label for the token before it, as causal language models do; the last token
            gets -100, for `Categorical(ignore_index=-100)`.

    Example:
        >>> batch = {"input_ids": torch.ones(1, 3), "labels": torch.tensor([[5, 6, 7]])}
        >>> inputs, targets = unpack(batch, shift=True)
        >>> list(inputs), targets
        (['input_ids'], tensor([[   6,    7, -100]]))
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if "labels" not in batch:
        return inputs
    targets = batch["labels"]
    if shift:
        targets = torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], IGNORED)], 1)
    return inputs, targets


class TrainerBNN(Trainable):
    """A BNN as a model for `transformers.Trainer`: `(loss, predictions)` of a batch by keywords.

    In train mode it returns the loss of `Trainable`, in eval mode minus the log-likelihood, in nats
    per data point, and the aggregated predictions of `predict`. Tied weights are saved twice. The
    trainer must not remove columns of a data set: `remove_unused_columns=False`.

    Args:
        bnn: as in `Trainable`, whose other arguments are taken too. Without labels the default of
            `num_predictions` is that of the BNN's `predict`.
        unpack: a function from a batch to inputs and targets.

    Example:
        >>> import pyro.distributions as dist, tyxe
        >>> class Net(nn.Linear):
        ...     def forward(self, pixels):
        ...         return super().forward(pixels)
        >>> bnn = tyxe.VariationalBNN(
        ...     Net(2, 3), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.Categorical(10), tyxe.guides.AutoNormal)
        >>> model = TrainerBNN(bnn).eval()
        >>> found = model(pixels=torch.zeros(5, 2), labels=torch.arange(5) % 3)
        >>> found["loss"].shape, found["logits"].shape
        (torch.Size([]), torch.Size([5, 3]))
    """

    accepts_loss_kwargs = False  # the loss is a mean over points, however many steps accumulate

    def __init__(self, bnn: Any, *, unpack: Unpack = unpack, **options: Any) -> None:
        super().__init__(bnn, unpack=unpack, **options)
        self._num_predictions = options.get("num_predictions")
        self.register_state_dict_post_hook(_without_sharing)  # type: ignore[no-untyped-call]

    # How much points have weighed so far decides what a weighted one does in a later step.
    def get_extra_state(self) -> Tensor:
        return torch.tensor(self._mean_weight.sums, dtype=torch.float64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        self._mean_weight.sums = state.tolist()

    # The trainer reads the name of the targets from the signature.
    def forward(self, labels: Any = None, **inputs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the loss of a batch, and in eval mode its predictions."""
        batch = inputs if labels is None else {**inputs, "labels": labels}
        if self.training:
            return {"loss": super().forward(batch)}
        if labels is None:
            inputs = self.unpack(batch) if self.unpack else batch
            return {"logits": self.bnn.predict([inputs], num_predictions=self._num_predictions)}
        predictions, _, found, weights = self.score_batch(batch, "sum")
        points = float(together(weights).sum()) or 1.0
        return {"loss": -together(found) / points, "logits": predictions}


def _without_sharing(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
    """Copy the tensors of a state that share memory with another, which safetensors refuses."""
    met = set()
    for name, value in state.items():
        if isinstance(value, Tensor):
            memory = value.untyped_storage().data_ptr()
            state[name] = value.clone() if memory in met else value.contiguous()
            met.add(memory)
