"""The last report of every engine, and who has yet to hear of it. Knows no socket and no clock."""

from __future__ import annotations

import msgspec

from fourfold.messages import EngineReport


class LoadBoard:
    """Reports of an older incarnation, and older ones of the same, are ignored."""

    def __init__(self, num_engines: int, num_clients: int) -> None:
        self._reports: list[EngineReport | None] = [None] * num_engines
        self._marks: list[bytes | None] = [None] * num_engines
        """What each engine last said of its prefix cache; most reports say nothing of it."""
        self._unheard: list[set[int]] = [set() for _ in range(num_clients)]
        """For each client the engines that it has to hear of."""
        self._unheard_marks: list[set[int]] = [set() for _ in range(num_clients)]

    @property
    def pending(self) -> bool:
        """Whether a client has something to hear."""
        return any(self._unheard) or any(self._unheard_marks)

    def post(self, report: EngineReport) -> None:
        """Take a report. Raises IndexError for an engine that does not exist."""
        engine = report.engine
        last = self._reports[engine]
        if last is not None:
            if report.incarnation < last.incarnation:
                return
            same = report.incarnation == last.incarnation
            if same and report.stats.version < last.stats.version:
                return
            if not same:
                self._marks[engine] = None
        if report.stats.prefix_marks is not None:
            self._marks[engine] = report.stats.prefix_marks
            for unheard in self._unheard_marks:
                unheard.add(engine)
            report.stats.prefix_marks = None
        if last is None or (last.incarnation, last.stats) != (report.incarnation, report.stats):
            for unheard in self._unheard:
                unheard.add(engine)
        self._reports[engine] = report

    def join(self, client: int) -> None:
        """Let a client, which may be new under its number, hear everything. Raises IndexError like ``post``."""
        known = {engine for engine, report in enumerate(self._reports) if report is not None}
        self._unheard[client] = set(known)
        self._unheard_marks[client] = {engine for engine in known if self._marks[engine] is not None}

    def take(self, client: int) -> list[EngineReport]:
        """What a client has to hear now; it is taken as heard."""
        engines = sorted(self._unheard[client] | self._unheard_marks[client])
        reports = []
        for engine in engines:
            report = self._reports[engine]
            if report is None:
                continue
            if engine in self._unheard_marks[client]:
                stats = msgspec.structs.replace(report.stats, prefix_marks=self._marks[engine])
                report = EngineReport(engine=engine, incarnation=report.incarnation, stats=stats)
            reports.append(report)
        self._unheard[client].clear()
        self._unheard_marks[client].clear()
        return reports
