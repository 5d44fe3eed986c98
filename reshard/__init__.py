"""Turn any distributed LLM training checkpoint into any other, whole and proven right.

`open`, `plan`, `convert`, `verify`, `diff`, `fingerprint` return what the commands print as JSON.
"""

from typing import TYPE_CHECKING

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


if TYPE_CHECKING:
    from reshard.api import Opened, convert, diff, fingerprint, open, plan, verify
else:

    def __getattr__(name: str) -> object:
        """What `api` offers, imported when it is first asked for: `--help` needs no numpy."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from reshard import api

        return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
