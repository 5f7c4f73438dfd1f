"""The executor `ray` of mvllm: workers in Ray actors, on the nodes of a Ray cluster.

executor.py   RayDistributedExecutor, which the entry point names; imports Ray when an engine starts
launch.py     from a topology to workers that know their ranks and have their queues
cluster.py    a connection to Ray, placement groups, actors
worker.py     what an actor does
group.py      the watch over the actors, and their end
"""
