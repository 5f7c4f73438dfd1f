"""A processor's process without a model: decodes images as the real one does, and misbehaves at certain contents.

python -m tests.helpers.scripted_processor <parent pid>
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from mvllm.messages.multimodal import ArrayData
from mvllm.multimodal import processor_main
from mvllm.multimodal.contents import AudioContent, VideoContent, hash_content
from mvllm.multimodal.frame_sampling import FrameDefaults
from mvllm.multimodal.processed_item import ProcessedItem
from mvllm.multimodal.processor_messages import ItemJob, ItemResult


class Family:
    def arguments(self, modality: str, counts: dict[str, int]) -> dict[str, Any]:
        return {"count": counts["image"]} if counts.get("image", 0) > 2 else {}

    def sampling_rate(self) -> int:
        return 8000

    def frame_defaults(self) -> FrameDefaults:
        return FrameDefaults()


class Processor:
    """Makes one row of two numbers of each image: its size. Those of height 77 take as many tokens as they are wide.

    The size of a video is that of a frame, and of an audio (1, 1).
    """

    family = Family()

    def placeholders(self) -> dict[str, str]:
        return {"image": "<i>"}

    def default_size(self, modality: str) -> None:
        return None

    def process(self, modality: str, content: Any, *, counts: dict[str, int], **unused: Any) -> ProcessedItem:
        if isinstance(content, AudioContent):
            width = height = 1
        elif isinstance(content, VideoContent):
            height, width = content.frames.shape[1:3]
        else:
            width, height = content.size
        num_tokens = width if height == 77 else 1
        return ProcessedItem(
            modality=modality,
            content_hash=hash_content(content, repr(self.family.arguments(modality, counts)).encode()),
            placeholder="<i>",
            placeholder_id=3,
            replacement="<p>",
            token_ids=[4] * num_tokens,
            start=0,
            stop=1,
            embedded=[(0, 1)],
            embedded_id=4,
            num_encoded=1,
            features={"size": ArrayData("uint8", [2], bytes([width % 256, height % 256]))},
        )


class ScriptedServer(processor_main.JobServer):
    def __init__(self, start: Any) -> None:
        super().__init__(start)
        self._processor = None if (Path(start.path) / "broken").exists() else Processor()

    def _load(self) -> ItemResult:
        error = f"The processor of {self._start.path} cannot be loaded."
        return ItemResult(error=error, parameter="multi_modal_data", is_last=True, is_load_failure=True)

    def run(self, job: ItemJob) -> ItemResult:
        match job.source.data:
            case b"crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case b"killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case b"loop":
                self._limit(1)
                while True:
                    pass
            case b"slow":
                time.sleep(0.2)
            case b"very slow":
                time.sleep(20)
            case b"memory":
                self._limit(60)
                try:
                    return ItemResult(error=str(len(bytes(8 << 30))))
                except MemoryError:
                    return super().run(ItemJob(job.source, {}, b"memory error"))
        return super().run(job)

    def _process(self, job: ItemJob) -> ItemResult:
        if job.kwargs == b"memory error":
            raise MemoryError
        return super()._process(job)


processor_main.JobServer = ScriptedServer  # type: ignore[misc]

if __name__ == "__main__":
    processor_main.main()
