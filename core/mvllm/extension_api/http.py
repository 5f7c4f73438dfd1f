"""For HTTP plugins with an API at the root of the server: requests, handlers that run them, and formats.

Importing it loads the web framework and the engine's front end, so the module of an entry point imports it only in the
methods of its HTTPPlugin.
"""

from mvllm.engine.frontend.outputs import CompletionOutput as CompletionOutput
from mvllm.engine.frontend.outputs import RequestMetrics as RequestMetrics
from mvllm.engine.frontend.pooling_outputs import PoolingRequestOutput as PoolingRequestOutput
from mvllm.entrypoints.chat_items import text_of_part as text_of_part
from mvllm.entrypoints.http_plugin import HTTPPlugin as HTTPPlugin
from mvllm.entrypoints.openai.chat_completions import ChatCompletionHandler as ChatCompletionHandler
from mvllm.entrypoints.openai.client_request import ClientRequest as ClientRequest
from mvllm.entrypoints.openai.client_request import ModelRequest as ModelRequest
from mvllm.entrypoints.openai.common.api_format import APIFormat as APIFormat
from mvllm.entrypoints.openai.common.api_router import APIRouter as APIRouter
from mvllm.entrypoints.openai.common.chat_prompt_renderer import check_tools as check_tools
from mvllm.entrypoints.openai.common.chat_template_renderer import ChatTemplateRenderer as ChatTemplateRenderer
from mvllm.entrypoints.openai.common.conversation import Conversation as Conversation
from mvllm.entrypoints.openai.common.conversation_truncation import is_too_long as is_too_long
from mvllm.entrypoints.openai.common.conversation_truncation import max_truncated_length as max_truncated_length
from mvllm.entrypoints.openai.common.conversation_truncation import num_prompt_tokens as num_prompt_tokens
from mvllm.entrypoints.openai.common.conversation_truncation import without_oldest_messages as without_oldest_messages
from mvllm.entrypoints.openai.common.errors import error_body as error_body
from mvllm.entrypoints.openai.common.errors import renamed_fields as renamed_fields
from mvllm.entrypoints.openai.common.errors import to_api_error as to_api_error
from mvllm.entrypoints.openai.common.handler import Handler as Handler
from mvllm.entrypoints.openai.common.handler import RequestHandler as RequestHandler
from mvllm.entrypoints.openai.common.json_response import encode_json as encode_json
from mvllm.entrypoints.openai.common.json_response import json_response as json_response
from mvllm.entrypoints.openai.common.load_header import waited_nanoseconds as waited_nanoseconds
from mvllm.entrypoints.openai.common.logprobs import TokenFormatter as TokenFormatter
from mvllm.entrypoints.openai.common.logprobs import chat_logprobs as chat_logprobs
from mvllm.entrypoints.openai.common.request_body import BodyDecoder as BodyDecoder
from mvllm.entrypoints.openai.common.request_body import convert_fields as convert_fields
from mvllm.entrypoints.openai.common.request_body import read_query as read_query
from mvllm.entrypoints.openai.common.server_sent_events import DONE as DONE
from mvllm.entrypoints.openai.common.serving_context import ServingContext as ServingContext
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels as OpenAIServingModels
from mvllm.entrypoints.openai.common.serving_models import weights_size as weights_size
from mvllm.entrypoints.openai.common.streaming_response import JSON_LINES as JSON_LINES
from mvllm.entrypoints.openai.common.streaming_response import EventStreamResponse as EventStreamResponse
from mvllm.entrypoints.openai.common.streaming_response import cancel_on_disconnect as cancel_on_disconnect
from mvllm.entrypoints.openai.common.unknown_fields import UnknownFields as UnknownFields
from mvllm.entrypoints.openai.common.usage import UsageCounter as UsageCounter
from mvllm.entrypoints.openai.completions import CompletionHandler as CompletionHandler
from mvllm.entrypoints.openai.pooling.embeddings import embedding_handler as embedding_handler
from mvllm.entrypoints.openai.pooling.inputs import InputList as InputList
from mvllm.entrypoints.openai.pooling.inputs import PoolingRequestHandler as PoolingRequestHandler
from mvllm.entrypoints.openai.pooling.inputs import pooling_usage as pooling_usage
from mvllm.entrypoints.openai.protocol import ChatCompletionRequest as ChatCompletionRequest
from mvllm.entrypoints.openai.protocol import CompletionRequest as CompletionRequest
from mvllm.entrypoints.openai.protocol import EmbeddingRequest as EmbeddingRequest
from mvllm.entrypoints.openai.response_types import ChatLogprobs as ChatLogprobs
from mvllm.entrypoints.openai.response_types import ChatTokenLogprob as ChatTokenLogprob
from mvllm.entrypoints.openai.response_types import MessageToolCall as MessageToolCall
from mvllm.entrypoints.openai.response_types import Usage as Usage
from mvllm.entrypoints.openai.server.authentication import Caller as Caller
from mvllm.entrypoints.openai.server.authentication import Role as Role
from mvllm.entrypoints.openai.server.authentication import key_digest as key_digest
from mvllm.entrypoints.openai.server.body_routes import AdmittedRequest as AdmittedRequest
from mvllm.entrypoints.openai.server.body_routes import BodyRoutes as BodyRoutes
from mvllm.entrypoints.openai.server.middleware import request_caller as request_caller
from mvllm.entrypoints.openai.server.server_handle import APIServerHandle as APIServerHandle
from mvllm.entrypoints.openai.server.server_handle import HTTPRoutes as HTTPRoutes
from mvllm.entrypoints.openai.server.settings import ServerSettings as ServerSettings
from mvllm.entrypoints.openai.unsupported_fields import reject_unsupported_fields as reject_unsupported_fields
from mvllm.entrypoints.parsers.interface import ToolCall as ToolCall
from mvllm.entrypoints.parsers.output_parser import OutputParser as OutputParser
from mvllm.errors import QueueFullError as QueueFullError
from mvllm.messages.inputs import PromptType as PromptType
from mvllm.messages.inputs import TokensPrompt as TokensPrompt
from mvllm.messages.pooling_params import PoolingParams as PoolingParams
from mvllm.messages.pooling_params import PoolingTask as PoolingTask
from mvllm.messages.structured_outputs import MAX_NESTING as MAX_NESTING

