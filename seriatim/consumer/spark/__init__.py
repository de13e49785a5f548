"""Spark: queues as a data source, and the replay of captured changes into another database.

`datasource.SeriatimDataSource` is the Python data source ``seriatim``, for batch and streaming reads; `columns` turns
records into Arrow. `replay` runs a streaming query whose micro-batches `application` applies to a target
(`targets`) by plans (`apply`). The position in the target is the truth; Spark's checkpoint only serves one run.

In a cluster, executors need Python with this package and its ``[spark]`` extra, and a way to coordinators and members.
They hold no session with ZooKeeper; the driver of a replay does, for its election.
"""
