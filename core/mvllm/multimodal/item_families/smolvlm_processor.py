"""SmolVLMProcessor for environments without num2words or torchvision, which transformers' class of that name needs.

Imported only in the processor's process. Images are those of Idefics3; a video is the following text:

    You are provided the following series of two frames from a 0:00:01 [H:MM:SS] video.

    Frame from 00:00:<fake_token_around_image><global-img><image><image>...<fake_token_around_image>
    Frame from 00:01:<fake_token_around_image>...
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from transformers import Idefics3Processor

_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)


class SmolVLMProcessor(Idefics3Processor):  # type: ignore[misc]
    """Its `video_processor` is an attribute that is set after it is built.

    Args:
        image_processor, tokenizer, image_seq_len, chat_template: As of transformers' processors.
    """

    def __init__(
        self, image_processor: Any, tokenizer: Any = None, image_seq_len: int = 169, chat_template: Any = None, **_: Any
    ) -> None:
        super().__init__(image_processor, tokenizer, image_seq_len=image_seq_len, chat_template=chat_template)
        self.video_token = getattr(tokenizer, "video_token", "<video>")

    def replace_video_token(self, video_inputs: Any, video_idx: int, **_: Any) -> str:
        """The text of a video."""
        metadata = video_inputs["video_metadata"][video_idx]
        count = video_inputs["pixel_values"].shape[1]
        embeddings = f"{self.global_image_tag}{self.image_token * self.image_seq_len}"
        frame = f"{self.fake_image_token}{embeddings}{self.fake_image_token}"
        times = [f"{int(second // 60):02d}:{int(second % 60):02d}" for second in metadata.timestamps]
        frames = "".join(f"\nFrame from {time}:{frame}" for time in times)
        duration = timedelta(seconds=int(metadata.duration))
        start = f"You are provided the following series of {number_in_words(count)} frames from a {duration}"
        return f"{start} [H:MM:SS] video.\n{frames}\n\n"


def number_in_words(number: int) -> str:
    """A number from 0 to 999,999 in English words, as the package num2words writes it."""
    names = _WORDS.split()
    if number < 20:
        return names[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return names[18 + tens] + (f"-{names[ones]}" if ones else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{names[hundreds]} hundred" + (f" and {number_in_words(rest)}" if rest else "")
    thousands, rest = divmod(number, 1000)
    words = f"{number_in_words(thousands)} thousand"
    return words if not rest else f"{words}{' and ' if rest < 100 else ', '}{number_in_words(rest)}"
