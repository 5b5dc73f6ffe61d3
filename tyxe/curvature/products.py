"""Products of vectors with a curvature whose matrix is never formed, and its largest eigenpairs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode
from torch.utils._pytree import tree_leaves

from tyxe import check
from tyxe.autocast import full_precision
from tyxe.curvature.collect import (
    CURVATURES,
    Curvature,
    counts_apart,
    key_of,
    numbers_of,
    read_numbers,
)
from tyxe.curvature.gradients import gradients_by_name
from tyxe.curvature.linearize import Forward, check_is_tensor
from tyxe.data import Targets
from tyxe.distributions import ParamBlocks
from tyxe.errors import warn
from tyxe.likelihoods import Likelihood
from tyxe.likelihoods.checks import check_batch
from tyxe.likelihoods.output_hessian import output_hessian_product
from tyxe.linalg import BlockDiagonal, LowRank
from tyxe.linalg.functions import largest_eigenpairs, vectors_in_memory
from tyxe.processes import all_or_none, check_group, checksum, total
from tyxe.rng import RandomStream, fresh_seed
from tyxe.util import Inputs, at_least_float32, outside_inference

# Of `CurvatureProducts`, whose Hessian may be indefinite.
KINDS = (*CURVATURES, "hessian")
# How many vectors a search for eigenvectors multiplies in a pass.
BLOCK = 4


class CurvatureProducts:
    """The products `v -> G v` of a net's curvature over a data set, `G = sum_n J_n^T H_n J_n`.

    A product is a pass through the data: for each batch and vector a Jacobian-vector product, one
    with output Hessians, and a vector-Jacobian product. Smaller batches take less memory. If
    PyTorch has no forward mode for the net, the first of the three is a derivative of a derivative,
    with a warning. The net has to be in eval mode.

    Args:
        forward: a function from values by name and the inputs of a batch to the net's outputs.
        values: the values at which the curvature is taken, by name.
        likelihood: the sum is scaled to its `dataset_size`.
        batches: returns the batches of a pass, the same each time: inputs and targets, which may be
            `Targets` with weights or a mask.
        curvature: `"ggn"`, whose output Hessians make it the exact Fisher information;
            `"fisher"`, with `r r^T` of one sampled label for each point, the same in all products;
            `"empirical"`, with the true labels; or `"hessian"` of the negative log-likelihood.
        blocks: the order of the elements of `v`; by default that of the values.
        group: processes of `torch.distributed`, each with its own batches; the sum is over all.

    Raises:
        ValueError: values in half precision; in a product, outputs or targets do not fit the
            likelihood, no point counts, a batch differs from that of the pass before, or
            the result is not finite.

    Example:
        >>> from tyxe.likelihoods import HomoskedasticGaussian
        >>> net, x = torch.nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> def forward(values, inputs):
        ...     return torch.func.functional_call(net, values, inputs)
        >>> values, likelihood = dict(net.named_parameters()), HomoskedasticGaussian(2, scale=1.0)
        >>> ggn = CurvatureProducts(forward, values, likelihood, lambda: [(x, torch.zeros(2, 1))])
        >>> ggn @ torch.tensor([1.0, 0.0, 0.0])  # of weight, weight, bias
        tensor([10., 14.,  4.])
    """

    @check.arguments
    def __init__(
        self,
        forward: Forward,
        values: Mapping[str, Tensor],
        likelihood: Likelihood,
        batches: Callable[[], Iterable[tuple[Any, Any]]],
        curvature: str = "ggn",
        *,
        blocks: ParamBlocks | None = None,
        group: Any = None,
    ) -> None:
        self.curvature = check.choice("curvature", curvature, KINDS)
        self._forward, self.likelihood, self._batches = forward, likelihood, batches
        self.values = {name: value.detach() for name, value in values.items()}
        for name, value in values.items():
            hint = " for products with a curvature: convert the net and its inputs with .float()"
            known = (torch.float32, torch.float64)
            check.choice(f"the dtype of {name!r}", value.dtype, known, hint)
        sites = {name: value.shape for name, value in values.items()}
        self.blocks = ParamBlocks.of_sites(sites) if blocks is None else blocks
        self._group, self._has_forward_mode = check_group(group), True
        self._seen: dict[int, int] = {}  # a checksum of each batch
        self._seed = fresh_seed() if curvature == "fisher" else 0

    @outside_inference(gradients=True)
    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Return `G v` for vectors `(..., P)`, of all of them in one pass."""
        check.shape("vectors", vectors, (*vectors.shape[:-1], self.blocks.size))
        rows = vectors.detach().reshape(-1, self.blocks.size)
        found = torch.zeros_like(rows)
        # Points, log-likelihood, error and number of targets.
        self._numbers = torch.zeros(4, dtype=torch.float64, device="cpu")
        with all_or_none(self._group), full_precision(rows):
            for index, (inputs, given) in enumerate(self._batches()):
                self._compare(index, inputs, Targets.of(given))
                found += self._of_batch(index, inputs, given, rows)
        if self._group is not None:
            total(found, self._group)
            self._numbers = total(self._numbers.to(found.device), self._group).cpu()
        found *= self.likelihood.dataset_size / check.points(float(self._numbers[0]))
        expected = "finite numbers: look at the inputs and the weights"
        check.numbers("the product with the curvature", found, expected)
        return found.reshape(vectors.shape)

    @property
    def numbers(self) -> Tensor:
        """Log-likelihood, error and number of targets in the last pass, scaled as products are."""
        return self.likelihood.dataset_size / self._numbers[0] * self._numbers[1:]

    def _compare(self, index: int, inputs: Any, targets: Targets) -> None:
        """Raise a ValueError where a batch is another one than in the pass before."""
        leaves = tree_leaves((inputs, targets.values, targets.weights, targets.mask))
        # Rows of the first point by themselves, since a sum does not tell their order.
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
        found = checksum([*tensors, *(tensor[:1] for tensor in tensors)])
        if self._seen.setdefault(index, found) != found:
            raise ValueError(
                f"batch {index + 1} of the loader is another one than in the pass before, and "
                "products with a curvature take many passes through the same data: let it not "
                "shuffle or augment, such as DataLoader(..., shuffle=False), or give it as "
                "list(loader)"
            )

    def _of_batch(self, index: int, inputs: Inputs, given: Any, rows: Tensor) -> Tensor:
        """Return the products of one batch, which is the `index`-th, `(S, P)`; count its points."""
        likelihood, targets = self.likelihood, self.likelihood.observed(given)
        at = {name: value.detach().requires_grad_() for name, value in self.values.items()}
        # Fused attention has one derivative only; any active mode turns off that of encoders.
        with BaseTorchFunctionMode(), sdpa_kernel(SDPBackend.MATH):
            raw = self._forward(at, inputs)
            check_is_tensor(raw)
            outputs = at_least_float32(raw)
            check_batch(likelihood, outputs.detach(), given)
            self._numbers += read_numbers(numbers_of(likelihood, outputs.detach(), targets, 1))
            tangents = [self.blocks.unflatten(row) for row in rows]
            if self.curvature == "hessian":
                loss = -likelihood.log_likelihood(outputs, targets, "sum")
                found = gradients_by_name([loss], at, create_graph=True)
                of = {name: slope for name, slope in found.items() if slope.requires_grad}
                pulled = [([*of.values()], [tangent[name] for name in of]) for tangent in tangents]
            else:
                hessian = self._output_hessian(index, outputs.detach(), targets)
                moved = self._moved(at, inputs, outputs, tangents)
                pulled = [([outputs], [hessian(each)]) for each in moved]
            each = (gradients_by_name(f, at, v, retain_graph=True) for f, v in pulled)
            return torch.stack([self.blocks.flatten(one) for one in each])

    def _moved(
        self,
        at: Mapping[str, Tensor],
        inputs: Inputs,
        outputs: Tensor,
        tangents: list[dict[str, Tensor]],
    ) -> list[Tensor]:
        """Return `J v` for each vector, of the outputs' shape."""
        if self._has_forward_mode:
            try:
                return [self._by_forward_mode(inputs, tangent) for tangent in tangents]
            except NotImplementedError as error:
                self._has_forward_mode = False
                warn(
                    "products with the curvature are derivatives of derivatives, and take longer: "
                    f"the net has no forward mode ({str(error).splitlines()[0]})"
                )
        # J v is the derivative of J^T u in u.
        u = torch.zeros_like(outputs, requires_grad=True)
        found = gradients_by_name([outputs], at, [u], create_graph=True)
        of, each = [*found.values()], [[tangent[name] for name in found] for tangent in tangents]
        return [torch.autograd.grad(of, u, one, retain_graph=True)[0] for one in each]

    def _by_forward_mode(self, inputs: Inputs, tangent: Mapping[str, Tensor]) -> Tensor:
        _load_forward_mode()
        with torch.no_grad(), forward_ad.dual_level():
            at = {n: forward_ad.make_dual(v, tangent[n]) for n, v in self.values.items()}
            outputs = forward_ad.unpack_dual(at_least_float32(self._forward(at, inputs)))
            moved = outputs.tangent
            return torch.zeros_like(outputs.primal) if moved is None else moved.detach()

    def _output_hessian(
        self, index: int, outputs: Tensor, targets: Targets
    ) -> Callable[[Tensor], Tensor]:
        """Return the product with the output Hessians of a batch."""
        likelihood = self.likelihood
        roots, once = counts_apart(likelihood, outputs, targets, self.curvature)
        roots = torch.ones_like(outputs) if roots is None else roots
        if self.curvature == "ggn":
            return lambda v: roots * output_hessian_product(likelihood, outputs, roots * v)
        with RandomStream(self._seed + index):
            (gradient,) = CURVATURES[self.curvature](likelihood, outputs, once)
        gradient = roots * gradient.detach()
        within = (*range(1, outputs.dim()),)
        return lambda v: gradient * ((gradient * v).sum(within, True) if within else gradient * v)


