from __future__ import annotations

import pytest

from fourfold.coordinator.load_board import LoadBoard
from fourfold.messages import EngineReport, EngineStats


def report(engine: int, incarnation: int, steps: int, marks: bytes | None = None) -> EngineReport:
    stats = EngineStats(num_steps=steps, prefix_marks=marks)
    return EngineReport(engine=engine, incarnation=incarnation, stats=stats)


def heard(board: LoadBoard, client: int) -> list[tuple[int, int, int, bytes | None]]:
    return [(one.engine, one.incarnation, one.stats.num_steps, one.stats.prefix_marks) for one in board.take(client)]


def test_each_client_hears_the_last_word_of_each_engine_once() -> None:
    board = LoadBoard(2, 2)
    assert not board.pending
    board.post(report(1, 1, 1))
    board.post(report(1, 1, 2))
    assert board.pending
    assert heard(board, 0) == [(1, 1, 2, None)]
    assert heard(board, 0) == []
    board.post(report(0, 1, 1))
    board.post(report(1, 1, 2))  # nothing new
    assert heard(board, 0) == [(0, 1, 1, None)]
    assert heard(board, 1) == [(0, 1, 1, None), (1, 1, 2, None)]
    assert not board.pending


def test_older_reports_and_those_of_older_incarnations_are_ignored() -> None:
    board = LoadBoard(1, 1)
    board.post(report(0, 2, 5))
    board.post(report(0, 2, 4))
    board.post(report(0, 1, 9))
    assert heard(board, 0) == [(0, 2, 5, None)]
    board.post(report(0, 3, 1))
    assert heard(board, 0) == [(0, 3, 1, None)]


def test_a_newcomer_hears_everything_marks_included() -> None:
    board = LoadBoard(2, 2)
    board.post(report(0, 1, 1, b"aaaa"))
    board.post(report(0, 1, 2))
    board.post(report(1, 1, 1))
    assert heard(board, 0) == [(0, 1, 2, b"aaaa"), (1, 1, 1, None)]
    board.post(report(0, 1, 3))
    assert heard(board, 0) == [(0, 1, 3, None)]
    board.join(0)
    assert heard(board, 0) == [(0, 1, 3, b"aaaa"), (1, 1, 1, None)]
    board.post(report(0, 2, 0))
    board.join(0)
    assert heard(board, 0)[0] == (0, 2, 0, None)


def test_who_does_not_exist_is_an_error() -> None:
    board = LoadBoard(1, 1)
    with pytest.raises(IndexError):
        board.post(report(1, 1, 1))
    with pytest.raises(IndexError):
        board.join(1)
