"""A plain decode step in one compiled call: the same as step by step, and the other way where it does not apply."""

import copy
import itertools
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import sparse_decode
import torch
from hashcore.cpu import threads
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import QueryHeadHasher, attach
from sparse_decode.attention.attend_inputs import Inputs
from sparse_decode.budget import LayerBudget
from sparse_decode.caches.cache_encoder import Encoder
from sparse_decode.caches.cache_types import carry_codes
from sparse_decode.layer import fused, fused_kernels
from sparse_decode.layer.blocks import AttentionArgs, RowRule
from sparse_decode.layer.fused import FusedStep
from sparse_decode.layer.plan import LayerPlan
from sparse_decode.select import HashSelector
from sparse_decode.unselected.sums import FOLD
from sparse_decode_doubles import SignHasher, generate, prompts, tiny_model
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

KINDS = [torch.float32, torch.bfloat16, torch.float16]
BUDGETS = [
    LayerBudget(0.1),
    LayerBudget(0.1, sink=0, recent=0),
    LayerBudget(0.2, sink=3, recent=2),
    LayerBudget(1.0),
    LayerBudget(0.01, sink=2, recent=2),
]


SHAPE = ModelShape(1, 6, 2, 16)
FIFTH = LayerBudget(0.2, min_tokens=4)


def make_hasher(variant="transform", shape=SHAPE, calibrated=True):
    hasher = Hasher(HasherConfig(variant, shape, bits=64, planes=4), 1)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for x in hasher.parameters():
            x.add_(torch.randn(x.shape, generator=draw) * 0.1)
        for layer in range(shape.num_layers if calibrated else 0):
            hasher.layer(layer).remainder.copy_(torch.rand(shape.num_query_heads, 6, generator=draw) * 0.4 - 0.1)
    return hasher.eval().requires_grad_(False)


def tensors(kind, batch, tokens, hq=6, hkv=2, dim=16, dim_v=16):
    draw = torch.Generator().manual_seed(tokens)
    sizes = (hq, 1, dim), (hkv, tokens, dim), (hkv, tokens, dim_v)
    return [torch.randn(batch, *size, generator=draw).to(kind) for size in sizes]


class Both:
    """A layer's steps in one call, and step by step over a cache of their own."""

    def __init__(self, hasher, budget, remainder=True, rule=None):
        def made():
            selector = HashSelector(hasher)
            return LayerPlan(0, selector, budget, rule or RowRule(None), selector.remainder(0) if remainder else None)

        self.fused, self.other = made(), made()
        self.held = [carry_codes(DynamicLayer(), plan.encoder) for plan in (self.fused, self.other)]

    def step(self, q, k, v, **options):
        """Do one step over the tokens of k and v, of which all new ones are appended; return both results."""
        for held in self.held:
            held.update(k[:, :, held.get_seq_length() :], v[:, :, held.get_seq_length() :])
        first, second = self.held
        ours = self.fused.step(first, Inputs(q, first.keys, first.values, 0.25, **options))
        return ours, self.other.attend(inputs(second, q, **options))[0]


def inputs(held, q, softcap=None, sinks=None):
    """A step for the other way."""
    return AttentionArgs(q, held.keys, held.values, None, held.codes, None, 0.25, softcap, sinks, held.moments)


def assert_alike(ours, theirs):
    """The same selection, so the same numbers but for rounding: the compiler orders sums of a loop as it likes."""
    step = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, theirs, atol=4e-6 if ours.dtype == torch.float32 else step / 8, rtol=step)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("remainder", [False, True])
def test_the_same_as_step_by_step(kind, budget, remainder):
    both = Both(make_hasher(), budget, remainder)
    q, k, v = tensors(kind, 3, 170)
    for n in (80, 81, 82, 83, 120, 121, 170):
        ours, theirs = both.step(q, k[:, :, :n], v[:, :, :n], softcap=5.0, sinks=torch.linspace(-1, 1, 6))
        alone = n in (81, 82, 83, 121)  # one token is new, so that the sums are those of all others
        assert (ours is None) == (remainder and not alone)
        if ours is None:
            first = both.held[0]
            ours = both.fused.attend(inputs(first, q, 5.0, torch.linspace(-1, 1, 6)))[0]
        assert_alike(ours, theirs)
        assert torch.equal(both.held[0].codes, both.held[1].codes)
        for mine, other in zip(both.held[0].moments._sums or (), both.held[1].moments._sums or (), strict=True):
            assert torch.equal(mine, other)
    assert both.fused.tally.totals() == both.other.tally.totals()