@functools.cache
def _load_forward_mode() -> None:
    """Make the first dual number, for which PyTorch calls a function that it deprecates."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated", FutureWarning)
        number = torch.zeros((), device="cpu")
        forward_ad.make_dual(number, number)


def low_rank_curvature(products: CurvatureProducts, rank: int, tolerance: float = 0.0) -> Curvature:
    """Return the part of a curvature in at most `rank` largest eigenvectors, `sum_r l_r v_r v_r^T`.

    Of these it has those with `l_r > tolerance`.

    Raises:
        ValueError: the eigenvectors do not fit into memory; a Hessian that is indefinite.
    """
    size, like = products.blocks.size, next(iter(products.values.values()))
    rank = min(rank, size)
    held = vectors_in_memory(rank, BLOCK)
    check.memory(
        f"{rank:,} eigenvectors of {size:,} weights, and {held - rank} more to find them,",
        held * size * like.element_size(),
        "take fewer, options=tyxe.LaplaceOptions(rank=...), or fewer weights",
        like.device,
    )
    generator = torch.Generator(device="cpu").manual_seed(0)
    start = torch.randn(min(BLOCK, size), size, generator=generator, device="cpu").to(like)
    with full_precision(like):
        values, vectors = largest_eigenpairs(products.__matmul__, start, rank)
    kept = int((values > tolerance).sum())
    if tolerance and kept == rank < size:
        warn(
            f"all {rank} eigenvalues are above tolerance={tolerance:g}, and there may be more: "
            "raise rank in tyxe.LaplaceOptions to look for them"
        )
    values, vectors = values[:kept], vectors[:kept]
    if 2 * vectors.nbytes <= vectors.untyped_storage().nbytes():
        vectors = vectors.clone()  # without the memory of the search
    factor = vectors.mul_(values.sqrt()[:, None]).mT
    points, numbers = float(products._numbers[0]), products.numbers
    operator = BlockDiagonal({"all": LowRank(factor.new_zeros(size), factor)})
    key = key_of([("all", factor)], numbers)
    log_likelihood, error, num_targets = numbers.tolist()
    return Curvature(operator, products.blocks, log_likelihood, error, num_targets, key, points)
