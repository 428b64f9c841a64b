"""Whatever hashtrain and sparse_decode export is copied, pickled and forked, or refuses in one sentence."""

import copy
import io
import os
import pickle
import signal
import threading

import hashtrain
import pytest
import sparse_decode
import torch
from hashtrain import Hasher, HasherConfig, ModelShape, TrainConfig
from sparse_decode import Budget, HashSelector, LshSelector, OracleSelector, QueryHeadHasher, RecentSelector, Rows
from sparse_decode.attach import attach_rows
from sparse_decode.budget import Tally
from sparse_decode_doubles import Calibrated, SignHasher, prompts, tiny_model

MODEL = tiny_model()
SHAPE = ModelShape.of(MODEL.config)


def hasher(variant="transform"):
    made = Hasher(HasherConfig(variant, SHAPE))
    for layer in made.layers:
        layer.remainder.copy_(Calibrated.coefficients)
    return made


VALUES = {
    "Budget": Budget(0.1),
    "HasherConfig": HasherConfig("planes", SHAPE),
    "ModelShape": SHAPE,
    "TrainConfig": TrainConfig(),
}
SELECTORS = {
    **{f"Hasher {variant}": lambda variant=variant: hasher(variant) for variant in ("linear", "paper", "planes")},
    "Hasher": hasher,
    "HashSelector": lambda: HashSelector(hasher("planes")),
    "LshSelector": lambda: LshSelector(MODEL.config),
    "OracleSelector": OracleSelector,
    "QueryHeadHasher": lambda: QueryHeadHasher(hasher()),
    "RecentSelector": RecentSelector,
}
BY_NAME = {"attach", "attend", "attend_reference", "ranking_loss", "top_count", "train_layer"}
BY_NAME |= {"AttendingSelector", "KeyQueryHasher", "Selector"}  # protocols


def saved(x):
    torch.save(x, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


WAYS = [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), saved]


def logits(selector):
    ids, _ = prompts((40,))
    with torch.no_grad(), attach_rows(MODEL, selector, Budget(0.2), sparse_rows=0):
        cache = MODEL(ids[:, :38]).past_key_values
        return MODEL(ids[:, 38:39], past_key_values=cache).logits


def test_every_public_name_is_here():
    others = {name for name in SELECTORS if " " not in name} | {"Attachment", "Rows"}  # see the last tests
    assert {*hashtrain.__all__, *sparse_decode.__all__} == VALUES.keys() | others | BY_NAME


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("way", WAYS)
def test_a_value_equals_its_copies(name, way):
    assert way(VALUES[name]) == VALUES[name]


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_functions_and_protocols_are_pickled_by_name(name):
    found = getattr(hashtrain if name in hashtrain.__all__ else sparse_decode, name)
    assert pickle.loads(pickle.dumps(found)) is found


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_selects_as_the_original(name, way):
    """And, of all but shallow copies, is another one."""
    selector = SELECTORS[name]()
    expected = logits(selector)
    twin = way(selector)
    if way is not copy.copy and (own := getattr(selector, "hasher", selector)) and isinstance(own, Hasher):
        for layer in own.layers:
            for x in layer.parameters():
                x.detach().zero_()
    assert torch.equal(logits(twin), expected)


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_those_of_their_copies(way):
    rows = Rows(0, *torch.randn(2, 1, 2, 3, 4), None, None, torch.ones(1, 3, dtype=torch.int64), 0.5)
    twin = way(rows)
    assert torch.equal(twin.k, rows.k)
    assert torch.equal(twin.candidates(), rows.candidates())


@pytest.mark.parametrize("way", WAYS)
def test_an_attachment_is_refused(way):
    refused = pytest.raises(TypeError, match=r"cannot be copied or pickled; call detach\(\) first")
    with attach_rows(MODEL, SignHasher(), sparse_rows=0) as attachment, refused:
        way(attachment)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of a fork beside threads, which is meant
def test_a_fork_counts_while_another_thread_does():
    tally, stop = Tally(), threading.Event()

    def count():
        while not stop.is_set():
            tally.totals()

    thread = threading.Thread(target=count)
    thread.start()
    children = []
    for _ in range(40):
        if not (child := os.fork()):
            signal.alarm(5)  # a lock that was held in the fork would stay so
            tally.add(1, 2)
            os._exit(0)
        children.append(child)
    stop.set()
    thread.join()
    assert {os.waitpid(child, 0)[1] for child in children} == {0}
