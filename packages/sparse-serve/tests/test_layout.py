"""Page layouts: learning vLLM's layout, and when pages move to rows."""

import functools

import numpy as np
import pytest
import torch
from serve_doubles import reshape_and_cache
from sparse_serve.layout import Layout, RowPages

SIZE, DIM, HEADS = 8, 6, 2


columns = functools.partial(reshape_and_cache, isa="vec")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "dim"), [(SIZE, DIM), (128, 128), (32, 80)])
def test_pages_are_moved_to_rows(dtype, size, dim):
    torch.manual_seed(0)
    k, v = torch.randn(2, 3 * size, HEADS, dim).to(dtype)
    cache = torch.zeros(3, HEADS, 2 * size, dim, dtype=dtype)
    keys, values = cache[:, :, :size].contiguous(), cache[:, :, size:].contiguous()
    columns(k, v, keys, values, torch.arange(3 * size))
    before = keys[1].clone()
    Layout.learn(columns, size, dim, dtype).to_rows(keys, values, torch.tensor([0, 2]))
    for x, found in ((k, keys), (v, values)):
        rows = x.view(3, size, HEADS, dim).transpose(1, 2)
        assert torch.equal(found[[0, 2]], rows[[0, 2]])
    assert torch.equal(keys[1], before)


def test_a_kernel_that_stores_other_numbers_is_refused():
    def halves(k, v, keys, values, slots):
        columns(k // 2, v // 2, keys, values, slots)

    with pytest.raises(ValueError, match=r"stores keys and values of 8 tokens of 6 torch.float32 as they are"):
        Layout.learn(halves, SIZE, DIM, torch.float32)


def settle(held, pages, lengths, counts, sparse):
    """Settle a step of rows with these pages, lengths and new tokens."""
    table = np.zeros((len(pages), max(map(len, pages))), int) - 1
    for row, own in enumerate(pages):
        table[row, : len(own)] = own
    first = np.arange(table.shape[1]) * SIZE
    used = first < np.array(lengths)[:, None]
    new = used & (first >= (np.array(lengths) - counts)[:, None])
    found = held.settle(table, used, new, np.array(sparse))
    return found.by_rows.tolist(), found.fresh.tolist(), found.moved.tolist()


def test_a_page_is_moved_once():
    held = RowPages()
    assert settle(held, [[4, 2]], [9], [9], [False]) == ([False], [2, 4], [])
    assert settle(held, [[4, 2]], [10], [1], [False]) == ([False], [], [])
    assert settle(held, [[4, 2]], [11], [1], [True]) == ([True], [], [2, 4])
    assert settle(held, [[4, 2]], [12], [1], [True]) == ([True], [], [])
    assert settle(held, [[4, 2, 9]], [17], [1], [True]) == ([True], [], [])  # a new page is by rows from the start


def test_who_shares_a_page_by_rows_has_all_pages_by_rows():
    held = RowPages()
    settle(held, [[0, 1], [0, 2], [2, 3], [5]], [16, 16, 16, 8], [16, 8, 8, 8], [False] * 4)
    found = settle(
        held, [[0, 1, 8], [0, 2, 9], [2, 3, 6], [5, 7]], [17, 17, 17, 9], [1] * 4, [True, False, False, False]
    )
    assert found == ([True, True, True, False], [7], [0, 1, 2, 3])
    # A prompt that finds its first page in the prefix cache.
    assert settle(held, [[3, 4]], [12], [4], [False]) == ([True], [], [])


def test_a_page_that_is_written_anew_is_vllms_again():
    held = RowPages()
    settle(held, [[1]], [5], [5], [False])
    settle(held, [[1]], [6], [1], [True])
    assert settle(held, [[1]], [3], [3], [False]) == ([False], [1], [])
    assert settle(held, [[1]], [4], [1], [True]) == ([True], [], [1])


def test_rows_of_padding_have_no_pages():
    assert settle(RowPages(), [[1], []], [5, 0], [5, 0], [False, False]) == ([False, False], [1], [])
    assert RowPages().settle(np.zeros((0, 0), int), *np.zeros((2, 0, 0), bool), np.zeros(0, bool)).moved.tolist() == []
