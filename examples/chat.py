"""Chat in the terminal with sparse attention, streamed, with speed and density after every answer.

    uv run hashtrain                                            # once: hashers of the demo model
    uv run examples/chat.py                                     # the demo model continues the code that you begin
    uv run examples/chat.py --hasher lsh                        # untrained codes need no training
    uv run examples/chat.py --model path/or/hub-id --hasher runs/mine/transform --document report.txt

Models with a chat template chat; any other model continues the text so far. Keys, values and codes of earlier turns
stay in the cache: a turn reads only what is new. Sparse attention pays off for long histories and documents.
/reset forgets everything but the document; /quit or the end of the input exits.
"""

import argparse
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hashtrain.demo import DEMO, model_path
from hashtrain.models import load_model, text_decoder
from hashtrain.usage import guarded
from rich.console import Console
from sparse_decode import Attachment, Budget, attach
from sparse_decode.streaming import TimedStreamer, load_selector, read_text, warm_up
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Turn:
    """One answer, and its statistics."""

    text: str
    new_tokens: int
    prompt_tokens: int
    reused: int
    """Tokens of the prompt that were already in the cache."""
    tokens_per_second: float | None
    density: float | None
    """Selected / visible tokens of its decode steps, over all sparse layers."""

    def __str__(self) -> str:
        rate = "" if self.tokens_per_second is None else f", {self.tokens_per_second:.1f} per second"
        density = "" if self.density is None else f", {100 * self.density:.2f} % of the visible tokens read"
        return f"{self.new_tokens} tokens{rate}{density}; {self.reused:,} of {self.prompt_tokens:,} from the cache"


class Chat:
    """A conversation that lives in one cache.

    Args:
        attachment: sparse attention on the model that answers.
        document: text before the first message.
        new_tokens: most tokens per answer.
        temperature: 0 takes the most likely token; above 0, tokens are sampled.
    Attributes:
        ids: the tokens of the conversation so far; the cache holds all but the last.
        messages: the conversation in the format of chat templates.
    """

    def __init__(
        self,
        attachment: Attachment,
        tokenizer: PreTrainedTokenizerBase,
        document: str = "",
        new_tokens: int = 200,
        temperature: float = 0.0,
    ):
        self._attachment, self._tokenizer, self._document = attachment, tokenizer, document
        sampling = {"temperature": temperature} if temperature else {}
        self._settings: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": bool(temperature), **sampling}
        self._model: PreTrainedModel = attachment.model
        end = self._model.generation_config.eos_token_id
        self._settings["pad_token_id"] = end[0] if isinstance(end, list) else end  # unused: there is only one row
        self.reset()

    def reset(self) -> None:
        """Forget everything but the document."""
        self.ids: list[int] = []
        self.messages: list[dict[str, str]] = []
        self._cache = DynamicCache(config=self._model.config)

    def say(self, text: str, write: Callable[[str], object]) -> Turn:
        """Answer a message, streaming the answer to `write`.

        Raises: ValueError if prompt and answer do not fit the model's context; the conversation is then unchanged.
        """
        before = self._document + "\n" if self._document and not self.ids else ""
        prompt = self._prompt(before + text)
        self._require_room(len(prompt))
        reused = self._reuse(prompt)
        self._attachment.reset_density()
        streamer = TimedStreamer(self._tokenizer, write, skip_special_tokens=True)
        ids = torch.tensor([prompt], dtype=torch.int64, device=self._model.device)
        cached: dict[str, Any] = {"past_key_values": self._cache, "attention_mask": torch.ones_like(ids)}
        made: Any = self._model.generate(ids, streamer=streamer, **cached, **self._settings)  # pyright: ignore[reportCallIssue]
        self.ids = made[0].tolist()
        answer = str(self._tokenizer.decode(streamer.tokens, skip_special_tokens=True))
        self.messages += [{"role": "user", "content": before + text}, {"role": "assistant", "content": answer}]
        selected, visible = (sum(x) for x in zip((0, 0), *self._attachment.counts().values(), strict=True))
        density = selected / visible if visible else None
        return Turn(answer, len(streamer.tokens), len(prompt), reused, streamer.tokens_per_second, density)

    def _prompt(self, text: str) -> list[int]:
        """Return the tokens of the whole conversation followed by a new message."""
        if self._tokenizer.chat_template is not None:
            messages = [*self.messages, {"role": "user", "content": text}]
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)  # pyright: ignore[reportReturnType]
        # Without a template only the new text is tokenised; earlier tokens stay as they are.
        new = self._tokenizer(("\n" if self.ids else "") + text + "\n", add_special_tokens=not self.ids, verbose=False)
        return self.ids + new["input_ids"]  # pyright: ignore[reportOperatorIssue]

    def _reuse(self, prompt: list[int]) -> int:
        """Crop the cache to what it shares with the prompt, and return its length.

        A template may format an answer differently from what the model wrote (without its thoughts or trailing space),
        so everything after the first difference is dropped. The prompt's last token is always recomputed.
        """
        cached = self._cache.get_seq_length()
        pairs = zip(self.ids[:cached], prompt[:-1], strict=False)
        shared = next((i for i, (old, new) in enumerate(pairs) if old != new), min(cached, len(prompt) - 1))
        if shared < cached and any(getattr(layer, "is_sliding", False) for layer in self._cache.layers):
            shared = 0  # a sliding layer has dropped the tokens before its window
        if shared == 0:
            self._cache = DynamicCache(config=self._model.config)
        else:
            self._cache.crop(shared - cached)
        return shared

    def _require_room(self, prompt: int) -> None:
        room = getattr(text_decoder(self._model).config, "max_position_embeddings", None)
        new = self._settings["max_new_tokens"]
        if room is not None and prompt + new > room:
            raise ValueError(
                f"conversation and answer must fit the model's context of {room}, got {prompt} and {new}; /reset "
                "forgets the conversation, and --new-tokens makes answers shorter"
            )


