"""The collector is off inside the pause and as it was behind it."""

import gc

import pytest

from decodegrid.engine.collector_pause import collector_paused


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_as_it_was(was_on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(ValueError, match="inside"), collector_paused():
            assert not gc.isenabled()
            raise ValueError("inside")
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()
