"""Events of KV caches, and routing by what the caches of replicas hold."""
