"""Programs: what is traced, what is refused, equal numbers compiled, and slow products."""

from typing import NamedTuple

import pytest
import torch

from tests.oracles.recorded import Recorded
from tyxe import program as programs
from tyxe.program import Program, _traced, check_repeatable, has_compiler
from tyxe.samplers import batched


class Pair(NamedTuple):
    """Two tensors."""

    one: torch.Tensor
    two: torch.Tensor


def function(pair, scale):
    """Return nested tuples, one of them of the arguments' kind."""
    one = torch.where(pair.two > 0, pair.one.exp(), pair.one) * scale
    return Pair(one.T, pair.two), (one.sum(-1), (pair.two > 0).long())


def arguments(seed=0):
    generator = torch.Generator().manual_seed(seed)
    one, two = torch.randn(2, 3, 3, generator=generator, dtype=torch.double)
    return Pair(one.clone(), two.clone()), torch.tensor(2.0, dtype=torch.double)


@pytest.mark.parametrize("compile", [False, True])
def test_a_program_returns_what_the_function_returns(compile):
    program = Program(function, *arguments(), how="compiled" if compile else "eager")
    for seed in range(3):
        found, expected = program(*arguments(seed)), function(*arguments(seed))
        assert type(found[0]) is Pair
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
        assert all(leaf.is_contiguous() for leaf in (*found[0], *found[1]))
    leaves = program.at_leaves(*arguments(1)[0], arguments(1)[1])
    torch.testing.assert_close(program.returned(leaves), function(*arguments(1)))


def test_what_is_captured_keeps_what_it_returns(monkeypatch):
    monkeypatch.setattr(programs, "Capture", Recorded)
    program = Program(function, *arguments(), how="traced")
    leaves = [[*pair, scale] for pair, scale in map(arguments, range(3))]
    launched = programs.captured(program.at_leaves, leaves[0])
    found = [program.returned(launched(*each)) for each in leaves]
    for seed, one in enumerate(found):
        torch.testing.assert_close(one, function(*arguments(seed)), rtol=1e-14, atol=1e-14)


def test_arguments_are_taken_by_their_numbers():
    """Of one tensor that is given twice, and that is not contiguous, a program has two."""

    def weighted(a, b):
        return ((a - 2 * b) @ torch.arange(4.0),)

    same, one, two = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3)
    program = Program(weighted, same.T, same.T, how="compiled")
    for given in ((one.T, two.T), (one.T.contiguous(), two.T)):
        torch.testing.assert_close(program(*given), weighted(*given))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda x: (x * 2 if bool(x.sum() > 0) else x,), "this net cannot be compiled"),
        (lambda x: (x + float(x.sum()),), "this net cannot be compiled"),
        (lambda x: (x[x > 0].sum(),), "depends on more than the shapes.*dynamic_output_shape"),
        (lambda x: (x + torch.randn(3),), "depends on more than the shapes.*seeded"),
    ],
)
def test_operations_that_depend_on_numbers_are_refused(refused, message):
    with pytest.raises(RuntimeError, match=f"(?s){message}.*; pass compile=False"):
        Program(refused, torch.ones(3), how="compiled")
    # Not compiled they are what they are.
    assert torch.is_tensor(Program(refused, torch.ones(3))(torch.ones(3))[0])


@pytest.mark.parametrize("places", [torch.tensor([0, 2, 2]), torch.zeros(2, 2, dtype=torch.int32)])
def test_rows_at_places_are_a_program(places):
    program = Program(lambda x: (x[places], x[:, places]), torch.ones(3, 3), how="traced")
    x = torch.randn(3, 3)
    assert all(map(torch.equal, program(x), (x[places], x[:, places])))


@pytest.mark.parametrize("dims", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_dropout_of_transposed_tensors_is_the_same_without_changes_in_place(dims):
    """Compilers make new tensors, which draws fill by rows."""

    def drops(x):
        return [torch.nn.functional.dropout(x), torch.nn.functional.dropout(x, 0.1).exp()]

    x, found = torch.randn(2, 3, 4).permute(dims), []
    graph = _traced(drops, [x], draws=True)
    graph.recompile()
    for function in (drops, graph, torch.func.functionalize(graph)):
        torch.manual_seed(0)
        found.append(function(x))
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


def test_functions_of_tensors_alone_are_repeatable():
    position = torch.randn(4, 3, dtype=torch.double)
    check_repeatable(batched(lambda w: w.sin().sum(), position), position)
    # Numbers are compared where they are finite.
    nowhere = torch.full_like(position, torch.nan)
    check_repeatable(lambda w: (w.square().sum(-1), nowhere), position)


@pytest.mark.parametrize("sides", [(1, 2, 2), (1, 1, 2)], ids=["trace", "second point"])
def test_state_of_python_s_own_is_refused(sides):
    """It changes after the trace, or where a trace and the first point agree."""
    state = iter(sides)

    def energy(position):
        side = next(state)
        return side * position.square().sum(-1), 2 * side * position

    position = torch.randn(4, 3, dtype=torch.double)
    with pytest.raises(RuntimeError, match="forward depends on more than weights and inputs"):
        check_repeatable(energy, position)


def test_there_is_a_compiler_where_these_tests_run():
    assert has_compiler(torch.device("cpu"))


# --- products that the linear algebra is slow at -------------------------------------------------

BMM = torch.ops.aten.bmm.default


def flat_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return a product as a matrix, which is a view that the product's strides have to allow."""
    return torch.bmm(left, right).view(len(left), -1)


@pytest.mark.parametrize(
    ("rows", "columns", "is_turned"),
    [(40, 2, True), (40, 15, True), (40, 1, False), (40, 16, False), (2, 5, False)],
)
def test_products_of_few_columns_and_more_rows_are_computed_transposed(
    rows: int, columns: int, is_turned: bool
) -> None:
    left, right = torch.randn(3, rows, 7), torch.randn(3, 7, columns)
    graph = _traced(flat_product, [left, right])
    (product,) = graph.graph.find_nodes(op="call_function", target=BMM)
    assert (product.args[0].op != "placeholder") == is_turned
    torch.testing.assert_close(graph(left, right), flat_product(left, right))
