from __future__ import annotations

from typing import Any

from fourfold.messages import FinishReason, RequestOutput, TokenLogprobs
from fourfold.sampling_params import SamplingParams
from fourfold.testing.fake_tokenizer import FakeTokenizer
from fourfold.text.output_processor import Delta, OutputProcessor

TOKENIZER = FakeTokenizer([" 6", ",", " 7", " 8"])
END = 2


def processor(**sampling: Any) -> OutputProcessor:
    return OutputProcessor(TOKENIZER, SamplingParams(**sampling), TOKENIZER.encode("1,"))


def feed(target: OutputProcessor, token_ids: list[int], *, at_once: int = 1, **end: Any) -> tuple[Delta, list[Delta]]:
    """All deltas merged, and each; ``end`` goes into the last output."""
    total, deltas = Delta(), []
    for start in range(0, len(token_ids), at_once):
        last = start + at_once >= len(token_ids)
        chunk = token_ids[start : start + at_once]
        delta = target.process(RequestOutput(request_id="r", token_ids=chunk, **(end if last else {})))
        deltas.append(delta)
        total.merge(delta)
    return total, deltas


NUMBERS = TOKENIZER.encode(" 6, 7, 8,")


def test_a_stop_string_ends_the_output_with_the_token_that_completes_it() -> None:
    target = processor(stop=(", 7",))
    total, deltas = feed(target, NUMBERS)
    assert (total.text, total.finish_reason, total.stop_reason) == (" 6", FinishReason.STOP, ", 7")
    assert target.num_tokens == len(total.token_ids) == 3
    assert [delta.finish_reason for delta in deltas[3:]] == [None] * 3


def test_several_tokens_at_once_change_nothing() -> None:
    for at_once in range(1, 7):
        target = processor(stop=(", 7",))
        total, _ = feed(target, NUMBERS, at_once=at_once)
        assert (total.text, total.token_ids, target.num_tokens) == (" 6", NUMBERS[:3], 3)


def test_text_before_min_tokens_neither_matches_nor_starts_a_match() -> None:
    total, _ = feed(processor(stop=("7",), min_tokens=4), NUMBERS, finish_reason=FinishReason.LENGTH)
    assert (total.text, total.finish_reason) == (" 6, 7, 8,", FinishReason.LENGTH)
    total, _ = feed(processor(stop=("7, 8",), min_tokens=4), NUMBERS, finish_reason=FinishReason.LENGTH)
    assert total.text == " 6, 7, 8,"
    total, _ = feed(processor(stop=("8",), min_tokens=4), NUMBERS)
    assert (total.text, total.stop_reason) == (" 6, 7, ", "8")
    total, _ = feed(processor(stop=("7",), min_tokens=3), NUMBERS)
    assert (total.text, total.token_ids) == (" 6, ", NUMBERS[:3])


def test_a_stop_token_is_counted_and_not_shown() -> None:
    target = processor()
    total, _ = feed(target, NUMBERS[:2], finish_reason=FinishReason.STOP, stop_token_id=NUMBERS[1])
    assert (total.text, total.stop_reason, target.num_tokens) == (" 6", NUMBERS[1], 2)
    shown, _ = feed(
        processor(include_stop_str_in_output=True),
        NUMBERS[:2],
        finish_reason=FinishReason.STOP,
        stop_token_id=NUMBERS[1],
    )
    assert shown.text == " 6,"


def test_eos_is_hidden_even_among_shown_special_tokens() -> None:
    total, _ = feed(processor(skip_special_tokens=False), [NUMBERS[0], END], finish_reason=FinishReason.STOP)
    assert (total.text, total.stop_reason) == (" 6", None)
    total, _ = feed(processor(skip_special_tokens=False), [END, NUMBERS[0]], finish_reason=FinishReason.LENGTH)
    assert total.text == "<|im_end|> 6"


def test_held_text_and_an_incomplete_character_come_with_the_end() -> None:
    heart = TOKENIZER.encode("♥")
    total, deltas = feed(processor(stop=(" 6!",)), [NUMBERS[0], heart[0]], finish_reason=FinishReason.LENGTH)
    assert [delta.text for delta in deltas] == ["", " 6\ufffd"]
    assert total.text == " 6\ufffd"


def test_logprobs_stand_beside_their_tokens() -> None:
    target = processor(stop=("7",))
    scores = [TokenLogprobs(token_id, -0.5, 1, []) for token_id in NUMBERS]
    delta = target.process(RequestOutput(request_id="r", token_ids=NUMBERS, logprobs=scores))
    assert [placed.text_offset for placed in delta.logprobs] == [0, 2, 3]
    assert [placed.logprobs.token_id for placed in delta.logprobs] == delta.token_ids == NUMBERS[:3]


def test_an_error_travels_with_its_status() -> None:
    delta = processor().process(
        RequestOutput(request_id="r", finish_reason=FinishReason.ERROR, error="full", error_status=429)
    )
    assert (delta.finish_reason, delta.error, delta.error_status) == (FinishReason.ERROR, "full", 429)


def test_cached_tokens_and_prompt_scores_survive_merging() -> None:
    total = Delta(prompt_logprobs=[None], num_cached_tokens=16)
    total.merge(Delta(text="a", token_ids=[5]))
    assert (total.prompt_logprobs, total.num_cached_tokens, total.empty) == ([None], 16, False)
    assert Delta().empty
