"""Targets: where a replay applies its plans. `postgres.PostgresTarget` is the one there is.

A target keeps the position of each replay job beside the data and moves it in the transaction that applies a plan, by
compare-and-set on position and fencing token. So a killed, repeated or overtaken micro-batch leaves all or nothing.
"""
