"""Names: what a path is called, which names are refused, and what the folders of a run are called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptspec.format import names

ID = "0123456789abcdef" * 2
TOKEN = st.text(st.characters(exclude_categories=["Cs", "Cc"]))


@given(st.lists(TOKEN, min_size=1, max_size=5))
def test_split_undoes_join(tokens: list[str]) -> None:
    assert list(names.split(names.join(tokens))) == tokens


@given(st.lists(TOKEN, min_size=1, max_size=4), st.lists(TOKEN, min_size=1, max_size=4))
def test_two_paths_have_two_names(a: list[str], b: list[str]) -> None:
    assert (names.join(a) == names.join(b)) == (a == b)


@given(st.lists(TOKEN, min_size=1, max_size=5))
def test_every_joined_path_without_control_characters_is_a_name_unless_too_long_or_empty(tokens: list[str]) -> None:
    name = names.join(tokens)
    assert (names.name_fault(name) is None) == (1 <= len(name.encode()) <= 4096)


def test_the_escapes_are_those_of_a_json_pointer() -> None:
    assert names.join(["a/b", "m~n", "~1", ""]) == "a~1b/m~0n/~01/"
    assert names.split("a~1b/m~0n/~01/") == ("a/b", "m~n", "~1", "")


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("", "at least one byte"),
        ("a" * 4097, "4097"),
        ("é" * 2049, "4098"),
        ("a\nb", "U+000A"),
        ("\x00", "U+0000"),
        ("a\x7f", "U+007F"),
        ("a\x85b", "U+0085"),
        ("a\ud800", "surrogate"),
        ("a~", "0 or 1"),
        ("a~2b", "0 or 1"),
        ("~~0", "0 or 1"),
    ],
)
def test_a_bad_name_is_refused_with_the_reason(name: str, word: str) -> None:
    assert word in (names.name_fault(name) or "")


@pytest.mark.parametrize(
    "name", ["a", "é" * 2048, "a" * 4096, "a b", "~0~1", "/", "a//b", "日本", "\u2028", "\U0001f600"]
)
def test_a_good_name_has_no_fault(name: str) -> None:
    assert names.name_fault(name) is None


@pytest.mark.parametrize("path", ["rank-00000.shard", "0.shard", "A_b-c.d.shard", "a" * 249 + ".shard"])
def test_a_good_shard_path_has_no_fault(path: str) -> None:
    assert names.shard_path_fault(path) is None


BAD_PATHS = [
    *["", ".shard", "../a.shard", "a/b.shard", "a\\b.shard", "a.shard\n", "a.bin", "-a.shard", "a b.shard", "é.shard"],
    *["a\x00.shard", "a" * 250 + ".shard", "..shard", "٣.shard"],
]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_a_bad_shard_path_is_refused(path: str) -> None:
    assert names.shard_path_fault(path)


@given(st.integers(0, names.STEP_LIMIT))
def test_a_step_folder_says_its_step(step: int) -> None:
    assert names.parse_step_folder(names.step_folder(step)) == step
    for folder in (names.staging_folder, names.abandoned_folder):
        special = names.parse_special(folder(step, ID))
        assert special is not None
        assert (special.step, special.id) == (step, ID)


BAD_STEPS = [
    *["step-1", "step-0000001", "step-000000001", "step-99999999999999999", "step-+0000001", "step-0000000a"],
    *["step-00000001 ", "step-00000001\n", "Step-00000001", "step-٠٠٠٠٠٠٠١", "step-00000001.bak", f"step-{2**53}"],
]


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_folder_that_is_not_exactly_a_step_is_not_one(name: str) -> None:
    assert names.parse_step_folder(name) is None


def test_special_folders_say_their_kind() -> None:
    kinds = {
        names.staging_folder(7, ID): names.SpecialFolder("tmp", ID, 7),
        names.abandoned_folder(7, ID): names.SpecialFolder("abandoned", ID, 7),
        names.trash_folder(ID): names.SpecialFolder("trash", ID),
        names.superseded_folder(ID): names.SpecialFolder("superseded", ID),
    }
    assert {name: names.parse_special(name) for name in kinds} == kinds
    assert sorted(kinds) == [f".abandoned-00000007-{ID}", f".superseded-{ID}", f".tmp-00000007-{ID}", f".trash-{ID}"]


@pytest.mark.parametrize(
    "name", [".tmp-7-" + ID, ".tmp-" + ID, ".trash-", ".trash-" + ID.upper(), ".trash-" + ID + "x", ".other-" + ID, "x"]
)
def test_what_is_not_exactly_a_special_folder_is_none(name: str) -> None:
    assert names.parse_special(name) is None
