"""What the worst rows miss is put down to its cause: tokens are missed on purpose here."""

import json
import sys

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.artefact.hasher import make_layer
from hashtrain.training.target import always_read
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

TOOL = "what_is_missed"
ROWS, TOKENS, COUNT = 40, 200, 9


@pytest.fixture
def planted(tool):
    """Attention of one head on four tokens that are searched for; the last two of the rows read none of these."""
    positions = torch.arange(TOKENS - ROWS, TOKENS)
    always = always_read(positions, TOKENS)
    p = torch.full((1, ROWS, TOKENS), 1e-6).masked_fill(torch.arange(TOKENS) > positions[:, None], -1.0)
    exact = [10, 20, 30, 40]
    for token, mass in zip(exact, (0.4, 0.3, 0.2, 0.1), strict=True):
        p[..., token] = mass
    whole = always[None].clone()
    whole[..., exact] = True
    deployed = whole.clone()
    deployed[:, -2:, exact] = False
    read = {"deployed": deployed, "clipping": deployed.clone(), "rounding": deployed.clone()}
    marks = {name: torch.zeros(1, 1, TOKENS, dtype=torch.bool) for name in tool.KINDS}
    counts = torch.full((ROWS,), COUNT)
    return lambda: tool.shares(p, counts, always, read, marks), read, marks


def by_cause(tool, found):
    return dict(zip(tool.CAUSES, found.causes[0].tolist(), strict=True))


def test_each_cause_gets_the_mass_of_its_tokens(tool, planted):
    run, read, marks = planted
    assert by_cause(tool, run())["other"] == pytest.approx(1, abs=1e-4)
    marks["separator"][..., 10] = True
    marks["key norm"][..., [10, 20]] = True  # a token may have two causes
    read["rounding"][..., 30] = True
    found = run()
    shares = by_cause(tool, found)
    expected = {"separator": 0.4, "key norm": 0.7, "rounding": 0.2, "other": 0.1, "near": 0, "clipping": 0}
    assert {name: shares[name] for name in expected} == pytest.approx(expected, abs=1e-3)
    assert found.usual[0].tolist() == pytest.approx([0, 0, 0.4, 0.7], abs=1e-3)
    assert found.missed.item() == pytest.approx(1, abs=1e-3)


def test_only_the_worst_twentieth_of_the_rows_counts(tool, planted):
    run, read, marks = planted
    marks["near"][..., 20] = True
    read["deployed"][:, :20, 20] = False  # half of the rows miss a little
    assert by_cause(tool, run())["near"] == pytest.approx(0.3, abs=1e-3)
    read["deployed"][:, -2:, [10, 30, 40]] = True  # now all miss the same
    read["deployed"][:, -2:, 20] = False
    assert by_cause(tool, run())["near"] == pytest.approx(1, abs=1e-3)


def test_what_is_read_but_not_in_the_exact_selection_is_not_missed(tool, planted):
    run, read, _ = planted
    read["deployed"][:, -2:, [10, 20, 30, 40]] = True
    read["deployed"][..., 50:60] = False
    found = run()
    assert found.missed.item() == 0
    assert found.low.item() == pytest.approx(1, abs=1e-3)


def test_kinds_of_tokens(tool):
    ids = torch.arange(50)
    ids[7] = ids[40]
    k = torch.ones(2, 50, 4)
    k[1, 3] = 9.0
    found = tool.kinds(ids, torch.tensor([40, 30]), k, ids == 5)
    assert found["near"][0, 0].nonzero().flatten().tolist() == [*range(25, 37)]  # the fifth last of 0 ... 40 is 36
    assert found["same token"][0, 0].nonzero().flatten().tolist() == [7, 40]
    assert found["same token"][0, 1].nonzero().flatten().tolist() == [30]
    assert found["separator"].nonzero()[:, -1].tolist() == [5]
    assert found["key norm"].nonzero().tolist() == [[1, 0, 3]]


def layer_of(planes):
    """A layer whose only coordinate of weight is the first, with one digit for keys of spread one."""
    config = HasherConfig("transform", ModelShape(1, 2, 1, 32), bits=32, planes=planes)
    layer = make_layer(config, 0)
    with torch.no_grad():
        for mlp in (layer.key, layer.query):
            mlp.r.copy_(torch.eye(32))
            mlp.w2.zero_()
    return layer


