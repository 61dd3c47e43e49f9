"""While a batch runs the collector sees what the batch makes; afterwards everything again."""

from __future__ import annotations

import gc

import pytest

from fourfold.client.frozen_heap import INTERPRETERS_OWN, frozen_heap


@pytest.fixture(autouse=True)
def thawed():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_lived_before_is_not_looked_at():
    before = [[]]
    with frozen_heap():
        assert gc.get_freeze_count() > INTERPRETERS_OWN
        assert not any(one is before for one in gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert any(one is before for one in gc.get_objects())


def test_what_somebody_else_froze_stays_so():
    gc.freeze()
    with frozen_heap():
        pass
    assert gc.get_freeze_count() > INTERPRETERS_OWN


def test_an_error_thaws():
    with pytest.raises(ValueError, match="x"), frozen_heap():
        raise ValueError("x")
    assert gc.get_freeze_count() == 0
