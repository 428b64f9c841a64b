"""The command's generation on a GPU that is not there, from the prompt to the last token."""

import io
import json
import sys
from unittest import mock

import pytest
import torch
from fake_gpu import Operators, config_of, fake_gpu, model_of
from hashtrain.demo import demo_model_path
from sparse_decode import streaming
from sparse_decode.select import LshSelector
from sparse_decode.settings import GenerateCommand
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoTokenizer, MaxLengthCriteria

TOKENS = 40


@pytest.fixture
def answers(monkeypatch):
    """Answer what the host reads: a text ends at its greatest length only, and every token is number 7."""
    read, criterion, ended = [], MaxLengthCriteria.__call__, [False]

    def judge(own, ids, scores, **how):
        ended[0] = ids.shape[1] >= own.max_length
        return criterion(own, ids, scores, **how)

    def answer(_):
        asking = sys._getframe(1).f_code.co_name
        read.append(asking)
        if done := ended[0] and asking in ("_has_unfinished_sequences", "__call__"):  # transformers' stop check
            ended[0] = False
        return done

    def numbers(x):
        """New tokens, and at the end the counts of each layer."""
        read.append("tokens" if x.device.type == "cpu" else "counts")
        return [7] * x.numel()

    def largest(x):
        read.append("largest")
        return 7

    monkeypatch.setattr(MaxLengthCriteria, "__call__", judge)
    monkeypatch.setattr(FakeTensor, "__bool__", answer, raising=False)
    monkeypatch.setattr(FakeTensor, "__int__", largest, raising=False)
    monkeypatch.setattr(FakeTensor, "tolist", numbers)
    return read


@pytest.mark.slow
def test_the_command_generates_there_in_bfloat16(answers, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text("def f(x): return x\n" * 20)
    config = config_of("llama")
    config.vocab_size = 4096
    asked = []

    def load_model(name, dtype, device):
        asked.append((dtype, device))
        return model_of(config), AutoTokenizer.from_pretrained(demo_model_path())

    monkeypatch.setattr(streaming, "device_for", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(streaming, "load_model", load_model)
    command = GenerateCommand(tmp_path / "prompt.txt", 4, hasher="lsh", max_prompt_tokens=TOKENS, compare=True)
    selector = LshSelector(config)
    out = io.StringIO()
    with fake_gpu(), mock.patch.object(streaming, "load_selector", return_value=selector), Operators() as seen:
        found = streaming.generate(command, out)
    assert asked == [(torch.bfloat16, "cuda:0")]
    assert (found["device"], found["dtype"]) == ("cuda:0", "bfloat16")
    assert "gather" in seen.launching
    assert found["sparse"]["new_tokens"] == found["dense"]["new_tokens"] == found["same_tokens"] == 4
    assert found["sparse"]["density"] == 1, "7 of 7 tokens, by what the host was told"
    assert answers.count("counts") == config.num_hidden_layers
    assert json.dumps(found)
    assert out.getvalue().startswith("--- sparse\n")
