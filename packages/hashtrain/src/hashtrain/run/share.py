"""Divide the budgets of a trained hasher among KV heads, without training it again."""

from dataclasses import replace
from pathlib import Path

from hashtrain.artefact.hasher import Hasher
from hashtrain.data.corpus import contexts, python_sources
from hashtrain.data.texts import read_texts
from hashtrain.demo import model_path
from hashtrain.evaluation.budgets import CONTEXTS, head_shares
from hashtrain.machine.distribute import device_for
from hashtrain.models import require_vocabulary
from hashtrain.run.prepare import require_plain_attention
from hashtrain.run.sources import loaded


def share(
    folder: Path, model: str, text: tuple[Path, ...], context: int, fraction: float, device: str, seed: int
) -> tuple[tuple[float, ...], ...]:
    """Measure the shares of KV heads (eq. 23) of the hasher in a folder, store them there, and return them.

    Args: the fields of `hashtrain.cli.ShareCommand`.
    Raises: ValueError or OSError with one sentence if the hasher, the model or the text cannot be used.
    """
    if not folder.is_dir():
        raise ValueError(f"expected the folder of a hasher, to store shares in it, got {folder}, which is none")
    place, hasher = str(device_for(device, 0)), Hasher.from_pretrained(folder)
    found, tokenizer = loaded(model_path(model), place)
    hasher.require_match(found.config)
    require_plain_attention(found.config)
    ids = contexts(read_texts(list(text), seed=seed) if text else python_sources(), tokenizer, context, CONTEXTS, seed)
    require_vocabulary(found, *ids)
    shares = head_shares(found, hasher.to(place), ids, fraction, seed)
    hasher.config = replace(hasher.config, head_shares=shares)
    hasher.save_pretrained(folder)
    return shares
