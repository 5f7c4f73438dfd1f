"""A stat logger and a command that come with a package of their own.

mvllm generate --stat-loggers csv ...      writes a line per step to EXAMPLE_STATS_CSV (`stats.csv`, if that is not set)
mvllm stats stats.csv                      sums the file up
"""
