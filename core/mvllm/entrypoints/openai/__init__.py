"""The OpenAI-compatible HTTP server, and the runner of batch files.

server/        process, HTTP and routes: api_server.py runs a server, routes.py has all of its routes
chat/          POST /v1/chat/completions: serving.py
completions/   POST /v1/completions: serving.py
pooling/       embeddings, classes, scores and ranks: serving_base.py, serving_embedding.py, serving_score.py
tokenize/      /tokenize and /detokenize: routes.py
admin/         sleep, caches, LoRA adapters: routes.py
common/        shared by these: serving_base.py has the base classes of all request handlers
protocol.py    the structs of request bodies
"""
