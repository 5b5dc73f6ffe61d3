"""A net at many draws of its weights in one pass, where that is faster and has been seen right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Types of devices on which all draws run faster in one pass than one after the other, by what is
# random. On CPUs that is a last layer, whose inputs are the same for all draws: of other maps one
# product for many draws takes longer. Convolutions of many draws are grouped ones, which are
# faster than a loop on some cards only. From benchmarks/last_layer.py and gpu_predict.py.
FASTER: dict[str, tuple[str, ...]] = {
    "last layer": ("cpu", "cuda"),
    "linear maps": ("cuda",),
    "convolutions": (),
}
# Those on which the draws of a site are made by one call. Processors would gain by it in small nets
# alone, and a seed would have other draws there.
DRAWS_AT_ONCE: tuple[str, ...] = ("cuda",)
# Most numbers of stacked draws, and of the inputs of one pass, each counted for every draw: they
# bound the memory that is taken beyond that of one draw after the other.
MOST_DRAWN: dict[bool, int] = {True: 2**24, False: 2**28}  # on a CPU, and elsewhere
MOST_GIVEN = 2**26
_NOT_FINITE = (torch.isnan, torch.isposinf, torch.isneginf)


def is_faster(random: Iterable[Tensor], device: torch.device, are_last: bool) -> bool:
    """Whether one pass is faster on a device for a net of which these tensors are random.

    `are_last`: they are those of one linear map, after which nothing with parameters runs.
    """
    kind = "convolutions" if any(one.dim() > 2 for one in random) else "linear maps"
    return device.type in FASTER["last layer" if are_last else kind]


class OnePass:
    """Passes at many draws at once, which are compared with passes one by one."""

    def __init__(self) -> None:
        # Whether no pass has been seen to differ, nor was refused by `torch.vmap`.
        self.is_right = True
        self._known: set[Any] = set()

    def knows(self, kind: Any) -> bool:
        """Whether passes for batches of a kind were compared, and are right."""
        return self.is_right and kind in self._known

    def __call__(
        self, together: Callable[[], Tensor], in_turn: Callable[[], Tensor], kind: Any = None
    ) -> Tensor:
        """Return outputs of all draws, `(S, ...)`, for a kind of batch.

        `together` makes one pass. `in_turn` makes them one by one, and may set `is_right` to False.
        """
        is_known = self.knows(kind)
        if is_known:
            try:
                return together()
            except torch.OutOfMemoryError:
                pass  # here its traceback would keep the memory that `in_turn` needs
            except Exception:  # such as of a branch that numbers of other batches did not take
                self.is_right = False
        outputs = in_turn()
        if is_known or not self.is_right or torch.compiler.is_compiling():
            return outputs
        try:
            found = together()
        except torch.OutOfMemoryError:
            return outputs
        except Exception:  # torch.vmap does not take such a net, which has run without it
            self.is_right = False
            return outputs
        self.is_right = are_alike(found, outputs)
        if self.is_right:
            self._known.add(kind)
            return found
        return outputs


def are_alike(found: Tensor, outputs: Tensor) -> bool:
    """Whether outputs `(S, ...)` are those of the same draws but for rounding.

    On GPUs two ways may round to half precision inside. Then they differ by less than draws do.
    """
    if found.shape != outputs.shape or found.dtype != outputs.dtype:
        return False
    if not (outputs.is_floating_point() or outputs.is_complex()):
        return torch.equal(found, outputs)
    if not all(torch.equal(is_so(found), is_so(outputs)) for is_so in _NOT_FINITE):
        return False
    found, outputs = (one.nan_to_num(0.0, 0.0, 0.0) for one in (found, outputs))
    error, spread = (found - outputs).norm(), (outputs - outputs.mean(0)).norm()
    least = torch.finfo(outputs.dtype).eps ** 0.5 * outputs.norm()
    return bool(error <= torch.maximum(least, 0.02 * spread))


def has_hooks(net: nn.Module, allowed: type) -> bool:
    """Whether a net has hooks, which expect tensors of one draw, but for those of a type."""
    return any(
        part._forward_pre_hooks
        or (
            part._forward_hooks
            and not all(isinstance(h, allowed) for h in part._forward_hooks.values())
        )
        for part in net.modules()
    )
