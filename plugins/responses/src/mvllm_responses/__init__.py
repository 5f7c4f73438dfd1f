"""Stored responses, conversations and MCP servers for mvllm's /v1/responses."""
