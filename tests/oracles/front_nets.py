"""Nets with a front that counts its calls, and a `head` with sites, which do what fronts may do."""

from collections import OrderedDict

import torch
from torch import Tensor, nn


class Counted(nn.Linear):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Net(nn.Module):
    """A front that counts, and a head with the site."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.head = Counted(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.front(x).flatten(1))


class Residual(Net):
    """An activation in place, as in torchvision's nets, and a sum outside of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.relu = nn.BatchNorm1d(4), nn.ReLU(inplace=True)
        self.body = Counted(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm(self.front(x)))
        return self.head(h + self.body(h))


class ReadsBetween(Residual):
    """Reads a tensor before an activation changes it in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.front(x))
        mean = h.mean()
        return self.head(self.relu(h) - mean)


class ViewsBetween(Residual):
    """Views a tensor before an activation changes it in place, and reads that after it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.front(x))
        view = h.flatten(1)
        self.relu(h)
        return self.head(view)


class ViewsAfter(Residual):
    """Views a tensor by a module after an activation has changed it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Sequential(nn.Flatten(), nn.ELU(inplace=True), Counted(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.flatten(self.relu(self.front(x))))


class Both(nn.Module):
    """Changes its input in place, and returns something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x.add_(1.0)


class ChangesBoth(Residual):
    """Changes what such a module has returned, outside of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.both = Both()

    def forward(self, x: Tensor) -> Tensor:
        h = self.front(x)
        other = self.both(h)
        other += self.head.bias.sum()
        return self.head(other * h)


class IgnoresReturn(Residual):
    """Uses what an activation has changed, not what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.front(x))
        self.relu(h)
        return self.head(h)


class ChangesInPlace(Net):
    """Changes what the front has returned, outside of modules."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.front(x)
        h += self.head.bias.sum()
        return self.head(h.relu_())


class ChangesInput(Residual):
    """Changes the batch in place, so that each pass has other inputs."""

    def forward(self, x: Tensor) -> Tensor:
        self.relu(x.add_(0.3))
        return self.head(self.front(x))


class Twice(Net):
    """Calls the front twice with the same, and changes one of what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.front(x), self.front(x)
        one += self.head.bias.sum()
        return self.head(one * other)


class Reads(nn.Module):
    """Reads a weight of another module, which it does not own."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = [other]
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.others[0].weight.sum()


class Tied(Net):
    """A module without sites reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = Reads(self.head)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.front(self.reads(x)))


class AlwaysDrops(nn.Module):
    """Draws random numbers in eval mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.scale * x, 0.5, training=True)


class Drops(Net):
    """A front that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.drops = AlwaysDrops()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.front(self.drops(x)))


class Counts(nn.Module):
    """Changes a buffer in eval mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


class ChangesBuffers(Drops):
    """A front that changes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.drops = Counts()


class Recurrent(Net):
    """A front that returns tensors in tuples, to a head that takes keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs, (hidden, _) = self.front(input=x[:, None] if x.dim() < 3 else x)
        return self.head(input=outputs[:, -1] + hidden[0])


class Containers(Net):
    """A front that takes and returns mappings, flags and None."""

    def __init__(self) -> None:
        super().__init__()
        self.front = Mapped()

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.front(batch=[x], double=True), self.front(batch=[x], double=False)
        one["more"] = one.pop("x") + other["x"]
        return self.head(one["more"])


class Mapped(Counted):
    """Takes and returns containers."""

    def __init__(self) -> None:
        super().__init__(3, 4)

    def forward(self, batch: list[Tensor], double: bool) -> OrderedDict[str, Tensor | None]:
        found = super().forward(batch[0])
        return OrderedDict(x=2 * found if double else found, none=None)


class Sparse(Counted):
    """Takes a sparse matrix."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.sparse.mm(x, self.weight.mT)
