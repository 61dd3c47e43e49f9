"""What of an engine's memory is there: the order of sleep, waking and new weights. Knows no request and no rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fourfold.errors import RequestError
from fourfold.messages import EngineStats
from fourfold.sleep_tags import TAGS, WEIGHTS

LEVELS = (1, 2)


class MemoryClient(Protocol):
    """What this needs of ``fourfold.engine.executor_client.ExecutorClient``; each call is for all ranks."""

    def sleep(self, level: int) -> None:
        """Give memory back."""

    def wake_up(self, tags: Sequence[str], *, complete: bool) -> None:
        """Take memory again."""

    def check_weights(self, model: str) -> None:
        """Raise ConfigError for weights that do not fit."""

    def discard_weights(self) -> None:
        """Let go of the weights."""

    def load_weights(self, model: str) -> None:
        """Read other weights."""


class Sleep:
    """Decides what is asleep; what fails on a rank stays asleep, and may be tried again."""

    def __init__(self, client: MemoryClient, stats: EngineStats) -> None:
        """``stats`` hears of every change."""
        self._client = client
        self._stats = stats
        self.halted = False
        """Whether no step may start."""
        self._discarded = False
        """Whether weights are gone and others have yet to come, as when whoever wanted them has died in between."""

    @property
    def asleep(self) -> tuple[str, ...]:
        """Which of ``TAGS`` are."""
        return self._stats.asleep

    def fall_asleep(self, level: int) -> None:
        """Raises RequestError for a level that is none."""
        check_level(level)
        self.halted = True
        self._set_asleep(TAGS)
        self._client.sleep(level)

    def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Wake up what is named, everything by default. Raises RequestError for what never sleeps, and where only
        other weights can come; ConfigError for weights that cannot be read again.
        """
        check_tags(tags)
        if self._discarded:
            raise RequestError("the weights are gone and no others have come; update_weights brings some", status=409)
        waking = [tag for tag in self.asleep if tag in (tags or TAGS)]
        staying = tuple(tag for tag in self.asleep if tag not in waking)
        if waking:
            self._client.wake_up(waking, complete=not staying)
            self._set_asleep(staying)
        self.halted = bool(staying)

    def discard_weights(self) -> None:
        """Others come next."""
        self.halted = self._discarded = True
        self._client.discard_weights()

    def load_weights(self, model: str) -> None:
        """Read others, which are awake then. Raises ConfigError for weights that cannot be read: they are asleep then,
        and the next to be read are these again.
        """
        slept = WEIGHTS in self.asleep
        others = tuple(tag for tag in self.asleep if tag != WEIGHTS)
        try:
            self._client.load_weights(model)
            if slept and not others:
                self._client.wake_up((), complete=True)
        except BaseException:
            self._discarded = False
            self._set_asleep(tuple(tag for tag in TAGS if tag == WEIGHTS or tag in others))
            raise
        self._discarded = False
        self._set_asleep(others)
        self.halted = bool(others)

    def _set_asleep(self, tags: tuple[str, ...]) -> None:
        if tags != self.asleep:
            self._stats.asleep = tags
            self._stats.state_changes += 1


def check_level(level: int) -> None:
    """Raise RequestError for a level that is none."""
    if level not in LEVELS:
        raise RequestError(
            f"level is {level}; 1 keeps the weights in the host's memory, 2 lets go of them too", parameter="level"
        )


def check_tags(tags: Sequence[str]) -> None:
    """Raise RequestError for a tag that is none."""
    unknown = [tag for tag in tags if tag not in TAGS]
    if unknown:
        raise RequestError(f"no tag {unknown[0]!r}; there are {' and '.join(TAGS)}", parameter="tags")
