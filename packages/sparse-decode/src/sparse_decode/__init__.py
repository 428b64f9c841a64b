"""Top-k retrieval inside Hugging Face attention: `attach(model, hasher, budget)`."""

from typing import TYPE_CHECKING

from hashtrain.lazy import export

if TYPE_CHECKING:
    from sparse_decode.attach import Attachment, attach
    from sparse_decode.attend import attend
    from sparse_decode.budget import Budget
    from sparse_decode.reference import attend_reference
    from sparse_decode.select import (
        AttendingSelector,
        HashSelector,
        KeyQueryHasher,
        LshSelector,
        OracleSelector,
        RecentSelector,
        Rows,
        Selector,
    )

export(
    __name__,
    {
        "attach": ("Attachment", "attach"),
        "attend": ("attend",),
        "budget": ("Budget",),
        "reference": ("attend_reference",),
        "select": (
            *("AttendingSelector", "HashSelector", "KeyQueryHasher", "LshSelector", "OracleSelector"),
            *("RecentSelector", "Rows", "Selector"),
        ),
    },
)
__all__ = [
    "Attachment",
    "AttendingSelector",
    "Budget",
    "HashSelector",
    "KeyQueryHasher",
    "LshSelector",
    "OracleSelector",
    "RecentSelector",
    "Rows",
    "Selector",
    "attach",
    "attend",
    "attend_reference",
]
__version__ = "2.0.0"
