"""Turn any distributed LLM training checkpoint into any other, whole and proven right.

`open`, `plan`, `convert`, `verify`, `diff`, `fingerprint` return what the commands print as JSON.
"""

from reshard.api import Opened, convert, diff, fingerprint, open, plan, verify
from reshard.errors import ReshardError
from reshard.version import VERSION as __version__

__all__ = [
    "Opened",
    "ReshardError",
    "__version__",
    "convert",
    "diff",
    "fingerprint",
    "open",
    "plan",
    "verify",
]
