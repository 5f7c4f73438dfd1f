"""Routers for mvllm: several models behind one server, prefill and decode on separate engines."""
