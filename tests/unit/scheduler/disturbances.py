"""What random schedules of requests do besides adding requests and running steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

from tests.unit.scheduler.builders import Engine


def disturb(
    action: str,
    dice: random.Random,
    engine: Engine,
    added: Collection[str],
    aborted: set[str],
    reset_prefix_cache: Callable[[], object],
) -> None:
    """Aborts or fails a request, lets a step run out of memory, or drops the prefix cache.

    Args:
        action: `abort`, `fail`, `lose` or `reset`; others do nothing.
        dice: Chooses.
        engine: The engine.
        added: Ids of the requests so far.
        aborted: Gets the id of an aborted request.
        reset_prefix_cache: Empties the prefix cache while no request holds blocks.
    """
    scheduler = engine.scheduler
    if action == "abort" and added:
        name = f"r{dice.randrange(len(added))}"
        if name in scheduler.requests.by_id:
            aborted.add(name)
        scheduler.abort_requests([name])
        scheduler.check_integrity()
    elif action == "fail" and added:
        name = f"r{dice.randrange(len(added))}"
        engine.runner.failing.add(name if dice.random() < 0.8 else f"{name} (companion)")
    elif action == "lose":
        engine.runner.steps_without_memory.add(scheduler.next_step + dice.randrange(2))
    elif action == "reset":
        while engine.in_flight:
            engine.collect()
        if dice.random() < 0.5:
            reset_prefix_cache()
        else:
            scheduler.forget_computed(restart=dice.random() < 0.5)
        scheduler.check_integrity()
