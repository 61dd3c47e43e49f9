from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.text.stop_strings import StopStrings


def run(stop: list[str], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """What each piece released, the end included, and the match."""
    strings = StopStrings(stop, include=include)
    released = []
    for piece in pieces:
        text, match = strings.push(piece)
        released.append(text)
        if match is not None:
            return released, match
    return [*released, strings.finish()], None


ALPHABET = ["DEF", "GH", "I", "J", "K", "LM"]


def test_a_stop_across_tokens_shows_nothing_of_itself() -> None:
    assert run(["DEFGHIJ"], ALPHABET) == (["", "", "", ""], "DEFGHIJ")


def test_a_false_start_is_released_by_the_next_token() -> None:
    assert run(["DEFX"], ALPHABET) == (["", "DEFGH", "I", "J", "K", "LM", ""], None)


def test_the_earliest_of_several_counts_whatever_their_order() -> None:
    for stop in itertools.permutations(["GHIJ", "FG", "H"]):
        released, match = run(list(stop), ALPHABET)
        assert ("".join(released), match) == ("DE", "FG")


def test_of_equal_starts_the_shorter_counts() -> None:
    assert run(["abc", "ab"], ["xabc"]) == (["x"], "ab")


def test_the_longest_possible_start_is_held() -> None:
    # "aab" may begin at either a; after "aaa" only the last two are still a start.
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")


def test_held_text_comes_out_at_the_end() -> None:
    assert run(["STOP"], ["now ", "ST", "O"]) == (["now ", "", "", "STO"], None)


def test_a_matched_stop_is_part_of_the_text_if_asked_for() -> None:
    assert run(["FG"], ALPHABET, include=True) == (["DE", "FG"], "FG")


def test_skipped_text_matches_nothing_and_starts_nothing() -> None:
    strings = StopStrings(["ab"])
    assert strings.push("a").text == ""
    assert strings.skip("b a") == "ab a"
    assert strings.push("b") == ("b", None)
    assert strings.push("ab").match == "ab"


def test_without_stop_strings_text_passes() -> None:
    assert run([], ["a", "", "b"]) == (["a", "", "b", ""], None)


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)
PIECES = st.lists(st.text("abc", max_size=3), max_size=12)


@given(STOPS, PIECES)
def test_agrees_with_looking_at_the_whole_text_after_each_token(stop: list[str], pieces: list[str]) -> None:
    released, match = run(stop, pieces)
    expected: tuple[str, str | None] = ("".join(pieces), None)
    for count in range(len(pieces) + 1):
        text = "".join(pieces[:count])
        found = sorted((text.find(s), len(s), s) for s in stop if s in text)
        if found:
            expected = (text[: found[0][0]], found[0][2])
            break
    assert ("".join(released), match) == expected


@given(STOPS, PIECES)
def test_holds_exactly_what_may_still_become_a_stop(stop: list[str], pieces: list[str]) -> None:
    strings = StopStrings(stop)
    seen, shown = "", ""
    for piece in pieces:
        text, match = strings.push(piece)
        seen, shown = seen + piece, shown + text
        if match is not None:
            return
        starts = [n for n in range(1, len(seen) + 1) if any(len(s) > n and s.startswith(seen[-n:]) for s in stop)]
        assert len(seen) - len(shown) == max(starts, default=0)


@pytest.mark.timeout(20)
def test_time_is_linear_in_the_text_whatever_the_pattern() -> None:
    strings = StopStrings(["a" * 2000 + "b"])
    start = time.perf_counter()
    for _ in range(20_000):
        strings.push("aaaa")
    assert time.perf_counter() - start < 5
