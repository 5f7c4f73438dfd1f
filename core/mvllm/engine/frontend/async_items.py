"""Prepares the items of prompts without blocking an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

from mvllm.engine.frontend.prompt_items import PreparedItems, PromptItems
from mvllm.errors import RequestError
from mvllm.multimodal.item_request import has_items
from mvllm.multimodal.processed_item import ProcessedItem


async def prepare_items(items: PromptItems, prompts: Sequence[object]) -> list[PreparedItems] | None:
    """The prepared items of each prompt; None if no prompt has any.

    Raises:
        RequestError: An item is not acceptable. With several prompts, the message has the position of its prompt.
    """
    if not any(map(has_items, prompts)):
        return None
    futures: list[Future[list[ProcessedItem]] | None] = []
    found: list[PreparedItems] = []
    position = 0
    try:
        for position in range(len(prompts)):
            futures.append(items.submit(prompts[position]))
        for position in range(len(futures)):
            future = futures[position]
            if future is None:
                found.append(())
            else:
                found.append(await asyncio.wrap_future(future))
    except RequestError as e:
        if len(prompts) == 1:
            raise
        raise RequestError(f"Prompt {position} of {len(prompts)}: {e}", parameter=e.parameter) from e
    finally:
        for future in futures:
            if future is not None:
                future.cancel()
    return found
