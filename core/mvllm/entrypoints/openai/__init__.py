"""The OpenAI-compatible HTTP server, and the runner of batch files.

chat_completions.py   POST /v1/chat/completions
completions.py        POST /v1/completions
pooling/              embeddings, classes, scores and ranks
audio/                transcriptions and translations
tokenize_routes.py    /tokenize and /detokenize
admin/                sleep, caches, LoRA adapters, weight updates
server/               process, HTTP and routes: api_server.py runs a server, routes.py has all of its routes
common/               shared by these: handler.py has the base of all request handlers
protocol.py           the structs of request bodies
"""
