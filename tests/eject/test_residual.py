"""What is left of a specialized kernel: variables that copy each other are one, and results are the same."""

import ast

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_corr.eject.residual import Renamed, Renamer, coalesced, unparsed

NAMES = "abcd"
variables = st.sampled_from(NAMES)
assignments = st.one_of(
    st.builds("{} = {}".format, variables, variables),
    st.builds("{} = {} + 2 * {}".format, variables, variables, variables),
    st.builds("{}, {} = {}, {} + 1".format, *[variables] * 4).filter(lambda x: x[0] != x[3]),
)


def indented(lines):
    return ["    " + line for line in lines]


def blocks(inner):
    body = st.lists(inner, min_size=1, max_size=4).map(lambda parts: [line for part in parts for line in part])
    return st.one_of(
        st.builds(
            lambda x, one, other: [f"if {x} % 2:", *indented(one), "else:", *indented(other)], variables, body, body
        ),
        st.builds(lambda one: ["for _ in range(3):", *indented(one)], body),
    )


programs = st.lists(st.recursive(assignments.map(lambda line: [line]), blocks, max_leaves=8), min_size=1, max_size=6)


def body_of(parts):
    """Statements that begin with a parameter and end with what all variables hold."""
    lines = [f"{name} = p + {place}" for place, name in enumerate(NAMES)]
    lines += [line for part in parts for line in part]
    return [*ast.parse("\n".join(lines)).body, ast.Return(ast.parse("(a, b, c, d)", mode="eval").body)]


def outcome(body):
    """What a function of these statements returns."""
    scope = {}
    text = unparsed(ast.Module(body, []))
    exec("def run(p):\n" + "\n".join(indented(text.splitlines())), scope)
    return scope["run"](1)


@settings(max_examples=60, deadline=None)
@given(programs)
def test_copies_become_one_variable_and_nothing_changes(parts):
    expected = outcome(body_of(parts))
    body = coalesced(body_of(parts), ["p"])
    assert outcome(body) == expected
    names = Renamer(["p"], body, {}).names(set())
    assert outcome([Renamed(names).visit(s) for s in body]) == expected


def test_a_loop_carries_one_variable():
    text = "kept = p\nkept_2 = kept + 1\nwhile kept_2 < 9:\n    more = kept_2 + 3\n    kept_2 = more\nlast = kept_2"
    assert unparsed(ast.Module(coalesced(ast.parse(text).body, ["p"]), [])) == (
        "kept = p\nkept_2 = kept + 1\nwhile kept_2 < 9:\n    kept_2 = kept_2 + 3"
    )
