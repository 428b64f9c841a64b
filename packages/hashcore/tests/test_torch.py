"""What is torch's own: operators and their schemas, traced programs, devices and dtypes."""

import importlib

import hashcore
import numpy as np
import pytest
from hashcore import reference
from hashcore_samples import assert_same, operator_samples, random_codes

torch = pytest.importorskip("torch", reason="torch is an optional extra of hashcore")
torch_ops = pytest.importorskip("hashcore.torch_ops", reason="torch is an optional extra of hashcore")


def codes(*shape: int):
    return torch.from_numpy(random_codes(np.random.default_rng(len(shape)), *shape))


@pytest.mark.parametrize("name", torch_ops.OPERATIONS)
def test_operators_keep_their_schema_and_their_shapes(name):
    torch.library.opcheck(getattr(torch.ops.hashcore, name).default, operator_samples("cpu")[name])


def decode_step(w, keys, x, lengths):
    """Every public function that a compiled model may call."""
    planes, weights = hashcore.planes(w, 3, check=False)
    found = hashcore.search(planes, keys, 10, weights, lengths=lengths, sink=2, order="index")
    best = hashcore.search(planes, keys, 10, weights, starts=1, recent=1)
    scores = hashcore.score(planes, keys, weights)
    grouped, _ = hashcore.group_planes(keys[..., :7, :])
    levels = hashcore.quantise(w)
    packed = hashcore.pack(x)
    some = planes, scores, grouped, packed, hashcore.unpack(packed)
    return *some, *found, *best, *hashcore.topk(scores, 5, starts=3), *levels


def test_a_program_compiles_whole_and_returns_the_same():
    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(2, 3, 128, generator=generator), torch.randn(5, 64, generator=generator)
    keys, lengths = codes(2, 3, 300, 4), torch.tensor([[100, 300, 20], [0, 7, 9]])
    compiled = torch.compile(decode_step, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(compiled(w, keys, x, lengths), decode_step(w, keys, x, lengths), strict=True):
        assert torch.equal(ours, eager)


def test_no_function_waits_for_a_gpu():
    """Fake tensors on a GPU hold no numbers: reading one raises. So does a tensor in host memory among them."""
    fake = importlib.import_module("torch._subclasses.fake_tensor")  # `import torch` alone does not bring it
    with fake.FakeTensorMode(), torch.device("cuda"):
        w, x, counts = torch.empty(2, 3, 128), torch.empty(5, 64), torch.ones(2, 3, dtype=torch.int64)
        keys = torch.empty(2, 3, 300, 4, dtype=torch.int32)
        found = [*decode_step(w, keys, x, counts)]
        rows = 9, counts, None, counts, 300, 0, 0, 0
        found += torch.ops.hashcore.search(keys[..., :3, :], keys, (1, 2, 4), True, None, *rows)
        found += torch.ops.hashcore.topk(keys[..., 0], *rows)
        assert {tensor.device.type for tensor in found if isinstance(tensor, torch.Tensor)} == {"cuda"}
        with pytest.raises(fake.DataDependentOutputException):  # it returns as many columns as the largest count
            hashcore.topk(keys[..., 0], counts)


def test_a_cache_that_fills_up_compiles_twice_at_most():
    def step(planes, keys):
        return hashcore.search(planes, keys, 5, (1, 2), order="index")

    testing = importlib.import_module("torch._dynamo.testing")  # `import torch` alone does not bring it
    counter = testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    planes, keys = codes(2, 2, 4), codes(2, 60, 4)
    for n in (40, 41, 42, 59):
        for ours, eager in zip(compiled(planes, keys[:, :n]), step(planes, keys[:, :n]), strict=True):
            assert torch.equal(ours, eager)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("most", [4, 9])
def test_slots_beyond_the_widest_row_stay_empty(most):
    query, keys, k = codes(2, 3, 4), codes(1, 33, 4), torch.tensor([[3, 0, 4], [1, 1, 1]])
    found = torch.ops.hashcore.search(query, keys, None, True, None, most, k, None, None, 33, 0, 0, 0)
    expected = reference.search(query.numpy(), keys.numpy(), k.numpy())
    for actual, array, empty in zip(found, expected, (0, -1), strict=True):
        assert_same(actual[..., :4], array)
        assert (actual[..., 4:] == empty).all()


ONE = torch.zeros(5, 4, dtype=torch.int32)
META, ARRAY, KIND = ONE.to("meta"), ONE.numpy(), "; convert them to one kind"
REFUSED = [
    (TypeError, "scores on meta must be int8, uint8, int16 or int32, got int64", lambda: hashcore.topk(META.long(), 1)),
    (ValueError, "at most 8 planes, got 9", lambda: hashcore.score(META[:1].expand(9, -1), META, (1,) * 9)),
    (ValueError, r"got query on meta, keys on cpu; move them with \.to\(\)", lambda: hashcore.score(META, ONE)),
    (TypeError, f"not mixed, got query: Tensor, keys: ndarray{KIND}", lambda: hashcore.score(META, ARRAY)),
    (TypeError, f"not mixed, got query: ndarray, keys: Tensor{KIND}", lambda: hashcore.score(ARRAY, ONE)),
    (TypeError, "not mixed, got scores: Tensor, k: ndarray", lambda: hashcore.topk(ONE[:2], np.array([1, 2]))),
    (ValueError, r"expected a strided tensor, got layout torch\.sparse_coo", lambda: hashcore.pack(ONE.to_sparse())),
    *(
        (TypeError, f"not mixed, got keys: {type(x).__name__}{KIND}", lambda x=x: hashcore.score(META, x))
        for x in (5, "a", None, [1])
    ),
    (
        Exception,
        "a compiled program needs the width of its results, got a tensor k; call the operator",
        lambda: torch.compile(hashcore.topk, fullgraph=True, backend="aot_eager")(ONE, torch.arange(5)),
    ),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_kinds_and_devices_that_do_not_go_together_are_refused(case):
    error, words, call = REFUSED[case]
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_that_require_grad_are_read_as_values(dtype):
    w = torch.nn.Parameter(torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype)))
    assert_same(hashcore.pack(w), hashcore.pack(w.detach()).numpy())
    codes, _ = hashcore.planes(w)
    assert not codes.requires_grad
    assert w.grad is None
    assert w.requires_grad
