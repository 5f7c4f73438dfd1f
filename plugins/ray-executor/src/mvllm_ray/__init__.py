"""The executor `ray` of mvllm: workers in Ray actors, on the nodes of a Ray cluster.

executor.py   RayDistributedExecutor, the entry point; imports Ray when an engine starts
launch.py     starts the actors: placement, ranks, environments, queues
cluster.py    connects to Ray, reserves resources, creates actors
worker.py     the actor: builds the worker and runs its request loop
fd_server.py  passes file descriptors to actors on the engine's node
group.py      watches and terminates the actors
"""
