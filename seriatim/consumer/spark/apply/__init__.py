"""What a micro-batch of captured changes does to a target: pure planning, no database and no Spark.

`planner.plan` cuts ordered rows at the last complete transaction and turns them into `Segment`s: per table the last
change of each key (`collapse`), or, where that could break a rule of the target or take one key for two, the changes one by one in
their order (`steps`). A truncate ends a segment. A target (`seriatim.consumer.spark.targets`) carries out the plan
and records the position it reaches in one transaction, so that a repeated micro-batch changes nothing.

The planner promises: carrying out the plan leaves what carrying out the rows one by one would leave.
"""
