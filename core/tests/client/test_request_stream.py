from __future__ import annotations

import asyncio

from fourfold.client.request_stream import RequestStream, merge_outputs
from fourfold.messages import FinishReason, RequestOutput, TokenLogprobs


def output(*token_ids: int, **fields: object) -> RequestOutput:
    return RequestOutput(request_id="r", token_ids=list(token_ids), **fields)  # type: ignore[arg-type]


def test_a_slow_reader_gets_one_merged_output() -> None:
    async def scenario() -> list[RequestOutput]:
        stream = RequestStream("r", lambda ids: None)
        stream.receive(output(1))
        stream.receive(output(2, 3))
        stream.receive(output(4, finish_reason=FinishReason.LENGTH))
        return [item async for item in stream]

    (merged,) = asyncio.run(scenario())
    assert (merged.token_ids, merged.finish_reason) == ([1, 2, 3, 4], FinishReason.LENGTH)


def test_merging_keeps_what_came_once() -> None:
    scores = [TokenLogprobs(token_id, -1.0, 1, []) for token_id in (1, 2)]
    merged = merge_outputs(
        output(1, logprobs=scores[:1], prompt_logprobs=[None], num_cached_tokens=16),
        output(2, logprobs=scores[1:], finish_reason=FinishReason.ERROR, error="gone", error_status=503),
    )
    assert merged == output(
        1,
        2,
        logprobs=scores,
        prompt_logprobs=[None],
        num_cached_tokens=16,
        finish_reason=FinishReason.ERROR,
        error="gone",
        error_status=503,
    )


def test_closing_aborts_once_and_lets_a_waiting_reader_go() -> None:
    async def scenario() -> tuple[list[RequestOutput], list[list[str]]]:
        aborted: list[list[str]] = []
        stream = RequestStream("r", aborted.append)

        async def read() -> list[RequestOutput]:
            return [item async for item in stream]

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        stream.close()
        stream.close()
        return await asyncio.wait_for(reader, 5), aborted

    assert asyncio.run(scenario()) == ([], [["r"]])


def test_closing_after_the_end_aborts_nothing() -> None:
    async def scenario() -> list[list[str]]:
        aborted: list[list[str]] = []
        stream = RequestStream("r", aborted.append)
        stream.receive(output(1, finish_reason=FinishReason.STOP))
        async for _ in stream:
            pass
        stream.close()
        return aborted

    assert asyncio.run(scenario()) == []