__all__ = [
    "DONE",
    "JSON_LINES",
    "MAX_NESTING",
    "APIFormat",
    "APIRouter",
    "APIServerHandle",
    "AdmittedRequest",
    "BodyDecoder",
    "BodyRoutes",
    "Caller",
    "ChatCompletionHandler",
    "ChatCompletionRequest",
    "ChatLogprobs",
    "ChatTemplateRenderer",
    "ChatTokenLogprob",
    "ClientRequest",
    "CompletionHandler",
    "CompletionOutput",
    "CompletionRequest",
    "Conversation",
    "EmbeddingRequest",
    "EventStreamResponse",
    "HTTPPlugin",
    "HTTPRoutes",
    "Handler",
    "InputList",
    "MessageToolCall",
    "ModelRequest",
    "OpenAIServingModels",
    "OutputParser",
    "PoolingParams",
    "PoolingRequestHandler",
    "PoolingRequestOutput",
    "PoolingTask",
    "PromptType",
    "QueueFullError",
    "RequestHandler",
    "RequestMetrics",
    "Role",
    "ServerSettings",
    "ServingContext",
    "TokenFormatter",
    "TokensPrompt",
    "ToolCall",
    "UnknownFields",
    "Usage",
    "UsageCounter",
    "cancel_on_disconnect",
    "chat_logprobs",
    "check_tools",
    "convert_fields",
    "embedding_handler",
    "encode_json",
    "error_body",
    "is_too_long",
    "json_response",
    "key_digest",
    "max_truncated_length",
    "num_prompt_tokens",
    "pooling_usage",
    "read_query",
    "reject_unsupported_fields",
    "renamed_fields",
    "request_caller",
    "text_of_part",
    "to_api_error",
    "waited_nanoseconds",
    "weights_size",
    "without_oldest_messages",
]
