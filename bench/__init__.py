"""Side by side: Seriatim and its peers, in turn, in one run on one machine.

    python -m bench --only seriatim,kafka --cases throughput --rounds 3        (make bench ARGS="…")

Duty: start each peer as its users would, put the same load on it, take the same figures, and end it again, for several
rounds. `docs/benchmarks.md` says what was set for each and why.

Parts. `cases`: what is measured. `peers`: the servers of each (fetched by `artifacts`, pinned there). `load`: a process of
its own that sends and reads through a client of `clients`, so that its processor time can be told from the servers'.
`measuring`: begins a load and looks at processor time and memory meanwhile. `outage`: harms the current leader. `driver`:
rounds, peers and cases in turn. `report`, `goals` and `plots`: medians and ratios as a table, JSON and pictures.
"""