def converse(chat: Chat, console: Console) -> int:
    """Answer one line after the other until the input ends. Returns: the number of answers."""
    answered = 0
    while True:
        try:
            text = console.input("[bold]> [/bold]").strip()
        except EOFError:
            return answered
        if text == "/quit":
            return answered
        if text == "/reset":
            chat.reset()
        elif text:
            try:
                turn = chat.say(text, lambda part: console.out(part, end="", highlight=False))
            except ValueError as error:
                console.print(f"[red]{error}[/red]", highlight=False)
                continue
            console.print(f"[dim]{turn}[/dim]\n", highlight=False)
            answered += 1


def run(arguments: list[str] | None) -> int:
    """Parse the arguments, load the model, and converse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO, help="folder or hub id; default: the demo model")
    parser.add_argument("--hasher", default="runs/demo/transform", help="a folder of `hashtrain`, or lsh")
    parser.add_argument("--document", type=pathlib.Path, help="text file to talk about")
    parser.add_argument("--new-tokens", type=int, default=100, help="most tokens per answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token")
    parser.add_argument("--fraction", type=float, default=0.02, help="share of the visible tokens to attend to")
    given = parser.parse_args(arguments)
    if given.new_tokens < 1 or given.temperature < 0:
        parser.error(f"expected new tokens and no negative temperature, got {given.new_tokens}, {given.temperature}")
    document = "" if given.document is None else read_text(given.document, "--document")
    model, tokenizer = load_model(model_path(given.model))
    # A few always-read tokens cost little and stabilise short conversations.
    budget = Budget(given.fraction, min_tokens=16, sink=4, recent=16)
    with attach(model, load_selector(given.hasher, model), budget) as attachment:
        warm_up(model, torch.zeros((1, 2), dtype=torch.long, device=model.device))  # compiles the kernels
        converse(Chat(attachment, tokenizer, document, given.new_tokens, given.temperature), Console())
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the example. Returns 0, or 2 with one sentence on stderr if the input cannot be used."""
    return guarded("chat", lambda: run(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