@pytest.mark.parametrize("variant", ["planes", "transform"])
@pytest.mark.parametrize(("hq", "hkv", "dim", "dim_v"), [(1, 1, 8, 8), (4, 4, 32, 16), (8, 2, 24, 40)])
def test_any_heads_and_any_hash_of_ours(variant, hq, hkv, dim, dim_v):
    both = Both(make_hasher(variant, ModelShape(1, hq, hkv, dim)), LayerBudget(0.1))
    q, k, v = tensors(torch.float32, 1, 90, hq, hkv, dim, dim_v)
    both.step(q, k[:, :, :60], v[:, :, :60])
    both.fused.attend(inputs(both.held[0], q))
    for n in range(61, 90):
        ours, theirs = both.step(q, k[:, :, :n], v[:, :, :n])
        assert_alike(ours, theirs)


@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 6, 9])
def test_rows_that_see_little_more_than_their_ends(tokens):
    both = Both(make_hasher(), LayerBudget(0.5, sink=2, recent=3), remainder=False)
    q, k, v = tensors(torch.float32, 2, tokens)
    ours, theirs = both.step(q, k, v)
    assert_alike(ours, theirs)


def test_threads_change_nothing(monkeypatch):
    wanted = []
    monkeypatch.setattr(fused.threads, "TEAM_GRAIN", 1)
    monkeypatch.setattr(fused.threads, "count", lambda work, limit: wanted[-1])
    both = Both(make_hasher(), LayerBudget(0.1), remainder=False)
    q, k, v = tensors(torch.float32, 3, 99)
    for workers in (1, 2, 5, 6):
        wanted.append(workers)
        ours, theirs = both.step(q, k, v)
        assert_alike(ours, theirs)


@pytest.mark.usefixtures("real_threads")
def test_real_threads_change_nothing(monkeypatch):
    monkeypatch.setattr(threads, "TEAM_GRAIN", 1)
    monkeypatch.setattr(threads, "most", lambda: 3)
    both = Both(make_hasher(), LayerBudget(0.1))
    q, k, v = tensors(torch.float32, 3, 170)
    both.step(q, k[:, :, :90], v[:, :, :90])
    both.fused.attend(inputs(both.held[0], q))
    for n in range(91, 171):
        assert_alike(*both.step(q, k[:, :, :n], v[:, :, :n]))
        assert torch.equal(both.held[0].codes, both.held[1].codes)


def in_another_order(kernel, steps, workers, given, own=threads.run):
    """Run the tasks of six heads, of which four attend before they have been selected for."""
    if kernel is not fused_kernels.tasks:
        return own(kernel, steps, workers, given)
    assert steps == 12
    return [threads.compiled(kernel)(at, at + 1, *given) for at in (0, 6, 7, 1, 2, 8, 11, 10, 9, 3, 4, 5)]


def test_no_task_waits_for_another(monkeypatch):
    both = Both(make_hasher(), LayerBudget(0.1))
    q, k, v = tensors(torch.float32, 3, 99)
    both.step(q, k[:, :, :90], v[:, :, :90])
    both.fused.attend(inputs(both.held[0], q))
    monkeypatch.setattr(fused.threads, "run", in_another_order)
    for n in range(91, 99):
        assert_alike(*both.step(q, k[:, :, :n], v[:, :, :n]))
        assert torch.equal(both.held[0].codes, both.held[1].codes)
        for mine, other in zip(both.held[0].moments._sums, both.held[1].moments._sums, strict=True):
            assert torch.equal(mine, other)


