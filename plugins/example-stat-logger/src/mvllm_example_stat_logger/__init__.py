"""Example stat logger, and a command that reads its files.

mvllm generate --stat-loggers csv ...      writes a line per step to EXAMPLE_STATS_CSV (`stats.csv`, if that is not set)
mvllm stats stats.csv                      sums the file up
"""
