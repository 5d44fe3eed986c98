"""Family files: what an expression may be, what a family must say, and the proof of all of ours."""

from __future__ import annotations

import pytest

from reshard.dialect import expand
from reshard.errors import CoverageError, FormatError
from reshard.expression import evaluate
from reshard.proof import prove
from reshard.schema import Scope, families, model_types, parse_family

CONFIG = {
    "a": 7,
    "b": None,
    "c": {"d": 3},
    "layers": ["x", "y"],
    "freq": [0, 0, 1, 0],
    "none": [0, 0, 0],
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a // 2 + 1", 4),
        ("b or a", 7),
        ("b and a", None),
        ("c.d * 2", 6),
        ("missing.d", None),
        ("layers[1] == 'y'", True),
        ("a in (1, 7)", True),
        ("a not in (b or [])", True),
        ("5 if b else -a", -7),
        ("freq.zeros", 2),
        ("none.zeros", 3),
        ("freq.where_zero", [0, 1, 3]),
        ("not a", False),
    ],
)
def test_an_expression_is_arithmetic_over_config_keys(text, value):
    assert evaluate(text, CONFIG.get) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "(lambda: 1)()",
        "[x for x in layers]",
        "a ** a ** a",
        "f'{a}'",
        "a.__class__.__bases__",
        "{1: 2}",
        "a := 3",
        "a / 2",
        "1 < a < 9",
        "'x' * 1000000000",
        "a" * 501,
        "a +",
    ],
)
def test_an_expression_that_is_more_is_refused(text):
    with pytest.raises(FormatError):
        evaluate(text, CONFIG.get)


@pytest.mark.parametrize("name", sorted(families()))
def test_every_family_holds_each_element_once_in_every_dialect(name):
    assert prove(families()[name])


TINY = """
family = "tiny"
types = { tiny = { class = "Tiny" } }
dims = { L = "n", D = "d" }
[[runs]]
name = "layers"
block = "layer"
over = "l"
count = "L"
prefix = { hf = "layers.<l>.", mcore = "decoder.layers.<l>." }
[logical.layer]
q = { shape = ["D", "D"], hf = "q", mcore = "q" }
k = { shape = ["D", "D"], hf = "k" }
[mcore.layer]
%s
[[examples]]
n = 2
d = 4
"""


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ("", "nothing holds layers.0.k"),
        ('"k" = "k"\n"kk" = { fuse = ["k", "k"] }', "held more than once"),
        ('"k" = { fuse = ["k", "k"] }', "held more than once|do not fill"),
        ('"k" = { fuse = ["k"], groups = "3" }', "do not fuse in 3 groups"),
        ('"k" = { stack = "k", count = "2" }', "held more than once|do not fill"),
        ('"k" = "nowhere"', "'nowhere' is no logical tensor"),
        ('"k" = { of = "k", wrong = 1 }', "unknown keys"),
        ('"k" = { turn = "k", fuse = ["k"] }', "one of of, fuse"),
    ],
)
def test_a_family_that_is_not_whole_is_refused_by_name(entries, error):
    with pytest.raises((CoverageError, FormatError), match=error):
        prove(parse_family(TINY % entries, "tiny.toml"))


def test_a_whole_family_is_proven():
    found = prove(parse_family(TINY % '"kv" = { turn = "k" }', "tiny.toml"))
    assert [(p.dialect, p.stored, p.logical) for p in found] == [("hf", 4, 4), ("mcore", 4, 4)]


@pytest.mark.parametrize(
    "text",
    ["family = 3", "family = 'x'", "[[", "family = 'x'\nwhatever = 1", "extends = 'nothing'"],
)
def test_a_file_that_is_no_family_is_refused(text):
    with pytest.raises(FormatError):
        parse_family(text, "broken.toml")


def test_a_size_that_the_config_does_not_say_is_named():
    scope = Scope(families()["llama"], {"model_type": "llama", "num_hidden_layers": 2})
    with pytest.raises(FormatError, match=r"hidden_size|V"):
        expand(scope, "hf")


def test_model_types_read_alone_are_those_of_the_whole_files():
    assert model_types() == {name: family.types for name, family in families().items()}
