"""Arithmetic over config keys: the only code that a family file may hold, and it calls nothing."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from reshard.errors import FormatError

#: What an expression may be worth: what JSON can hold.
Value = None | bool | int | float | str | Sequence["Value"] | Mapping[str, "Value"]
Lookup = Callable[[str], Value]

_BINARY: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDER: dict[type, Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_LONGEST = 500  # characters of an expression; they are one line each


@lru_cache(maxsize=4096)
def _parsed(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise FormatError(f"expression {text[:40]!r}… is longer than {_LONGEST} characters")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormatError(f"expression {text!r} cannot be read: {error}") from error


@lru_cache(maxsize=4096)
def names_in(text: str) -> frozenset[str]:
    """The names that an expression looks up."""
    return frozenset(n.id for n in ast.walk(_parsed(text)) if isinstance(n, ast.Name))


def evaluate(text: str, lookup: Lookup) -> Value:
    """The value of an expression whose names `lookup` gives (None for a key that is not there).

    Integers with + - * // %, comparisons, `in`, and/or/not, `a if b else c`, constants, `key.sub`
    and `key[index]`; of a list, `list.zeros` counts leading zeros and `list.where_zero` gives where
    zeros are (1 stands for a list of ones). No calls. Raises FormatError for anything else.
    """
    try:
        return _value(_parsed(text), lookup)
    except FormatError:
        raise
    except (TypeError, ZeroDivisionError, IndexError, KeyError) as error:
        raise FormatError(f"expression {text!r}: {error}") from error


def _value(node: ast.expr, lookup: Lookup) -> Value:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as constant):
            return constant
        case ast.Name(id=name):
            return lookup(name)
        case ast.BoolOp(op=op, values=values):
            return _either(values, lookup, until=isinstance(op, ast.Or))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, lookup)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(_value(operand, lookup))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_number(_value(left, lookup)), _number(_value(right, lookup)))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _compared(op, _value(left, lookup), _value(right, lookup))
        case ast.IfExp(test=test, body=body, orelse=other):
            return _value(body if _value(test, lookup) else other, lookup)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [_value(p, lookup) for p in parts]
        case ast.Attribute(value=inner, attr=key):
            return _member(_value(inner, lookup), key)
        case ast.Subscript(value=inner, slice=index):
            return _member(_value(inner, lookup), _value(index, lookup))
        case _:
            raise FormatError(f"{ast.unparse(node)!r} is not allowed in an expression")


def _either(values: Sequence[ast.expr], lookup: Lookup, *, until: bool) -> Value:
    found: Value = None
    for node in values:
        found = _value(node, lookup)
        if bool(found) is until:
            return found
    return found


def _number(value: Value) -> int:
    if isinstance(value, int):
        return int(value)
    raise TypeError(f"{value!r} is not a whole number")


def _compared(op: ast.cmpop, left: Value, right: Value) -> bool:
    if isinstance(op, ast.Eq | ast.Is):
        return left == right
    if isinstance(op, ast.NotEq | ast.IsNot):
        return left != right
    if isinstance(op, ast.In | ast.NotIn):
        if not isinstance(right, Sequence):
            raise TypeError(f"{right!r} is no list")
        return (left in right) is isinstance(op, ast.In)
    return _ORDER[type(op)](_number(left), _number(right))


def _member(value: Value, key: Value) -> Value:
    """`value.key` or `value[key]`; None of a missing key and of nothing."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return value.get(str(key))
    if isinstance(value, Sequence) and not isinstance(value, str):
        if key in ("zeros", "where_zero"):
            at = [i for i, v in enumerate(value) if not v]
            return (
                at
                if key == "where_zero"
                else next((i for i, v in enumerate(value) if v), len(value))
            )
        return value[_number(key)]
    if value == 1 and key in ("zeros", "where_zero"):
        return 0 if key == "zeros" else []
    raise TypeError(f"{value!r} has no part {key!r}")
