"""How BitIndex encodes vectors: centring, rotation, rounding after every addition."""

import numpy as np
import pytest
from hashcore import BitIndex, reference
from hashcore.index import encoder
from hashcore_index import LAW, seeds, vectors_of
from hashcore_samples import assert_same
from hypothesis import given
from hypothesis import strategies as st


@LAW
@given(st.data(), st.integers(1, 70), st.sampled_from([32, 64, 96]), st.booleans(), seeds)
def test_codes_are_the_signs_of_the_centred_rotation(data, dim, bits, centred, seed):
    x = vectors_of(seed, 7, dim)
    mean = x.mean(0) if centred else None
    index = BitIndex(dim, bits, seed=seed, mean=mean)
    index.add(x)
    projected = np.zeros((7, bits), np.float32)
    y = x - mean if centred else x
    for j, row in enumerate(encoder.rotation(dim, bits, seed)):  # one rounding an addition, first dimension first
        projected += y[:, j, None] * row
    np.testing.assert_array_equal(index._encoder.project("vectors", x), projected)
    np.testing.assert_array_equal(index.codes, reference.pack(projected))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
def test_every_float_dtype_and_stride_gives_the_same_codes(dtype):
    x = vectors_of(0, 20, 40).astype(np.float16)
    expected = BitIndex.from_vectors(x.astype(np.float32)).codes
    wide = np.zeros((40, 80), dtype)
    wide[::2, ::2] = x
    for view in (x.astype(dtype), wide[::2, ::2], np.asfortranarray(x.astype(dtype))):
        np.testing.assert_array_equal(BitIndex.from_vectors(view).codes, expected)


@pytest.mark.parametrize(("dim", "bits"), [(1, 32), (5, 32), (32, 32), (40, 32), (40, 96), (33, 64)])
def test_rotation_is_special_orthogonal_block_by_block(dim, bits):
    matrix = encoder.rotation(dim, bits, 3)
    assert matrix.shape == (dim, bits)
    for start in range(0, bits, dim):
        block = matrix[:, start : start + dim].astype(np.float64)
        np.testing.assert_allclose(block.T @ block, np.eye(block.shape[1]), atol=1e-6)
        if block.shape[1] == dim:
            assert np.linalg.det(block) == pytest.approx(1, abs=1e-4)
    assert not np.array_equal(matrix, encoder.rotation(dim, bits, 4)) or dim == 1


def test_rotation_is_the_q_of_its_draw_whose_r_has_a_positive_diagonal():
    """Only this choice is uniform, and the same for every LAPACK."""
    for seed in range(6):
        drawn = np.random.default_rng(seed).standard_normal((5, 5))
        r = encoder.rotation(5, 5, seed).T.astype(np.float64) @ drawn
        np.testing.assert_allclose(np.tril(r, -1), 0, atol=1e-5)
        assert (np.diagonal(r)[1:] > 0).all()  # column 0 may have been turned to reach SO(5)


def test_fewer_bits_are_the_first_columns_and_more_begin_with_them():
    few, many = encoder.rotation(40, 32, 7), encoder.rotation(40, 96, 7)
    np.testing.assert_array_equal(few, many[:, :32])


def test_centring_subtracts_the_mean_of_the_first_vectors_everywhere():
    x = vectors_of(0, 90, 32) + 5
    centred = BitIndex.from_vectors(x, encoder="sign", centre=True)
    moved = BitIndex.from_vectors(x - centred._encoder.mean, encoder="sign")
    np.testing.assert_allclose(centred._encoder.mean, x.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(centred.codes, moved.codes)
    assert_same(centred.search(x[:3], 5), moved.search(x[:3] - centred._encoder.mean, 5))


def test_encode_gives_the_codes_that_add_stores():
    x = vectors_of(0, 30, 50)
    index = BitIndex.from_vectors(x)
    np.testing.assert_array_equal(index.encode(x.reshape(5, 6, 50)).reshape(30, -1), index.codes)
    assert index.search(index.encode(x[3]), 1)[1].tolist() == [3]