def test_large_work_for_fewer_heads_than_threads_is_left_to_searches_in_parts(monkeypatch):
    torch.set_num_threads(7)
    monkeypatch.setattr(threads, "most", lambda: 7)
    both = Both(make_hasher(), LayerBudget(0.1), remainder=False)
    q, k, v = tensors(torch.float32, 3, 99)
    assert both.step(q, k, v)[0] is not None  # 6 tasks
    monkeypatch.setattr(threads, "GRAIN", 1)
    assert both.step(q, k, v)[0] is None


def refuse_infinite_queries():
    """Run steps on two threads with an infinite number in one of the heads."""
    torch.set_num_threads(3)
    threads.TEAM_GRAIN, threads.most = 1, lambda: 2
    both = Both(make_hasher(), LayerBudget(0.1), remainder=False)
    q, k, v = tensors(torch.float32, 3, 90)
    both.step(q, k, v)
    held = both.held[0]
    for batch, head in itertools.product(range(3), (0, 5)):
        bad = q.clone()
        bad[batch, head, 0, 3] = torch.inf
        assert both.fused.step(held, Inputs(bad, held.keys, held.values, 0.25)) is None
    assert_alike(*both.step(q, k, v))


@pytest.mark.slow
def test_a_query_that_is_not_finite_stops_no_thread():
    """Tasks of other heads go on, and none waits for a selection that is never made; it could wait for ever."""
    code = "import torch, test_fused; torch.set_grad_enabled(False); test_fused.refuse_infinite_queries()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600, cwd=Path(__file__).parent)


def test_weights_that_are_not_finite_are_refused_and_change_nothing():
    both = Both(make_hasher(), LayerBudget(0.1))
    q, k, v = tensors(torch.float32, 1, 90)
    both.step(q, k[:, :, :88], v[:, :, :88])
    first = both.held[0]
    both.fused.attend(inputs(first, q))
    bad = q.clone()
    bad[0, 5, 0, 3] = torch.inf
    first.update(k[:, :, 88:89], v[:, :, 88:89])
    assert both.fused.step(first, Inputs(bad, first.keys, first.values, 0.25)) is None
    with pytest.raises(ValueError, match="finite"):
        both.fused.attend(inputs(first, bad))
    both.held[1].update(k[:, :, 88:89], v[:, :, 88:89])
    assert torch.equal(first.codes, both.held[1].codes)


def counted(monkeypatch):
    """Note of each decode step without a mask whether one call did it."""
    done, own = [], LayerPlan.step

    def step(*given):
        out = own(*given)
        done.append(out is not None)
        return out

    monkeypatch.setattr(LayerPlan, "step", step)
    return done


CHANGES = [(family, change) for family in ("llama", "gemma2", "gpt_oss") for change in ("nothing", "beams", "copy")]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("family", "change"), [*CHANGES, ("llama", "crop"), ("qwen3", "crop")])  # windows cannot crop
def test_generation_with_and_without(family, change, monkeypatch):
    model, (ids, _) = tiny_model(family), prompts((40, 40))
    hasher = make_hasher(shape=ModelShape.of(model.config))
    options = {"num_beams": 3} if change == "beams" else {}

    def run():
        with attach(model, hasher, LayerBudget(0.2, min_tokens=4)) as attachment:
            cache = DynamicCache(config=model.config)
            first = generate(model, ids, past_key_values=cache, **options)
            if change == "copy":
                cache = copy.deepcopy(cache)
            if change == "crop":
                cache.crop(-10)
                first = first[:, :46]
            again = first if change == "beams" else generate(model, first, past_key_values=cache)
            return again, attachment.density()

    done = counted(monkeypatch)
    ours = run()
    assert sum(done) > len(done) / 2
    monkeypatch.setattr(FusedStep, "run", lambda *_, **__: None)
    theirs = run()
    assert torch.equal(ours[0], theirs[0])
    assert ours[1] == theirs[1]


