"""Reasoning of gpt-oss: the messages of the harmony format in the channel `analysis`.

Other messages without a recipient are content: those in `final`, and those in `commentary` before a tool call. Messages
to a tool stay as the model wrote them, for the tool parser `gpt_oss`. Messages of one kind are joined by a line break.
"""

from __future__ import annotations

from mvllm.extension_api.parsers import ContentDelta, Delta, ReasoningDelta, ReasoningParser, ReasoningStream
from mvllm_parsers.harmony import (
    CHANNEL,
    END,
    MARKERS,
    MESSAGE,
    START,
    Closed,
    Event,
    HarmonyScanner,
    Opened,
    Outside,
    Text,
)

_ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
_FINAL = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"


class GptOssReasoningParser(ReasoningParser):
    """`<|channel|>analysis<|message|>...<|end|>`."""

    markers = MARKERS
    tags = (_ANALYSIS, _FINAL)
    thinking_tags = (_ANALYSIS, END, _FINAL)

    def stream(self, prompt: str | None = None) -> ReasoningStream:
        return _Stream(prompt)


class _Stream(ReasoningStream):
    def __init__(self, prompt: str | None) -> None:
        self._scanner = HarmonyScanner(prompt)
        self._seen: set[type] = set()  # kinds of deltas so far
        self._ended: set[type] = set()  # kinds whose next text is that of another message

    @property
    def in_reasoning(self) -> bool:
        message = self._scanner.message
        return message is not None and message.is_reasoning

    def feed(self, text: str) -> list[Delta]:
        return self._deltas(text)

    def finish(self) -> list[Delta]:
        return self._deltas(None)

    def _deltas(self, text: str | None) -> list[Delta]:
        message = self._scanner.message
        events = self._scanner.finish() if text is None else self._scanner.feed(text)
        out: list[Delta] = []
        for event in events:
            if isinstance(event, Opened):
                message = event.header
            if isinstance(event, Outside):
                out.append(ContentDelta(event.text))
            elif message is not None and message.recipient is not None:
                out.append(ContentDelta(_as_written(event)))
            elif message is not None:
                kind = ReasoningDelta if message.is_reasoning else ContentDelta
                if isinstance(event, Text):
                    out.append(kind("\n" + event.text if kind in self._ended else event.text))
                    self._ended.discard(kind)
                    self._seen.add(kind)
                elif isinstance(event, Closed) and kind in self._seen:
                    self._ended.add(kind)
            if isinstance(event, Closed):
                message = None
        return [delta for delta in out if not isinstance(delta, ContentDelta) or delta.text]


def _as_written(event: Event) -> str:
    if isinstance(event, Opened):
        return event.header.text
    return event.marker if isinstance(event, Closed) else event.text
