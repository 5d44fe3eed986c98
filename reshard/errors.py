"""The tree of errors; every refusal a user can meet is one of these.

ReshardError
├── UsageError          the command line or a call is off (exit 2)
├── FormatError         not a checkpoint we know, two candidates, or a form refused by name
├── CorruptError        a file that is cut short, contradicts itself, or fails its checksum
│   └── UnsafeError     a file that names code to run, or a path outside its folder
├── LayoutError         a cut that does not divide, a stage map that misses a layer
├── CoverageError       a gap, an overlap, a tensor that no stored array holds
├── ReplicaError        copies that should agree and do not
├── LossError           something would be lost and `--strict` forbids it, or no rule allows it
├── TargetError         the target exists, is busy, or does not fit on the disk
└── VerifyError         what was written is not what was read
"""

from __future__ import annotations


class ReshardError(Exception):
    """What is wrong, where, and what to do; the command line prints it and exits 1."""

    exit_code = 1


class UsageError(ReshardError):
    """The command line or a call is off."""

    exit_code = 2


class FormatError(ReshardError):
    """Not a checkpoint we know, two candidates, or a form refused by name."""


class CorruptError(ReshardError):
    """A file that is cut short, contradicts itself, or fails its checksum."""


class UnsafeError(CorruptError):
    """A file that names code to run, or a path outside its folder."""


class LayoutError(ReshardError):
    """A cut that does not divide, or a stage map that misses a layer."""


class CoverageError(ReshardError):
    """A gap, an overlap, or a tensor that no stored array holds."""


class ReplicaError(ReshardError):
    """Copies of one tensor that should agree and do not."""


class LossError(ReshardError):
    """Something would be lost, and `--strict` forbids it or no rule allows it."""


class TargetError(ReshardError):
    """The target exists, is busy, or does not fit on the disk."""


class VerifyError(ReshardError):
    """What was written is not what was read."""
