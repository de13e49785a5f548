"""Whether Seriatim stays fast as the work grows: backlog, groups, queues, links, herds, back-pressure, start-up, bytes on the disk.

    python -m bench growth --cases backlog --backlog 10000000        (make bench ARGS="growth …")

Duty: grow one thing at a time on a cluster of real processes, and take the same figure at each size. The load, its process,
and what is asked of processes are those of `bench`; a switch is measured as `seriatim bench failover` does.

Parts. `command`: arguments, and the cases in turn. `cluster`: Seriatim with any number of groups, and what its processes
take. `backlog`, `switching`, `queues`, `links`, `herds`, `pressure`, `disk`: a case each. `findings`: what they tell, as a table, JSON and pictures.
"""