@pytest.mark.parametrize("case", ["padding", "host", "per query head", "another hasher", "gradients", "lsh"])
def test_what_is_not_plain_goes_the_other_way(case, monkeypatch):
    model, (ids, mask) = tiny_model(), prompts((40, 40))
    hasher = make_hasher("lsh" if case == "lsh" else "transform", ModelShape.of(model.config), calibrated=False)
    hasher = (
        QueryHeadHasher(hasher) if case == "per query head" else SignHasher() if case == "another hasher" else hasher
    )
    if case == "padding":
        ids, mask = prompts((40, 30))
    done = counted(monkeypatch)
    with attach(model, hasher, LayerBudget(0.2), kv="host" if case == "host" else "device"):
        if case == "gradients":
            cache = DynamicCache(config=model.config)
            with torch.enable_grad():
                for part in ids.split([36, 1, 1, 2], 1):
                    model(part, past_key_values=cache)
        else:
            generate(model, ids, mask)
    assert not any(done)


def test_tensors_that_do_not_agree_go_the_other_way_which_says_so():
    both = Both(make_hasher(), LayerBudget(0.1), remainder=False)
    q, k, v = tensors(torch.bfloat16, 1, 90)
    both.step(q, k, v)
    held = both.held[0]
    assert both.fused.step(held, Inputs(q.half(), held.keys, held.values, 0.25)) is None
    with pytest.raises(ValueError, match="must all be float32, bfloat16 or float16"):
        both.fused.attend(inputs(held, q.half()))
    apart = q.repeat_interleave(2, -1)[..., ::2]
    assert both.fused.step(held, Inputs(apart, held.keys, held.values, 0.25)) is None
    assert both.fused.step(held, Inputs(q, held.keys.clone(), held.values, 0.25)) is None
    assert both.fused.step(held, Inputs(q, held.keys, held.values.clone(), 0.25)) is None
    ours = both.fused.step(held, Inputs(q, held.keys, held.values, 0.25))
    assert_alike(ours, both.fused.attend(inputs(held, apart))[0])


def test_two_threads_with_a_cache_each():
    model, (ids, _) = tiny_model(), prompts((40,))
    texts = [ids, ids.flip(1)[:, :31]]
    with attach(model, make_hasher(shape=ModelShape.of(model.config)), LayerBudget(0.2, min_tokens=4)):
        alone = [generate(model, text, new_tokens=30) for text in texts]
        found = [None, None]

        def work(i):
            found[i] = generate(model, texts[i], new_tokens=30)

        workers = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))


def test_a_copy_of_the_sums_stays_what_it_was():
    both = Both(make_hasher(), LayerBudget(0.1))
    q, k, v = tensors(torch.float32, 1, 90)
    both.step(q, k[:, :, :88], v[:, :, :88])
    held = both.held[0]
    both.fused.attend(inputs(held, q))
    kept, before = copy.copy(held.moments), [x.clone() for x in held.moments._sums]
    held.update(k[:, :, 88:89], v[:, :, 88:89])
    assert both.fused.step(held, Inputs(q, held.keys, held.values, 0.25)) is not None
    assert held.moments.length == 88, "a step does not add its token yet"
    for n in range(89, 88 + FOLD):
        held.update(k[:, :, n - 70 : n - 69], v[:, :, n - 70 : n - 69])
        assert both.fused.step(held, Inputs(q, held.keys, held.values, 0.25)) is not None
    assert held.moments.length == 88 + FOLD
    assert kept.length == 88
    assert all(torch.equal(x, y) for x, y in zip(kept._sums, before, strict=True))
    assert not torch.equal(held.moments._sums.spread, before[-1])


def test_steps_after_those_of_inference_mode(monkeypatch):
    model, (ids, _) = tiny_model(), prompts((40,))
    done = counted(monkeypatch)

    def run(modes):
        cache, logits = DynamicCache(config=model.config), []
        with torch.inference_mode():
            model(ids[:, :30], past_key_values=cache)
        for token, mode in zip(range(30, 40), modes, strict=True):
            with mode():
                logits.append(model(ids[:, token : token + 1], past_key_values=cache).logits.clone())
        return torch.cat(logits)

    with attach(model, make_hasher(shape=ModelShape.of(model.config)), LayerBudget(0.2, min_tokens=4)):
        alone = run([torch.inference_mode] * 10)
        mixed = run([torch.inference_mode] * 5 + [torch.no_grad] * 5)
    assert sum(done) > len(done) / 2
    torch.testing.assert_close(mixed, alone)


