"""PixtralProcessor for environments without torchvision, which transformers' class of that name needs.

Imported only in the processor's process.
"""

from __future__ import annotations

from typing import Any

from transformers.processing_utils import ProcessorMixin


class PixtralProcessor(ProcessorMixin):  # type: ignore[misc]
    """Replaces a placeholder by a row of image tokens for each row of patches, with tokens between rows and at the end.

    Args:
        image_processor, tokenizer, chat_template: As of transformers' processors.
        patch_size: Pixels along each side of a patch.
        spatial_merge_size: Patches along each side of the square that becomes one embedding.
        image_token, image_break_token, image_end_token: Texts of the tokens.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: Any = None,
        image_token: str = "[IMG]",  # noqa: S107  (tokens of text)
        image_break_token: str = "[IMG_BREAK]",  # noqa: S107
        image_end_token: str = "[IMG_END]",  # noqa: S107
        **_: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.patch_size, self.spatial_merge_size = patch_size, spatial_merge_size
        self.image_token, self.image_break_token, self.image_end_token = image_token, image_break_token, image_end_token
        tokens = (image_token, image_break_token, image_end_token)
        self.image_token_id, self.image_break_token_id, self.image_end_token_id = (
            tokenizer.convert_tokens_to_ids(each) for each in tokens
        )

    @property
    def image_token_ids(self) -> list[int]:
        """All tokens of an image."""
        return [self.image_token_id, self.image_break_token_id, self.image_end_token_id]

    def _process_images(self, images: Any, **settings: Any) -> Any:
        settings["patch_size"] = self.patch_size * self.spatial_merge_size
        return super()._process_images(images, **settings)

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        """The text of an image, whose size after resizing is in `image_sizes`."""
        square = self.patch_size * self.spatial_merge_size
        height, width = image_inputs["image_sizes"][image_idx]
        row = self.image_token * (int(width) // square)
        return self.image_break_token.join([row] * (int(height) // square)) + self.image_end_token
