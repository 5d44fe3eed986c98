"""Opens what a user names: a checkpoint, or a run folder that holds some."""

from __future__ import annotations

from pathlib import Path

from reshard.checkpoint import Checkpoint
from reshard.errors import CorruptError, FormatError
from reshard.format import OpenOptions, open_checkpoint
from reshard.topology import Target, parse_target


def open_as(
    path: str | Path, given: str | None, iteration: int | None, vocab_size: int | None
) -> Checkpoint:
    """Open a checkpoint as --from, --iteration and --vocab-size say. Headers only."""
    target = parse_target(given) if given else Target(None, None)
    return open_finished(path, OpenOptions(target, iteration, vocab_size))


def open_finished(path: str | Path, options: OpenOptions) -> Checkpoint:
    """Open a checkpoint; where it does not open, say so if its conversion has not ended."""
    try:
        return open_checkpoint(path, options)
    except (FormatError, CorruptError) as error:
        from reshard.commit import interrupted

        why = interrupted(Path(path))
        if why is None:
            raise
        raise type(error)(f"{error} But {why}") from None
