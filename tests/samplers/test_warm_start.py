"""Warm starts: each member against one that a plain loop trains alone, and stops by itself."""

import functools

import pytest
import torch

from tyxe.samplers import warm_start

pytestmark = pytest.mark.usefixtures("double")

MEMBERS, D, N = 4, 3, 37
ADAMW = functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
SGD = functools.partial(torch.optim.SGD, lr=0.3, momentum=0.5)


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=generator, dtype=torch.double)
    noise = torch.randn(N, generator=generator, dtype=torch.double)
    return x, x.sum(-1).sin() + 0.5 * noise


X, Y = data()


def loss(w, rows):
    return (torch.tanh(X[rows] @ w) - Y[rows]).square().mean()


def starts():
    return torch.linspace(-1, 1, MEMBERS * D, dtype=torch.double).reshape(MEMBERS, D)


def trained(start, **options):
    generator = torch.Generator().manual_seed(5)
    *_, found = warm_start(**options).train(loss, start, N, generator)
    return found


def rows_of(start, num_epochs, validation):
    """Return the validation rows, and each epoch's rows of each member, by the same numbers."""
    generator = torch.Generator().manual_seed(5)
    order = torch.randperm(N, generator=generator).tolist()
    held_out = round(validation * N)
    kept, rows = order[:held_out], order[held_out:]
    epochs = []
    for _ in range(num_epochs):
        keys = torch.rand(len(start), len(rows), generator=generator).tolist()
        epochs.append([sorted(rows, key=dict(zip(rows, key, strict=True)).get) for key in keys])
    return torch.tensor(kept), epochs


def alone(start, optim, num_epochs, patience, batch_size, validation):
    """Train each member by itself, and stop it for good where it has waited long enough."""
    kept, epochs = rows_of(start, num_epochs, validation)
    members, lengths = [], []
    for member, first in enumerate(start):
        w = first.clone().requires_grad_()
        optimizer = optim([w])
        best, least, waited, made = first.clone(), float("inf"), 0, 0
        for epoch in epochs:
            for at in range(0, len(epoch[member]), batch_size):
                optimizer.zero_grad()
                loss(w, torch.tensor(epoch[member][at : at + batch_size])).backward()
                optimizer.step()
            made += 1
            if not len(kept):
                best = w.detach().clone()
                continue
            now = float(loss(w.detach(), kept))
            if now < least:
                best, least, waited = w.detach().clone(), now, 0
            else:
                waited += 1
            if waited == patience:
                break
        members.append(best)
        lengths.append(made)
    return torch.stack(members), lengths


@pytest.mark.parametrize("optim", [ADAMW, SGD])
@pytest.mark.parametrize("validation", [0.0, 0.3])
def test_members_are_those_that_are_trained_alone(optim, validation):
    options = {"num_epochs": 30, "patience": 3, "batch_size": 8, "validation": validation}
    given = starts()
    found = trained(given, optim=optim, **options)
    assert torch.equal(given, starts())
    expected, lengths = alone(starts(), optim, **options)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert (found != starts()).any(-1).all()
    if validation:
        # Some have stopped, and not at the same time, while the others went on.
        assert min(lengths) < 30
        assert len(set(lengths)) > 1
    else:
        assert lengths == [30] * MEMBERS


def test_a_run_ends_when_the_last_member_has_stopped():
    lengths = alone(starts(), SGD, 200, 3, 8, 0.3)[1]
    generator = torch.Generator().manual_seed(5)
    rows = []

    def counted(w, at):
        rows.append(1)
        return loss(w, at)

    epochs = list(warm_start(SGD, 200, 3, 8, 0.3).train(counted, starts(), N, generator))
    batches = -(-(N - round(0.3 * N)) // 8)
    assert max(lengths) < 200
    assert len(epochs) == max(lengths)
    # Once to see whether it can be batched; in each epoch for its batches, and for the validation.
    assert len(rows) == 1 + max(lengths) * (batches + 1)
