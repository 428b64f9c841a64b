"""Arguments of earlier versions, and what to do instead."""

from collections.abc import Mapping

_OFF = "evaluations pass a sparse_decode.budget.LayerBudget as the budget"
_ROWS = "evaluations call sparse_decode.attach.attach_rows"
OF_ATTACH = {
    "backend": 'load the model with attn_implementation="flash_attention_2" for dense calls by flash-attn, and omit it',
    "exact": "exact mode was at most 1.23 times as fast as dense steps; omit it, or leave the model dense",
    "layer_budgets": f"a hasher's shares divide a budget among layers; omit it, or list dense_layers ({_OFF})",
    "max_decode_rows": f"calls of several tokens are dense; omit it ({_ROWS})",
    "sparse_rows": f"prompts are dense and steps are sparse; omit it ({_ROWS})",
}
"""What to do instead of each argument that left `attach`."""
OF_BUDGET = {
    "shortlist": "no decode step was faster with it; omit it",
    "values": "no decode step was faster with it; omit it, or lower fraction",
    "by_layer": f"budgets are divided among layers if the hasher has shares; omit it ({_OFF})",
    "by_head": f"budgets are divided among heads if the hasher has shares; omit it ({_OFF})",
    "dense_below": f"attach without a budget keeps short contexts dense; omit one of both ({_OFF})",
    "of": f"a fraction is of the visible tokens; omit it ({_OFF})",
}
"""What to do instead of each field that left `Budget`."""


def refuse(name: str, left: Mapping[str, str], given: Mapping[str, object]) -> None:
    """Raise ValueError for an argument that has left a function, and TypeError for one that it never had."""
    for argument in given:
        if argument not in left:
            raise TypeError(f"{name}() got an unexpected keyword argument {argument!r}")
        raise ValueError(f"{name} no longer takes {argument}: {left[argument]}")
