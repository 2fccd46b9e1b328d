"""Rules for access tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfold.errors import InvalidError
from streamfold.model.access_tokens import (
    EVERYTHING,
    GROUP_OPERATIONS,
    NOTHING,
    Group,
    OperationGroups,
    Permission,
    ResourceSet,
    Right,
    Scope,
    Secret,
    parse_token_id,
)

exact, prefix = ResourceSet.exact, ResourceSet.prefix


@pytest.mark.parametrize(
    ("names", "contained", "left_out"),
    [
        (NOTHING, [], ["", "a"]),
        (exact(""), [], ["", "a"]),
        (EVERYTHING, ["a", "b/c", "é"], []),
        (exact("a"), ["a"], ["", "ab", "b", "A"]),
        (prefix("a/"), ["a/", "a/b"], ["a", "b/a/", ""]),
    ],
)
def test_a_set_has_one_name_or_all_with_a_prefix(
    names: ResourceSet, contained: list[str], left_out: list[str]
) -> None:
    assert all(names.contains(name) for name in contained)
    assert not any(names.contains(name) for name in left_out)


@pytest.mark.parametrize(
    ("larger", "smaller", "covered"),
    [
        (NOTHING, NOTHING, True),
        (NOTHING, exact("a"), False),
        (NOTHING, EVERYTHING, False),
        (EVERYTHING, prefix("a"), True),
        (prefix("a"), EVERYTHING, False),
        (prefix("a"), prefix("ab"), True),
        (prefix("ab"), prefix("a"), False),
        (prefix("a"), exact("ab"), True),
        (prefix("a"), exact("b"), False),
        (prefix("a"), NOTHING, True),
        (exact("a"), exact("a"), True),
        (exact("a"), exact("b"), False),
        (exact("a"), prefix("a"), False),
    ],
)
def test_a_set_covers_those_within_it(
    larger: ResourceSet, smaller: ResourceSet, covered: bool
) -> None:
    assert larger.covers(smaller) is covered


def test_every_operation_is_in_a_group() -> None:
    grouped = [half for halves in GROUP_OPERATIONS.values() for half in halves]
    assert frozenset().union(*grouped) == set(Right)


@pytest.mark.parametrize("group", Group)
def test_reading_and_writing_are_apart(group: Group) -> None:
    reading, writing = GROUP_OPERATIONS[group]
    assert not reading & writing


def test_operations_are_those_of_the_groups_and_those_named() -> None:
    groups = OperationGroups(stream=Permission(read=True), basin=Permission(write=True))
    wanted = Scope(op_groups=groups, ops=frozenset({Right.FENCE, Right.READ}))
    assert wanted.operations == {
        Right.GET_STREAM_CONFIG,
        Right.CHECK_TAIL,
        Right.READ,
        Right.STREAM_METRICS,
        Right.CREATE_STREAM,
        Right.DELETE_STREAM,
        Right.RECONFIGURE_STREAM,
        Right.RECONFIGURE_BASIN,
        Right.FENCE,
    }


TEXTS = st.text("ab/", max_size=3)
SETS = st.builds(ResourceSet, TEXTS, st.booleans())


@given(SETS, SETS, st.text("ab/", min_size=1, max_size=4))
def test_a_set_that_covers_another_contains_all_its_names(
    larger: ResourceSet, smaller: ResourceSet, name: str
) -> None:
    if larger.covers(smaller) and smaller.contains(name):
        assert larger.contains(name)


@pytest.mark.parametrize("text", ["", ".", "..", "x" * 97, "é" * 49, "a\0b", "\ud800"])
def test_an_id_that_breaks_the_rules_is_refused(text: str) -> None:
    with pytest.raises(InvalidError):
        parse_token_id(text)


def test_a_secret_does_not_show_itself() -> None:
    secret = Secret("sf_very-secret")
    assert "very-secret" not in f"{secret} {secret!r} {[secret]}"
    assert secret.digest == Secret("sf_very-secret").digest
    assert len(secret.digest) == 32