def calls_of_a_step(budget, tokens=40):
    """Return how often a step calls Python functions of each file of this package, per layer."""
    model, (ids, _) = tiny_model(), prompts((tokens,))
    source, calls = Path(sparse_decode.__file__).parent, Counter()

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and source in path.parents and path != Path(fused_kernels.__file__):
            calls[path.name] += 1

    with torch.no_grad(), attach(model, make_hasher(shape=ModelShape.of(model.config)), budget):
        cache = DynamicCache(config=model.config)
        model(ids[:, : tokens - 5], past_key_values=cache)
        for token in range(tokens - 5, tokens):
            calls.clear()
            sys.setprofile(note if token == tokens - 1 else None)
            try:
                model(ids[:, token : token + 1], past_key_values=cache)
            finally:
                sys.setprofile(None)
    return {name: count / model.config.num_hidden_layers for name, count in calls.items()}


def test_a_plain_step_crosses_seven_files_of_this_package():
    """The compiled kernel is an eighth; the threads it runs on are hashcore's."""
    names = "interface", "plan", "cache", "buffer", "fused", "remainder", "budget"
    assert calls_of_a_step(FIFTH).keys() == {f"{name}.py" for name in names}


def test_a_plain_step_makes_few_calls_in_python():
    """Each takes longer than it seems, because the other layers have filled the CPU's caches."""
    assert sum(calls_of_a_step(FIFTH).values()) <= 14


@pytest.mark.parametrize(("tokens", "most"), [(40, 6), (600, 17)])
def test_a_dense_step_below_the_break_even_makes_few_calls_in_python(tokens, most):
    """By torch's attention; and by our own, two kernels of which count, from a cache that grows in place."""
    assert sum(calls_of_a_step(LayerBudget(dense_below=1000), tokens).values()) <= most


def test_a_deep_copy_of_the_sums_has_addresses_of_its_own():
    both = Both(make_hasher(), LayerBudget(0.1))
    q, k, v = tensors(torch.float32, 1, 90)
    both.step(q, k, v)
    held = both.held[0]
    both.fused.attend(inputs(held, q))
    held.update(k[:, :, :1], v[:, :, :1])
    before = held.moments.for_step(1, 91)
    twin = copy.deepcopy(held.moments)
    assert before == held.moments.for_step(1, 91)
    assert twin.for_step(1, 91) == tuple(x.data_ptr() for x in (*twin._sums[1:3], *twin._rounded))
    assert not set(before) & set(twin.for_step(1, 91))
    assert held.moments.for_step(2, 91) is None


def test_weights_that_are_replaced_or_written_to_count_at_once():
    hasher = make_hasher()
    both = Both(hasher, LayerBudget(0.1), remainder=False)
    q, k, v = tensors(torch.float32, 1, 90)
    both.step(q, k, v)
    query, other = hasher.layer(0).query, copy.deepcopy(hasher.layer(0))
    other.query.r.data.neg_()
    for change in (
        lambda: query.r.neg_(),
        lambda: setattr(query, "w1", torch.nn.Parameter(query.w1 * -1, False)),
        lambda: setattr(query.w2, "data", query.w2.data.neg()),
        lambda: hasher.layers.__setitem__(0, other),
    ):
        before = both.step(q, k, v)[0]
        change()
        ours, theirs = both.step(q, k, v)
        assert_alike(ours, theirs)
        assert not torch.equal(ours, before)


def test_codes_are_hashed_by_the_encoder_where_there_is_no_room():
    hashed = []
    hasher = make_hasher()
    selector = HashSelector(hasher)
    plan = LayerPlan(0, selector, LayerBudget(0.1), RowRule(None))
    held = carry_codes(DynamicLayer(), Encoder(lambda k: (hashed.append(k.shape[2]), selector.encode_keys(0, k))[1]))
    q, k, v = tensors(torch.float32, 1, 300)
    held.update(k[:, :, :60], v[:, :, :60])
    for n in range(60, 300):
        held.update(k[:, :, n : n + 1], v[:, :, n : n + 1])
        assert plan.step(held, Inputs(q, held.keys, held.values, 0.25)) is not None
    assert torch.equal(held.codes, selector.encode_keys(0, k))
    assert 0 < len(hashed) < 10
