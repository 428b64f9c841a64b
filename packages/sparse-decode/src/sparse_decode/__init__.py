"""Top-k retrieval inside Hugging Face attention: `attach(model, hasher, budget)`."""

from sparse_decode.attach import Attachment, attach
from sparse_decode.attend import attend, attend_reference
from sparse_decode.budget import Budget
from sparse_decode.oracle import OracleSelector
from sparse_decode.select import (
    AttendingSelector,
    HashSelector,
    KeyQueryHasher,
    LshSelector,
    QueryHeadHasher,
    RecentSelector,
    Rows,
    Selector,
)

__all__ = [
    "Attachment",
    "AttendingSelector",
    "Budget",
    "HashSelector",
    "KeyQueryHasher",
    "LshSelector",
    "OracleSelector",
    "QueryHeadHasher",
    "RecentSelector",
    "Rows",
    "Selector",
    "attach",
    "attend",
    "attend_reference",
]
__version__ = "1.0.0"
