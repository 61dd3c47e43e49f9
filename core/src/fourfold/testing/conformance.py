"""What every conformance class shares: its tests cannot be replaced, only waived out loud."""

from __future__ import annotations

from typing import ClassVar


class Conformance:
    """Base of all conformance classes. Tests may be added to; a replaced or misnamed one is a TypeError."""

    waivers: ClassVar[dict[str, str]] = {}
    """Tests that this plugin cannot pass yet, each with the reason. A waived test that passes is a failure."""

    def __init_subclass__(cls) -> None:
        inherited = {name for base in cls.__mro__[1:] for name in vars(base) if name.startswith("test_")}
        replaced = sorted(inherited & vars(cls).keys())
        if replaced:
            raise TypeError(f"{cls.__name__} replaces {', '.join(replaced)}; waive a test with `waivers` instead")
        unknown = sorted(cls.waivers.keys() - inherited - vars(cls).keys())
        if unknown:
            raise TypeError(f"{cls.__name__} waives {', '.join(unknown)}, which is no test of it")
