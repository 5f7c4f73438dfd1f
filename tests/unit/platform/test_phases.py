"""Phases: a thread has one, a platform may require one, and outside an engine there is none."""

from __future__ import annotations

import threading

import pytest

from mvllm.errors import ContractError
from mvllm.platform.phases import Phase, current_phase, enter_phase, require_phase


def test_outside_the_engine_everything_is_permitted():
    assert current_phase() is None
    require_phase(Phase.WORKER)


def test_a_call_in_a_permitted_phase_passes():
    with enter_phase(Phase.ENGINE):
        assert current_phase() is Phase.ENGINE
        require_phase(Phase.FRONTEND, Phase.ENGINE)


@pytest.mark.parametrize("phase", [Phase.PROBE, Phase.FRONTEND, Phase.ENGINE])
def test_a_call_in_another_phase_names_both(phase):
    with (
        enter_phase(phase),
        pytest.raises(ContractError, match=rf"phase worker was called in phase {phase.value}"),
    ):
        require_phase(Phase.WORKER)


def test_phases_nest_and_an_error_restores_the_outer_one():
    with enter_phase(Phase.ENGINE):
        with pytest.raises(OSError), enter_phase(Phase.WORKER):
            assert current_phase() is Phase.WORKER
            raise OSError
        assert current_phase() is Phase.ENGINE
    assert current_phase() is None


def test_each_thread_has_its_own():
    seen = []
    with enter_phase(Phase.WORKER):
        thread = threading.Thread(target=lambda: seen.append(current_phase()))
        thread.start()
        thread.join()
    assert seen == [None]