def test_a_key_far_beyond_the_last_level_is_found_without_clipping(tool):
    k, q = torch.zeros(1, 1, 64, 32), torch.zeros(1, 2, 1, 32)
    k[..., 0] = 1.0  # level 1, the last one
    k[0, 0, 9, 0] = 12.0
    q[..., 0] = 1.0
    found = tool.score_variants(layer_of(6), q, k)
    assert found["deployed"][0, 0, 0].unique().numel() == 1
    assert found["clipping"][0, 0, 0].argmax() == 9
    assert found["rounding"][0, 0, 0].unique().numel() == 1


def test_small_weights_drown_in_the_rounding_of_the_query(tool):
    k, q = torch.full((1, 1, 64, 32), -1.0), torch.zeros(1, 2, 1, 32)
    k[..., 0] = 1.0
    k[0, 0, 9, 1:9] = 1.0  # eight small weights with the right sign
    q[..., 0], q[..., 1:] = 100.0, -0.01
    q[..., 1:9] = 0.02
    found = tool.score_variants(layer_of(2), q, k)
    assert found["rounding"][0, 0, 0].argmax() == 9
    q[..., 1:9] = -0.02  # the same levels, but the weights say the opposite
    assert tool.score_variants(layer_of(2), q, k)["rounding"][0, 0, 0].argmin() == 9


def test_scores_are_those_of_the_search_if_nothing_clips(tool):
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 5, 32, generator=draw), torch.rand(1, 1, 64, 32, generator=draw) * 3 - 1.5
    found = tool.score_variants(layer_of(6), q, k)
    clipped, deployed = (found[name] - found[name][..., :1] for name in ("clipping", "deployed"))
    scale = (clipped / deployed)[..., 1:].nan_to_num(0).amax(-1, keepdim=True)  # of each row; the same for all keys
    torch.testing.assert_close(clipped, scale * deployed, atol=1e-3, rtol=1e-3)


def test_separators_are_line_breaks_and_punctuation(tool):
    class Letters:
        def decode(self, ids):
            return ["a", " ", "\n", "()", " x.", "...", "9", "\t"][ids[0]]

    found = tool.separators_of(Letters(), torch.arange(8))
    assert found.nonzero().flatten().tolist() == [2, 3, 5]


def test_a_run_writes_a_line_for_each_head_and_keeps_other_runs(tool, tmp_path, monkeypatch, capsys):
    from hashtrain.demo import demo_model_path

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=4096, num_hidden_layers=2, head_dim=32, max_position_embeddings=512, **sizes)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(demo_model_path()).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(f"def name_{i}(x): return x * {i}" for i in range(500)))
    for variant in ("transform", "lsh"):
        Hasher(HasherConfig(variant, ModelShape.of(config))).save_pretrained(tmp_path / variant)
    words = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--context", "512"]
    words += ["--rows", "40", "--out", str(tmp_path / "missed.json")]
    Hasher(HasherConfig("transform", ModelShape.of(config)), seed=1).save_pretrained(tmp_path / "other")
    for variants, more in ((["transform"], []), (["transform", "other"], ["--kind", "code"]), (["transform"], [])):
        folders = [str(tmp_path / variant) for variant in variants]
        monkeypatch.setattr(sys, "argv", ["what_is_missed", *words, "--hashers", *folders, *more])
        tool.main()
    stored = json.loads((tmp_path / "missed.json").read_text())
    named = [(run["text"], run["hasher"]) for run in stored["runs"]]
    assert named == [("Python", "transform"), ("code", "other"), ("code", "transform")]
    assert stored["runs"][1]["heads"] != stored["runs"][2]["heads"] == stored["runs"][0]["heads"]
    for run in stored["runs"]:
        assert [line[:2] for line in run["heads"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
        assert {len(line) for line in run["heads"]} == {len(stored["columns"])}
        assert all(sum(line[4:]) > 0 and 0 < line[3] < 1 for line in run["heads"])
    monkeypatch.setattr(sys, "argv", ["what_is_missed", *words, "--hashers", str(tmp_path / "lsh")])
    with pytest.raises(SystemExit, match="2"):
        tool.main()
    assert "expected a hasher of variant transform, got lsh" in capsys.readouterr().err
