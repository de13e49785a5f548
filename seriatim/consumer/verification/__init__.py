"""Is one database a copy of another? Row by row, chunk by chunk, without holding a table in memory.

`comparison.compare` is the way in; `tables` reads what is to be compared, `chunks` compares one table, `result` holds the
answers. Both sides are read in one REPEATABLE READ snapshot each. Called by `seriatim verify` and by the demo.
"""
