"""Products in chunks beside tp's traffic: what is under way while what is computed, and that all of it adds up."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from meshwright.parallel.chunked_products import Overlap, column_backward, column_forward, row_backward, row_forward
from meshwright.parallel.token_chunks import LocalChunks, chunk_bounds, put_chunk, take_chunk

SIZE, ROWS, TOKENS = 2, 2, 7
"""Ranks, and on each rank rows of 7 tokens, which 2, 3 and 4 chunks don't divide."""
PRODUCTS = ("mm", "matmul", "__matmul__", "addmm_")


class SlowWork:
    """A collective that ends when it is waited for, and not before."""

    def __init__(self, events: list[str], name: str, finish: Callable[[], object]) -> None:
        self._events, self._name, self._finish = events, name, finish
        events.append(f"start {name}")

    def wait(self) -> bool:
        self._finish()
        self._events.append(f"wait {self._name}")
        return True


class SlowGroup:
    """Stands for `AxisGroup` of ranks that all hold the same, so that a sum is ``size`` times a rank's own."""

    is_traced, operator_name, size, index = False, "", SIZE, 0

    def __init__(self) -> None:
        self.events: list[str] = []
        self.bytes = 0
        self._count = 0

    def _work(self, sent: int, finish: Callable[[], object]) -> SlowWork:
        self._count, self.bytes = self._count + 1, self.bytes + sent
        return SlowWork(self.events, str(self._count), finish)

    def all_reduce(self, tensor: torch.Tensor) -> SlowWork:
        return self._work(tensor.nbytes, lambda: tensor.mul_(SIZE))

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> SlowWork:
        return self._work(shard.nbytes, lambda: output.view(SIZE, -1).copy_(shard))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> SlowWork:
        return self._work(output.nbytes, lambda: output.copy_(tensor.view(SIZE, -1)[0] * SIZE))


class Products(TorchFunctionMode):
    """Notes each product of matrices where it is launched."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_function__(
        self, func: Any, types: Collection[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in PRODUCTS:
            self._events.append("product")
        return func(*args, **kwargs or {})


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def watched(chunks: int, sequence: bool, call: Callable[[Overlap], Any]) -> tuple[SlowGroup, Any]:
    group = SlowGroup()
    with Products(group.events):
        result = call(Overlap(group, chunks, sequence))  # type: ignore[arg-type]
    return group, result


@pytest.mark.parametrize("tokens", [1, 2, 7, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 16])
def test_chunks_hold_a_part_of_each_ranks_tokens_and_all_of_them_together(tokens: int, chunks: int) -> None:
    bounds = chunk_bounds(tokens, chunks)
    assert [token for span in bounds for token in range(*span)] == list(range(tokens))
    assert len(bounds) == min(tokens, chunks) and all(start < stop for start, stop in bounds)
    x = numbers(ROWS, SIZE * tokens, 3)
    out, local = torch.zeros_like(x), LocalChunks(x, ROWS, tokens, 3)
    for start, stop in bounds:
        rows = take_chunk(x, SIZE, (start, stop))
        runs = rows.view(SIZE, ROWS, stop - start, 3)
        for rank in range(SIZE):
            torch.testing.assert_close(runs[rank], x[:, rank * tokens + start : rank * tokens + stop])
        put_chunk(out, rows, SIZE, (start, stop))
        part = local.part((start, stop))
        part.copy_(runs[1])
        local.put(part, (start, stop))
    torch.testing.assert_close(out, x)
    torch.testing.assert_close(local.out, x[:, tokens:])


@pytest.mark.parametrize("sequence", [False, True])
def test_a_rows_chunk_travels_while_the_next_is_computed(sequence: bool) -> None:
    x, matrix = numbers(ROWS, SIZE * TOKENS, 5), numbers(5, 3)
    group, out = watched(3, sequence, lambda overlap: row_forward(x, matrix, overlap))
    assert group.events == [
        "product",
        "start 1",
        "product",
        "start 2",
        "product",
        "start 3",
        "wait 1",
        "wait 2",
        "wait 3",
    ]
    whole = SIZE * (x @ matrix)
    torch.testing.assert_close(out, whole[:, :TOKENS] if sequence else whole)
    assert group.bytes == out.nbytes


def test_gathers_are_a_chunk_ahead_of_their_products() -> None:
    x, matrices = numbers(ROWS, TOKENS, 5), [numbers(5, 3), numbers(5, 4)]
    group, (gathered, *products) = watched(3, True, lambda overlap: column_forward(x, matrices, overlap))
    two = ["product", "product"]
    assert group.events == [
        *("start 1", "start 2", "wait 1", *two, "start 3", "wait 2", *two, "wait 3", *two),
    ]  # fmt: skip
    torch.testing.assert_close(gathered, x.repeat(1, SIZE, 1))
    for product, matrix in zip(products, matrices, strict=True):
        torch.testing.assert_close(product, gathered @ matrix)
    assert group.bytes == x.nbytes
    group, (x_grad, whole) = watched(3, True, lambda overlap: row_backward(x, numbers(4, 5), overlap))
    assert group.events == [
        "start 1",
        "start 2",
        "wait 1",
        "product",
        "start 3",
        "wait 2",
        "product",
        "wait 3",
        "product",
    ]
    torch.testing.assert_close(whole, gathered)
    torch.testing.assert_close(x_grad, gathered @ numbers(4, 5).t())


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_weight_gradients_hide_the_sum_of_the_inputs(sequence: bool, chunks: int) -> None:
    """Each chunk's sum starts before the next one's products, and none is waited for before the last product."""
    x, matrices = numbers(ROWS, SIZE * TOKENS, 5), [numbers(5, 3), numbers(5, 4)]
    grads = [numbers(ROWS, SIZE * TOKENS, matrix.shape[1]) for matrix in matrices]
    other = numbers(ROWS, SIZE * TOKENS, 5) + 1

    def backward(overlap: Overlap) -> list[torch.Tensor]:
        return column_backward(other, grads, matrices, x, [False, True], [True, True], overlap)

    group, (x_grad, first, second) = watched(chunks, sequence, backward)
    each = [event for number in range(chunks) for event in ("product", "product", f"start {number + 1}")]
    assert group.events == [*each, "product", "product", *(f"wait {number + 1}" for number in range(chunks))]
    whole = SIZE * (other + sum(grad @ matrix.t() for grad, matrix in zip(grads, matrices, strict=True)))
    torch.testing.assert_close(x_grad, whole[:, :TOKENS] if sequence else whole)
    torch.testing.assert_close(first, x.flatten(0, 1).t() @ grads[0].flatten(0, 1))
    torch.testing.assert_close(second, grads[1].flatten(0, 1).t() @ x.flatten(0, 1))
    assert group.bytes == x_grad.nbytes


def test_frozen_weights_have_no_gradient() -> None:
    matrix, grad = numbers(5, 3), numbers(1, 4, 3)
    group, (x_grad,) = watched(
        2, False, lambda overlap: column_backward(None, [grad], [matrix], None, [False], [False], overlap)
    )
    assert group.events.count("product") == 2
    torch.testing.assert_close(x_grad, SIZE * (grad @ matrix.t()))
