"""``X-Data-Parallel-Rank``: a client's own choice of the replica that begins with its request."""

from __future__ import annotations

from starlette.datastructures import Headers

from fourfold.errors import RequestError

RANK_HEADER = "x-data-parallel-rank"


def read_rank(headers: Headers, ranks: range) -> int | None:
    """The engine that a request asks for, by its rank among ``ranks``; None: the load balancer chooses.

    Raises RequestError for what is no rank.
    """
    value = headers.get(RANK_HEADER)
    if value is None:
        return None
    return check_rank(value, ranks, parameter="X-Data-Parallel-Rank")


def check_rank(value: str, ranks: range, *, parameter: str, status: int = 400) -> int:
    """The engine whose rank ``value`` spells. Raises RequestError with ``status``."""
    text = value.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) in ranks):
        raise RequestError(
            f"{parameter} is {value!r}; the ranks are {ranks.start} to {ranks.stop - 1}",
            parameter=parameter,
            status=status,
        )
    return int(text) - ranks.start
