"""Public names of the types of a prompt."""

from mvllm.messages.inputs import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
